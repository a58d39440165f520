"""A scripted agent whose conversations move, for plays on the core: it keeps the messages that it has handled."""

from __future__ import annotations

import json

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.errors import failure
from tests.support.core import CoreMesh, Process, record


class Keeper:
    """An agent whose conversations move: what it knows of each is the list of messages it has handled."""

    def __init__(self, core: CoreMesh, name: str) -> None:
        self.core = core
        self.process = core.process(name, record(f"keeper/{name}"))
        self.process.releases, self.process.restores = self._release, self._restore
        self.state: dict[str, list[str]] = {}
        self.epochs: dict[str, int] = {}
        self.answers = True
        """False: its hooks hang."""
        self.fails: set[str] = set()
        """The hooks that fail: "release", "restore"."""
        self.asked: list[str] = []
        self._lived: set[str] = set()
        """Sessions that have had a turn here since they came."""

    @property
    def agent_id(self) -> str:
        return f"keeper/{self.process.name}"

    def handle(self, envelope: Envelope) -> None:
        """One turn."""
        notes = self.state.setdefault(envelope.session_id, [])
        assert envelope.message_id not in notes, "it ran twice"
        notes.append(envelope.message_id)
        self._lived.add(envelope.session_id)
        self.epochs[envelope.session_id] = envelope.epoch
        self.process.answer(envelope, json.dumps(notes))

    def handle_all(self) -> None:
        """Every turn that waits here, until none does."""
        while self.process.running:
            self.handle(next(iter(self.process.running.values())))

    def checkpoint(self, session_id: str = "s", turn: int = 0) -> None:
        """Hand a state over unasked."""
        self.process.signal(Signal(session_snapshot=self._snapshot(session_id, self.epochs[session_id], turn)))
        self.core.pump()

    def _snapshot(self, session_id: str, epoch: int, turn: int = 0) -> frames.SessionSnapshot:
        notes = self.state.get(session_id, [])
        return frames.SessionSnapshot(
            agent_id=self.agent_id,
            session_id=session_id,
            epoch=epoch,
            turn=turn or len(notes),
            state=frames.SessionState(inline=json.dumps(notes).encode()),
        )

    def _release(self, process: Process, order: frames.SessionRelease) -> None:
        self.asked.append("release")
        if not self.answers:
            return
        snapshot = self._snapshot(order.session_id, order.epoch)
        if "release" in self.fails:
            snapshot.ClearField("state")
            snapshot.error.CopyFrom(failure(codes.AGENT_ERROR, "the disk is full"))
        else:
            self.state.pop(order.session_id, None)
        snapshot.released = True
        process.signal(Signal(session_snapshot=snapshot))

    def _restore(self, process: Process, given: frames.SessionRestore) -> None:
        self.asked.append("restore")
        if not self.answers:
            return
        ready = frames.SessionReady(agent_id=self.agent_id, session_id=given.session_id, epoch=given.epoch)
        if self.epochs.get(given.session_id) == given.epoch and given.session_id in self.state:
            ready.held = given.session_id in self._lived
        elif "restore" in self.fails:
            ready.error.CopyFrom(failure(codes.AGENT_ERROR, "not now"))
        else:
            self.state[given.session_id] = json.loads(given.state.inline)
            self.epochs[given.session_id] = given.epoch
            self._lived.discard(given.session_id)
        process.signal(Signal(session_ready=ready))
