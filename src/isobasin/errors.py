"""The one family of exceptions: every user's mistake is an `IsobasinError`.

A message is one line that says what was found, where (tensor or file), what was expected and what to do.
The command line turns it into exit code 2; anything else that escapes is our bug (exit code 4).
"""


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
