"""The one family of exceptions: every user's mistake is an `IsobasinError`.

A message is one line that says what was found, where (tensor or file), what was expected and what to do.
The command line turns it into exit code 2, and so it does with what the operating system refuses (`system_problem`);
anything else that escapes is our bug (exit code 4).
"""

import errno
import unicodedata

MAX_LINE = 1000  # characters of a message
_CONTROL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode categories: control, format, surrogate, separators
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch, numpy, the threads of Python and the dynamic loader say when memory is short.
_NO_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
)


class IsobasinError(Exception):
    """Something the user can mend: bad input, an unsupported model, an output that is in the way."""

    exit_code = 2


class CheckpointError(IsobasinError):
    """A folder of weights that can not be read or written."""


class ArchitectureError(IsobasinError):
    """A checkpoint whose configuration or tensors do not fit a supported family."""


class TransformError(IsobasinError):
    """A transform that can not act on this model, or a file that does not hold one."""


class VerificationError(IsobasinError):
    """A result that would have changed the function of the model: nothing is written."""

    exit_code = 4


# -- messages --------------------------------------------------------------------------------------------------------


def with_article(noun: str) -> str:
    """A family of models with its article.

    >>> with_article("llama"), with_article("opt"), with_article("isobasin")
    ('a llama', 'an opt', 'an isobasin')
    """
    return f"{'an' if noun[:1] in 'aeio' else 'a'} {noun}"


def printable(text: str) -> str:
    """The text with escapes in place of control characters: a file name must not send commands to the terminal."""
    if text.isprintable():
        return text
    return "".join(_escape(letter) if unicodedata.category(letter) in _CONTROL else letter for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")


def one_line(text: str) -> str:
    """The text as one printable line of at most MAX_LINE characters, without its middle if it is longer."""
    line, half = printable(" ".join(text.split())), MAX_LINE // 2
    return line if len(line) <= MAX_LINE else f"{line[: half - 1]}…{line[-half:]}"


def brief(value: object, limit: int = 80) -> str:
    """The start of `repr(value)`, also where Python refuses it: a number of 5,000 digits, a list of 1,000 levels."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= limit else f"{text[:limit]}…"


def is_memory_problem(error: Exception) -> bool:
    """Whether there was not enough memory, whichever library says so."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


def system_problem(error: Exception) -> str | None:
    """What the operating system refused (a file, the disk, memory), and what to do; None if the error is ours."""
    text = str(error)
    if is_memory_problem(error):
        return "not enough memory: close other programs, raise the limit (ulimit -v), or use a machine with more"
    if isinstance(error, RuntimeError) and text.startswith("Symlink loop"):  # pathlib before Python 3.13
        return f"{text.partition('from ')[2]}: a symbolic link that leads to itself: remove it or choose another path"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    if error.errno in _DISK_FULL:
        return f"{where}no space left to write: free space, or choose another disk, and run again"
    return f"{where}{error.strerror}: check the path, its permissions and the disk"
