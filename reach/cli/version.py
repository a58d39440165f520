"""`reach version`."""

from __future__ import annotations

import platform

import click

from reach.cli.output import as_json, print_json


@click.command()
@as_json
def version(json_wanted: bool) -> None:
    """Print the version of Agent-Reach and of what it stands on."""
    from importlib.metadata import version as installed

    found = {
        "agent-reach-mesh": installed("agent-reach-mesh"),
        "python": platform.python_version(),
        "grpcio": installed("grpcio"),
        "protobuf": installed("protobuf"),
    }
    if json_wanted:
        print_json(found)
        return
    mesh, *others = found.items()
    click.echo(f"Agent-Reach {mesh[1]} ({', '.join(f'{name} {number}' for name, number in others)})")
