"""Frames by the hundred thousand at a node that runs: over real gRPC streams, whether or not they parse.

    thrower = Thrower("127.0.0.1:7070", seed=1)
    await thrower.throw(30_000)

Most frames are numbered as they must be, so that what is in them gets past the link; some are repeated, skip a number,
are damaged bytes, or hold thousands of envelopes. Streams end in every way: by the node's goodbye, half-closed, cut,
and some go on with the link of one before. A frame counts as thrown when it was written to a stream that nobody had
ended as far as was known here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agentreach.aio.options import CLIENT_OPTIONS
from agentreach.v1.frame_pb2 import Frame, Goodbye, Signal
from agentreach.wire.framing import ACK, AGE, ENVELOPES, SEQ, SIGNALS, varint
from tools.fuzzing import seeds
from tools.fuzzing.drawing import Drawing
from tools.fuzzing.octets import damage

CONNECT = "/agentreach.v1.MeshService/Connect"
OPEN_S = 20.0  # a node under attack may take a while to admit a stream
POOL = 2_000  # prepared envelopes and signals, each; a few are drawn anew all the time
FRAMES_A_STREAM = 2_000  # at most; then it ends by our side
CROWD = 3_000  # envelopes in one frame
STREAMS = 8
CHANNELS = 4
LEARN_EVERY = 16  # frames of the node


class _Line:
    """What is known of one link."""

    def __init__(self) -> None:
        self.seq = 0
        self.heard = 0
        self.token = b""
        self.over = False
        self.acks = True


class Thrower:
    """Throws frames over `STREAMS` streams at a time; what is drawn depends on the seed alone, its order on timing."""

    def __init__(self, address: str, seed: int) -> None:
        self.address = address
        self.rng = rng = Random(seed)
        self.words = seeds.words()
        self.drawing = Drawing(rng, self.words)
        self.envelopes = [self._envelope() for _ in range(POOL)]
        self.signals = [self._signal() for _ in range(POOL)]
        self.thrown = 0
        self.streams = 0
        self.kinds: Counter[str] = Counter()
        self.goodbyes: Counter[str] = Counter()
        self._wanted = 0

    async def throw(self, count: int) -> None:
        """Throw so many more. Raises if the node does not admit a stream in time."""
        self._wanted = self.thrown + count
        async with contextlib.AsyncExitStack() as stack:
            channels = []
            for number in range(CHANNELS):
                options = [*CLIENT_OPTIONS, ("grpc.channel_id", number)]  # else they would share one connection
                channels.append(
                    await stack.enter_async_context(grpc.aio.insecure_channel(self.address, options=options))
                )
            async with asyncio.TaskGroup() as group:
                for number in range(STREAMS):
                    group.create_task(self._throw_on(channels[number % CHANNELS]), name=f"thrower {number}")

    async def _throw_on(self, channel: grpc.aio.Channel) -> None:
        line = _Line()
        while self.thrown < self._wanted:
            line = await self._stream(channel, line)

    async def _stream(self, channel: grpc.aio.Channel, former: _Line) -> _Line:
        """One stream, from hello to its end."""
        rng, line = self.rng, _Line()
        if former.token and rng.random() < 0.4:
            line.token, line.seq, line.heard = former.token, former.seq, former.heard
        line.acks = rng.random() < 0.9
        call: Any = channel.stream_stream(CONNECT)()
        async with asyncio.timeout(OPEN_S):
            await call.initial_metadata()
        self.streams += 1
        reader = asyncio.create_task(self._read(call, line), name="thrower's reader")
        try:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(self._hello(line))
                for _ in range(rng.randrange(1, FRAMES_A_STREAM)):
                    if line.over or self.thrown >= self._wanted:
                        break
                    await call.write(self._frame(line))
                    self.thrown += 1
                if rng.random() < 0.3:
                    await call.done_writing()
                    await asyncio.wait([reader], timeout=0.1)
        finally:
            call.cancel()
            await asyncio.wait([reader])
        return line

    async def _read(self, call: Any, line: _Line) -> None:
        number = 0
        with contextlib.suppress(grpc.aio.AioRpcError, DecodeError):
            async for data in call:
                number += 1
                if number % LEARN_EVERY == 1 or len(data) < 200:
                    self._learn(Frame.FromString(data), line)
                elif data[:1] == SEQ:
                    line.heard = max(line.heard, _number_at(data, 1))
        line.over = True

    def _learn(self, frame: Frame, line: _Line) -> None:
        line.heard = max(line.heard, frame.seq)
        for signal in frame.signals:
            if signal.HasField("welcome"):
                line.token = signal.welcome.resume_token
                if not signal.welcome.resumed:
                    line.seq = line.heard = 0
            elif signal.HasField("goodbye"):
                self.goodbyes[Goodbye.Code.Name(signal.goodbye.code)] += 1
                line.over = True
        for envelope in frame.envelopes:
            self.words.learn((envelope.message_id,), (envelope.entry, envelope.lineage))
            if envelope.recipient:
                self.words.delivered.append(envelope)
                del self.words.delivered[:-8]

    # ---- what is thrown ----

    def _hello(self, line: _Line) -> bytes:
        rng = self.rng
        hello = seeds.hello(f"evil/{rng.randrange(20)}", "evil/1", incarnation=bytes([rng.randrange(4)]) * 16)
        hello.resume_token, hello.last_seq = line.token, line.heard
        if rng.random() < 0.1:
            hello.last_seq += rng.randrange(3)
        return Frame(signals=[Signal(hello=hello)]).SerializeToString()

    def _frame(self, line: _Line) -> bytes:
        rng = self.rng
        roll = rng.random()
        if roll < 0.05:
            self.envelopes[rng.randrange(POOL)] = self._envelope()
            self.signals[rng.randrange(POOL)] = self._signal()
        elif roll < 0.054:
            self.kinds["damaged"] += 1
            return damage(rng, self._numbered(line, line.seq + 1), rng.choice(self.envelopes))
        elif roll < 0.056:
            self.kinds["gap"] += 1
            return self._numbered(line, line.seq + rng.randrange(2, 9))
        elif roll < 0.057:
            self.kinds["noise"] += 1
            return rng.randbytes(rng.randrange(200))
        elif roll < 0.10 and line.seq:
            self.kinds["repeated"] += 1
            return self._numbered(line, rng.randrange(1, line.seq + 1))
        elif roll < 0.13:
            self.kinds["unnumbered"] += 1
            return b"".join((ACK, varint(line.heard if line.acks else 0), *self._some(SIGNALS, self.signals, 3)))
        elif roll < 0.1302:
            self.kinds["crowd"] += 1
            line.seq += 1
            return b"".join((SEQ, varint(line.seq), *(self._field(ENVELOPES, self.envelopes) for _ in range(CROWD))))
        self.kinds["numbered"] += 1
        line.seq += 1
        return self._numbered(line, line.seq)

    def _numbered(self, line: _Line, seq: int) -> bytes:
        ack = (ACK, varint(line.heard)) if line.acks else ()
        age = (AGE, varint(self.rng.choice((1, 50, 10_000)))) if self.rng.random() < 0.1 else ()
        envelopes = self._some(ENVELOPES, self.envelopes, 3)
        signals = self._some(SIGNALS, self.signals, 2) if self.rng.random() < 0.4 else ()
        return b"".join((SEQ, varint(seq), *ack, *age, *envelopes, *signals))

    def _some(self, key: bytes, pool: list[bytes], most: int) -> list[bytes]:
        return [self._field(key, pool) for _ in range(self.rng.randrange(most))]

    def _field(self, key: bytes, pool: list[bytes]) -> bytes:
        data = self.rng.choice(pool)
        return b"".join((key, varint(len(data)), data))

    def _envelope(self) -> bytes:
        return self.drawing.envelope().SerializeToString()

    def _signal(self) -> bytes:
        while (signal := self.drawing.signal()).HasField("goodbye") and self.rng.random() < 0.98:
            pass  # each ends a link: a few will do
        return signal.SerializeToString()


def _number_at(data: bytes, at: int) -> int:
    """The base-128 number that begins there."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number
        at, shift = at + 1, shift + 7
