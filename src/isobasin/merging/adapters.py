"""LoRA adapters under the symmetries of their base, and under their own.

A transform of the base moves an adapter with it: with T the transform and ΔW what the adapter adds, T(W + ΔW) − T(W)
has the rank of ΔW, since a transform acts on every weight linearly, up to constants that both have in common. Its
factors are the adapter of the moved base.

The factors themselves are known up to GL(r): (B U⁻¹, U A) is the same adapter. Averages of factors depend on U, so that
of each adapter is chosen first, as between two heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isobasin import __version__
from isobasin.alignment.head_linear import align_linear_factors
from isobasin.checkpoint import Adapter
from isobasin.checkpoint.adapter import Factors
from isobasin.checkpoint.folder import MADE_WITH
from isobasin.display import Shown, Summary
from isobasin.errors import IsobasinError, TransformError
from isobasin.merging.card import adapter_card
from isobasin.merging.recipe import check_reference
from isobasin.symmetries.transform import Transform
from isobasin.weights import ModelSource, Weights, adapted_names, load, with_adapter

METHODS = ("linear", "svd")
CARRIED = 1e-9  # of what the adapter adds: below it, what it adds elsewhere is rounding of float64


# -- an adapter on a moved base ---------------------------------------------------------------------------------------


def move_adapter(transform: Transform, adapter: Adapter | str | Path, base: ModelSource) -> Adapter:
    """The adapter for the moved base: `transform` applied to the base, with this adapter, is the same function.

    >>> found = align(b, to=a)  # doctest: +SKIP
    >>> move_adapter(found.transform, "adapter-of-b", b).save("adapter-of-a")  # doctest: +SKIP
    """
    given = adapter if isinstance(adapter, Adapter) else Adapter.open(adapter)
    weights = load(base)
    before, after = (transform.apply(w) for w in (weights, with_adapter(weights, given)))
    names = adapted_names(weights, given)
    sizes = {module: _size(given.factors(module)) for module in given.modules}
    moved = {}
    for module in given.modules:
        old, name = given.factors(module), names[f"{module}.weight"]
        added = (after[name].double() - before[name].double()).cpu()
        added = added.mT if old.embedding or weights.arch.tensors[name].inputs_first else added
        moved[module] = _factorised(added, old, sizes[module], module)
    biases = _moved_biases(before, after, names, max(sizes.values()))
    return given.with_config({"base_model_name_or_path": None}).with_factors(moved, biases)


def _size(factors: Factors) -> float:
    """‖s·B·A‖, from the small matrices alone."""
    return float((torch.linalg.qr(factors.up, mode="r").R @ torch.linalg.qr(factors.down.mT, mode="r").R.mT).norm())


def _moved_biases(before: Weights, after: Weights, names: Mapping[str, str], size: float) -> dict[str, Tensor]:
    """The biases that the adapter replaces, and those into which the transform carries a part of it (from a shift in
    front of a weight that it changes, for instance). A part that is carried into any other tensor is refused."""
    found = {}
    for name in sorted(before.changed | after.changed):
        key = _key_of(name, names)
        if key is not None and key.endswith(".weight") and key in names:
            continue
        apart = float((after[name].double() - before[name].double()).norm())
        if key in names or apart > CARRIED * max(size, float(before[name].double().norm())):
            if key is None or not key.endswith(".bias"):
                raise TransformError(
                    f"{name}: the transform carries a part of the adapter here, where an adapter can not change "
                    "anything; merge it into its base and apply the transform to both (base+adapter)"
                )
            found[key.removesuffix(".bias")] = after[name].cpu()
    return found


def _key_of(name: str, names: Mapping[str, str]) -> str | None:
    """A tensor of the model as the adapter names it: with the prefix of the base, or without."""
    known = {found: key for key, found in names.items()}
    if name in known:
        return known[name]
    pattern, key = next(iter(known.items()))
    prefix = pattern.removesuffix(key)
    return name.removeprefix(prefix) if pattern.endswith(key) and name.startswith(prefix) else None


def _factorised(added: Tensor, old: Factors, size: float, module: str) -> Factors:
    """Factors of the same rank whose product is `added`; balanced, so that both train at one rate."""
    if size == 0:  # a fresh adapter: B is zero, and any A is as good
        return replace(old, up=torch.zeros_like(old.up))
    probe = torch.randn(added.shape[1], old.rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(added @ (added.mT @ (added @ probe))).Q
    u, s, v = torch.linalg.svd(basis.mT @ added, full_matrices=False)
    found = Factors(basis @ (u * s.sqrt()), s.sqrt()[:, None] * v, old.embedding)
    rest = float((found.up @ found.down - added).norm())
    if rest > 1e-6 * size:
        raise TransformError(
            f"{module}: what the moved adapter adds has a rank above {old.rank} ({rest / size:.1e} is left); merge "
            "the adapter into its base and apply the transform to both (base+adapter)"
        )
    return found


# -- several adapters of one base -------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class AdapterMerge(Shown):
    """The merged adapter, and by module how far its product is from the mean of the products, relative to that; and the
    same without the choice of U."""

    adapter: Adapter
    method: str
    errors: Mapping[str, float]
    naive_errors: Mapping[str, float]
    inputs: tuple[Adapter, ...]
    names: tuple[str, ...]
    shares: tuple[float, ...]
    to: int | None  # None: not aligned

    @property
    def error(self) -> float:
        """The mean over the modules."""
        return sum(self.errors.values()) / len(self.errors)

    @property
    def naive_error(self) -> float:
        return sum(self.naive_errors.values()) / len(self.naive_errors)

    def save(self, out: str | Path, *, force: bool = False) -> None:
        """Write an adapter folder with a model card."""
        self.adapter.save(out, force=force, card=self._card(Path(out).resolve().name))

    def _card(self, title: str) -> str:
        how = f"A {self.method} merge of {len(self.names)} LoRA adapters, {MADE_WITH} {__version__}."
        if self.to is not None:
            how += f" Before their factors were averaged, each was brought close to those of adapter {self.to}."
        how += f" What it adds is {self.error:.1%} away from the mean of what they add."
        bases = [each.config.get("base_model_name_or_path") for each in self.inputs]
        return adapter_card(title, how, self.names, self.shares, bases, [each.path for each in self.inputs])

    def summary(self) -> Summary:
        """The error of every module."""
        rows = [(module, f"{self.naive_errors[module]:.3f}", f"{error:.3f}") for module, error in self.errors.items()]
        return Summary(str(self), {}, ("module", "as they are", self.method), rows)

    def __str__(self) -> str:
        return (
            f"{self.method} merge of adapters; distance from the mean of what they add: {self.error:.1%}, and "
            f"{self.naive_error:.1%} with the factors as they are"
        )


def merge_adapters(
    adapters: Sequence[Adapter | str | Path],
    *,
    weights: Sequence[float] | None = None,
    method: str = "linear",
    align: bool = True,
    to: int = 0,
) -> AdapterMerge:
    """One adapter of the same rank from several adapters of one base.

    `linear` averages the factors, after each adapter was brought as close to adapter `to` as GL(r) allows (unless
    `align=False`); `svd` takes the product of this rank that is closest to the mean of the products. `weights` are
    equal if not given, and are divided by their sum.
    """
    given = [each if isinstance(each, Adapter) else Adapter.open(each) for each in adapters]
    shares = _shares(len(given), weights)
    check_reference(to, len(given))
    if method not in METHODS:
        raise IsobasinError(f"merge method {method!r}: expected one of {', '.join(METHODS)} for adapters")
    first = given[0]
    for number, other in enumerate(given[1:], 1):
        if other.modules != first.modules or other.embeddings != first.embeddings:
            apart = sorted(set(other.modules) ^ set(first.modules))[0]
            raise IsobasinError(f"{apart}: not in both adapters 0 and {number}; expected adapters of the same modules")
        if other.biased != first.biased:
            raise IsobasinError(f"adapters 0 and {number} replace different biases; expected the same in all")
        for module in set(first.stored) & set(other.stored):
            if not torch.equal(first.tensors[f"{module}.weight"], other.tensors[f"{module}.weight"]):
                raise IsobasinError(f"{module}: adapters 0 and {number} store other weights; expected one base")
    found, errors, naive = {}, {}, {}
    for module in first.modules:
        factors = [_even(adapter.factors(module)) for adapter in given]
        _check_shapes(module, factors)
        mean = _joined(factors, shares)
        plain = _average(factors, shares)
        if method == "svd":
            merged = _truncated(mean, factors[0].rank)
        else:
            merged = _average([_closest(each, factors[to]) for each in factors], shares) if align else plain
        found[module] = merged
        errors[module], naive[module] = (_distance(each, mean) for each in (merged, plain))
    biases = {module: _mean([each.tensors[f"{module}.bias"] for each in given], shares) for module in first.biased}
    merged_adapter = first.with_factors(found, biases)
    names = tuple(_name(source, i) for i, source in enumerate(adapters))
    aligned_to = to if align and method == "linear" else None
    return AdapterMerge(merged_adapter, method, errors, naive, tuple(given), names, tuple(shares), aligned_to)


def _name(source: Adapter | str | Path, number: int) -> str:
    path = source.path if isinstance(source, Adapter) else source
    return str(path or f"adapter {number}, in memory")


def _shares(n: int, weights: Sequence[float] | None) -> list[float]:
    if n < 2:
        raise IsobasinError(f"{n} adapter to merge: expected two or more")
    given = [1.0] * n if weights is None else [float(w) for w in weights]
    if len(given) != n or not 1e-12 <= abs(sum(given)) < 1e30:
        raise IsobasinError(f"weights {given} for {n} adapters: expected one for each, with a sum that is not 0")
    return [w / sum(given) for w in given]


def _check_shapes(module: str, factors: Sequence[Factors]) -> None:
    shapes = {(tuple(each.up.shape), tuple(each.down.shape)) for each in factors}
    if len(shapes) > 1:
        raise IsobasinError(
            f"{module}: factors of shapes {' and '.join(f'{up}, {down}' for up, down in sorted(shapes))}; expected "
            "adapters of one base and one rank"
        )


def _even(factors: Factors) -> Factors:
    """The same product with factors of one norm, so that neither rules the choice of U."""
    up, down = factors.up.norm(), factors.down.norm()
    if not (up > 0 and down > 0):
        return factors
    scale = (down / up).sqrt()
    return replace(factors, up=factors.up * scale, down=factors.down / scale)


def _closest(factors: Factors, reference: Factors) -> Factors:
    """(B U⁻¹, U A) as close as it comes to the factors of the reference."""
    if not (float(factors.up.norm()) and float(reference.up.norm())):
        return factors
    u = align_linear_factors(reference.up, reference.down.mT, factors.up, factors.down.mT).u
    return replace(factors, up=factors.up @ u.mT, down=torch.linalg.solve(u.mT, factors.down))


def _average(factors: Sequence[Factors], shares: Sequence[float]) -> Factors:
    up, down = (_mean(parts, shares) for parts in ([f.up for f in factors], [f.down for f in factors]))
    return replace(factors[0], up=up, down=down)


def _mean(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    return torch.stack([w * part.double() for w, part in zip(shares, parts)]).sum(0)


def _joined(factors: Sequence[Factors], shares: Sequence[float]) -> Factors:
    """The mean of the products, exactly: factors side by side, of the sum of the ranks."""
    up = torch.cat([w * each.up for w, each in zip(shares, factors)], 1)
    return replace(factors[0], up=up, down=torch.cat([each.down for each in factors]))


def _truncated(factors: Factors, rank: int) -> Factors:
    """The closest product of a lower rank, with balanced factors."""
    left, right = torch.linalg.qr(factors.up), torch.linalg.qr(factors.down.mT)
    u, s, v = torch.linalg.svd(left.R @ right.R.mT)
    root = s[:rank].sqrt()
    return replace(factors, up=left.Q @ (u[:, :rank] * root), down=(right.Q @ (v[:rank].mT * root)).mT)


def _distance(factors: Factors, mean: Factors) -> float:
    """‖BA − mean‖/‖mean‖."""
    apart = Factors(torch.cat([factors.up, -mean.up], 1), torch.cat([factors.down, mean.down]))
    return _size(apart) / max(_size(mean), 1e-300)
