"""The trace of the request being handled, in the log lines of its handler.

    handler = logging.StreamHandler()
    handler.addFilter(TraceFilter())
    handler.setFormatter(logging.Formatter("%(trace_id)s %(name)s %(message)s"))

`agent.run()` does this when nothing has configured logging yet. With structlog, or anything else that asks for values
itself, use `current_trace_id()`.
"""

from __future__ import annotations

import logging

from agent_sdk.current import current_work
from agentreach.wire.redaction import STANDARD


def current_trace_id() -> str:
    """The trace_id of the request being handled here; empty outside of handlers."""
    work = current_work.get()
    return work.trace_id if work is not None else ""


class TraceFilter(logging.Filter):
    """Gives every record the attributes `trace_id`, `message_id` and `agent_id` (`-` outside of handlers)."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; never drops a record."""
        work = current_work.get()
        if not hasattr(record, "trace_id"):
            record.trace_id = (work.trace_id if work is not None else "") or "-"
        record.message_id = work.message_id if work is not None else "-"
        record.agent_id = work.host.agent_id if work is not None else "-"
        return True


class _Redacted(logging.Formatter):
    """Lines, tracebacks too, without what has the shape of a secret: a handler's exception may quote one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return STANDARD.text(super().format(record))


def configure_if_nobody_has(level: int = logging.INFO) -> None:
    """Log to stderr, trace first, unless the application has set up logging."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.addFilter(TraceFilter())
    handler.setFormatter(_Redacted("%(asctime)s %(levelname)s %(trace_id)s %(name)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)
