"""Memory that was freed and not given back: on a long run the heap keeps pages of tensors that are gone."""

import ctypes
import sys


def give_back() -> None:
    """Return the free pages of the C library's heap to the system, where it is glibc; elsewhere nothing.

    Tensors of up to 32 MB come from the heap. Those of a sweep have many sizes and lifetimes, and without this the
    holes between them add up to as much as the sweep itself needs.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
