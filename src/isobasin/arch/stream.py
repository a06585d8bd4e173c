"""Which maps of the residual stream, and of feed-forward units, a model allows (MATH: the groups)."""

from isobasin.arch.architecture import Kind


def stream_kind(norm: str, *, tied: bool = False, bare: bool = False, post_norm: bool = False) -> Kind:
    """Folded gains leave rotations; a gain that can not fold (tied, post-norm) leaves permutations.

    RMSNorm keeps every sign, LayerNorm one for the whole stream; a bare model shows the stream itself.
    """
    if bare:
        return "fixed"
    if tied or post_norm:
        return "signed" if norm == "rms" else "permutation±"
    return "orthogonal" if norm == "rms" else "orthogonal1"


def units_kind(activation: str) -> Kind:
    """Any elementwise activation allows permutations; ReLU also positive scales, odd functions also signs."""
    return {"relu": "positive", "tanh": "signed"}.get(activation, "permutation")  # type: ignore[return-value]
