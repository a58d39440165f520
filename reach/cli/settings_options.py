"""The settings of a node as options: made from the settings' own table, so that none can be forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from reach.cli.ending import Ended, Exit

F = TypeVar("F", bound=Callable[..., Any])

_OFTEN = ("listen", "http", "registry", "node_id", "log_level", "log_format", "insecure")


def node_settings(function: F) -> F:
    """`--config` and one option for each setting; they arrive as keyword arguments by the settings' names."""
    from reach.node.settings import Table, settings

    # A secret is none: everybody on the machine can read the options of a command.
    table = [setting for setting in settings() if setting.kind is not Table and not setting.secret]
    often = [setting for name in _OFTEN for setting in table if setting.name == name]
    seldom = [setting for setting in table if setting.name not in _OFTEN]
    for setting in reversed(often + seldom):
        # Values are checked by the configuration itself, which knows bounds and names sources.
        options: dict[str, Any] = (
            {"is_flag": True, "flag_value": True} if setting.kind is bool else {"metavar": _shape(setting)}
        )
        shown = (
            ""
            if setting.default in ("", {}, False)
            else f"  [default: {_default(setting.default)}{setting.unit and ' '}{setting.unit}]"
        )
        function = click.option(setting.flag, setting.name, default=None, help=f"{setting.meaning}{shown}", **options)(
            function
        )
    config = click.option(
        "--config", "file", metavar="FILE", type=click.Path(path_type=Path), envvar="REACH_CONFIG",
        help="A TOML file with settings by the same names, '_' for '-'.",
    )  # fmt: skip
    return config(function)


def load_or_end(file: Path | None, flags: dict[str, Any]) -> Any:
    """The configuration, or the end with one line and exit code 2."""
    from reach.node.config import ConfigError, load

    try:
        return load(file, flags=flags)
    except ConfigError as error:
        raise Ended(str(error), Exit.USAGE) from error


def _shape(setting: Any) -> str:
    if setting.name in ("listen", "http"):
        return "HOST:PORT"
    if setting.kind is dict:
        return "NAME=VALUE,…"
    return {int: "N", float: "SECONDS", str: "TEXT"}[setting.kind]


def _default(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
