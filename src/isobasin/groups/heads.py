"""The heads of an attention layer: which head is which, and a factor inside each.

One element is one thing: the permutation of kv heads, the permutation of query heads inside each group, the
Q–K factors and the V–O factors. Keys move by the Q–K factor and queries by its dual; values by the V–O factor
and the columns of the output projection by its dual. Query heads of a group share the factor of their kv head.
Columns of keys that there are only once, for all heads (latent attention), have one factor that all heads share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

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
        return self._dual

    @cached_property
    def _dual(self) -> "Face":
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

    @cached_property
    def is_identity(self) -> bool:
        return self.factor.is_identity and bool((self.index == torch.arange(len(self.index))).all())

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        # Not x[..., index, :]: the gradient of that sorts the index on CUDA, and may add in any order.
        heads = x.unflatten(-1, (len(self.index), self.factor.n)).index_select(-2, self.index.to(x.device))
        return (heads if self.factor.is_identity else self.factor._apply(heads)).flatten(-2)


@dataclass(frozen=True, eq=False)
class HeadsElement(Element):
    """kv head i of the result was kv head `kv[i]`; its query j was query `queries[i, j]` of that head's group."""

    kv: Int[Tensor, " kv"]
    queries: Int[Tensor, "kv group"]
    qk: Element
    vo: Element
    shared: Element | None = None  # a batch of one

    def face(self, side: Side, *, queries: bool = False) -> Face:
        """How one of the four projections moves: keys and values, or with `queries` one copy per query head; of the
        shared columns, one copy for each query head, or a single one."""
        if (side, queries) not in self._faces:
            self._faces[side, queries] = self._face(side, queries)
        return self._faces[side, queries]

    @cached_property
    def _faces(self) -> dict[tuple[Side, bool], Face]:
        """Made once: the dual of a face takes an inverse for each head."""
        return {}

    def _face(self, side: Side, queries: bool) -> Face:
        if side == "shared":
            assert self.shared is not None
            index = self.head_permutation if queries else torch.zeros(1, dtype=torch.int64, device=self.kv.device)
            return Face(index, self.shared.take(torch.zeros_like(index)))
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
        return len(self.kv) * (self.qk.n + self.vo.n) + (self.shared.n if self.shared else 0)

    def __matmul__(self, other: "HeadsElement") -> "HeadsElement":
        return HeadsElement(
            other.kv[self.kv],
            other.queries[self.kv].gather(1, self.queries),
            self.qk @ other.qk.take(self.kv),
            self.vo @ other.vo.take(self.kv),
            self.shared @ other.shared if self.shared and other.shared else None,
        )

    def inverse(self) -> "HeadsElement":
        back = torch.argsort(self.kv)
        return HeadsElement(
            back,
            torch.argsort(self.queries[back], dim=1),
            self.qk.take(back).inverse(),
            self.vo.take(back).inverse(),
            self.shared.inverse() if self.shared else None,
        )

    def dual(self) -> "HeadsElement":
        shared = self.shared.dual() if self.shared else None
        return HeadsElement(self.kv, self.queries, self.qk.dual(), self.vo.dual(), shared)

    def permutation_part(self) -> "HeadsElement":
        shared = self.shared.permutation_part() if self.shared else None
        return HeadsElement(self.kv, self.queries, self.qk.permutation_part(), self.vo.permutation_part(), shared)

    def tensors(self) -> dict[str, Tensor]:
        parts: dict[str, dict[str, Tensor]] = {side: factor.tensors() for side, factor in self._factors.items()}
        return {"kv": self.kv, "queries": self.queries} | prefixed(parts)

    @property
    def _factors(self) -> dict[Side, Element]:
        found: dict[Side, Element] = {"qk": self.qk, "vo": self.vo}
        if self.shared:
            found["shared"] = self.shared
        return found

    @property
    def exact(self) -> bool:
        return all(factor.exact for factor in self._factors.values())

    @property
    def is_identity(self) -> bool:
        return self.head_order().is_identity and all(factor.is_identity for factor in self._factors.values())

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        """On keys, values and shared columns side by side; the laws of the group are tested on this action."""
        faces = [self.face(side) for side in self._factors]
        parts = x.split([face.n for face in faces], dim=-1)
        return torch.cat([face._apply(part) for face, part in zip(faces, parts)], dim=-1)


@dataclass(frozen=True)
class Heads(Group):
    """(S_group ≀ S_kv), and the Q–K and V–O groups once per kv head; `shared` is the group of columns that all heads
    share. Without `permute` the heads keep their places."""

    n_kv: int
    group_size: int
    qk: Group
    vo: Group
    permute: bool = True
    shared: Group | None = None

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.n_kv * (self.qk.n + self.vo.n) + (self.shared.n if self.shared else 0)

    def __str__(self) -> str:
        inner = f"({self.qk} × {self.vo})"
        if not self.permute:
            return f"{inner}^{self.n_kv}"
        inside = f"(S{self.group_size} × {self.qk} × {self.vo})" if self.group_size > 1 else inner
        return f"S{self.n_kv} ≀ {inside}" + (f" × {self.shared}" if self.shared else "")

    @property
    def dim(self) -> int:
        return self.n_kv * (self.qk.dim + self.vo.dim) + (self.shared.dim if self.shared else 0)

    def identity(self, *batch: int) -> HeadsElement:
        return self._element(torch.arange(self.n_kv), self._ordered(), None)

    def _ordered(self, device: torch.device | None = None) -> Tensor:
        """Made on the device: a step that is captured as a CUDA graph can not copy it there."""
        return torch.arange(self.group_size, device=device).expand(self.n_kv, -1).clone()

    def _element(self, kv: Tensor, queries: Tensor, seed: int | None) -> HeadsElement:
        if seed is None:
            shared = self.shared.identity(1) if self.shared else None
            return HeadsElement(kv, queries, self.qk.identity(self.n_kv), self.vo.identity(self.n_kv), shared)
        qk, vo = self.qk.sample(self.n_kv, seed=seed + 11), self.vo.sample(self.n_kv, seed=seed + 23)
        return HeadsElement(kv, queries, qk, vo, self.shared.sample(1, seed=seed + 37) if self.shared else None)

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
        groups = {"qk": self.qk, "vo": self.vo} | ({"shared": self.shared} if self.shared else {})
        factors = element._factors
        inside = factors.keys() == groups.keys() and all(groups[side].contains(g) for side, g in factors.items())
        return permuted and (self.permute or still) and inside

    def project(self, matrix: Float[Tensor, "n n"]) -> HeadsElement:
        """From a matrix on keys and values side by side; query heads keep their order inside a group."""
        split, end = self.n_kv * self.qk.n, self.n_kv * (self.qk.n + self.vo.n)
        keys = matrix[:split, :split].to(FLOAT).unflatten(0, (self.n_kv, -1)).unflatten(2, (self.n_kv, -1))
        values = matrix[split:end, split:end].to(FLOAT).unflatten(0, (self.n_kv, -1)).unflatten(2, (self.n_kv, -1))
        shared = self.shared.project(matrix[None, end:, end:]) if self.shared else None
        weight = keys.square().sum((1, 3)) + values.square().sum((1, 3))
        kv = torch.arange(self.n_kv)
        if self.permute:
            kv = assign(-weight)
        rows = torch.arange(self.n_kv)
        return HeadsElement(
            kv, self._ordered(), self.qk.project(keys[rows, :, kv]), self.vo.project(values[rows, :, kv]), shared
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The factors of every kv head, and those that all share; the heads keep their places."""
        factors = prefixed({"qk": self.qk.parameter_shapes(), "vo": self.vo.parameter_shapes()})
        found = {name: (self.n_kv, *shape) for name, shape in factors.items()}
        shared = prefixed({"shared": self.shared.parameter_shapes()}) if self.shared else {}
        return found | {name: (1, *shape) for name, shape in shared.items()}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(parameters.values())).device
        qk, vo = (g.parametrised(selected(parameters, side)) for side, g in (("qk", self.qk), ("vo", self.vo)))
        places = {"kv": torch.arange(self.n_kv, device=device), "queries": self._ordered(device)}
        shared = {"shared": self.shared.parametrised(selected(parameters, "shared"))} if self.shared else {}
        return places | prefixed({"qk": qk, "vo": vo} | shared)

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        qk, vo = (g.differentiable(selected(tensors, side)) for side, g in (("qk", self.qk), ("vo", self.vo)))
        shared = self.shared.differentiable(selected(tensors, "shared")) if self.shared else None
        return HeadsElement(tensors["kv"], tensors["queries"], qk, vo, shared)

    def element(self, tensors: dict[str, Tensor]) -> HeadsElement:
        return HeadsElement(
            tensors["kv"].to(torch.int64),
            tensors["queries"].to(torch.int64),
            self.qk.element(selected(tensors, "qk")),
            self.vo.element(selected(tensors, "vo")),
            self.shared.element(selected(tensors, "shared")) if self.shared else None,
        )
