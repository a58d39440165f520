"""The group of commands, and the outermost rim: signals, broken pipes, unknown names."""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any

import click

from reach.cli.agents import agents
from reach.cli.authz import authz
from reach.cli.breakers import breakers
from reach.cli.call import call
from reach.cli.certs import certs
from reach.cli.check_config import check_config
from reach.cli.config import config
from reach.cli.dead import dead
from reach.cli.demo import demo
from reach.cli.drain import drain
from reach.cli.ending import Ended
from reach.cli.explain import explain
from reach.cli.keys import keys
from reach.cli.nodes import nodes
from reach.cli.rollout import rollout
from reach.cli.serve import serve
from reach.cli.sessions import sessions
from reach.cli.test_agent import test_agent
from reach.cli.trace import trace
from reach.cli.version import show_version, version
from reach.cli.versions import versions

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class SuggestingGroup(click.Group):
    """A group that names the nearest command for one that does not exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, or say which one was probably meant."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=SuggestingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 the mesh answered an error, 2 usage or configuration, 3 no node reached, "
    "4 replaced by another process.",
)
@click.option("--version", "asked", is_flag=True, expose_value=False, is_eager=True, callback=show_version,
              help="Print the version and exit.")  # fmt: skip
def reach() -> None:
    """Agent-Reach: any agent reaches any other, by name, type or capability.

    \b
      reach demo                              a node with agents, to look at
      reach serve                             a node
      reach call --capability echo '{"hello": "world"}'
    """


_COMMANDS: tuple[click.Command, ...] = (
    serve, demo, test_agent,
    agents, nodes, sessions, call, explain, trace, breakers, dead, drain,
    versions, rollout, config, keys, authz, certs, check_config, version,
)  # fmt: skip
for command in _COMMANDS:
    reach.add_command(command)


def run() -> None:
    """Run the command line and exit with its code."""
    try:
        code = reach.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        code = _INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = int(error.code) if isinstance(error, Ended) else error.exit_code
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, say) had enough; that is no failure. Python flushes at exit once more: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
