"""Processes that no SDK wrote: frames by hand over grpc.aio, honest or not.

    async with raw_link(node.grpc, agents=["liar/1"]) as link:
        await link.send(Envelope(...))                    # numbered, with the ack that is due
        await link.write(b"garbage")                      # anything at all
        frame = await link.until("goodbye")

Nothing is said by itself, no heartbeat, probe's answer or ack, unless a `taker` is given. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.v1.envelope_pb2 import RESPONSE, Envelope, Payload, Target
from agentreach.v1.frame_pb2 import Attach, Frame, Goodbye, Heartbeat, Hello, ProbeReply, Signal, Welcome
from agentreach.v1.registry_pb2 import HEALTHY, AgentLoad, AgentRecord

LIMIT_S = 10.0
BEAT_S = 0.3  # well within three of the heartbeats that tests shrink to half a second
CONNECT = "/agentreach.v1.MeshService/Connect"

Taker = Callable[[Envelope], "Envelope | None"]


class StreamOver(Exception):
    """The node ended the stream."""


class RawLink:
    """One Connect stream, its numbers kept by hand. `welcome` stands once `greet` has had its answer."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._seen: list[Frame] = []
        self._taker: Taker | None = None
        self.seq = 0
        """The number of the last frame sent."""
        self.accepted = 0
        """The number of the last frame received."""
        self.acks = True
        """False: never acknowledge anything, as a process does that is frozen behind a live transport."""
        self.welcome = Welcome()
        self.reading = asyncio.Event()
        """Cleared: nothing more is read, and the stream's buffers fill; pings are answered all the same."""
        self.reading.set()
        self._writing = asyncio.Lock()  # concurrent writes lose messages
        self.reader: asyncio.Task[None] | None = None

    def read_on(self) -> None:
        """Begin to read; before this the stream's buffers fill."""
        self.reader = asyncio.create_task(self._read(), name="raw link reader")

    async def _read(self) -> None:
        try:
            async for data in self._call:
                await self._arrived(Frame.FromString(data))
                await self.reading.wait()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            self._frames.put_nowait(None)

    async def _arrived(self, frame: Frame) -> None:
        self.accepted = max(self.accepted, frame.seq)
        self._frames.put_nowait(frame)
        if self._taker is None:
            return
        for signal in frame.signals:
            if signal.HasField("probe"):
                reply = ProbeReply(agent_id=signal.probe.agent_id, nonce=signal.probe.nonce, ready=True)
                await self.signal(Signal(probe_reply=reply))
        answers = [answer for envelope in frame.envelopes if (answer := self._taker(envelope)) is not None]
        if answers:
            await self.send(*answers)
        elif frame.seq:
            await self.write(Frame(ack=self._ack()))

    def answering(self, taker: Taker) -> None:
        """Answer probes, acknowledge, and send what `taker` makes of each envelope, from now on."""
        self._taker = taker

    # ---- sending ----

    async def write(self, frame: Frame | bytes) -> None:
        """Write this, whatever it is."""
        async with self._writing:
            await self._write(frame)

    async def _write(self, frame: Frame | bytes) -> None:
        data = frame if isinstance(frame, bytes) else frame.SerializeToString()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(data)

    async def send(self, *envelopes: Envelope, signals: Sequence[Signal] = ()) -> None:
        """Write these in the next numbered frame."""
        async with self._writing:
            self.seq += 1
            await self._write(Frame(seq=self.seq, ack=self._ack(), envelopes=envelopes, signals=signals))

    async def signal(self, *signals: Signal) -> None:
        """Write signals of the kind that is not numbered."""
        await self.write(Frame(ack=self._ack(), signals=signals))

    async def beat(self, *agent_ids: str, load: float = 0.0) -> None:
        """One heartbeat."""
        loads = [AgentLoad(agent_id=agent_id, status=HEALTHY, load=load) for agent_id in agent_ids]
        await self.signal(Signal(heartbeat=Heartbeat(agents=loads)))

    async def beat_on(self) -> None:
        """Heartbeats for all agents of the welcome, until cancelled."""
        agent_ids = [each.agent_id for each in self.welcome.agents if each.generation]
        while True:
            await self.beat(*agent_ids)
            await asyncio.sleep(BEAT_S)

    async def half_close(self) -> None:
        """Say nothing more."""
        await self._call.done_writing()

    def _ack(self) -> int:
        return self.accepted if self.acks else 0

    # ---- receiving ----

    async def next_frame(self, limit_s: float = LIMIT_S) -> Frame:
        """The next frame; `StreamOver` at the stream's end."""
        async with asyncio.timeout(limit_s):
            frame = await self._frames.get()
        if frame is None:
            self._frames.put_nowait(None)
            raise StreamOver
        return frame

    async def until(self, kind: str, limit_s: float = LIMIT_S) -> Any:
        """The next signal of this kind, past everything else."""
        async with asyncio.timeout(limit_s):
            while True:
                for signal in (await self.next_frame(limit_s)).signals:
                    if signal.HasField(kind):  # type: ignore[arg-type]  # any name of the oneof
                        return getattr(signal, kind)

    async def envelope(self, limit_s: float = LIMIT_S) -> Envelope:
        """The next envelope; those that came with it in one frame come next."""
        async with asyncio.timeout(limit_s):
            while not self._waiting:
                self._waiting.extend((await self.next_frame(limit_s)).envelopes)
        return self._waiting.pop(0)

    @property
    def _waiting(self) -> list[Envelope]:
        return self.__dict__.setdefault("_envelopes", [])  # type: ignore[no-any-return]

    async def over(self, limit_s: float = LIMIT_S) -> None:
        """Wait for the stream's end."""
        async with asyncio.timeout(limit_s):
            with contextlib.suppress(StreamOver):
                while True:
                    await self.next_frame(limit_s)

    async def status(self) -> grpc.StatusCode:
        """The RPC's status, once it is over."""
        async with asyncio.timeout(LIMIT_S):
            return await self._call.code()  # type: ignore[no-any-return]


def record(agent_id: str, *capabilities: str, **more: Any) -> AgentRecord:
    """What an agent registers."""
    return AgentRecord(agent_id=agent_id, capabilities=capabilities, **more)


def request(text: str = "x", timeout_ms: int = 5_000, **more: Any) -> Envelope:
    """A request; give it a `target`, or any other field."""
    return Envelope(timeout_ms=timeout_ms, **{"payload": Payload(text=text), **more})


def to(agent_type: str = "", **more: Any) -> Target:
    """A target."""
    return Target(agent_type=agent_type, **more)


def response(to_envelope: Envelope, text: str = "", **more: Any) -> Envelope:
    """The answer to a delivered request, echoing what an answer must echo."""
    return Envelope(
        type=RESPONSE, correlation_id=to_envelope.message_id, entry=to_envelope.entry, attempt=to_envelope.attempt,
        epoch=to_envelope.epoch, source=to_envelope.recipient, **{"payload": Payload(text=text), **more},
    )  # fmt: skip


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that shows an API key; empty: none."""
    return (("authorization", f"Bearer {key}"),) if key else ()


@contextlib.asynccontextmanager
async def raw_stream(address: str, *, read: bool = True, key: str = "") -> AsyncIterator[RawLink]:
    """A Connect stream on which nothing has been said yet; `key` is the API key to open it with."""
    async with grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS]) as channel:
        call: Any = channel.stream_stream(CONNECT)(metadata=bearer(key))
        async with asyncio.timeout(LIMIT_S):
            await call.initial_metadata()
        link = RawLink(call)
        if read:
            link.read_on()
        try:
            yield link
        finally:
            call.cancel()
            if link.reader is not None:
                link.reader.cancel()
                await asyncio.gather(link.reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def raw_link(
    address: str,
    *,
    agents: Sequence[AgentRecord | str] = (),
    incarnation: bytes = b"",
    taker: Taker | None = None,
    key: str = "",
    **hello: Any,
) -> AsyncIterator[RawLink]:
    """A stream that has said hello and was welcomed. With `taker` its agents live: probes answered, heartbeats sent."""
    async with raw_stream(address, key=key) as link:
        if taker is not None:
            link.answering(taker)
        records = [record(each) if isinstance(each, str) else each for each in agents]
        message = Hello(
            agents=[Attach(record=each) for each in records], incarnation=incarnation or secrets.token_bytes(16),
            **{"protocol_version": 1, **hello},
        )  # fmt: skip
        await link.write(Frame(signals=[Signal(hello=message)]))
        link.welcome = await link.until("welcome")
        beating = asyncio.create_task(link.beat_on()) if taker is not None else None
        try:
            yield link
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)


async def call(address: str, method: str, message: Envelope | bytes, timeout_s: float = LIMIT_S) -> bytes:
    """One unary call by hand, `method` as in `MeshService/Invoke`; raises `AioRpcError`."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    async with grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS]) as channel:
        unary: Callable[..., Awaitable[bytes]] = channel.unary_unary(f"/agentreach.v1.{method}")
        async with asyncio.timeout(timeout_s):  # not the RPC's own: that would bound the request's time
            return await unary(data)


async def refusal(address: str, message: Envelope | bytes, method: str = "MeshService/Invoke") -> tuple[str, str]:
    """(gRPC status, text) of a call that must be refused."""
    try:
        reply = await call(address, method, message)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError(f"it was answered: {Envelope.FromString(reply)}")


__all__ = [
    "Goodbye", "RawLink", "StreamOver", "bearer", "call", "raw_link", "raw_stream", "record", "refusal", "request",
    "response", "to",
]  # fmt: skip
