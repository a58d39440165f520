"""Writes the audit log: one JSON object a line, to a file of its own or into the node's log under `reach.audit`.

What somebody with a right does is always written, but for agents that come and go all the time. Those, and what anybody
can cause, are written up to a bound and counted beyond it. A file that cannot be written costs the node nothing but the
lines: it says so in its log, and counts them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import structlog

from agentreach.aio.clock import boot_time
from agentreach.wire.errors import clean
from agentreach.wire.redaction import Redaction
from reach.core.auditing import Bounded
from reach.core.effects import AuditLine
from reach.core.stats import Stats

log = structlog.get_logger("reach")
audit_log = structlog.get_logger("reach.audit")

TEXT_CHARS = 500  # of one value; a capability list may be that long
ERROR_EVERY_S = 60.0  # how often it is said that lines are lost


class Lines(Protocol):
    """Where lines go: `reach.adapters.audit_file.AuditFile`."""

    why: str

    def write(self, line: bytes) -> bool:
        """Add a line. False: it is lost, and `why` says why."""
        ...

    def reopen(self) -> None:
        """It was rotated."""
        ...

    def close(self) -> None:
        """No more lines come."""
        ...


class Auditor:
    """One node's. Call it with a line, inside the event loop."""

    def __init__(
        self,
        node_id: str,
        lines: Lines | None,
        stats: Stats,
        redaction: Redaction,
        *,
        unix: Callable[[], float],
        caller: Callable[[], str] = lambda: "",
    ) -> None:
        """`lines` None: into the node's log. `caller` gives the address of the call that is being answered."""
        self._node_id = node_id
        self._lines = lines
        self._stats = stats
        self._redaction = redaction
        self._unix = unix
        self._caller = caller
        self._bounded = Bounded()
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        self._lost = 0
        self._complained_at = float("-inf")

    def __call__(self, line: AuditLine) -> None:
        """Write a line, or count it."""
        now = boot_time()
        if not self._bounded.admits(line.action, line.outcome, now, (line.tenant, line.principal)):
            self._stats.audit["summed up"] += 1
            due_at = self._bounded.due_at
            if self._timer is None and due_at is not None:
                self._timer = asyncio.get_running_loop().call_later(due_at - now, self._sum_up)
            return
        address = self._caller() if line.address is None else line.address
        self._write(
            {
                "action": line.action,
                "outcome": line.outcome,
                "tenant": line.tenant,
                "principal": line.principal,
                "key_id": line.key_id,
                "peer": address,
                "trace_id": line.trace_id,
                "about": {name: value for name, value in line.about.items() if value},
                "why": line.why,
            }
        )

    def begin(self, version: str) -> None:
        """The node has started. (One that cannot start says so in one line, elsewhere.)"""
        self._begun = True
        self._write({"action": "node.started", "outcome": "OK", "about": {"version": version}})

    def reopen(self) -> None:
        """The file was rotated."""
        if self._lines is not None:
            self._lines.reopen()

    def close(self) -> None:
        """Write what is counted and that the node has stopped, and end."""
        if self._timer is not None:
            self._timer.cancel()
        self._sum_up()
        if self._begun:
            self._write({"action": "node.stopped", "outcome": "OK"})
        if self._lines is not None:
            self._lines.close()

    def _sum_up(self) -> None:
        self._timer = None
        since = self._bounded.since
        for action, outcome, (tenant, principal), count in self._bounded.sums():
            about = {"count": str(count), "within_s": f"{boot_time() - since:.1f}"}
            whose = {"tenant": tenant, "principal": principal}
            self._write(
                {"action": action, "outcome": outcome, **whose, "about": about, "why": "too many to write each"}
            )

    def _write(self, said: dict[str, object]) -> None:
        said = {name: value for name, value in self._redacted(said).items() if value}
        if self._lines is None:
            audit_log.info(said.pop("action"), **said)
            self._stats.audit["written"] += 1
            return
        if self._lost and not self._put({"action": "audit.lost", "about": {"count": str(self._lost)}}):
            self._lose()
        elif self._put(said):
            self._stats.audit["written"] += 1
            if self._lost:
                log.info("the audit log can be written again", lost=self._lost)
            self._lost = 0
        else:
            self._lose()

    def _put(self, said: dict[str, object]) -> bool:
        assert self._lines is not None
        at = datetime.fromtimestamp(self._unix(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return self._lines.write(json.dumps({"at": at, "node": self._node_id, **said}, ensure_ascii=False).encode())

    def _lose(self) -> None:
        self._lost += 1
        self._stats.audit["lost"] += 1
        now = boot_time()
        if self._lines is not None and now - self._complained_at >= ERROR_EVERY_S:
            self._complained_at = now
            log.error("the audit log cannot be written; its lines are lost", why=self._lines.why, lost=self._lost)

    def _redacted(self, said: dict[str, object]) -> dict[str, object]:
        """No secret, no line break, nothing endless: most of these texts somebody else has chosen."""
        return {name: self._shown(name, value) for name, value in said.items()}

    def _shown(self, name: str, value: object) -> object:
        if isinstance(value, dict):
            return {str(key): self._shown(str(key), each) for key, each in value.items()}
        return clean(self._redaction.field(name, str(value)), TEXT_CHARS)
