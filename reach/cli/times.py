"""Times as a person gives them to a command."""

from __future__ import annotations

import math
import re
from typing import Any

import click


class Seconds(click.ParamType[float]):
    """A number of seconds above 0, and at most `up_to_s` where there is a bound here and not at the node."""

    name = "seconds"

    def __init__(self, up_to_s: float = math.inf) -> None:
        self._up_to_s = up_to_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that says what is expected."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= self._up_to_s or math.isinf(seconds):
            bound = f" and at most {self._up_to_s:g}" if math.isfinite(self._up_to_s) else ""
            self.fail(f"{value!r} is not a number of seconds above 0{bound}", param, ctx)
        return seconds


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN = re.compile(r"([0-9]{1,9})([smhd])")


class Span(click.ParamType[float]):
    """A time as 30m, 12h or 90d, in seconds: above 0, or with `zero` also 0."""

    name = "span"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds, or a usage error that says what is expected."""
        if isinstance(value, float):
            return value
        found = _SPAN.fullmatch(value.strip().lower())
        seconds = float(int(found[1]) * _UNITS_S[found[2]]) if found else 0.0 if value == "0" else math.nan
        if math.isnan(seconds) or (not seconds and not self._zero):
            self.fail(
                f"{value!r} is no time{'' if self._zero else ' above 0'}; allowed: 45s, 30m, 12h, 90d", param, ctx
            )
        return seconds
