"""Verdicts of `equal` on copies and on changes of known size, checked against both models run in float64.

    python tests/campaigns/verdicts.py -o results/reliability/verdicts.json
    python tests/campaigns/verdicts.py --models types --every 20 -o results/reliability/verdicts_types.json

The models are those of the nine oldest families, or (`types`) every configuration of `model_types`.

The truth is measured, not assumed. On every input (random ones, ones that hit the changed row, and the witness of the
verdict) both models run in float64. The effect is the largest difference of outputs in multiples of what perturbing
either model by the rounding of its stored type causes. A `same` is wrong if the effect exceeds `MAX_SAME`; a
`different` is wrong if it is below `MIN_DIFFERENT`, or if B is a copy.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "compare")]

import compared_models  # noqa: E402
from compared_models import held, own_model, scrambled_file, stored, tiny_model  # noqa: E402

import isobasin as ib  # noqa: E402
import model_types  # noqa: E402
from isobasin.model import ModelConfig  # noqa: E402
from isobasin.rounding import perturbed, rounding_unit, rounding_units  # noqa: E402
from isobasin.runtime import random_inputs, token_key, vocabulary_size, with_tokens  # noqa: E402
from isobasin.symmetries.coordinate import face_columns  # noqa: E402
from isobasin.weights import Weights, untied  # noqa: E402

MAX_SAME, MIN_DIFFERENT = 10.0, 2.0
SIZES = (1, 3, 10, 30, 100, 300, 1000)  # of a change, in units of rounding of the stored type
SCALES = (1e-4, 1e-7, 1e-12, 1e-20)  # of a part that is small, relative to the others
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PERTURBED_COPIES = 3
EPSILONS = ("eps", "epsilon")  # the ends of config keys
TABLES = {
    "token row": ("wte.weight", "word_embeddings.weight", "embed_tokens.weight", "embed_in.weight", "tokens.weight"),
    "position row": ("wpe.weight", "position_embeddings.weight", "position_embeddings", "positions.weight"),
    "type row": ("token_type_embeddings.weight",),
    "output row": ("lm_head.weight", "embed_out.weight", "classifier.weight", "head.weight"),
}
ROWS = ("token row", "position row", "type row")  # behind them stands a norm

_SMALL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_head": 6, "d_ff": 12, "d_vocab": 23, "n_positions": 12}
_OWN: Mapping[str, dict[str, object]] = {
    "isobasin-rope": {"positions": "rope", "norm": "rms", "feed_forward": "swiglu", "bias": False, "causal": True},
    "isobasin-learned": {"positions": "learned"},
}
MODELS = (
    "gpt2-lm-untied",
    "gpt2-lm-tied",
    "bert-classifier",
    "bert-masked-lm-tied",
    "vit-no-qkv-bias",
    "llama-gqa",
    "mistral-gqa",
    "qwen2-gqa",
    "phi3-gqa",
    "gpt_neox-half-rotary",
    *_OWN,
)
CONFIG_KEYS = (
    ("bert-classifier", "hidden_act", "relu"),
    ("llama-gqa", "rms_norm_eps", 2e-3),
    ("llama-gqa", "rms_norm_eps", 1e-3 * (1 + 1e-9)),
    ("qwen2-gqa", "rope_parameters", {"rope_type": "default", "rope_theta": 20_000.0}),
    ("gpt2-classifier", "pad_token_id", 3),
    ("vit-no-qkv-bias", "layer_norm_eps", 2e-3),
)


TYPES_OF_MODELS = tuple(each.name for each in model_types.MODEL_TYPES)


def model(name: str) -> Weights:
    if name in TYPES_OF_MODELS:
        return held(model_types.weights(name))
    return own_model(ModelConfig(**(_SMALL | _OWN[name]))) if name in _OWN else tiny_model(name)  # type: ignore[arg-type]


def outputs(name: str, weights: Weights, inputs: Mapping[str, Tensor]) -> Tensor:
    """In float64: by formulas of the tests, or by transformers where its casts to float32 are turned off."""
    if name not in TYPES_OF_MODELS:
        return compared_models.outputs(weights, inputs)
    usual = model_types.weights(name).config
    changed = tuple((k, v) for k, v in weights.config.items() if k.endswith(EPSILONS) and v != usual.get(k))
    return model_types.outputs(weights, _module(name, changed), inputs)


@cache
def _module(name: str, changed: tuple[tuple[str, Any], ...]) -> Any:
    """The model of transformers, with some keys of its config changed."""
    kind = model_types.model_type(name)
    return replace(kind, config={**kind.config, **dict(changed)}).build() if changed else model_types.built(name)


@dataclass(frozen=True)
class Case:
    """A pair of models. `size` is that of the change (units of rounding) or of the small part; `is_copy`: B is A's
    function by construction."""

    model: str
    kind: str
    what: str
    size: float
    dtype: str
    a: Weights
    b: Weights
    is_copy: bool
    tokens: tuple[int, ...] = ()


# -- the cases ------------------------------------------------------------------------------------------------------


def copies(name: str) -> Iterator[Case]:
    """Scrambled and stored in each type, cast, saved again in shards, untied."""
    a = model(name)
    for dtype, t in TYPES.items():
        yield Case(name, "copy", "scrambled", 0, dtype, a, scrambled_file(a, t), True)
        narrow = stored(a, t)
        yield Case(name, "copy", "scrambled, both in this type", 0, dtype, narrow, scrambled_file(narrow, t, 2), True)
        yield Case(name, "copy", "cast", 0, dtype, a, stored(a, t), True)
    yield Case(name, "copy", "saved again in shards", 0, "float32", a, _saved_again(a), True)
    if name not in TYPES_OF_MODELS and any(a.arch.tied(n) for n in a.arch.tensors):
        yield Case(name, "copy", "untied", 0, "float32", a, untied(a), True)
        yield Case(name, "copy", "untied and scrambled", 0, "float32", a, scrambled_file(untied(a)), True)


def _saved_again(a: Weights) -> Weights:
    with TemporaryDirectory() as folder:
        a.save(Path(folder) / "copy", max_shard_size="4KB")
        return held(ib.load(Path(folder) / "copy"))


def changes(name: str, per_tensor: int) -> Iterator[Case]:
    """Every tensor changed as a whole, in one row, in one entry; sizes, types and scrambling take turns."""
    a, number = model(name), sum(map(ord, name))
    for tensor in (n for n, p in a.arch.tensors.items() if not p.buffer):
        for _ in range(per_tensor):
            number += 1
            dtype, size = list(TYPES)[number % 3], SIZES[number % len(SIZES)]
            part = ("tensor", "row", "entry")[number // 7 % 3]
            start = stored(a, TYPES[dtype])
            part = part if start[tensor].dim() else "tensor"
            value, row = _changed(start[tensor].double(), part, size * rounding_unit(TYPES[dtype]), number)
            b = stored(held(start, {tensor: value}), TYPES[dtype])
            b = scrambled_file(b, TYPES[dtype], number) if number % 4 == 0 else b
            yield Case(name, "change", f"{part} of {tensor}", size, dtype, start, b, False, (row % _vocabulary(a),))


def _changed(t: Tensor, part: str, share: float, seed: int) -> tuple[Tensor, int]:
    """The tensor, one of its rows or one of its entries moved by this share of its norm; and the row."""
    rng = torch.Generator().manual_seed(seed)
    noise, row = torch.randn(t.shape, generator=rng, dtype=torch.float64), seed % len(t) if t.dim() else 0
    at = {"tensor": ..., "row": row, "entry": (row, *(seed % n for n in t.shape[1:]))}[part]
    t = t.clone()
    t[at] += share * t[at].norm() / noise[at].norm() * noise[at]  # type: ignore[index]
    return t, row


def _vocabulary(weights: Weights) -> int:
    return vocabulary_size(weights) or 1


Place = tuple[str, int, Tensor, int]  # a tensor, an axis, indices on it, and the power of the scale they get


def small_parts(name: str) -> Iterator[Case]:
    """A part of A is scaled down and what it meets scaled up; in B the part has another direction. And scrambled copies
    of A. Rows of embeddings also with hardly any eps in the norms, where the size of a row has no effect at all."""
    base = model(name)
    for note, weights in (("", base), (", eps ≈ 0", _without_eps(base))):
        for number, (what, places) in enumerate(parts(weights).items()):
            for turn, scale in enumerate(SCALES if what in ROWS or not note else ()):
                dtype = ("float32", "bfloat16")[(number + turn) % 2]
                a = stored(_scaled(weights, places, scale), TYPES[dtype])
                b = stored(_turned(a, places), TYPES[dtype])
                tokens = tuple(places[0][2].tolist()) if what == "token row" else ()
                if all(bool(torch.isfinite(a[n]).all()) for n in a):
                    yield Case(name, "small part", what + note, scale, dtype, a, b, False, tokens)
                if all(bool(torch.isfinite(a[n]).all()) for n in a) and turn % 2:
                    copy = scrambled_file(a, TYPES[dtype], number)
                    yield Case(name, "copy of a small part", what + note, scale, dtype, a, copy, True, tokens)


def parts(weights: Weights) -> dict[str, list[Place]]:
    """Parts whose size matters little or not at all: what it meets is scaled the other way, or a norm follows."""
    arch, heads = weights.arch, next(weights.arch.heads())
    norm = arch.norm_of(heads)
    one, units = torch.tensor([3]), next(s.name for s in arch.spaces.values() if s.role == "units" and s.layer == 0)
    found = {
        "unit": [
            (n, axis, one, -1 if term.dual else 1)
            for n, axis, _, term in arch.carriers(units)
            if not term.permutation_part
        ],
        "queries of a head": _head_places(weights, heads.qk, small_dual=True),
        "values of a head": _head_places(weights, heads.vo, small_dual=False),
    }
    if norm is not None:  # None: heads read the stream as it is
        found["gain"] = [(norm.gain, 0, one, 1), *((r.weight, r.axis, one, -1) for r in arch.readers(norm.name))]
    for what, endings in TABLES.items():
        for n in (n for n in arch.tensors if n.endswith(endings)):
            found[what] = [(n, weights[n].dim() - 2, one % weights[n].shape[-2], 1)]
    return found


def _head_places(weights: Weights, face: str, *, small_dual: bool) -> list[Place]:
    """The first kv head and its queries."""
    heads, found = weights.arch.faces[face][0], []
    for n, axis, words, term in weights.arch.carriers(face):
        columns = face_columns(weights.arch, words, face, dual=term.dual)
        count = heads.d_head * (heads.group_size if term.queries else 1)
        found.append((n, axis, torch.tensor(columns[:count]), 1 if term.dual == small_dual else -1))
    return found


def _scaled(weights: Weights, places: list[Place], scale: float) -> Weights:
    tensors = {n: weights[n].double().clone() for n, *_ in places}
    for n, axis, at, power in places:
        tensors[n].index_copy_(axis, at, tensors[n].index_select(axis, at) * scale**power)
    return held(weights, tensors)


def _turned(weights: Weights, places: list[Place]) -> Weights:
    """Other numbers of the same size in the small places."""
    rng, tensors = torch.Generator().manual_seed(0), {n: weights[n].double().clone() for n, *_ in places}
    for n, axis, at, power in places:
        part = tensors[n].index_select(axis, at)
        noise = torch.randn(part.shape, generator=rng, dtype=torch.float64)
        if power > 0:
            tensors[n].index_copy_(axis, at, noise * part.norm() / noise.norm() if part.numel() > 1 else 1.5 * part)
    return held(weights, tensors)


def _without_eps(weights: Weights) -> Weights:
    keys = [k for k in weights.config if k.endswith(EPSILONS)]
    return replace(weights, config=dict(weights.config) | dict.fromkeys(keys, 1e-38))


def config_changes() -> Iterator[Case]:
    """The same weights under another value of one key."""
    for name, key, value in CONFIG_KEYS:
        a = tiny_model(name)
        b = ib.load({disk: a[n] for n, disk in a.names.on_disk.items()}, dict(a.config) | {key: value})
        yield Case(name, "config", f"{key} = {value}", 0, "float32", a, b, False)


# -- the truth ------------------------------------------------------------------------------------------------------


def effect(case: Case, verdict: ib.Verdict) -> float:
    """The largest difference of outputs in float64, in multiples of what rounding of the stored types causes."""
    inputs = [*random_inputs(case.a, n=4, length=12, seed=1), *_hits(case), verdict.outputs.inputs]
    apart = [_difference(case.model, case.a, case.b, each) for each in inputs]
    noise = [0.0] * len(inputs)
    for w in (case.a, case.b):
        for seed in range(PERTURBED_COPIES):
            copy = held(perturbed(w, rounding_units(w), seed=100 + seed))
            noise = [max(n, _difference(case.model, w, copy, each)) for n, each in zip(noise, inputs)]
    usual = sorted(noise)[len(noise) // 2]
    return max(x / max(n, usual, 1e-300) for x, n in zip(apart, noise))


def _hits(case: Case) -> list[dict[str, Tensor]]:
    """The changed token alone, and between others."""
    found = []
    for token in case.tokens:
        for drawn, every in zip(random_inputs(case.a, n=2, length=12, seed=2), (1, 2)):
            if (key := token_key(drawn)) is not None:
                ids = drawn[key].flatten(0, -2)[0].clone()
                ids[::every] = token
                found.append(with_tokens(case.a, drawn, ids))
    return found


def _difference(name: str, a: Weights, b: Weights, inputs: Mapping[str, Tensor]) -> float:
    x, y = (outputs(name, each, inputs) for each in (a, b))
    return float((x - y).abs().max() / x.abs().max().clamp(min=1e-300))


@dataclass(frozen=True)
class Result:
    """A case, the verdict and the measured effect."""

    case: Case
    verdict: ib.Verdict
    effect: float
    seconds: float

    @property
    def wrong(self) -> bool:
        if self.verdict.answer == "same":
            return not self.case.is_copy and self.effect > MAX_SAME
        return self.verdict.answer == "different" and (self.case.is_copy or self.effect < MIN_DIFFERENT)

    def to_dict(self) -> dict[str, Any]:
        worst, c = self.verdict.evidence.worst, self.case
        return {
            **{key: getattr(c, key) for key in ("model", "kind", "what", "size", "dtype")},
            "verdict": self.verdict.answer,
            "effect": self.effect,
            "wrong": self.wrong,
            "element": self.verdict.evidence.kind,
            "excess": worst.excess if worst else None,
            "reason": self.verdict.reason,
            "seconds": round(self.seconds, 2),
        }


def judge(case: Case) -> Result:
    start = time.perf_counter()
    verdict = ib.equivalent(case.a, case.b)
    seconds = time.perf_counter() - start
    return Result(case, verdict, effect(case, verdict), seconds)


# -- the campaign ---------------------------------------------------------------------------------------------------


def cases(models: tuple[str, ...], per_tensor: int) -> Iterator[Case]:
    for name in models:
        for make in (copies, partial(changes, per_tensor=per_tensor), small_parts):
            yield from make(name)
    yield from config_changes()


def table(results: list[Result]) -> list[dict[str, Any]]:
    """Counts of verdicts by kind of case and size."""
    counts: dict[tuple[str, float], Counter[str]] = {}
    for r in results:
        counts.setdefault((r.case.kind, r.case.size), Counter()).update([r.verdict.answer, *["wrong"] * r.wrong])
    answers = ("same", "different", "undecided", "wrong")
    return [{"kind": k, "size": size, **{a: n[a] for a in answers}} for (k, size), n in sorted(counts.items())]


def written(output: Path, results: list[Result], crashes: list[str]) -> dict[str, Any]:
    """The table, the crashes and all cases, which are written to the output."""
    found = {
        "command": " ".join(["python", "tests/campaigns/verdicts.py", *sys.argv[1:]]),
        "table": table(results),
        "wrong": sum(r.wrong for r in results),
        "crashes": crashes,
        "cases": [r.to_dict() for r in results],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file for the table and all cases")
    parser.add_argument("--per-tensor", type=int, default=1, help="changes of each tensor")
    parser.add_argument("--every", type=int, default=1, help="judge only every n-th case")
    parser.add_argument("--models", nargs="*", default=MODELS, help="some of the models, or `types`")
    options = parser.parse_args()
    options.models = TYPES_OF_MODELS if options.models == ["types"] else options.models
    results, crashes = [], list[str]()
    for case in islice(cases(tuple(options.models), options.per_tensor), options.every - 1, None, options.every):
        try:
            result = judge(case)
        except Exception as error:  # a crash is a finding, and the other cases still count
            crashes.append(f"{case.model}, {case.kind}, {case.what}, {case.size:g}, {case.dtype}: {error!r:.300}")
            print("CRASH", crashes[-1], flush=True)
            continue
        results.append(result)
        if result.wrong:
            print("WRONG", json.dumps(result.to_dict()), flush=True)
        if len(results) % 20 == 0:  # a stopped campaign keeps what it has
            written(options.output, results, crashes)
    found = written(options.output, results, crashes)
    for row in found["table"]:
        print(row)
    sys.exit(1 if found["wrong"] or crashes else 0)


if __name__ == "__main__":
    main()
