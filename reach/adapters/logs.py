"""Structured logs: one line an event, `trace_id` first, as JSON or for a terminal; stdlib logging goes the same way.

Payloads are never logged: fields that would hold one, or a secret, are replaced before anything is rendered, whoever
put them there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from agentreach.wire.redaction import STANDARD, Redaction

_FIRST = ("trace_id", "agent", "agent_id", "target", "code", "error")  # agent, target, error class; then the rest
_WITHHELD = frozenset(
    {"payload", "body", "data", "envelope", "frame", "lineage", "resume_token", "password", "api_key", "authorization"}
)
_DEPTH = 4  # of a value's own parts that are looked at one by one; below, it is one text
_QUIET = {"asyncio": logging.WARNING, "grpc": logging.WARNING, "aiohttp": logging.WARNING}

Event = MutableMapping[str, Any]


def configure(level: str, log_format: str, stream: TextIO | None = None, *, redaction: Redaction = STANDARD) -> None:
    """Send every log line of the process to `stream` (default: standard error).

    `level` is debug, info, warning or error; `log_format` console, json or auto (console on a terminal). What
    `redaction` recognises is in no line, whoever logs it.
    """
    stream = sys.stderr if stream is None else stream
    if log_format == "auto":
        log_format = "console" if _is_terminal(stream) else "json"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _withhold,
    ]
    ending: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        _Redacting(redaction),
        _order,
    ]
    ending.append(
        structlog.processors.JSONRenderer(ensure_ascii=False) if log_format == "json" else _for_people(stream)
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=ending))
    handler.addFilter(_not_an_exit)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _for_people(stream: TextIO) -> structlog.dev.ConsoleRenderer:
    """With plain tracebacks: structlog's own show the values of all variables, payloads and keys among them."""
    return structlog.dev.ConsoleRenderer(
        colors=_is_terminal(stream), sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _not_an_exit(record: logging.LogRecord) -> bool:
    """An exit is no fault: libraries that log one as an exception say nothing."""
    exc_info = record.exc_info
    return not (isinstance(exc_info, tuple) and isinstance(exc_info[1], SystemExit | KeyboardInterrupt))


def _withhold(_: Any, __: str, event: Event) -> Event:
    for name in _WITHHELD.intersection(event):
        event[name] = "(withheld)"
    return event


class _Redacting:
    """The last to see a line before it is put in order and written: everything is a text by then, or becomes one."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction

    def __call__(self, _: Any, __: str, event: Event) -> Event:
        for name, value in event.items():
            event[name] = self._shown(name, value, _DEPTH)
        return event

    def _shown(self, name: str, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._redaction.field(name, value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping) and depth:
            return {str(key): self._shown(str(key), each, depth - 1) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset) and depth:
            return [self._shown(name, each, depth - 1) for each in value]
        return self._redaction.field(name, str(value))


def _order(_: Any, __: str, event: Event) -> Event:
    ordered: Event = {}
    for name in ("trace_id", "timestamp", "level", "event", *_FIRST[1:]):
        if event.get(name):
            ordered[name] = event[name]
    for name, value in event.items():
        if name not in ordered:
            ordered[name] = value
    return ordered
