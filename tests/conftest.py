"""Its place makes `tiny` and `oracle` importable from every folder of tests, whichever is run alone."""

import os
import signal
from collections.abc import Iterator

import pytest
from jaxtyping import install_import_hook

# Shapes in signatures are checked here, and only here: at run time they cost nothing. Left out are modules whose tests
# hand them a wrong word on purpose (head_linear and head_rotary of alignment), and the abstract classes (groups.group).
install_import_hook(
    [
        *(f"isobasin.groups.{name}" for name in ("heads", "linear", "monomial", "product", "rotary")),
        *(f"isobasin.alignment.{name}" for name in ("head_newton", "head_cost", "reference", "verification")),
        "isobasin.symmetries.attention",
    ],
    "beartype.beartype",
)

# A background job of a shell ignores Ctrl-C, and so would the programs that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def known_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Families that a test makes known are unknown afterwards."""
    from isobasin.arch import FAMILIES, user_family
    from isobasin.arch.registry import REFUSED

    known, refused = dict(FAMILIES), dict(REFUSED)
    monkeypatch.delenv(user_family.VARIABLE, raising=False)
    yield
    FAMILIES.clear()
    FAMILIES.update(known)
    REFUSED.clear()
    REFUSED.update(refused)
    user_family._loaded.clear()
    os.environ.pop(user_family.VARIABLE, None)
