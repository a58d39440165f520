"""What a setting is: its kind, bounds, meaning, and what goes wrong at either end; `settings` is the table of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

_KEY: Final = "setting"


class Table:
    """The kind of a setting that is too rich for a variable or a flag: tables by name, in a file only."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as people meet it. `low` and `high` are what goes wrong at either end; empty if there is no end."""

    name: str
    kind: type
    default: Any
    unit: str
    meaning: str
    low: str
    high: str
    least: float | None
    most: float | None
    secret: bool

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "REACH_" + self.name.upper()

    @property
    def flag(self) -> str:
        """The option of `reach serve`."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What may stand there, in words."""
        if self.kind is bool:
            return "true or false"
        if self.kind is dict:
            return "pairs NAME=VALUE"
        if self.kind is Table:
            return "tables in a configuration file"
        if self.kind is str:
            return "text"
        number = "a whole number" if self.kind is int else "a number"
        unit = f" of {self.unit}" if self.unit else ""
        return f"{number}{unit} from {self.least:g} to {self.most:g}"


def text(default: str, meaning: str, *, secret: bool = False) -> Any:
    """A setting that is text."""
    return field(default=default, repr=not secret, metadata={_KEY: (str, "", meaning, "", "", None, None, secret)})


def number(default: float, unit: str, least: float, most: float, meaning: str, low: str, high: str) -> Any:
    """A setting that is a number: whole, if its default is."""
    return field(default=default, metadata={_KEY: (type(default), unit, meaning, low, high, least, most, False)})


def switch(default: bool, meaning: str) -> Any:
    """A setting that is true or false."""
    return field(default=default, metadata={_KEY: (bool, "", meaning, "", "", None, None, False)})


def pairs(meaning: str) -> Any:
    """A setting of pairs NAME=VALUE."""
    return _mapping(dict, meaning)


def tables(meaning: str) -> Any:
    """A setting of tables by name."""
    return _mapping(Table, meaning)


def quota(meaning: str, low: str, unit: str = "") -> Any:
    """A setting that limits what one principal or tenant may have or do; without one there is no limit."""
    high = "it may take what others need"
    return number(0, unit, 0, 1 << 40, f"{meaning}; 0: no limit.", low, high)


def _mapping(kind: type, meaning: str) -> Any:
    return field(
        default_factory=lambda: MappingProxyType({}), metadata={_KEY: (kind, "", meaning, "", "", None, None, False)}
    )


def setting_of(each: Any) -> Setting:
    """The setting that a field of `Config` is."""
    kind, unit, meaning, low, high, least, most, secret = each.metadata[_KEY]
    default = {} if kind in (dict, Table) else each.default
    return Setting(each.name, kind, default, unit, meaning, low, high, least, most, secret)
