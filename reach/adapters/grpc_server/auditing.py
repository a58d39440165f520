"""Has the audit log told of each call of an operator: by whom, from where, what it was about, and how it ended.

What a request holds besides names is not told: no payload, no header, no value of a setting. Each call gets a trace_id
of its own, which the node's log lines of that moment carry too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from structlog.contextvars import bound_contextvars

from reach.adapters.grpc_server.gating import identify
from reach.adapters.grpc_server.outcome import Context, ended_as
from reach.core.auditing import line
from reach.core.ports import Switchboard

_NAMES = frozenset(
    {
        "action", "actors", "admin", "agent_id", "agent_type", "capabilities", "env", "envs", "expires_at", "key_id",
        "may_call", "may_publish", "may_register", "may_subscribe", "message_id", "name", "node_id", "overlap_s",
        "preferred", "principal", "reason", "reply_topic", "scrape", "session_id", "signs", "tenant", "timeout_ms",
        "topic", "trace_id", "version", "weights",
    }
)  # fmt: skip
"""The fields of requests that are told, wherever they stand."""

_OPENED = frozenset({"key", "policy", "target"})
_MADE = {"CreateKey": "key_id", "RotateKey": "key_id", "RedriveDeadLetter": "message_id"}
"""What some replies name that did not exist before."""

Handler = Any  # grpc.RpcMethodHandler is generic in its stubs only


def audited(method: MethodDescriptor, handler: Handler, node: Switchboard) -> Handler:
    """The handler of a unary method, which is told of when it has ended."""
    inner = handler.unary_unary
    kind = "admin" if method.containing_service.name == "AdminService" else "registry"

    async def serve(data: bytes, context: Context) -> bytes:
        trace_id = secrets.token_hex(16)
        ended_as.set("CANCELLED")
        about = dict(_told(_parsed(method.input_type, data)))
        try:
            with bound_contextvars(trace_id=trace_id):
                reply: bytes = await inner(data, context)
            ended_as.set("OK")
            made = _MADE.get(method.name)
            if made is not None:
                about["made"] = dict(_told(_parsed(method.output_type, reply))).get(made, "")
            return reply
        finally:
            node.audit(
                line(
                    f"{kind}.{method.name}",
                    identify(),
                    context.peer(),
                    about,
                    outcome=ended_as.get(),
                    trace_id=trace_id,
                )
            )

    return grpc.unary_unary_rpc_method_handler(serve)


def _parsed(kind: Any, data: bytes) -> Message | None:
    try:
        message: Message = GetMessageClass(kind).FromString(data)
    except DecodeError:
        return None
    return message


def _told(message: Message | None) -> Iterator[tuple[str, str]]:
    """(name, value) of what a message names; of settings their names alone."""
    for field, value in message.ListFields() if message is not None else ():
        if field.name == "settings":
            yield "settings", ",".join(sorted(value))
        elif field.name in _OPENED and isinstance(value, Message):
            yield from _told(value)
        elif field.name in _NAMES:
            yield field.name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str | bool | int | float):
        return str(value)
    if isinstance(value, Message):
        return str(value).strip().replace("\n", " ")
    if hasattr(value, "items"):
        return ",".join(f"{name}={each}" for name, each in sorted(value.items()))
    return ",".join(map(str, value))
