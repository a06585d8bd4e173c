"""The heads of an attention layer: which head is which, and a factor inside each.

One element is one thing: the permutation of kv heads, the permutation of query heads inside each group, the
Q–K factors and the V–O factors. Keys move by the Q–K factor and queries by its dual; values by the V–O factor
and the columns of the output projection by its dual. Query heads of a group share the factor of their kv head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.groups.assignment import assign
from isobasin.groups.group import FLOAT, Element, Group, Side, generator, prefixed, selected
from isobasin.groups.monomial import Monomial
from isobasin.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class Face(Element):
    """Heads side by side on one axis: head i of the result is factor i acting on head `index[i]`."""

    index: Int[Tensor, " heads"]
    factor: Element

    @property
    def n(self) -> int:
        return self.index.shape[0] * self.factor.n

    def __matmul__(self, other: "Face") -> "Face":
        return Face(other.index[self.index], self.factor @ other.factor.take(self.index))

    def inverse(self) -> "Face":
        back = torch.argsort(self.index)
        return Face(back, self.factor.take(back).inverse())

    def dual(self) -> "Face":
        return Face(self.index, self.factor.dual())

    def permutation_part(self) -> "Face":
        return Face(self.index, self.factor.permutation_part())

    def tensors(self) -> dict[str, Tensor]:
        return {"index": self.index} | {f"factor.{k}": t for k, t in self.factor.tensors().items()}

    @property
    def exact(self) -> bool:
        return self.factor.exact

    @property
    def precision(self) -> torch.dtype:
        return self.factor.precision

    @property
    def is_identity(self) -> bool:
        return self.factor.is_identity and bool((self.index == torch.arange(len(self.index))).all())

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        heads = x.unflatten(-1, (len(self.index), self.factor.n))[..., self.index.to(x.device), :]
        return (heads if self.factor.is_identity else self.factor._apply(heads)).flatten(-2)


@dataclass(frozen=True, eq=False)
class HeadsElement(Element):
    """kv head i of the result was kv head `kv[i]`; its query j was query `queries[i, j]` of that head's group."""

    kv: Int[Tensor, " kv"]
    queries: Int[Tensor, "kv group"]
    qk: Element
    vo: Element

    def face(self, side: Side, *, queries: bool = False) -> Face:
        """How one of the four projections moves: keys and values, or with `queries` one copy per query head."""
        factor = self.qk if side == "qk" else self.vo
        if not queries:
            return Face(self.kv, factor)
        n_kv, group = self.queries.shape
        return Face(
            (self.kv[:, None] * group + self.queries).flatten(),
            factor.take(torch.arange(n_kv, device=self.kv.device).repeat_interleave(group)),
        )

    @property
    def head_permutation(self) -> Tensor:
        """For every query head of the result, the query head it was before."""
        return self.face("qk", queries=True).index

    def head_order(self, *, kv: bool = False) -> Monomial:
        index = self.kv if kv else self.head_permutation
        return Monomial(index, torch.ones(len(index), dtype=FLOAT, device=index.device))

    def signed_matrix(self) -> Tensor:
        return torch.eye(self.queries.numel(), dtype=FLOAT)[self.head_permutation]

    @property
    def n(self) -> int:
        return len(self.kv) * (self.qk.n + self.vo.n)

    def __matmul__(self, other: "HeadsElement") -> "HeadsElement":
        return HeadsElement(
            other.kv[self.kv],
            other.queries[self.kv].gather(1, self.queries),
            self.qk @ other.qk.take(self.kv),
            self.vo @ other.vo.take(self.kv),
        )

    def inverse(self) -> "HeadsElement":
        back = torch.argsort(self.kv)
        return HeadsElement(
            back,
            torch.argsort(self.queries[back], dim=1),
            self.qk.take(back).inverse(),
            self.vo.take(back).inverse(),
        )

    def dual(self) -> "HeadsElement":
        return HeadsElement(self.kv, self.queries, self.qk.dual(), self.vo.dual())

    def permutation_part(self) -> "HeadsElement":
        return HeadsElement(self.kv, self.queries, self.qk.permutation_part(), self.vo.permutation_part())

    def tensors(self) -> dict[str, Tensor]:
        factors = {f"{side}.{k}": t for side in ("qk", "vo") for k, t in getattr(self, side).tensors().items()}
        return {"kv": self.kv, "queries": self.queries} | factors

    @property
    def exact(self) -> bool:
        return self.qk.exact and self.vo.exact

    @property
    def is_identity(self) -> bool:
        return self.face("qk", queries=True).is_identity and self.vo.is_identity

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        """On keys and values side by side; the laws of the group are tested on this action."""
        keys, values = x.split([len(self.kv) * self.qk.n, len(self.kv) * self.vo.n], dim=-1)
        return torch.cat([self.face("qk")._apply(keys), self.face("vo")._apply(values)], dim=-1)


@dataclass(frozen=True)
class Heads(Group):
    """(S_group ≀ S_kv), and the Q–K and V–O groups once per kv head. Without `permute` the heads keep their places."""

    n_kv: int
    group_size: int
    qk: Group
    vo: Group
    permute: bool = True

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.n_kv * (self.qk.n + self.vo.n)

    def __str__(self) -> str:
        inner = f"({self.qk} × {self.vo})"
        if not self.permute:
            return f"{inner}^{self.n_kv}"
        inside = f"(S{self.group_size} × {self.qk} × {self.vo})" if self.group_size > 1 else inner
        return f"S{self.n_kv} ≀ {inside}"

    @property
    def dim(self) -> int:
        return self.n_kv * (self.qk.dim + self.vo.dim)

    def identity(self, *batch: int) -> HeadsElement:
        return self._element(torch.arange(self.n_kv), self._ordered(), None)

    def _ordered(self, device: torch.device | None = None) -> Tensor:
        """Made on the device: a step that is captured as a CUDA graph can not copy it there."""
        return torch.arange(self.group_size, device=device).expand(self.n_kv, -1).clone()

    def _element(self, kv: Tensor, queries: Tensor, seed: int | None) -> HeadsElement:
        if seed is None:
            return HeadsElement(kv, queries, self.qk.identity(self.n_kv), self.vo.identity(self.n_kv))
        qk, vo = self.qk.sample(self.n_kv, seed=seed + 11), self.vo.sample(self.n_kv, seed=seed + 23)
        return HeadsElement(kv, queries, qk, vo)

    def sample(self, *batch: int, seed: int) -> HeadsElement:
        rng = generator(seed)
        kv, queries = torch.arange(self.n_kv), self._ordered()
        if self.permute:
            kv = torch.randperm(self.n_kv, generator=rng)
            queries = torch.rand(self.n_kv, self.group_size, generator=rng).argsort(dim=1)
        return self._element(kv, queries, seed)

    def contains(self, element: Element) -> bool:
        if not isinstance(element, HeadsElement) or element.queries.shape != (self.n_kv, self.group_size):
            return False
        ordered = self._ordered()
        permuted = torch.equal(element.kv.sort().values, torch.arange(self.n_kv)) and torch.equal(
            element.queries.sort(dim=1).values, ordered
        )
        still = torch.equal(element.kv, torch.arange(self.n_kv)) and torch.equal(element.queries, ordered)
        return permuted and (self.permute or still) and self.qk.contains(element.qk) and self.vo.contains(element.vo)

    def project(self, matrix: Float[Tensor, "n n"]) -> HeadsElement:
        """From a matrix on keys and values side by side; query heads keep their order inside a group."""
        split = self.n_kv * self.qk.n
        keys = matrix[:split, :split].to(FLOAT).unflatten(0, (self.n_kv, -1)).unflatten(2, (self.n_kv, -1))
        values = matrix[split:, split:].to(FLOAT).unflatten(0, (self.n_kv, -1)).unflatten(2, (self.n_kv, -1))
        weight = keys.square().sum((1, 3)) + values.square().sum((1, 3))
        kv = torch.arange(self.n_kv)
        if self.permute:
            kv = assign(-weight)
        rows = torch.arange(self.n_kv)
        return HeadsElement(
            kv, self._ordered(), self.qk.project(keys[rows, :, kv]), self.vo.project(values[rows, :, kv])
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The factors of every kv head; the heads keep their places."""
        factors = prefixed({"qk": self.qk.parameter_shapes(), "vo": self.vo.parameter_shapes()})
        return {name: (self.n_kv, *shape) for name, shape in factors.items()}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(parameters.values())).device
        qk, vo = (g.parametrised(selected(parameters, side)) for side, g in (("qk", self.qk), ("vo", self.vo)))
        places = {"kv": torch.arange(self.n_kv, device=device), "queries": self._ordered(device)}
        return places | prefixed({"qk": qk, "vo": vo})

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        qk, vo = (g.differentiable(selected(tensors, side)) for side, g in (("qk", self.qk), ("vo", self.vo)))
        return HeadsElement(tensors["kv"], tensors["queries"], qk, vo)

    def element(self, tensors: dict[str, Tensor]) -> HeadsElement:
        return HeadsElement(
            tensors["kv"].to(torch.int64),
            tensors["queries"].to(torch.int64),
            self.qk.element(selected(tensors, "qk")),
            self.vo.element(selected(tensors, "vo")),
        )
