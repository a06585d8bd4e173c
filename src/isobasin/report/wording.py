"""Numbers and metrics as a person writes them."""

from isobasin.report.result import Number

NONE = "–"
NBSP = "\N{NO-BREAK SPACE}"
TITLES = {"loss": "Loss", "accuracy": "Accuracy", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
UNITS = {"loss": "nats", "accuracy": "%", "perplexity": "", "bits_per_byte": "bits"}


def plain(value: Number, digits: int = 4) -> str:
    """Significant digits, with a power of ten only where the plain number would be long.

    >>> plain(1.20412), plain(0.03), plain(0), plain(1.5e-7), plain(123456.0), plain(None)
    ('1.204', '0.03', '0', '1.5e-7', '1.235e5', '–')
    """
    if value is None:
        return NONE
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        return _minus(f"{value:.{digits}g}")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return _minus(f"{mantissa}e{int(exponent)}")


def percent(value: Number) -> str:
    """A share as a percentage; its sign stays on the same line (no-break space).

    >>> [percent(share).replace("\N{NO-BREAK SPACE}", " ") for share in (0.026, 1, -0.04, 12.3456)]
    ['2.6 %', '100 %', '−4 %', '1,235 %']
    """
    if value is None:
        return NONE
    size = abs(100 * value)
    digits = 0 if size >= 1000 else 1 if size >= 0.05 or size == 0 else 3
    if size >= 1e6:
        return f"{plain(100 * value)}{NBSP}%"
    number = f"{100 * value:,.{digits}f}"
    return _minus(f"{number.rstrip('0').rstrip('.') if '.' in number else number}{NBSP}%")


def measured(metric: str, value: Number) -> str:
    """A value of a metric in a column: accuracy as a percentage, the others with as many places as are worth it.

    >>> measured("loss", 0.21), measured("loss", 0.03104), measured("perplexity", 1234.5), measured("loss", 1e-5)
    ('0.210', '0.0310', '1234.5', '1e-5')
    """
    if value is None:
        return NONE
    if metric == "accuracy":
        return f"{100 * value:.1f}{NBSP}%" if abs(value) < 1e4 else percent(value)
    size = abs(value)
    if value != 0 and not 1e-3 <= size < 1e6:
        return plain(value, 3)
    return _minus(f"{value:.{1 if size >= 100 else 3 if size >= 0.1 or value == 0 else 4}f}")


def rise(metric: str, value: Number) -> str:
    """A barrier: accuracy in points, so that nobody takes it for a share."""
    return measured(metric, value).replace("%", "pt")


def listed(values: tuple[float, ...], most: int = 4) -> str:
    """λ values in a sentence.

    >>> listed((0.25, 0.5, 0.75)), listed((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    ('0.25, 0.5 and 0.75', '0.1, 0.2, 0.3, 0.4 and 2 more')
    """
    words = [plain(value, 3) for value in values]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _minus(number: str) -> str:
    return number.replace("-", "−", 1) if number.startswith("-") else number
