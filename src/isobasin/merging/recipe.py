"""What to merge and how, as plain data: checked, read from YAML (see `document.py`) and written as YAML again."""

import math
from dataclasses import dataclass
from typing import Any

import yaml

from isobasin.checkpoint import DTYPE_POLICIES
from isobasin.errors import IsobasinError
from isobasin.merging.mixing import Linear, Method, Slerp

METHODS = ("linear", "slerp")
DTYPES = tuple(name for name in DTYPE_POLICIES if name != "keep")
THEN_MERGEKIT = "align first (`isobasin align`), then mergekit"


@dataclass(frozen=True)
class Recipe:
    """A merge, described. `to` is the model that others are aligned to (and where slerp starts), or "mean".

    Only `checked` gives one that is known to make sense.
    """

    models: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    method: str = "linear"
    t: float | None = None
    normalize: bool = True
    dtype: str | None = None
    tokenizer_source: str | None = None
    align: bool = False
    to: int | str = 0
    scope: str | None = None
    matcher: str | None = None

    @classmethod
    def checked(cls, **fields: Any) -> "Recipe":
        """A recipe that makes sense, or one line that says why it does not."""
        recipe = cls(**fields)
        recipe._check_models()
        recipe._check_choices()
        recipe._check_numbers()
        return recipe

    def _check_models(self) -> None:
        if len(self.models) < 2:
            raise IsobasinError(f"{len(self.models)} model to merge: expected two or more")
        if self.method == "slerp" and len(self.models) != 2:
            raise IsobasinError(f"slerp goes from one model to another, and there are {len(self.models)}: use linear")
        if self.weights is not None and len(self.weights) != len(self.models):
            raise IsobasinError(
                f"{len(self.weights)} weights for {len(self.models)} models: expected one weight for each model"
            )

    def _check_choices(self) -> None:
        if self.method not in METHODS:
            raise IsobasinError(
                f"merge method {self.method!r} is not one of {', '.join(METHODS)}; for others {THEN_MERGEKIT}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise IsobasinError(f"dtype {self.dtype!r} is unknown: give one of {', '.join(DTYPES)}")
        sound = self.to == "mean" or (type(self.to) is int and 0 <= self.to < len(self.models))
        if not sound:
            last = len(self.models) - 1
            raise IsobasinError(f"align to {self.to!r}: expected mean, or the number of a model from 0 to {last}")

    def _check_numbers(self) -> None:
        numbers = [*(self.weights or ()), *([] if self.t is None else [self.t])]
        for number in numbers:
            if not math.isfinite(number) or abs(number) > 1e30:
                raise IsobasinError(f"weight {number}: expected an ordinary finite number")
        if self.t is not None and self.method != "slerp":
            raise IsobasinError(f"t belongs to slerp, the method is {self.method}: give weights")
        divided = self.weights is not None and (self.method == "slerp" or self.normalize)
        if divided and abs(sum(self.weights or ())) < 1e-12:
            raise IsobasinError(f"the weights {self.weights} add up to 0, so they can not be divided by their sum")

    @property
    def start(self) -> int:
        """The model where slerp starts."""
        return self.to if isinstance(self.to, int) else 0

    def arithmetic(self) -> Method:
        n = len(self.models)
        if self.method == "linear":
            equal = (1.0,) * n if self.normalize else (1.0 / n,) * n
            return Linear(self.weights or equal, self.normalize)
        first, second = self.weights or (0.5, 0.5)
        share = (second if self.start == 0 else first) / (first + second)
        return Slerp(share if self.t is None else self.t, self.start)

    @property
    def shares(self) -> tuple[float, ...]:
        """What each model counts for: its weight, or for slerp its share of the way."""
        method = self.arithmetic()
        if isinstance(method, Linear):
            return method.weights
        assert isinstance(method, Slerp)
        return (1 - method.t, method.t) if self.start == 0 else (method.t, 1 - method.t)

    def to_yaml(self) -> str:
        """The same recipe as a file that `isobasin merge` reads."""
        method = self.arithmetic()
        shares = method.weights if isinstance(method, Linear) else [None] * len(self.models)
        found: dict[str, Any] = {
            "models": [
                {"model": name} | ({} if share is None else {"parameters": {"weight": share}})
                for name, share in zip(self.models, shares)
            ],
            "merge_method": self.method,
        }
        if isinstance(self.to, int):
            found["base_model"] = self.models[self.to]
        found["parameters"] = {"t": method.t} if isinstance(method, Slerp) else {"normalize": self.normalize}
        found |= {} if self.dtype is None else {"dtype": self.dtype}
        found |= {} if self.tokenizer_source is None else {"tokenizer_source": self.tokenizer_source}
        chosen = {"scope": self.scope, "matcher": self.matcher, "to": self.to}
        found["align"] = {key: value for key, value in chosen.items() if value is not None} if self.align else False
        return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=1000)
