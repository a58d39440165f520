"""The request being handled here and now; empty outside of handlers."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sdk.work import Work

current_work: ContextVar[Work | None] = ContextVar("agent_sdk_work", default=None)
"""Set by the host for the handler's task; what is sent from there echoes its lineage."""
