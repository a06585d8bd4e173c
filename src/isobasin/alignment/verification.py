"""Evaluating a transform: how close it brings B to A, and whether it leaves every layer's function alone.

Distances are those of the weights as they will be stored. A layer of B reads a normalised stream and adds to it; the
moved layer must read the moved stream and add the moved sum. Both are run on random streams in float64. Attention and
feed-forward of a layer are taken together, as a bias may pass from one to the other.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.alignment.descent import SweepState
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.result import Alignment
from isobasin.arch import Architecture, Axis, HeadSpace, Norm, Space, Term
from isobasin.errors import VerificationError
from isobasin.shapes import Float
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import attend, attention_matrices, norm_gains
from isobasin.symmetries.symmetry import Symmetry
from isobasin.symmetries.transform import Transform
from isobasin.views import AsFloat64, Tensors, trim_heap
from isobasin.weights import Weights

EXACT = 1e-6  # the largest relative change of a layer's outputs that counts as rounding
LENGTH = 24  # tokens of random input
CHUNK = 2**22  # numbers compared at a time
Squares = tuple[float, float, float]  # ‖B − A‖², ‖gB − A‖², ‖A‖²


@dataclass(frozen=True)
class Evaluation:
    """A transform of one problem: squares by space, and how far each layer's outputs moved (None: not verified)."""

    transform: Transform
    squares: Mapping[str, Squares]
    changes: Mapping[int, float] | None
    state: SweepState | None

    @property
    def totals(self) -> Squares:
        before, after, size = (sum(s[k] for s in self.squares.values()) for k in range(3))
        return before, after, size

    @property
    def closer(self) -> bool:
        before, after, _ = self.totals
        return after < before


def evaluate_transform(
    problem: AlignmentProblem,
    transform: Transform,
    dtypes: Mapping[str, torch.dtype],
    *,
    verify: bool = True,
    state: SweepState | None = None,
) -> Evaluation:
    """Measure the distances of a transform, and refuse one that changes what a layer computes.

    Each tensor of the moved model is computed once, for its distance and for the verification of its layer.
    """
    moved = transform.apply(problem.b, device=problem.device)
    check = LayerCheck.of(problem.b, problem.part, transform, problem.device) if verify else None
    squares: dict[str, Squares] = {}
    changes: dict[int, float] = {}
    for layer, names in _by_layer(problem).items():
        found, change = _evaluate_layer(problem, moved, dtypes, layer, names, check)
        squares |= found
        if layer is not None and change:
            if transform.elements or transform.gauge:
                require_unchanged(layer, change[0])
            changes[layer] = change[1]
        if problem.device.type == "cpu":
            trim_heap()
    ordered = {space: squares[space] for space in problem.arch.blocks if space in squares}
    return Evaluation(transform, ordered, changes if verify else None, state)


def unmoved(evaluation: Evaluation, problem: AlignmentProblem) -> Evaluation:
    """The same problem with B left as it is."""
    return Evaluation(
        Transform(problem.arch.family, dict(problem.arch.spaces)),
        {space: (s[0], s[0], s[2]) for space, s in evaluation.squares.items()},
        None if evaluation.changes is None else dict.fromkeys(evaluation.changes, 0.0),
        evaluation.state,
    )


def combined(problem: AlignmentProblem, evaluations: list[Evaluation]) -> Alignment:
    """Problems that do not depend on each other as one alignment."""
    transform = Transform(
        problem.arch.family,
        dict(problem.arch.spaces),
        {name: g for e in evaluations for name, g in e.transform.elements.items()},
        {name: v for e in evaluations for name, v in e.transform.gauge.items()},
    )
    before, after, size = (sum(e.totals[k] for e in evaluations) for k in range(3))
    scale = max(size, 1e-300)
    spaces = [problem.arch.spaces[name] for name in problem.part.groups]
    heads = [
        transform.elements.get(space.name, problem.part.groups[space.name].identity()).face("qk", queries=queries)
        for space in spaces
        if space.role == "heads"
        for queries in (True, False)
    ]
    permutations = [tuple(face.tensors()["index"].tolist()) for face in heads]
    changes = [c for e in evaluations for c in (e.changes or {}).values()]
    return Alignment(
        transform,
        tuple(_row(problem.arch, space, s, e) for e in evaluations for space, s in e.squares.items() if s[2] > 0),
        (before / scale) ** 0.5,
        (after / scale) ** 0.5,
        tuple(permutations[::2]),
        tuple(permutations[1::2]),
        None if any(e.changes is None for e in evaluations) else max(changes, default=0.0),
        evaluations[0].state.history if len(evaluations) == 1 and evaluations[0].state else (),
    )


def _row(arch: Architecture, name: str, squares: Squares, evaluation: Evaluation) -> dict[str, object]:
    space, state = arch.spaces[name], evaluation.state
    scale = max(squares[2], 1e-300)
    head = state.heads.get(name) if state else None
    changes = evaluation.changes or {}
    return {
        "layer": space.layer,
        "space": space.label,
        "distance_before": (squares[0] / scale) ** 0.5,
        "distance_after": (squares[1] / scale) ** 0.5,
        "converged": bool(head.converged.all()) if head else state is None or state.converged,
        "rank_deficient_kv_heads": torch.nonzero(head.deficient).flatten().tolist() if head else [],
        "max_output_change": changes.get(space.layer) if space.layer is not None else None,
    }


# -- distances ------------------------------------------------------------------------------------------------------


def _by_layer(problem: AlignmentProblem) -> dict[int | None, dict[str, list[str]]]:
    """The tensors that the problem may change, by layer and space.

    Tensors of the stream alone (norms, output biases) count with the one space that moves, or else by themselves.
    """
    scope, alone = problem.part.tensors, next(iter(problem.part.groups)) if len(problem.part.groups) == 1 else None
    found: dict[int | None, dict[str, list[str]]] = {}
    for space, tensors in problem.arch.blocks.items():
        names = [name for name in tensors if name in scope]
        if names:
            space = alone or space
            layer = found.setdefault(problem.arch.spaces[space].layer, {})
            layer.setdefault(space, []).extend(names)
    return found


def _evaluate_layer(
    problem: AlignmentProblem,
    moved: Weights,
    dtypes: Mapping[str, torch.dtype],
    layer: int | None,
    names: Mapping[str, list[str]],
    check: "LayerCheck | None",
) -> tuple[dict[str, Squares], list[float]]:
    """One layer, whose moved tensors are held together and released when this returns."""
    if layer is not None:
        moved = moved.held(n for part in names.values() for n in part)
    squares = {space: _squares(problem, moved, dtypes, part) for space, part in names.items()}
    if check is None or layer is None:
        return squares, []
    return squares, check.changes(layer, moved, _Stored(moved, dtypes))


def _squares(problem: AlignmentProblem, moved: Tensors, dtypes: Mapping[str, torch.dtype], names: list[str]) -> Squares:
    """Squared distances from A before and after, both as stored, and A's own square; a few numbers at a time, as an
    embedding in float64 is the largest thing there is."""
    sums = torch.zeros(3, dtype=torch.float64)
    for name in names:
        after = moved[name].to(dtypes[name])
        before = problem.b[name].to(after.device, dtypes[name])
        tensors = (before, after, problem.a[name].to(after.device))
        for x, y, z in zip(*(t.reshape(-1).split(CHUNK) for t in tensors), strict=True):
            reference = z.to(torch.float64, copy=True)  # squared in place below, and A stays as it is
            parts = (x - reference, y - reference, reference)
            sums += torch.stack([part.square_().sum() for part in parts]).cpu()
    before_square, after_square, size = sums.tolist()
    return before_square, after_square, size


class _Stored(Mapping[str, Tensor]):
    """A model in the types in which it will be written."""

    def __init__(self, tensors: Tensors, dtypes: Mapping[str, torch.dtype]) -> None:
        self._tensors, self._dtypes = tensors, dtypes

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtypes.get(name, torch.float32))  # norms without parameters have ones

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# -- the function of a layer ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCheck:
    """The layers of B, and of a moved model, on the same random streams, each in its own frame.

    Only the parts of a layer that may have moved are run: attention alone where the scope is attention.
    """

    arch: Architecture
    part: Symmetry
    before: Tensors
    stream_action: Action

    @staticmethod
    def of(b: Weights, part: Symmetry, transform: Transform, device: torch.device) -> "LayerCheck":
        moving = {name: g for name, g in transform.elements.items() if name in b.arch.streams}
        return LayerCheck(b.arch, part, AsFloat64(b, device), Action(b.arch, moving))

    def changes(self, layer: int, *others: Tensors) -> list[float]:
        """How far the sum of the layer's parts moved in each of these models, relative to the largest entry.

        Behind LayerNorms the mean of what is written to the stream is not seen, and does not count.
        """
        if not self._spaces(layer):
            return []
        stream = self._written(layer)
        expected = self._run(layer, self.before, Action(self.arch, {}))
        expected = self.stream_action.act(expected, -1, Axis((Term(stream.name),)))
        found = []
        for tensors in others:
            difference = self._run(layer, AsFloat64(tensors, expected.device), self.stream_action) - expected
            if all(norm.kind == "layer" for norm in self.arch.norms.values() if norm.space == stream.name):
                difference = difference - difference.mean(-1, keepdim=True)
            found.append(float(difference.abs().max() / expected.abs().max().clamp(min=1e-300)))
        return found

    def _spaces(self, layer: int) -> list[Space | HeadSpace]:
        spaces = [s for s in self.arch.spaces.values() if s.layer == layer and s.role != "experts"]
        return [space for space in spaces if self.part.moves_stream or space.name in self.part.groups]

    def _run(self, layer: int, tensors: Tensors, action: Action) -> Float[Tensor, "t d"]:
        """What a layer adds to random streams, moved as its model is. What reads one norm reads one stream, as experts
        may change places; each expert counts with its output of the router, as if all were chosen."""
        rng, device = torch.Generator().manual_seed(layer), self._device(layer, tensors)
        streams, total = _RandomStreams(self.arch, tensors, action, rng, device), torch.zeros(())
        constants: dict[str, Tensor] = {}
        for space in self._spaces(layer):
            norm, out = self.arch.norm_of(space), None
            x = streams.read(norm, self._written(layer))
            if isinstance(space, HeadSpace):
                keys = [self.arch.norm_of(space, source=True)]
                if space.shared_rotary:
                    keys = [*map(self.arch.norm_read_by, self._keys(space.rope)), *keys]
                read = [x if each is None or each == norm else streams.read(each) for each in keys]
                out = _attention(self.arch, space, tensors, x, read)
            out = out if out is not None else _units(self.arch, space, tensors, x)  # type: ignore[arg-type]
            share = self._share(space, tensors, x)
            for writer in self._writers(space):
                out = out * self._scale(writer, tensors)
                # What the layer adds whatever it reads; a parallel attention and feed-forward may share one.
                if (bias := self.arch.bias_of(writer)) is not None:
                    constants[bias] = tensors[bias] * self._scale(writer, tensors) * share
            out = out * share
            total = total + (out + x if norm and norm.skip else out)  # after a post-norm the stream itself goes on
        return total + sum(constants.values())

    def _device(self, layer: int, tensors: Tensors) -> torch.device:
        return tensors[self.arch.blocks[self._spaces(layer)[0].name][0]].device

    def _keys(self, face: str) -> list[str]:
        """The weights of the keys on a face."""
        carriers = self.arch.carriers(face)
        return [name for name, *_, term in carriers if not term.dual and len(self.arch.shapes[name]) > 1]

    def _written(self, layer: int) -> Space:
        """The stream to which a layer writes."""
        found = self.arch.stream_of(self._writers(self._spaces(layer)[0])[0])
        assert found is not None, layer
        return found

    def _writers(self, space: Space | HeadSpace) -> list[str]:
        """The weights that read a space and write to the stream."""
        carriers = self.arch.carriers(space.vo if isinstance(space, HeadSpace) else space.name)
        return [name for name, *_, term in carriers if term.dual and len(self.arch.shapes[name]) > 1]

    def _share(self, space: Space | HeadSpace, tensors: Tensors, x: Float[Tensor, "t d"]) -> Tensor | float:
        """The output of the router for the units of an expert; 1 for anything else."""
        for experts in self.arch.expert_spaces.values():
            if space.name in experts.members:
                router = self.arch.router_of(experts.name)
                bias = self.arch.bias_of(router)
                scores = x @ tensors[router].mT + (tensors[bias] if bias else 0.0)
                return scores.softmax(-1)[:, [experts.members.index(space.name)]]
        return 1.0

    def _scale(self, writer: str, tensors: Tensors) -> Tensor | float:
        scale = self.arch.scale_of(writer)
        return tensors[scale] if scale else 1.0


def require_unchanged(layer: int, change: float) -> None:
    """Refuse an alignment that changes what a layer does by more than rounding, before it is stored."""
    if not change <= EXACT:
        raise VerificationError(
            f"layer {layer}: the alignment found would change what this layer adds to the stream by {change:.1e} "
            f"(allowed {EXACT:.0e}); nothing was written: try --scope all-attention, or --stage2 orthogonal there, and "
            "please report the models"
        )


@dataclass(frozen=True)
class _RandomStreams:
    """What the norms of a layer hand on for random streams, moved as the model is; a latent stream is computed from the
    one that its layer reads."""

    arch: Architecture
    tensors: Tensors
    action: Action
    rng: torch.Generator
    device: torch.device
    _drawn: dict[Norm | None, Tensor] = field(default_factory=dict)

    def read(self, norm: Norm | None, written: Space | None = None) -> Float[Tensor, "t d"]:
        """What readers of a norm see; of none: the stream that is written."""
        stream = written if norm is None else self.arch.streams[norm.space]
        assert stream is not None
        if stream.latent:
            assert norm is not None
            return _read(self.arch, self.tensors, norm, _normalised(self._latent(stream), norm.kind))
        if norm not in self._drawn:
            drawn = torch.randn(LENGTH, stream.size, generator=self.rng, dtype=torch.float64)
            self._drawn[norm] = _normalised(drawn.to(self.device), "rms" if norm is None else norm.kind)
        z = self.action.act(self._drawn[norm], -1, Axis((Term(stream.name),)))
        return z if norm is None else _read(self.arch, self.tensors, norm, z)

    def _latent(self, stream: Space) -> Float[Tensor, "t d"]:
        (writer,) = (each for each in self.arch.writers(stream.name) if len(self.arch.shapes[each.weight]) > 1)
        x = self.read(self.arch.norm_read_by(writer.weight))
        z = x @ self.tensors[writer.weight].movedim(writer.axis, -1)
        return z + self.tensors[writer.bias] if writer.bias else z


def _normalised(z: Tensor, kind: str) -> Float[Tensor, "t d"]:
    if kind == "layer":
        z = z - z.mean(-1, keepdim=True)
    return z / z.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-300)  # of width 1, a LayerNorm leaves zeros


def _read(arch: Architecture, tensors: Tensors, norm: Norm, z: Tensor) -> Float[Tensor, "t d"]:
    x = z * tensors[norm.gain]
    return x + tensors[norm.shift] if norm.shift in arch.tensors else x


def _attention(
    arch: Architecture, heads: HeadSpace, tensors: Tensors, x: Tensor, sources: list[Tensor]
) -> Float[Tensor, "t d"]:
    """`sources`: what keys read, the last of them what values read too."""
    m = attention_matrices(arch, heads, tensors)
    ended = (torch.cat([*each, torch.ones_like(x[:, :1])], -1) for each in ([x], sources, sources[-1:]))
    q, k, v = (y[:, : matrix.shape[-2]] for y, matrix in zip(ended, (m.q, m.k, m.v)))
    gains = norm_gains(heads, tensors) if heads.qk_norm else None
    return attend(m, q, heads, gains, k, v, tensors[heads.sinks] if heads.sinks else None)


def _units(arch: Architecture, space: Space, tensors: Tensors, x: Tensor) -> Float[Tensor, "t d"]:
    """down(φ(up x)), or down(φ(gate x) · up x); which φ makes no difference to what is a symmetry of its kind."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name in arch.blocks[space.name]:
        for place in arch.placements(name, space.name):
            role = "down" if place.term.dual else "gate" if place.term.permutation_part else "up"
            block = tensors[name].narrow(place.axis, place.start, place.size)
            if block.dim() == 1:
                biases[role] = block
            else:
                weights[role] = block.movedim(place.axis, 0 if role == "down" else -1)

    def through(role: str, inputs: Tensor) -> Tensor:
        out = inputs @ weights[role]
        return out + biases[role] if role in biases else out  # that of the output is added once for the layer

    phi = _ACTIVATIONS.get(space.kind, F.gelu)
    hidden = F.silu(through("gate", x)) * through("up", x) if "gate" in weights else phi(through("up", x))
    return through("down", hidden)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"positive": F.relu, "signed": torch.tanh}
