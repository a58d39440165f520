"""`reach dead`: requests that the mesh gave up, to look at and to send once more."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.ending import Ended, Exit
from reach.cli.output import as_json, duration, how_many, message_as_dict, note, print_json, print_table, size
from reach.cli.times import Seconds

if TYPE_CHECKING:
    from agentreach.v1.admin_pb2 import DeadLetter, ListDeadLettersReply, RedriveDeadLetterReply

_LISTED = 50
_LOOK_EVERY_S = 0.2
_WAIT_S_MAX = 660.0  # a request has 600 s at most


@click.group()
def dead() -> None:
    """Look at requests that the mesh gave up, and send them once more.

    Kept are requests that were cut as loops (HOP_LIMIT, LOOP_DETECTED), and TASKs whose attempts are used up. What
    their payloads hold is never shown.

    \b
    Example:
      reach dead list
    """


@dead.command("list")
@click.option("--limit", type=how_many, default=_LISTED, metavar="N", help="At most so many, the youngest first.")
@targets.url
@as_json
def list_(limit: int, url: str | None, json_wanted: bool) -> None:
    """List the dead letters that are kept.

    \b
    Example:
      reach dead list
    """
    reply = ending.run(_list(url, limit=limit))
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    if not reply.dead_letters:
        note("there are no dead letters")
    else:
        print_table(("MESSAGE", "REASON", "TARGET", "FROM", "AGO", "SIZE", "REDRIVEN"), map(_row, reply.dead_letters))
    if len(reply.dead_letters) < reply.kept:
        note(f"{len(reply.dead_letters)} of {reply.kept} shown; more with --limit")
    if reply.silent_nodes:
        note(f"not complete: no answer from {', '.join(reply.silent_nodes)}")


@dead.command()
@click.argument("message_id", metavar="ID")
@targets.url
@as_json
def show(message_id: str, url: str | None, json_wanted: bool) -> None:
    """Show a dead letter: what its caller was told, for whom it was, and its trace.

    \b
    Example:
      reach dead show 0199f3a2-7c11-7cc0-9e7a-3f2b6f0c1d2e
    """
    reply = ending.run(_list(url, message_id=message_id))
    if not reply.dead_letters:
        raise Ended(f"no dead letter {message_id!r} is kept; see: reach dead list", Exit.MESH_ERROR)
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    for number, letter in enumerate(reply.dead_letters):
        if number:
            click.echo()
        for name, value in _facts(letter):
            click.echo(f"{name:<14}{value}")


@dead.command()
@click.argument("message_id", metavar="ID")
@click.option("--env", default="", metavar="NAME", help="Its environment, if several letters have this ID.")
@click.option("--principal", default="", metavar="NAME", help="Whose it is, if several letters have this ID.")
@click.option("--reply-topic", default="", metavar="TOPIC", help="Publish its outcome there.")
@click.option(
    "--wait", type=Seconds(up_to_s=_WAIT_S_MAX), metavar="SECONDS", help="Wait so long for its outcome, and tell it."
)
@targets.url
@as_json
def redrive(message_id: str, wait: float | None, url: str | None, json_wanted: bool, **how: str) -> None:
    """Send a dead letter's request once more, under a new id and as a new call. A letter is redriven once.

    If the letter says that it may have executed, it may now run a second time.

    \b
    Examples:
      reach dead redrive 0199f3a2-7c11-7cc0-9e7a-3f2b6f0c1d2e
      reach dead redrive 0199f3a2-7c11-7cc0-9e7a-3f2b6f0c1d2e --wait 60
    """
    reply, outcome = ending.run(_redrive(message_id, wait, url, how))
    if json_wanted:
        shown = message_as_dict(reply)
        print_json({**shown, "outcome": outcome} if wait is not None else shown)
    else:
        click.echo(f"sent once more as {reply.message_id}")
        if outcome:
            click.echo(f"outcome: {outcome}")
        if outcome in ("", "OK"):
            note(f"see: reach trace {reply.trace_id}")
    if wait is not None and not outcome:
        raise Ended(f"it has no outcome after {duration(wait)}", Exit.MESH_ERROR)
    if outcome not in ("", "OK"):
        raise Ended(f"{outcome}: the request failed again; see: reach trace {reply.trace_id}", Exit.MESH_ERROR)


async def _list(url: str | None, **asked: Any) -> ListDeadLettersReply:
    async with targets.client(url) as client:
        return await client.list_dead_letters(**asked)


async def _redrive(
    message_id: str, wait_s: float | None, url: str | None, how: dict[str, str]
) -> tuple[RedriveDeadLetterReply, str]:
    from agentreach.v1.admin_pb2 import RedriveDeadLetterRequest

    async with targets.client(url) as client:
        reply = await client.redrive_dead_letter(RedriveDeadLetterRequest(message_id=message_id, **how))
        give_up = time.monotonic() + (wait_s or 0.0)
        while wait_s is not None and time.monotonic() < give_up:
            trace = await client.get_trace(reply.trace_id)
            outcome = next((each.outcome for each in trace.messages if each.message_id == reply.message_id), "")
            if outcome:
                return reply, outcome
            await asyncio.sleep(min(_LOOK_EVERY_S, max(0.0, give_up - time.monotonic())))
        return reply, ""


def _row(letter: DeadLetter) -> tuple[Any, ...]:
    from rich.text import Text

    return (
        Text(letter.message_id, style="bold"),
        Text(letter.reason, style="red"),
        _target(letter),
        letter.envelope.source,
        duration(max(0.0, time.time() - letter.at.ToNanoseconds() / 1e9)),
        size(letter.payload_bytes),
        f"as {letter.redriven_as}" if letter.redriven else "–",
    )


def _target(letter: DeadLetter) -> str:
    target = letter.envelope.target
    parts = [target.agent_id or target.agent_type, *target.capabilities]
    parts += [f"{key}={value}" for key, value in sorted(target.labels.items())]
    return " ".join(part for part in (*parts, target.version) if part)


def _facts(letter: DeadLetter) -> list[tuple[str, str]]:
    envelope, error = letter.envelope, letter.error
    ran = "yes" if error.may_have_executed else "no"
    facts = [
        ("message", letter.message_id),
        ("reason", f"{letter.reason}: {error.message}"),
        ("path", error.details.get("path", "")),
        ("attempts", str(error.attempts)),
        ("may have run", ran),
        ("target", _target(letter)),
        ("from", f"{envelope.source}, principal {envelope.principal}, env {envelope.env}"),
        ("session", envelope.session_id),
        ("payload", f"{size(letter.payload_bytes)} of {envelope.payload.content_type or 'no declared type'}"),
        ("time", duration(envelope.timeout_ms / 1000) if envelope.timeout_ms else "that of its profile"),
        ("reply topic", envelope.reply_topic),
        ("died", letter.at.ToJsonString()),
        ("kept until", letter.expires_at.ToJsonString()),
        ("redriven", f"as {letter.redriven_as}" if letter.redriven else "no"),
        ("trace", f"{letter.trace_id}   (reach trace {letter.trace_id})"),
    ]
    return [(f"{name}:", value) for name, value in facts if value]
