"""What decoders have in common: the token embedding and the head behind it, tied to it or not."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from isobasin.arch.architecture import Sum
from isobasin.arch.config import Fields

CLASSIFIER, TOKENS, ANSWERS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"


class DecoderHead(NamedTuple):
    """The patterns of embedding and head. `tied`: one tensor for both; `bare`: no head, the stream is the output."""

    tied: bool
    bare: bool
    tensors: dict[str, str]
    modules: dict[str, str]
    aliases: dict[str, str]
    biases: dict[str, str]

    @property
    def exposed(self) -> str:
        """What the last norm says of itself."""
        return ", exposed" if self.bare else ""


def decoder_head(
    c: Fields,
    embedding: str,
    *,
    lm_head: str = "lm_head",
    tied_default: bool = False,
    bias: bool = False,
    token_head: str = "classifier",
) -> DecoderHead:
    """The head that `architectures` names; a causal language model if it names none.

    `bias`: the language model head has a bias. `token_head` is what the classifier of tokens is called.
    """
    vocab, name = c.size("vocab_size"), c.architecture
    bare = name.endswith("Model") and not name.endswith("LMHeadModel")
    modules = {CLASSIFIER: "score", TOKENS: token_head, ANSWERS: "qa_outputs"}
    other = next((module for ending, module in modules.items() if name.endswith(ending)), None)
    tied = not bare and other is None and c.flag("tie_word_embeddings", tied_default)
    tensors = {embedding: f".{vocab} resid & .{vocab} f*" if tied else f".{vocab} resid"}
    if tied:
        biases = {embedding: f"{lm_head}.bias"} if bias else {}
        tensors |= dict.fromkeys(biases.values(), f".{vocab}")
        return DecoderHead(tied, bare, tensors, {}, {f"{lm_head}.weight": embedding}, biases)
    if other == "score" and name.endswith(CLASSIFIER):  # never a bias
        return DecoderHead(tied, bare, tensors | {"score.weight": ". f*"}, {}, {}, {})
    if other is not None:
        return DecoderHead(tied, bare, tensors, {other: ". f*"}, {}, {})
    if bare:
        return DecoderHead(tied, bare, tensors, {}, {}, {})
    if bias:
        return DecoderHead(tied, bare, tensors, {lm_head: f".{vocab} f*"}, {}, {})
    return DecoderHead(tied, bare, tensors | {f"{lm_head}.weight": f".{vocab} f*"}, {}, {}, {})


def attention_modules(
    names: Sequence[str], qk: str, vo: str, norm: str, source: str, stream: str = "resid"
) -> dict[str, str]:
    """The projections of queries, keys, values and outputs, by these names; keys and values read the norm `source`,
    which in cross attention is not that of the queries."""
    return dict(zip(names, (f"{qk}* {norm}*", f"{qk} {source}*", f"{vo} {source}*", f"{stream} {vo}*"), strict=True))


def middle_bucket(n_buckets: int, max_distance: int = 128) -> range:
    """The row of a table of relative positions that no pair of tokens has, where both sides have buckets of their own:
    the first on the right would be for tokens at the same place, which count as on the left. Sizes that make no sense
    are not judged."""
    each_side = n_buckets // 2
    known = each_side >= 2 and max_distance > each_side // 2
    return range(each_side, each_side + 1) if known else range(0)


def parallel_biases(attention: str, feed_forward: str, n_layers: int) -> tuple[Sum, ...]:
    """Both sublayers read the same stream and add to it: of their two output biases only the sum is seen."""
    return tuple(
        Sum(f"out{i}", ((attention.format(i=i), 0, None),), ((feed_forward.format(i=i), 0, None),))
        for i in range(n_layers)
    )


def two_rotary(c: Fields, base: float, local_base: float | None = None) -> dict[str, Any]:
    """Rotary positions of full and of sliding attention; older configs have them in three keys, and `rope_scaling`
    changes those of full attention. `base` is what transformers takes where a config has none."""
    table = c.table("rope_parameters")
    full = table.get("full_attention") or {"rope_theta": c.config.get("rope_theta", base)}
    sliding = table.get("sliding_attention") or {"rope_theta": c.config.get("rope_local_base_freq", local_base or base)}
    return {"full": _rotary({**full, **c.table("rope_scaling")}), "sliding": _rotary(sliding)}


def _rotary(table: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers reads of a table: of the default type, the base alone."""
    plain = table.get("rope_type", "default") == "default"
    return {"rope_type": "default", "rope_theta": table.get("rope_theta")} if plain else dict(table)


def sliding_windows(config: Mapping[str, Any], every: int = 2, usual: int = 4096) -> dict[str, Any]:
    """The sliding window of each layer; by default every n-th layer has none."""
    window = config.get("sliding_window", usual)
    types = Fields(config).layer_types(lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    return {"sliding windows": [window if kind == "sliding_attention" else None for kind in types]}
