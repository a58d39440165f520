"""`reach config`: settings that agents get while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, message_as_dict, note, print_json

if TYPE_CHECKING:
    from agentreach.v1.admin_pb2 import GetConfigReply


@click.group()
def config() -> None:
    """Show or set what agents are told while they run (`@agent.on_config`).

    NAME is `agents`, for all of them, or `agents/TYPE`, for those of one type; what is set for the type wins.

    \b
    Examples:
      reach config set agents/extractor model=large depth=3
      reach config get agents/extractor
    """


@config.command("get")
@click.argument("name", metavar="NAME")
@targets.url
@as_json
def get(name: str, url: str | None, json_wanted: bool) -> None:
    """Show what is set under NAME, one KEY=VALUE a line.

    \b
    Example:
      reach config get agents/extractor
    """
    reply = ending.run(_get(name, url))
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    for key in sorted(reply.settings):
        click.echo(f"{key}={reply.settings[key]}")
    if not reply.settings:
        note(f"nothing is set under {name}")


@config.command("set")
@click.argument("name", metavar="NAME")
@click.argument("pairs", nargs=-1, metavar="KEY=VALUE…")
@click.option("--unset", multiple=True, metavar="KEY", help="Take this key out; may be repeated.")
@targets.url
@as_json
def set_(name: str, pairs: tuple[str, ...], unset: tuple[str, ...], url: str | None, json_wanted: bool) -> None:
    """Set keys under NAME, and leave the others as they are. Agents that are attached are told at once.

    \b
    Examples:
      reach config set agents/extractor model=large depth=3
      reach config set agents --unset depth
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        if key in settings:
            raise click.UsageError(f"{key!r} is there twice")
        settings[key] = value
    if both := settings.keys() & set(unset):
        raise click.UsageError(f"set or --unset: {', '.join(sorted(both))} cannot be both")
    if not settings and not unset:
        raise click.UsageError("say what to set: KEY=VALUE, or --unset KEY")
    version = ending.run(_set(name, settings, unset, url))
    if json_wanted:
        print_json({"name": name, "version": version})
    else:
        click.echo(f"{name} is set")


async def _get(name: str, url: str | None) -> GetConfigReply:
    async with targets.client(url) as client:
        return await client.get_config(name)


async def _set(name: str, settings: dict[str, str], unset: tuple[str, ...], url: str | None) -> int:
    """What is there is read first, and replaced only if nobody changed it meanwhile."""
    async with targets.client(url) as client:
        there = await client.get_config(name)
        wanted = {**there.settings, **settings}
        for key in unset:
            if wanted.pop(key, None) is None:
                note(f"{key} was not set under {name}")
        return await client.set_config(name, wanted, there.version)
