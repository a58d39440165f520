"""`reach explain`: who would get a message, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.output import as_json, console, message_as_dict, print_json, print_table

if TYPE_CHECKING:
    from agentreach.v1.admin_pb2 import ExplainReply


@click.command()
@targets.target
@targets.url
@as_json
def explain(
    capabilities: tuple[str, ...],
    agent_type: str | None,
    agent_id: str | None,
    labels: tuple[str, ...],
    version: str | None,
    policy: str | None,
    session: str | None,
    env: str,
    url: str | None,
    json_wanted: bool,
) -> None:
    """Show whom a message would reach: each candidate, the stage that removed it, and the choice. Nothing is sent.

    \b
    Examples:
      reach explain --capability ner
      reach explain --type memory --session ada
    """
    targets.require_target(agent_id, agent_type, capabilities, labels, version)
    from agentreach.v1.envelope_pb2 import Envelope

    envelope = Envelope(
        target=targets.target_message(agent_id, agent_type, capabilities, labels, version, policy),
        session_id=session or "",
        env=env,
        timeout_ms=5_000,
    )
    reply = ending.run(_ask(envelope, url))
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    _show(reply)


async def _ask(envelope: Any, url: str | None) -> ExplainReply:
    async with targets.client(url) as client:
        return await client.explain(envelope)


def _show(reply: ExplainReply) -> None:
    from rich.text import Text

    if reply.candidates:
        rows = []
        for candidate in reply.candidates:
            chosen = candidate.agent_id == reply.chosen
            verdict = "chosen" if chosen else candidate.removed_by or "usable"
            style = "green" if chosen else "dim" if candidate.removed_by else ""
            rows.append(
                (
                    Text("→" if chosen else " "),
                    Text(candidate.agent_id, style=style),
                    Text(verdict, style=style),
                    candidate.why,
                )
            )
        print_table(("", "AGENT", "STAGE", "WHY"), rows)
    else:
        console().print("no agents are registered that this could be for")
    console().print(f"\nchosen: {_choice(reply)}   (view: revision {reply.revision}, {reply.age_ms} ms old)")


def _choice(reply: ExplainReply) -> str:
    from agentreach.v1.envelope_pb2 import RoutingPolicy

    if not reply.chosen:
        return "nobody"
    if reply.policy == RoutingPolicy.ROUTING_POLICY_UNSPECIFIED:
        return f"{reply.chosen}, to which the session is pinned"
    usable = sum(1 for candidate in reply.candidates if not candidate.removed_by)
    policy = RoutingPolicy.Name(reply.policy) if reply.policy in RoutingPolicy.values() else str(reply.policy)
    return f"{reply.chosen} by {policy} among {usable}"
