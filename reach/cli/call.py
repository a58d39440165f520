"""`reach call`: one request, from a shell."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from reach.cli import ending, targets
from reach.cli.ending import Ended, Exit
from reach.cli.output import as_json, duration, note, print_json
from reach.cli.times import Seconds

if TYPE_CHECKING:
    from agent_sdk.errors import ReachError

_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 4.0  # with the start of the process a person waits 5 s at most
_JSON_BEGINS = ("{", "[", '"')


@click.command()
@click.argument("data", required=False)
@targets.target
@click.option(
    "--timeout", type=Seconds(), metavar="SECONDS", help=f"Time for the whole request.  [default: {_TIMEOUT_S:g}]"
)
@click.option(
    "--profile",
    type=click.Choice(targets.PROFILES, case_sensitive=False),
    help="Timeout and retries by name. With --timeout as well, that bounds the whole.",
)
@click.option("--stream", is_flag=True, help="Print each item of a streamed reply as it comes.")
@click.option("--strict-session", is_flag=True, help="Rather fail than go on without the conversation's state.")
@click.option("--idempotent", is_flag=True, help="Running it twice does no harm.")
@click.option("--message-id", metavar="ID", help="Call again with the same one: the handler runs once.")
@click.option("--reply-topic", metavar="TOPIC", help="Do not wait: the outcome is published on this topic.")
@targets.url
@as_json
def call(
    data: str | None,
    stream: bool,
    reply_topic: str | None,
    url: str | None,
    env: str,
    json_wanted: bool,
    **how: Any,
) -> None:
    """Send DATA to whoever matches and print the answer. DATA is JSON, or else text; '-' or none: standard input.

    \b
    Examples:
      reach call --capability echo '{"hello": "world"}'
      reach call --type memory --session ada 'my name is Ada'
      reach call --capability think --stream 'why is the sky blue?'
      cat document.json | reach call -c ner --json
      reach call --capability report --reply-topic reports/done --timeout 600 '{"month": 11}'
    """
    targets.require_target(how["agent_id"], how["agent_type"], how["capabilities"], how["labels"], how["version"])
    if stream and reply_topic:
        raise click.UsageError("--stream prints what --reply-topic sends elsewhere: choose one")
    value = _value(data)
    options = _request_options(how)
    failure = ending.run(_send(value, options, stream, reply_topic, url, env, json_wanted))
    if failure is not None:
        _end_with(failure, json_wanted, targets.access().identified)


def _value(data: str | None) -> Any:
    """What to send: JSON if it is some, else the text itself."""
    if data is None or data == "-":
        if data is None and sys.stdin.isatty():
            raise click.UsageError("give DATA as an argument, or pipe it in")
        try:
            data = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise click.UsageError("standard input is neither JSON nor text") from error
    try:
        return json.loads(data, parse_constant=_no_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        text = data.rstrip("\n")
        if text.lstrip()[:1] in _JSON_BEGINS:
            why = f"{error}" if isinstance(error, ValueError) else "it is nested too deeply"
            note(f"DATA looks like JSON, but is none ({why}): it is sent as text")
        return text


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> float:
    raise click.UsageError(f"{text} in DATA is no number that JSON has; as text, put it in quotes")


def _request_options(how: dict[str, Any]) -> dict[str, Any]:
    timeout = how["timeout"]
    if timeout is None and how["profile"] is None:
        timeout = _TIMEOUT_S
    return {
        "agent_id": how["agent_id"],
        "agent_type": how["agent_type"],
        "capabilities": list(how["capabilities"]) or None,
        "labels": targets.labels_of(how["labels"]) or None,
        "version": how["version"],
        "timeout": timeout,
        "profile": how["profile"].upper() if how["profile"] else None,
        "session": how["session"],
        "strict_session": how["strict_session"],
        "policy": how["policy"].upper() if how["policy"] else None,
        "idempotent": how["idempotent"],
        "message_id": how["message_id"],
    }


async def _send(
    value: Any,
    options: dict[str, Any],
    stream: bool,
    reply_topic: str | None,
    url: str | None,
    env: str,
    json_wanted: bool,
) -> ReachError | None:
    """Print the answer; what the mesh answered instead is returned."""
    from agent_sdk import connect
    from agent_sdk.errors import ConnectFailed, ReachError

    way = targets.sdk_access()
    async with AsyncExitStack() as stack:
        try:
            mesh = await stack.enter_async_context(
                connect(url, name="reach-call", env=env, timeout=_CONNECT_TIMEOUT_S, **way)
            )
        except ConnectFailed as error:
            raise Ended(error.message, Exit.NO_NODE) from error
        began = time.monotonic()
        try:
            if stream:
                await _print_items(mesh, value, options, json_wanted)
                return None
            if reply_topic:
                await _submit(mesh, value, reply_topic, options, json_wanted)
                return None
            reply = await mesh.request(value, **options)
        except ReachError as error:
            return error
        took_s = time.monotonic() - began
        if json_wanted:
            print_json(
                {
                    "data": _printable(reply.data),
                    "source": reply.source,
                    "trace_id": reply.trace_id,
                    "session_event": reply.session_event,
                    "took_ms": round(took_s * 1e3, 3),
                }
            )
        else:
            _print_value(reply.data)
            event = f", session {reply.session_event}" if reply.session_event else ""
            note(f"from {reply.source} in {duration(took_s)}{event}, trace {reply.trace_id}")
    return None


async def _submit(mesh: Any, value: Any, reply_topic: str, options: dict[str, Any], json_wanted: bool) -> None:
    accepted = await mesh.submit(value, reply_topic=reply_topic, **options)
    if json_wanted:
        print_json(
            {
                "message_id": accepted.message_id,
                "trace_id": accepted.trace_id,
                "reply_topic": accepted.reply_topic,
            }
        )
    else:
        click.echo(accepted.message_id)
        note(f"accepted; its outcome goes to topic {reply_topic}, trace {accepted.trace_id}")


async def _print_items(mesh: Any, value: Any, options: dict[str, Any], json_wanted: bool) -> None:
    began = time.monotonic()
    count = 0
    async with mesh.stream(value, **options) as items:
        async for item in items:
            count += 1
            if json_wanted:
                click.echo(json.dumps(_printable(item), ensure_ascii=False))
            else:
                _print_value(item)
    if not json_wanted:
        note(f"{count} items in {duration(time.monotonic() - began)}")


def _print_value(value: Any) -> None:
    """Text as it is, bytes as they are, everything else as JSON."""
    if isinstance(value, bytes | str):
        click.echo(value)
    else:
        print_json(value)


def _printable(value: Any) -> Any:
    """Bytes have no place in JSON: they are shown in base64."""
    if isinstance(value, bytes):
        import base64

        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return value


def _end_with(error: ReachError, json_wanted: bool, identified: bool = False) -> None:
    """`identified`: the node knows who called, and shows traces to admins only."""
    if json_wanted:
        shown = {
            "code": error.code.value,
            "message": error.message,
            "retryable": error.retryable,
            "retry_after": error.retry_after,
            "may_have_executed": error.may_have_executed,
            "agent_id": error.agent_id,
            "attempts": error.attempts,
            "trace_id": error.trace_id,
            "details": error.details,
        }
        print_json({"error": shown})
        sys.exit(Exit.MESH_ERROR)
    ran = "; it may have run" if error.may_have_executed and "may have executed" not in error.message else ""
    facts = _facts(error)
    told = f"\n{'; '.join(facts)}" if facts else ""
    see = "an admin sees more" if identified else "see"
    more = f"\n{see}: reach trace {error.trace_id}" if error.trace_id else ""
    raise Ended(f"{error.code.value}: {error.message}{ran}{told}{more}", Exit.MESH_ERROR)


def _facts(error: ReachError) -> list[str]:
    """What the error knows and its message may not say: from whom it is, after how many attempts, and what to do."""
    facts = []
    if error.agent_id and error.agent_id not in error.message:
        facts.append(f"from {error.agent_id}")
    if error.attempts > 1:
        facts.append(f"after {error.attempts} attempts")
    if reason := error.details.get("not_retried"):
        facts.append(f"not tried again: {reason}")
    if error.retry_after:
        facts.append(f"come again in {duration(error.retry_after)}")
    return facts
