"""`reach version`."""

from __future__ import annotations

import platform

import click

from reach.cli.output import as_json, print_json


@click.command()
@as_json
def version(json_wanted: bool) -> None:
    """Print the version of Agent-Reach and of what it stands on."""
    if json_wanted:
        print_json(_found())
    else:
        click.echo(_line())


def show_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """What `reach --version` does."""
    if asked:
        click.echo(_line())
        context.exit()


def _line() -> str:
    mesh, *others = _found().items()
    return f"Agent-Reach {mesh[1]} ({', '.join(f'{name} {number}' for name, number in others)})"


def _found() -> dict[str, str]:
    from importlib.metadata import version as installed

    return {
        "agent-reach-mesh": installed("agent-reach-mesh"),
        "python": platform.python_version(),
        "grpcio": installed("grpcio"),
        "protobuf": installed("protobuf"),
    }
