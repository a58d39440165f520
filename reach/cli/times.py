"""Times as a person gives them to a command."""

from __future__ import annotations

import math
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
