"""Spaces: where each lies in its model, which element of its group is nearest, and that nobody guesses from names."""

import ast
import re
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import subject
from torch import Tensor

import isobasin
import tiny
from isobasin.arch import Space
from isobasin.arch.architecture import Kind
from isobasin.errors import IsobasinError
from isobasin.groups import Element, Group, Monomial, Overlap
from isobasin.groups.monomial import balance, scale_cost
from isobasin.symmetries import group_of, symmetry

every_case = pytest.mark.parametrize("name", [pytest.param(c.name, marks=pytest.mark.hf) for c in tiny.CASES])
seeds = st.integers(0, 2**31)

# -- where a space lies ------------------------------------------------------------------------------------------------

NAME = re.compile(r"(?P<label>[a-z]+)(?P<layer>\d*)")
ROLES = {"resid": "stream", "heads": "heads", "ff": "units", "pool": "units", "mlm": "units"}


@every_case
def test_a_space_has_the_layer_role_and_label_of_its_name(name: str) -> None:
    arch = subject(name).weights.arch
    for key, space in arch.spaces.items():
        found = NAME.fullmatch(key)
        assert found is not None
        layer = int(found["layer"]) if found["layer"] else None
        assert (space.name, space.layer, space.label) == (key, layer, found["label"])
        assert space.role == ROLES[found["label"]]
        assert (key in arch.streams) == (key == "resid")
    layers = range(arch.sizes.n_layers)
    assert {n for n, s in arch.spaces.items() if s.layer is not None} == {
        f"{w}{i}" for w in ("heads", "ff") for i in layers
    }


@every_case
def test_faces_lead_to_their_heads(name: str) -> None:
    arch = subject(name).weights.arch
    layers = range(arch.sizes.n_layers)
    expected = {f"{side}{i}": (arch.spaces[f"heads{i}"], side) for i in layers for side in ("qk", "vo")}
    assert dict(arch.faces) == expected
    for face, (heads, side) in arch.faces.items():
        assert face == getattr(heads, side)
        assert {name for name, *_ in arch.carriers(face)} <= set(arch.blocks[heads.name])


# The gain in front of heads and of units, from the names in the files alone; {j} is the layer before.
GAINS = {
    "gpt2": ("transformer.h.{i}.ln_1.weight", "transformer.h.{i}.ln_2.weight"),
    "bert": (
        "bert.encoder.layer.{j}.output.LayerNorm.weight",
        "bert.encoder.layer.{i}.attention.output.LayerNorm.weight",
    ),
    "vit": ("vit.encoder.layer.{i}.layernorm_before.weight", "vit.encoder.layer.{i}.layernorm_after.weight"),
    "llama": ("model.layers.{i}.input_layernorm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    "gpt_neox": (
        "gpt_neox.layers.{i}.input_layernorm.weight",
        "gpt_neox.layers.{i}.post_attention_layernorm.weight",
    ),
}
GAINS |= dict.fromkeys(("mistral", "qwen2", "phi3"), GAINS["llama"])


def gain_of(family: str, space: Space, n_layers: int) -> str:
    """The gain that a space of heads or units reads, by the names of its family."""
    heads, units = GAINS[family]
    layer = n_layers if space.layer is None else space.layer  # the pooler and the transform of BERT come last
    if family == "bert" and (space.layer == 0 and space.role == "heads"):
        return "bert.embeddings.LayerNorm.weight"
    text = heads if space.role == "heads" or space.layer is None else units
    return text.format(i=layer, j=layer - 1)


@every_case
def test_a_block_reads_one_norm_the_one_in_front_of_it(name: str) -> None:
    arch = subject(name).weights.arch
    moving = [arch.spaces[n] for n in symmetry(arch).groups if n not in arch.streams]
    assert len(moving) >= 2 * arch.sizes.n_layers
    for space in moving:
        found = arch.norm_of(space)
        assert found.gain == gain_of(arch.family, space, arch.sizes.n_layers)
        read = {r.weight: n for n, norm in arch.norms.items() if norm.space == "resid" for r in arch.readers(n)}
        assert {read[t] for t in arch.blocks[space.name] if t in read} == {found.name}
    gains = [arch.norm_of(space).gain for space in moving if space.layer is not None]
    assert len(set(gains)) == len(gains)  # no two blocks of a layer, and no two layers, read the same norm


# -- the nearest element -----------------------------------------------------------------------------------------------

KINDS: tuple[Kind, ...] = get_args(Kind)
SCALED = ("positive", "scaled")


def test_every_kind_is_tried() -> None:
    kinds = {
        space.kind
        for c in tiny.CASES
        for space in subject(c.name).weights.arch.spaces.values()
        if isinstance(space, Space)
    }
    assert kinds <= set(KINDS)
    assert len(KINDS) == 8


def group(kind: Kind, n: int) -> Group:
    return group_of(Space("x", n, kind))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Tables = tuple[Tensor, Tensor, Tensor]  # slices that move by g, by its dual and by its permutation alone


def acted(g: Element, tables: Tables) -> Tables:
    up, down, gate = tables
    return g.act(up, 0), g.dual().act(down, 0), g.permutation_part().act(gate, 0)


def overlap(a: Tables, b: Tables) -> Overlap:
    primal, dual, permuted = (x @ y.mT for x, y in zip(a, b, strict=True))
    return Overlap(primal, dual, permuted, torch.zeros_like(primal), b[0].square().sum(1), b[1].square().sum(1))


def squared_distance(a: Tables, b: Tables) -> float:
    return sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))


def balancing(kind: Kind, tables: Tables) -> Element:
    """Where the group has scales, those at which the rows and the columns of every unit have the same size."""
    if kind not in SCALED:
        return group(kind, len(tables[0])).identity()
    return Monomial(torch.arange(len(tables[0])), balance(tables[0].square().sum(1), tables[1].square().sum(1)))


def drawn(kind: Kind, n: int, seed: int) -> Tables:
    """Random tables; nothing is only permuted in a space that rotates."""
    gates = 0.0 if kind in ("orthogonal", "orthogonal1") else 1.0
    return normal(n, 40, seed=seed), normal(n, 40, seed=seed + 1), gates * normal(n, 40, seed=seed + 2)


def near(found: Element, expected: Element, tolerance: float) -> bool:
    """The same element: permutations and signs exactly, numbers to within a tolerance."""
    discrete = not isinstance(expected, Monomial) or torch.equal(found.signed_matrix(), expected.signed_matrix())
    return discrete and torch.allclose(found.matrix(), expected.matrix(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(2, 9), noise=st.sampled_from([0.0, 0.03]), seed=seeds)
@settings(max_examples=25, deadline=None)
def test_a_planted_element_is_found(kind: Kind, n: int, noise: float, seed: int) -> None:
    b, planted = drawn(kind, n, seed), group(kind, n).sample(seed=seed)
    up, down, gate = (x + noise * normal(*x.shape, seed=seed + 3) for x in acted(planted, b))
    a = (up, down, gate)
    to_a, to_b = balancing(kind, a), balancing(kind, b)
    a, b = acted(to_a, a), acted(to_b, b)
    found = group(kind, n).nearest(overlap(a, b))
    assert group(kind, n).contains(found)
    assert near(to_a.inverse() @ found @ to_b, planted, 0.05 if noise else 1e-7)
    left = squared_distance(a, acted(found, b))
    assert left <= squared_distance(a, acted(to_a @ planted @ to_b.inverse(), b)) + 1e-9
    other = to_a @ group(kind, n).sample(seed=seed + 7) @ to_b.inverse()
    if not near(other, found, 1e-2):  # negative control: another element of the group leaves more
        assert squared_distance(a, acted(other, b)) > left


@pytest.mark.parametrize("kind", SCALED)
def test_units_of_very_different_scales_are_found_in_balanced_form_only(kind: Kind) -> None:
    n, b = 12, drawn(kind, 12, seed=5)
    planted = Monomial(torch.arange(n).roll(1), torch.logspace(-2, 2, n, dtype=torch.float64))
    a = acted(planted, b)
    to_a, to_b = balancing(kind, a), balancing(kind, b)
    balanced = group(kind, n).nearest(overlap(acted(to_a, a), acted(to_b, b)))
    assert near(to_a.inverse() @ balanced @ to_b, planted, 1e-6)
    b = acted(Monomial(torch.arange(n), torch.logspace(2, -2, n, dtype=torch.float64)), b)
    unbalanced = group(kind, n).nearest(overlap(a, (b[0], b[1], 0 * b[2])))
    assert not torch.equal(unbalanced.permutation_part().matrix(), planted.permutation_part().matrix())


def elements(kind: Kind, n: int) -> Iterator[Monomial]:
    """Every element of a finite group."""
    whole = [torch.ones(n), -torch.ones(n)]
    each = [torch.tensor(s, dtype=torch.float64) for s in product([1.0, -1.0], repeat=n)]
    scales = {"permutation±": whole, "signed": each}.get(kind, whole[:1])
    orders = [tuple(range(n))] if kind == "fixed" else list(permutations(range(n)))
    yield from (Monomial(torch.tensor(order), scale.double()) for order in orders for scale in scales)


@pytest.mark.parametrize("kind", ["fixed", "permutation", "permutation±", "signed"])
@given(seed=seeds)
@settings(max_examples=25, deadline=None)
def test_no_element_of_a_finite_group_is_nearer(kind: Kind, seed: int) -> None:
    """Between unrelated tables, by brute force over the whole group of four coordinates."""
    a, b = drawn(kind, 4, seed), drawn(kind, 4, seed + 10)
    every = [squared_distance(a, acted(g, b)) for g in elements(kind, 4)]
    assert len(every) == {"fixed": 1, "permutation": 24, "permutation±": 48, "signed": 384}[kind]
    found = group(kind, 4).nearest(overlap(a, b))
    assert group(kind, 4).contains(found)
    assert squared_distance(a, acted(found, b)) == pytest.approx(min(every), abs=1e-9)
    assert len(every) == 1 or max(every) > min(every) + 1  # negative control: they are not all as near


@pytest.mark.parametrize("kind", ["orthogonal", "orthogonal1"])
@given(n=st.integers(3, 7), seed=seeds)
@settings(max_examples=25, deadline=None)
def test_no_rotation_is_nearer(kind: Kind, n: int, seed: int) -> None:
    a, b = drawn(kind, n, seed), drawn(kind, n, seed + 10)
    found = group(kind, n).nearest(overlap(a, b))
    assert group(kind, n).contains(found)
    left = squared_distance(a, acted(found, b))
    far = [group(kind, n).sample(seed=seed + k) for k in range(5)]
    close = [group(kind, n).project(found.matrix() + 0.05 * normal(n, n, seed=seed + k)) for k in range(5)]
    others = [squared_distance(a, acted(g, b)) for g in far + close]
    assert min(others) >= left - 1e-9
    assert max(others) > left + 1e-3


@pytest.mark.parametrize("kind", SCALED)
@given(n=st.integers(1, 6), seed=seeds)
@settings(max_examples=25, deadline=None)
def test_no_scale_is_nearer_for_the_pairs_that_were_chosen(kind: Kind, n: int, seed: int) -> None:
    a, b = drawn(kind, n, seed), drawn(kind, n, seed + 10)
    a, b = acted(balancing(kind, a), a), acted(balancing(kind, b), b)
    found = group(kind, n).nearest(overlap(a, b))
    assert isinstance(found, Monomial)
    rows_b = [x[found.index] for x in b]
    u, d = (x.square().sum(1) for x in rows_b[:2])
    p, q = ((x * y).sum(1) for x, y in zip(a[:2], rows_b[:2], strict=True))
    sizes = torch.logspace(-1.5, 1.5, 301, dtype=torch.float64)[:, None]
    grid = torch.cat([sizes, -sizes]) if kind == "scaled" else sizes
    searched = scale_cost(u, d, p, q, grid)
    assert bool((scale_cost(u, d, p, q, found.scale) <= searched.amin(0) + 1e-9).all())
    assert bool((searched.amax(0) > searched.amin(0) + 1).all())


def test_heads_have_no_nearest_element_from_an_overlap() -> None:
    heads = group_of(next(subject("llama-gqa").weights.arch.heads()))
    with pytest.raises(IsobasinError, match="heads are matched by their matrices"):
        heads.nearest(Overlap.empty(heads.n, torch.zeros(())))


# -- nobody guesses ----------------------------------------------------------------------------------------------------

ROOT = Path(isobasin.__file__).parent
# Every package but `arch`, which makes the names, and `groups`, which makes the classes.
PACKAGES = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"arch", "groups"})
WORDS = ("resid", "heads", "ff", "qk", "vo")  # of which the names of spaces and faces are made
PARSERS = {"removeprefix", "removesuffix", "startswith", "endswith", "partition", "rpartition", "split", "rsplit"}
PARSERS |= {"strip", "lstrip", "rstrip", "replace", "find", "index"}
CHECKS = {"isinstance", "issubclass"}
PATTERN = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})(?![a-z])")


def subclasses(kind: type) -> set[str]:
    return {kind.__name__}.union(*map(subclasses, kind.__subclasses__()))


def names_in(node: ast.AST) -> set[str]:
    """The names, and last parts of dotted names, of an expression."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def texts_in(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Line and kind of every place that looks at the class of a group or element, or at the letters of a name."""
    algebra = subclasses(Group) | subclasses(Element)
    tree = ast.parse(source)
    patterns = regular_expressions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass) and names_in(node.cls) & algebra:
            yield node.lineno, "class of a group or element"
        if isinstance(node, ast.JoinedStr):
            for text, value in zip(node.values, node.values[1:]):
                before = text.value if isinstance(text, ast.Constant) else ""
                if isinstance(value, ast.FormattedValue) and before in WORDS:
                    yield node.lineno, "name of a space"
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [text for argument in node.args for text in texts_in(argument)]
        if called in CHECKS and len(node.args) == 2 and names_in(node.args[1]) & algebra:
            yield node.lineno, "class of a group or element"
        if called in PARSERS and isinstance(node.func, ast.Attribute) and set(given) & set(WORDS):
            yield node.lineno, "name of a space"
        if names_in(node.func) & patterns and any(map(PATTERN.search, given)):
            yield node.lineno, "name of a space"


def regular_expressions(tree: ast.AST) -> set[str]:
    """The names under which a module has `re`, or parts of it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name for alias in node.names if alias.name == "re"}
        if isinstance(node, ast.ImportFrom) and node.module == "re":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_file_guesses_what_a_space_or_an_element_is(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [f"{f.relative_to(ROOT)}:{line}: {what}" for f in files for line, what in offences(f.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "statement",
    [
        "isinstance(g, Monomial)",
        "isinstance(g, groups.Matrix)",
        "isinstance(g, (int, HeadsElement))",
        "isinstance(group, Heads | Orthogonal)",
        "issubclass(kind, Element)",
        'number = int(name.removeprefix("heads"))',
        'name.startswith(("ff", "heads"))',
        'name.split("qk")[1]',
        're.fullmatch(r"heads(\\d+)", name)',
        'fullmatch(r"(qk|vo)[0-9]+", name)',
        'face = f"qk{number}"',
        'face = f"norm of {x} at heads{i}"[3:].partition("heads")',
        "match g:\n        case Monomial(index, scale): pass",
    ],
)
def test_a_planted_guess_is_found(statement: str) -> None:
    source = f"import re\nfrom re import fullmatch\n\ndef work(name, g):\n    {statement}\n"
    assert [line for line, _ in offences(source)] == [5 if "case" not in statement else 6]


@pytest.mark.parametrize(
    "statement",
    [
        "isinstance(space, HeadSpace)",
        "isinstance(x, dict)",
        "element = Monomial(index, scale)",
        'space.role == "heads"',
        'getattr(heads, "qk")',
        'name.removeprefix("gauge/")',
        're.sub(r"\\s+", " ", text)',
        'message = f"{n} heads of {d}"',
    ],
)
def test_what_is_no_guess_is_not_found(statement: str) -> None:
    assert list(offences(f"import re\n\n{statement}\n")) == []
