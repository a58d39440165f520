"""An agent and a caller of the SDK whose node is hostile for a while, and honest again afterwards.

What the node says may harm what it is asked for, not the process: no error is logged with a traceback (the SDK's rims
catch and log what should not happen: here that is a fault), nothing reaches the event loop's handler of exceptions,
every pending request ends with an answer or a `ReachError`, and with an honest node the process works as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from enum import IntEnum
from random import Random
from typing import Any

from google.protobuf.message import DecodeError

from agent_sdk import Agent, AgentReplaced, ConnectedMesh, Context, ReachError, connect
from agentreach.aio.clock import boot_time
from agentreach.v1.envelope_pb2 import REQUEST, RESPONSE, Envelope
from agentreach.v1.frame_pb2 import Frame, Hello, Signal
from agentreach.wire.link import LinkError
from tests.support.fake_node import FakeNode, FakeStream, Session
from tools.fuzzing import seeds
from tools.fuzzing.drawing import Drawing
from tools.fuzzing.messages import Words, disturb
from tools.fuzzing.octets import damage

AGENT = "worker/1"
CALL_S = 0.3
END_S = 15.0  # for what must end by itself, on a busy machine


class Step(IntEnum):
    """What the node does with the bytes of a step."""

    RAW = 0
    """A stream message as it is."""
    LINKED = 1
    """Signals and envelopes of a frame, if they parse, on the link: numbered as they must be."""
    CUT = 2
    FORGET = 3
    CALL = 4
    """Nothing of the node: the caller asks for something."""
    WELCOME = 5
    """The next welcomes are disturbed, or (empty) no longer."""


class _HostileSession(Session):
    def received(self, data: bytes) -> None:
        """What does not fit any more, after all that was thrown, ends the stream; the next one begins anew."""
        try:
            super().received(data)
        except LinkError:
            self.node.sessions.pop(self.token, None)
            self.cut()


class HostileNode(FakeNode):
    """An honest node, until told otherwise."""

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> FakeStream:
        """Admit every stream."""
        self.dials += 1
        await asyncio.sleep(0)
        return _HostileSession(self).open()

    def __init__(self) -> None:
        super().__init__()
        self.disturbs: Random | None = None
        self.words = seeds.words()
        self.words.learn((AGENT, "worker", "work", "e1", "fake"), (b"e1", b"e2", b"e3"))

    def greeted(self, fresh: Session, hello: Hello) -> None:
        """Welcome a process, perhaps in a way that makes no sense."""
        super().greeted(fresh, hello)
        rng = self.disturbs
        for session in self.sessions.values() if rng is not None else ():
            for at, data in enumerate(session.link._unnumbered):
                signal = Signal.FromString(data)
                disturb(rng, signal, self.words)  # type: ignore[arg-type]
                session.link._unnumbered[at] = signal.SerializeToString()

    def _response(self, envelope: Envelope) -> None:
        known = self._entries.get(envelope.entry)
        if known is None or known[1] == envelope.correlation_id:  # any other answers what was thrown, not routed
            super()._response(envelope)

    def throw(self, kind: int, data: bytes) -> None:
        """Do one step to whoever is connected."""
        for session in list(self.sessions.values()):
            if kind == Step.RAW:
                session.raw(data)
            elif kind == Step.LINKED:
                _put(session, data)
        if kind == Step.CUT:
            self.cut()
        elif kind == Step.FORGET:
            self.forget()
        elif kind == Step.WELCOME:
            self.disturbs = Random(data) if data else None


def _put(session: Session, data: bytes) -> None:
    try:
        frame = Frame.FromString(data)
    except DecodeError:
        return
    for signal in frame.signals:
        session.link.signal(signal)
    for envelope in frame.envelopes:
        session.link.put(envelope, boot_time())
    session._wake()


class SdkDrawing:
    """What a hostile node thinks of next."""

    def __init__(self, rng: Random, words: Words) -> None:
        self.rng = rng
        self.drawing = Drawing(rng, words)
        self.words = words

    def step(self) -> tuple[int, bytes]:
        """One step."""
        rng = self.rng
        kind = rng.choice([Step.LINKED] * 12 + [Step.CALL] * 4 + [Step.RAW, Step.CUT, Step.FORGET, Step.WELCOME])
        frame = self.drawing.frame()
        for envelope in frame.envelopes:
            self._address(envelope)
        data = frame.SerializeToString()
        if kind == Step.RAW:
            data = damage(rng, data) if rng.random() < 0.7 else data
        elif kind == Step.WELCOME:
            data = rng.randbytes(rng.randrange(3))
        return kind, data

    def _address(self, envelope: Envelope) -> None:
        """Most of what a node says is meant for somebody who is there."""
        rng = self.rng
        if rng.random() < 0.7:
            envelope.recipient = AGENT
        if envelope.type in (REQUEST, 0) and rng.random() < 0.5:
            envelope.entry, envelope.timeout_ms = rng.choice(self.words.blobs), rng.choice((0, 50, 5000))
        if rng.random() < 0.3:
            envelope.type = RESPONSE
            envelope.correlation_id = f"call{rng.randrange(4)}"
            envelope.sequence = rng.randrange(3)


class Faults(logging.Handler):
    """What was logged with a traceback, and what reached the loop's handler of exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is the SDK's or asyncio's own fault; a handler's exception is its user's."""
        if record.exc_info:
            self.found.append(logging.Formatter().format(record))

    def unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For `loop.set_exception_handler`."""
        self.found.append(f"{context.get('message')}: {context.get('exception')!r}")


def _agent(node: FakeNode) -> Agent:
    agent = Agent(AGENT, capabilities=["work"], transport=node, own_link=True, drain_timeout=0.2, max_concurrency=4)

    @agent.handler
    async def echo(data: Any, ctx: Context) -> Any:
        await asyncio.sleep(0)
        return data

    @agent.on("talk")
    async def stream(data: Any) -> AsyncIterator[int]:
        for number in range(100):
            yield number

    @agent.on_event("news")
    async def heard(data: Any) -> None:
        await asyncio.sleep(0)

    return agent


async def attack(steps: Iterable[tuple[int, bytes]], *, honest_again: bool = True) -> list[str]:
    """Let a node do these steps to a process; returns the faults."""
    faults, node, calls = Faults(), HostileNode(), []
    asyncio.get_running_loop().set_exception_handler(faults.unhandled)
    loggers = [logging.getLogger(name) for name in ("agent_sdk", "asyncio")]
    for logger in loggers:
        logger.addHandler(faults)
    agent = _agent(node)
    try:
        await agent.start(wait_s=END_S)
        async with connect(transport=node, own_link=True) as mesh:
            for kind, data in steps:
                if kind == Step.CALL:
                    calls.append(asyncio.create_task(_call(mesh, len(calls))))
                node.throw(kind, data)
                for _ in range(4):
                    await asyncio.sleep(0)
            if calls:
                _, hanging = await asyncio.wait(calls, timeout=END_S)
                faults.found += [f"a request hangs: {task.get_name()}" for task in hanging]
                faults.found += [f"{task.exception()!r}" for task in calls if task not in hanging and task.exception()]
            if honest_again:
                faults.found += await _serves(node, agent, mesh)
    finally:
        await agent.drain()
        for logger in loggers:
            logger.removeHandler(faults)
    return faults.found


async def _call(mesh: ConnectedMesh, number: int) -> None:
    """Ask; whatever the node makes of it, it is an answer or a `ReachError`."""
    message_id = f"call{number}"
    try:
        if number % 2:
            await mesh.request({"n": 1}, capabilities=["work"], timeout=CALL_S, message_id=message_id)
        else:
            async with mesh.stream({"n": 1}, capabilities=["work"], timeout=CALL_S, message_id=message_id) as items:
                async for _ in items:
                    pass
    except ReachError:
        return


async def _serves(node: HostileNode, agent: Agent, mesh: ConnectedMesh) -> list[str]:
    """Whether the process works with a node that is honest again, unless it was told that it is over."""
    node.disturbs = None
    node.forget()
    try:
        async with asyncio.timeout(END_S):
            if mesh._link().failure is not None or agent._link().failure is not None or agent._host is None:
                return []
            if agent._host.gone.is_set():
                failure = agent._host.failure
                clean = failure is None or isinstance(failure, ReachError | AgentReplaced)
                return [] if clean else [f"the agent ended with {failure!r}"]
            while True:
                try:
                    reply = await mesh.request("again", agent_id=AGENT, timeout=1.0)
                except ReachError:
                    await asyncio.sleep(0.01)
                    continue
                return [] if reply.data == "again" else [f"it answers {reply.data!r}"]
    except TimeoutError:
        return ["the process does not work with an honest node"]
