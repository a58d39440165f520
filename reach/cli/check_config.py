"""`reach check-config`: what a node would run with, or why it would not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reach.cli.ending import Ended, Exit
from reach.cli.output import as_json, print_json, print_table
from reach.cli.settings_options import load_or_end, node_settings

if TYPE_CHECKING:
    from reach.node.config import Config


@click.command("check-config")
@as_json
@node_settings
def check_config(file: Path | None, json_wanted: bool, **flags: Any) -> None:
    """Read all sources of configuration and show what a node would run with. Exit code 2 if it cannot be used.

    \b
    Examples:
      reach check-config --config reach.toml
      REACH_LANE_MAX=50 reach check-config --json
    """
    config = load_or_end(file, flags)
    _check_files(config)
    from agentreach.wire.redaction import STANDARD
    from reach.node.config import describe

    shown: dict[str, Any] = {}
    for setting in describe():
        value = getattr(config, setting.name)
        if setting.secret and value:
            value = "(secret)"
        if isinstance(value, str):
            value = STANDARD.text(value)
        shown[setting.name] = dict(value) if isinstance(setting.default, dict) else value
    if json_wanted:
        print_json(shown)
        return
    rows = []
    for setting in describe():
        value = shown[setting.name]
        changed = "" if value == setting.default or setting.name == "node_id" else f"default {_plain(setting.default)}"
        rows.append((setting.name, _plain(value), setting.unit, changed, setting.meaning))
    print_table(("SETTING", "VALUE", "UNIT", "CHANGED", "MEANING"), rows)


def _check_files(config: Config) -> None:
    """Keys and certificates, as a node looks at them when it starts."""
    from reach.adapters.certificates import CertificateUnusable
    from reach.core.keyring import KeysUnusable
    from reach.node.encryption import Encryption
    from reach.node.key_stores import FileOfKeys
    from reach.node.keys import ApiKeys

    try:
        if config.keys_file:
            asyncio.run(ApiKeys(FileOfKeys(config.keys_file), b"", time.time).start())
        if config.tls_cert:
            Encryption(config)
    except (KeysUnusable, CertificateUnusable) as error:
        raise Ended(str(error), Exit.USAGE) from error


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(_pair(name, other) for name, other in value.items()) or "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "–"


def _pair(name: str, value: Any) -> str:
    return name if isinstance(value, Mapping) else f"{name}={value}"
