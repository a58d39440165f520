"""How a command ends: exit codes that scripts rely on, and one line for a person instead of a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from agent_sdk.errors import ReachError

T = TypeVar("T")


class Exit(IntEnum):
    """Exit codes of `reach`."""

    OK = 0
    MESH_ERROR = 1
    USAGE = 2
    NO_NODE = 3
    REPLACED = 4


class Ended(click.ClickException):
    """Ends the command with one line on standard error and an exit code."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code

    def show(self, file: Any = None) -> None:
        """Print the line, marked as an error."""
        click.echo(f"reach: {self.message}", file=file, err=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; what the mesh or the network answers becomes an `Ended`."""
    from reach.adapters.admin_client import NodeUnreached
    from reach.core.ports import MeshFailure

    try:
        return asyncio.run(work)
    except NodeUnreached as error:
        raise Ended(str(error), Exit.NO_NODE) from error
    except MeshFailure as error:
        raise Ended(told(error), Exit.MESH_ERROR) from error
    except _sdk_error() as error:
        raise Ended(f"{error.code.value}: {error}", Exit.MESH_ERROR) from error
    finally:
        work.close()  # Ctrl-C may come before it was begun; Python would say that nobody awaited it


def _sdk_error() -> type[ReachError]:
    """Looked up only when a command has failed otherwise: most do without the SDK, and it takes long to import."""
    from agent_sdk.errors import ReachError

    return ReachError


def told(failure: Any) -> str:
    """A `MeshFailure` in one line."""
    from agentreach.wire.errors import code_name

    return f"{code_name(failure.error.code)}: {failure.error.message}"
