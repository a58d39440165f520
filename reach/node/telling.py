"""Writes what the core has to say into the node's log."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from reach.core.effects import LogLine

log = structlog.get_logger("reach")


def tell(line: LogLine) -> None:
    """Write a line of the core's, with its trace_id if it has one."""
    write: Callable[..., object] = getattr(log, line.level)
    if line.trace_id:
        write(line.event, trace_id=line.trace_id, **line.fields)
    else:
        write(line.event, **line.fields)
