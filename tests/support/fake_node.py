"""A node small enough to read, for tests of the SDK: in the process, over byte streams, with faults on demand.

It speaks the real link (`agentreach.wire.link`) and routes by the first capability, type or id that matches. It knows
no policies, sessions, deadlines or retries.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence

from agentreach.aio.outlet import Outlet
from agentreach.aio.transport import Refused, StreamBroken
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.error_pb2 import Error, ErrorCode
from agentreach.wire import errors
from agentreach.wire.link import Link


class FakeStream:
    """The client's end of a stream; `to_client` and `to_node` are what is under way."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.to_client: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended = False
        self.why_ended = ""

    async def write(self, data: bytes) -> None:
        if self.ended:
            raise StreamBroken("the stream has ended")
        self._session.received(data)

    async def read(self) -> bytes | None:
        data = await self.to_client.get()
        if data is None:
            self.to_client.put_nowait(None)
        return data

    async def half_close(self) -> None:
        self._session.half_closed(self)

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            self.to_client.put_nowait(None)
            self._session.stream_ended(self)

    async def close(self) -> None:
        self.cancel()


class Session:
    """The node's end of one link."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.link = Link()
        self.token = os.urandom(16)
        self.agents: dict[str, frames.Attach] = {}
        self.topics: set[tuple[str, str, str]] = set()
        self.hello: frames.Hello | None = None
        self.signals: list[frames.Signal] = []
        self.envelopes: list[pb.Envelope] = []
        self.goodbye: frames.Goodbye | None = None
        self.stream: FakeStream | None = None
        self.outlet: Outlet | None = None
        self._writer: asyncio.Task[None] | None = None

    # ---- the stream ----

    def open(self) -> FakeStream:
        self.stream = FakeStream(self)
        return self.stream

    def stream_ended(self, stream: FakeStream) -> None:
        if self.stream is stream:
            self.stream = None
            if self.outlet is not None:
                self.outlet.abandon()
                self.outlet = None
            self.link.cut()

    def half_closed(self, stream: FakeStream) -> None:
        if self.outlet is not None:
            self.outlet.close()

    def cut(self) -> None:
        """Break the stream as a network would."""
        if self.stream is not None:
            self.stream.why_ended = "UNAVAILABLE: cut by the test"
            self.stream.cancel()

    def received(self, data: bytes) -> None:
        if self.node.deaf:
            self.node.swallowed += 1
            return
        frame = frames.Frame.FromString(data)
        if self.outlet is None:
            hello = next(s.hello for s in frame.signals if s.WhichOneof("kind") == "hello")
            self.node.greeted(self, hello)
            return
        if not self.link.receive(frame):
            self.outlet.received()
            return
        for signal in frame.signals:
            self.node.on_signal(self, signal)
        for envelope in frame.envelopes:
            self.envelopes.append(envelope)
            self.node.on_envelope(self, envelope)
        if self.outlet is not None:
            self.outlet.received()

    def start(self, stream: FakeStream) -> None:
        self.stream = stream
        self.outlet = Outlet(self.link)
        self._writer = asyncio.get_running_loop().create_task(self._write(self.outlet, stream), name="fake node writer")

    async def _write(self, outlet: Outlet, stream: FakeStream) -> None:
        while (frame := await outlet.next_frame()) is not None:
            stream.to_client.put_nowait(frame)
        stream.to_client.put_nowait(None)

    def send(self, envelope: pb.Envelope) -> None:
        from agentreach.aio.clock import boot_time

        self.link.put(envelope, boot_time())
        self._wake()

    def signal(self, **kind: object) -> None:
        self.link.signal(frames.Signal(**kind))  # type: ignore[arg-type]
        self._wake()

    def raw(self, data: bytes) -> None:
        """Put bytes on the stream that no link made."""
        if self.stream is not None:
            self.stream.to_client.put_nowait(data)

    def _wake(self) -> None:
        if self.outlet is not None:
            self.outlet.wake()

    def close(self) -> None:
        if self.outlet is not None:
            self.outlet.close()


class FakeNode:
    """All sessions, and the routes between them. It is its own transport."""

    def __init__(self, node_id: str = "fake") -> None:
        self.node_id = node_id
        self.sessions: dict[bytes, Session] = {}
        self.peers: list[str] = []
        """Addresses of other nodes that it tells of."""
        self.dials = 0
        self.down = False
        self.silent = False
        """True: a dial is neither taken nor refused."""
        self.refuse: Refused | None = None
        self.deaf = False
        """True: what arrives is swallowed."""
        self.swallowed = 0
        self.hold_requests = False
        """True: requests are accepted and left lying."""
        self.heartbeat_interval_ms = 10_000
        self.payload_bytes_max = 1 << 20
        self.attach_errors: list[Error] = []
        """What the next attaches are refused with."""
        self.unknown: list[str] = []
        self.on_hello: Callable[[], None] = lambda: None
        self.on_request: Callable[[Session, pb.Envelope], bool] | None = None
        self.generation = itertools.count(1)
        self._entries: dict[bytes, tuple[Session, str, Session, str]] = {}
        self._count = itertools.count(1)

    # ---- transport ----

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> FakeStream:
        self.dials += 1
        await asyncio.sleep(0)
        if self.silent:
            await asyncio.get_running_loop().create_future()
        if self.refuse is not None:
            raise self.refuse
        if self.down:
            raise Refused("UNAVAILABLE", "nobody listens", False)
        return Session(self).open()

    # ---- faults ----

    def cut(self) -> None:
        """Break every stream; sessions can be resumed."""
        for session in list(self.sessions.values()):
            session.cut()

    def forget(self) -> None:
        """Restart: every stream breaks, and no session can be resumed."""
        sessions = list(self.sessions.values())
        self.sessions.clear()
        self._entries.clear()
        for session in sessions:
            session.cut()

    def kill(self) -> None:
        """End as SIGKILL ends a node: nobody listens any more, and nothing is remembered."""
        self.down = True
        self.forget()

    @property
    def session(self) -> Session:
        """The only session there is."""
        (session,) = self.sessions.values()
        return session

    def session_of(self, agent_id: str) -> Session:
        return next(s for s in self.sessions.values() if agent_id in s.agents)

    # ---- the node's half of the protocol ----

    def greeted(self, fresh: Session, hello: frames.Hello) -> None:
        stream = fresh.stream
        assert stream is not None
        self.on_hello()
        known = self.sessions.get(hello.resume_token)
        resumed = known is not None and known.link.fits(hello.last_seq)
        session = known if known is not None and resumed else fresh
        stream._session = session
        if session is not fresh:
            session.cut()
            session.link.resume(hello.last_seq)
        else:
            self.sessions.pop(hello.resume_token, None)
            self.sessions[session.token] = session
        session.hello = hello
        attached = []
        for attach in hello.agents:
            attached.append(self._attached(session, attach))
        session.stream = stream
        welcome = frames.Welcome(
            link_id="link",
            resume_token=session.token,
            resumed=resumed,
            last_seq=session.link.last_accepted if resumed else 0,
            node_id=self.node_id,
            peers=self.peers,
            agents=attached,
            caller_id=hello.name or "caller/fake",
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            limits=frames.Limits(payload_bytes_max=self.payload_bytes_max),
        )
        session.link.signal(frames.Signal(welcome=welcome))
        session.start(stream)

    def _attached(self, session: Session, attach: frames.Attach) -> frames.Attached:
        agent_id = attach.record.agent_id
        if self.attach_errors:
            return frames.Attached(agent_id=agent_id, error=self.attach_errors.pop(0))
        session.agents[agent_id] = attach
        return frames.Attached(agent_id=agent_id, generation=next(self.generation))

    def on_signal(self, session: Session, signal: frames.Signal) -> None:
        session.signals.append(signal)
        kind = signal.WhichOneof("kind")
        if kind == "attach":
            session.signal(attached=self._attached(session, signal.attach))
        elif kind == "detach":
            session.agents.pop(signal.detach.agent_id, None)
        elif kind == "subscribe":
            for topic in signal.subscribe.topics:
                session.topics.add((signal.subscribe.agent_id, signal.subscribe.env or "production", topic))
        elif kind == "unsubscribe":
            for topic in signal.unsubscribe.topics:
                session.topics.discard((signal.unsubscribe.agent_id, signal.unsubscribe.env or "production", topic))
        elif kind == "heartbeat":
            session.signal(heartbeat_ack=frames.HeartbeatAck(unknown=self.unknown, peers=self.peers))
            self.unknown = []
        elif kind == "stream_credit":
            self._credit(signal.stream_credit)
        elif kind == "goodbye":
            session.goodbye = signal.goodbye
            self.sessions.pop(session.token, None)

    def _credit(self, credit: frames.StreamCredit) -> None:
        for entry, (_, message_id, home, _) in self._entries.items():
            if message_id == credit.correlation_id:
                onward = frames.StreamCredit(correlation_id=message_id, entry=entry, up_to=credit.up_to)
                home.signal(stream_credit=onward)

    def on_envelope(self, session: Session, envelope: pb.Envelope) -> None:
        kind = envelope.type
        if kind == pb.RESPONSE:
            self._response(envelope)
        elif kind == pb.CANCEL:
            self._cancel(session, envelope)
        elif kind == pb.EVENT and envelope.target.topic:
            self._publish(session, envelope)
        elif not self.hold_requests and not (self.on_request and self.on_request(session, envelope)):
            self.route(session, envelope)

    def route(self, session: Session, envelope: pb.Envelope) -> None:
        """Deliver a request to the first agent that matches."""
        target = envelope.target
        for home in self.sessions.values():
            for agent_id, attach in home.agents.items():
                if (
                    agent_id == target.agent_id
                    or (target.agent_type and attach.record.agent_type == target.agent_type)
                    or (target.capabilities and set(target.capabilities) <= set(attach.record.capabilities))
                ):
                    self.deliver(session, home, agent_id, envelope)
                    return
        self.fail(session, envelope, ErrorCode.NO_ROUTE, "nothing registered matches")

    def deliver(self, session: Session, home: Session, agent_id: str, envelope: pb.Envelope, attempt: int = 1) -> bytes:
        """Hand a request to an agent as one attempt; returns its entry."""
        entry = b"e%d" % next(self._count)
        self._entries[entry] = (session, envelope.message_id, home, agent_id)
        onward = pb.Envelope()
        onward.CopyFrom(envelope)
        onward.recipient, onward.entry, onward.attempt = agent_id, entry, attempt
        onward.source = envelope.source or "caller/fake"
        onward.tenant, onward.principal, onward.env = "default", "anonymous", envelope.env or "production"
        onward.lineage = b"lineage of " + envelope.message_id.encode()
        onward.path.extend(self._path(envelope))
        onward.path.add(agent_id=agent_id, message_id=envelope.message_id)
        home.send(onward)
        return entry

    def _path(self, envelope: pb.Envelope) -> list[pb.Hop]:
        return [pb.Hop(message_id=envelope.parent_message_id)] if envelope.parent_message_id else []

    def _response(self, envelope: pb.Envelope) -> None:
        found = self._entries.get(envelope.entry)
        if found is None:
            return
        session, message_id, _, agent_id = found
        assert envelope.correlation_id == message_id
        if not envelope.more:
            del self._entries[envelope.entry]
        onward = pb.Envelope()
        onward.CopyFrom(envelope)
        onward.source = agent_id
        if session.token in self.sessions:
            session.send(onward)

    def _cancel(self, session: Session, envelope: pb.Envelope) -> None:
        for entry, (origin, message_id, home, agent_id) in list(self._entries.items()):
            if origin is session and message_id == envelope.correlation_id:
                home.send(
                    pb.Envelope(type=pb.CANCEL, correlation_id=message_id, entry=entry, attempt=1, recipient=agent_id)
                )

    def _publish(self, session: Session, envelope: pb.Envelope) -> None:
        matched = 0
        for home in self.sessions.values():
            for agent_id, env, topic in list(home.topics):
                if topic == envelope.target.topic and env == (envelope.env or "production"):
                    matched += 1
                    onward = pb.Envelope()
                    onward.CopyFrom(envelope)
                    onward.recipient = agent_id or "caller/fake"
                    onward.source = envelope.source or "caller/fake"
                    home.send(onward)
        reply = pb.Envelope(type=pb.RESPONSE, correlation_id=envelope.message_id)
        reply.payload.content_type = "application/json"
        reply.payload.body = b'{"matched":%d,"accepted":%d,"dropped":0,"unknown":0}' % (matched, matched)
        session.send(reply)

    def fail(self, session: Session, envelope: pb.Envelope, code: ErrorCode.ValueType, message: str) -> None:
        """Answer a request with an error."""
        error = errors.failure(code, message)
        session.send(pb.Envelope(type=pb.RESPONSE, correlation_id=envelope.message_id, error=error))


class FakeNodes:
    """Several nodes that know nothing of one another, and the way to each by its address."""

    def __init__(self, count: int) -> None:
        self.at = {f"127.0.0.1:{7070 + 10 * n}": FakeNode(f"node-{n}") for n in range(count)}
        self.nodes = list(self.at.values())
        self.addresses = list(self.at)
        self.url = ",".join(self.at)
        self.dialled: list[str] = []

    async def open(self, address: str, metadata: Sequence[tuple[str, str]]) -> FakeStream:
        self.dialled.append(address)
        return await self.at[address].open(address, metadata)

    def elsewhere(self, than: FakeNode) -> FakeNode | None:
        """Another node that some process is linked with."""
        return next((node for node in self.nodes if node is not than and node.sessions), None)


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `condition` holds; fails the test after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # conditions of any kind, seen from outside
            await asyncio.sleep(0.005)
