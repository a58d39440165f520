"""The options by which a person names a node and a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentreach.wire.addresses import DEFAULT_URL, addresses

if TYPE_CHECKING:
    from agentreach.v1.envelope_pb2 import Target

F = TypeVar("F", bound=Callable[..., Any])

PROFILES = ("CACHE", "RPC", "LLM", "EXTERNAL", "TASK")
POLICIES = (
    "RANDOM", "WEIGHTED_RANDOM", "ROUND_ROBIN", "LEAST_ACTIVE", "LEAST_LOAD", "SCORE", "CONSISTENT_HASH",
)  # fmt: skip


def _addresses(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse what is no address before anything is dialled."""
    if value:
        try:
            addresses(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return value


url = click.option(
    "--url",
    metavar="HOST:PORT[,…]",
    envvar="REACH_URL",
    show_envvar=True,
    callback=_addresses,
    help="The node.  [default: 127.0.0.1:7070]",
)


def node_addresses(given: str | None) -> Sequence[str]:
    """Addresses to try, in order."""
    return addresses(given or DEFAULT_URL)


def _not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("an empty ID names no conversation; leave the option out", context, option)
    return value


_OPTIONS = (
    click.option("--capability", "-c", "capabilities", multiple=True, metavar="NAME",
                 help="What it can do; may be repeated."),
    click.option("--type", "-t", "agent_type", metavar="TYPE", help="The agent's type."),
    click.option("--id", "agent_id", metavar="TYPE/INSTANCE", help="Exactly this agent."),
    click.option("--label", "-l", "labels", multiple=True, metavar="KEY=VALUE",
                 help="A label it must have; may be repeated."),
    click.option("--version", "version", metavar="RANGE", help="Its version, or a range such as '>=2.1,<3'."),
    click.option("--policy", type=click.Choice(POLICIES, case_sensitive=False), help="How to choose among several."),
    click.option("--session", metavar="ID", callback=_not_empty,
                 help="The conversation it belongs to: it stays with one instance."),
    click.option("--env", metavar="NAME", default="", help="The environment.  [default: production]"),
)  # fmt: skip


def target(function: F) -> F:
    """The options that name a target."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def labels_of(pairs: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE pairs as a mapping; a usage error for anything else."""
    labels: dict[str, str] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        labels[key] = value
    return labels


def require_target(
    agent_id: str | None,
    agent_type: str | None,
    capabilities: Sequence[str],
    labels: Sequence[str],
    version: str | None,
) -> None:
    """A usage error if nothing, or two kinds of target, were named."""
    selector = agent_type or capabilities or labels or version
    if agent_id and selector:
        raise click.UsageError("--id names one agent: leave out --type, --capability, --label and --version")
    if not agent_id and not selector:
        raise click.UsageError(
            "say whom to reach: --capability NAME, --type TYPE, --label KEY=VALUE or --id TYPE/INSTANCE"
        )


def target_message(
    agent_id: str | None,
    agent_type: str | None,
    capabilities: Sequence[str],
    labels: Sequence[str],
    version: str | None,
    policy: str | None,
) -> Target:
    """The options as the contract's Target."""
    from agentreach.v1.envelope_pb2 import RoutingPolicy, Target

    message = Target(
        agent_id=agent_id or "",
        agent_type=agent_type or "",
        capabilities=capabilities,
        labels=labels_of(labels),
        version=version or "",
    )
    if policy:
        message.policy = RoutingPolicy.Value(policy.upper())
    return message
