"""The node's core on virtual time: scripted processes, real links at both ends, a store that answers at once.

Nothing here waits: `CoreMesh.pump` carries frames until both ends are silent, `advance` moves the clock from one
timer to the next. A test plays the processes, looks at what they were sent, and ends with `assert_settled`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.envelope_pb2 import Envelope, Payload, Target
from agentreach.v1.frame_pb2 import Frame, Signal
from agentreach.v1.registry_pb2 import AgentLoad, AgentRecord
from agentreach.wire.errors import failure
from agentreach.wire.link import Link
from agentreach.wire.outbox import Item
from reach.core import arrivals, homes, links, mesh, moves, owners
from reach.core.arrivals import Arrival
from reach.core.calls import Call
from reach.core.effects import (
    CreatePin,
    DeregisterAgent,
    DropSnapshot,
    EndStream,
    LoadSnapshot,
    LogLine,
    ReadPin,
    RefreshPin,
    RegisterAgents,
    StoreSnapshot,
    VoidPin,
)
from reach.core.lineage import LineageKeys
from reach.core.moving import Holder
from reach.core.peers import Peer
from reach.core.ports import ANYBODY, Identity
from reach.core.requests import Attachment
from reach.core.rules import Rules
from reach.core.state import State

BEAT_S = 10.0
_FRAMES_MAX = 10_000  # carried by one pump; more means that two ends answer each other for ever


def no_hooks(process: Process, order: frames.SessionRelease | frames.SessionRestore) -> None:
    """The answer of an agent whose sessions do not move."""
    error, whose = failure(codes.REJECTED, "no hooks"), (order.agent_id, order.session_id, order.epoch)
    if isinstance(order, frames.SessionRelease):
        answer = frames.SessionSnapshot(error=error, released=True)
        answer.agent_id, answer.session_id, answer.epoch = whose
        process.signal(Signal(session_snapshot=answer))
    else:
        ready = frames.SessionReady(error=error)
        ready.agent_id, ready.session_id, ready.epoch = whose
        process.signal(Signal(session_ready=ready))


class Process:
    """One process: the other end of a link, with agents and callers that do what the test says."""

    def __init__(self, core: CoreMesh, name: str, who: Identity, env: str) -> None:
        self.core = core
        self.name = name
        self.who = who
        self.env = env
        self.incarnation = core.rng.getrandbits(128).to_bytes(16, "big")
        self.link = Link()
        self.peer: Peer | None = None
        self.connected = False
        self.frozen = False
        """It neither reads nor says anything, and its stream stays up."""
        self.beating = True
        self.ready = True
        """What its agents answer to probes; with None they do not answer."""
        self.answers_probes = True
        self.answers_lookups = True
        self.sdk = ""
        """With one it numbers the items of its streamed replies."""
        self.confirms_cancels = True
        self.handler: Callable[[Process, Envelope], None] | None = None
        self.releases: Callable[[Process, frames.SessionRelease], None] | None = no_hooks
        self.restores: Callable[[Process, frames.SessionRestore], None] | None = no_hooks
        """What it does when it is to hand a session over, or to take one; None: nothing."""
        self.welcome: frames.Welcome | None = None
        self.goodbye: frames.Goodbye | None = None
        self.agents: dict[str, AgentRecord] = {}
        self.requests: list[Envelope] = []
        """Every REQUEST it was given, in order."""
        self.running: dict[bytes, Envelope] = {}
        """By entry: requests that it has not answered."""
        self.cancels: list[Envelope] = []
        self.events: list[Envelope] = []
        self.callbacks: list[Envelope] = []
        self.replies: list[Envelope] = []
        self.signals: list[Signal] = []
        self.sent: dict[str, Item] = {}
        """By message_id: its own requests and events that have no final reply yet."""
        self.beat_at = core.state.now + BEAT_S

    # ---- its link ----

    def connect(
        self,
        *agents: AgentRecord,
        holds: Iterable[tuple[str, int]] = (),
        holding: Iterable[frames.Holding] = (),
    ) -> frames.Welcome | None:
        """Say hello on a new stream: resume the link if there was one, and attach these agents (and its former)."""
        core = self.core
        for record in agents:
            self.agents[record.agent_id] = record
        held = [frames.SessionRef(session_id=name, epoch=epoch) for name, epoch in holds]
        hello = frames.Hello(
            agents=[frames.Attach(record=record, sessions=held, holding=holding) for record in self.agents.values()],
            incarnation=self.incarnation,
            protocol_version=1,
            resume_token=self.welcome.resume_token if self.welcome is not None else b"",
            last_seq=self.link.last_accepted,
            env=self.env,
            name=self.name,
            sdk=self.sdk,
        )
        self.link.cut()
        self.welcome = None
        with core.step():
            peer = links.hello(core.state, self.who, hello)
            self.peer = peer
            if peer is not None:
                peer.stream = self
        self.connected = peer is not None
        self.frozen = False
        core.pump()
        return self.welcome

    def cut(self) -> None:
        """Its stream breaks, without a goodbye."""
        assert self.peer is not None
        self.connected = False
        with self.core.step() as state:
            links.cut(state, self.peer)
        self.core.pump()

    def restart_numbering(self) -> None:
        """Make the next hello not fit: as if this end had lost count of what it accepted."""
        self.link.last_accepted += 10**6

    def forget(self) -> None:
        """Begin a new link: the token is lost."""
        self.link = Link()
        self.welcome = None

    def leave(self, reason: str = "done") -> None:
        """Say goodbye."""
        self.signal(Signal(goodbye=frames.Goodbye(code=frames.Goodbye.NORMAL, reason=reason)))
        self.core.pump()

    def signal(self, signal: Signal) -> None:
        """Queue a signal; the next pump carries it."""
        self.link.signal(signal)

    def send(self, envelope: Envelope, priority: int = 1) -> Item:
        """Queue an envelope."""
        item = self.link.put(envelope, self.core.state.now, priority)
        if envelope.type in (pb.REQUEST, pb.EVENT):
            self.sent[envelope.message_id] = item
        return item

    # ---- as a caller ----

    def request(self, text: str = "hi", **fields: object) -> str:
        """Send a REQUEST and let it travel; returns its message_id."""
        envelope = self.core.envelope(text, **fields)
        self.send(envelope)
        self.core.pump()
        return envelope.message_id

    def cancel(self, message_id: str, env: str = "") -> None:
        """Withdraw a request."""
        self.send(Envelope(type=pb.CANCEL, correlation_id=message_id, env=env))
        self.core.pump()

    def publish(self, topic: str = "", **fields: object) -> str:
        """Send an EVENT; its counts come as a reply."""
        if topic:
            fields["topic"] = topic
        fields.setdefault("timeout_ms", 0)
        envelope = self.core.envelope("event", **fields)
        envelope.type = pb.EVENT
        self.send(envelope)
        self.core.pump()
        return envelope.message_id

    def subscribe(self, *topics: str, agent_id: str = "") -> None:
        """Ask for topics."""
        self.signal(Signal(subscribe=frames.Subscribe(topics=topics, agent_id=agent_id)))
        self.core.pump()

    def replies_to(self, message_id: str) -> list[Envelope]:
        """What came back for a message, in order."""
        return [reply for reply in self.replies if reply.correlation_id == message_id]

    def reply_to(self, message_id: str) -> Envelope:
        """The one final reply to a message."""
        final = [reply for reply in self.replies_to(message_id) if not reply.more]
        assert len(final) == 1, f"{message_id} ended {len(final)} times"
        return final[0]

    def error_of(self, message_id: str) -> codes.Error:
        """The error that ended a message."""
        reply = self.reply_to(message_id)
        assert reply.HasField("error"), "it ended well"
        return reply.error

    def text_of(self, message_id: str) -> str:
        """The text that a message was answered with."""
        reply = self.reply_to(message_id)
        assert not reply.HasField("error"), f"{codes.ErrorCode.Name(reply.error.code)}: {reply.error.message}"
        return reply.payload.text

    # ---- as agents ----

    def got(self, message_id: str) -> Envelope:
        """The last delivery of a message to this process."""
        return [envelope for envelope in self.requests if envelope.message_id == message_id][-1]

    def has(self, message_id: str) -> bool:
        """Whether it was given the message."""
        return any(envelope.message_id == message_id for envelope in self.requests)

    def answer(
        self,
        request: Envelope | str,
        text: str = "ok",
        *,
        more: bool = False,
        sequence: int = 0,
        error: codes.Error | None = None,
        pump: bool = True,
        **fields: object,
    ) -> None:
        """Answer a delivered request."""
        envelope = self.got(request) if isinstance(request, str) else request
        reply = Envelope(
            type=pb.RESPONSE,
            correlation_id=envelope.message_id,
            entry=envelope.entry,
            attempt=envelope.attempt,
            epoch=envelope.epoch,
            more=more,
            sequence=sequence,
            source=envelope.recipient,
        )
        if error is not None:
            reply.error.CopyFrom(error)
        else:
            reply.payload.text = text
        for name, value in fields.items():
            setattr(reply, name, value)
        if not more:
            self.running.pop(envelope.entry, None)
        self.send(reply)
        if pump:
            self.core.pump()

    def refuse(self, request: Envelope | str, code: codes.ErrorCode.ValueType = codes.REJECTED) -> None:
        """Answer with an error."""
        self.answer(request, error=failure(code, "no"))

    def call_from(self, handled: Envelope | str, text: str = "nested", **fields: object) -> str:
        """Send a REQUEST from the handler of a delivered one."""
        envelope = self.got(handled) if isinstance(handled, str) else handled
        return self.request(text, lineage=envelope.lineage, source=envelope.recipient, **fields)

    def say(self, status: int, agent_id: str = "") -> None:
        """Report a status at once."""
        agent_id = agent_id or next(iter(self.agents))
        self.signal(Signal(status_change=frames.StatusChange(agent_id=agent_id, status=status)))  # type: ignore[arg-type]
        self.core.pump()

    def beat(self, *, agents: Iterable[str] | None = None, leftovers: int = 0) -> None:
        """Send a heartbeat."""
        names = list(self.agents if agents is None else agents)
        loads = [AgentLoad(agent_id=name, leftovers=leftovers) for name in names]
        self.signal(Signal(heartbeat=frames.Heartbeat(agents=loads)))
        self.core.pump()

    # ---- what comes in ----

    def take(self, data: bytes) -> None:
        """One frame from the node."""
        frame = Frame.FromString(data)
        for signal in frame.signals:
            if signal.HasField("welcome"):
                self.welcome = signal.welcome
                if signal.welcome.resumed:
                    assert self.link.resume(signal.welcome.last_seq)
                else:
                    self.link.restart()
        if not self.link.receive(frame, self.core.state.now):
            return
        self.signals.extend(frame.signals)
        for signal in frame.signals:
            self._signal(signal)
        for envelope in frame.envelopes:
            self._envelope(envelope)

    def _signal(self, signal: Signal) -> None:
        kind = signal.WhichOneof("kind")
        if kind == "probe" and self.answers_probes:
            reply = frames.ProbeReply(agent_id=signal.probe.agent_id, nonce=signal.probe.nonce, ready=self.ready)
            self.signal(Signal(probe_reply=reply))
        elif kind == "lookup" and self.answers_lookups:
            self.signal(Signal(found=self._found(signal.lookup)))
        elif kind == "goodbye":
            self.goodbye = signal.goodbye
        elif kind == "detached":
            self.agents.pop(signal.detached.agent_id, None)
        elif kind == "session_release" and self.releases is not None:
            self.releases(self, signal.session_release)
        elif kind == "session_restore" and self.restores is not None:
            self.restores(self, signal.session_restore)

    def _found(self, lookup: frames.Lookup) -> frames.Found:
        found = frames.Found(nonce=lookup.nonce)
        for key in lookup.keys:
            item = found.items.add(key=key)
            for envelope in self.requests:
                if envelope.message_id == key.message_id:
                    running = any(each.message_id == key.message_id for each in self.running.values())
                    item.state = frames.Found.RUNNING if running else frames.Found.DONE
                    item.agent_id, item.incarnation = envelope.recipient, self.incarnation
        return found

    def _envelope(self, envelope: Envelope) -> None:
        kind = envelope.type
        if kind == pb.REQUEST:
            self.requests.append(envelope)
            self.running[envelope.entry] = envelope
            if self.handler is not None:
                self.handler(self, envelope)
        elif kind == pb.CANCEL:
            self.cancels.append(envelope)
            held = self.running.get(envelope.entry)
            if held is not None and self.confirms_cancels:
                self.answer(held, error=failure(codes.CANCELLED, "cancelled"), pump=False)
        elif kind == pb.EVENT:
            self.events.append(envelope)
        elif kind == pb.CALLBACK:
            self.callbacks.append(envelope)
        else:
            assert kind == pb.RESPONSE, kind
            self.replies.append(envelope)
            item = self.sent.pop(envelope.correlation_id, None) if not envelope.more else None
            if item is not None:
                self.link.withdraw(item)  # answered: a link that begins anew does not send it again

    def got_signals(self, kind: str) -> list[Signal]:
        """The signals of a kind that it was sent."""
        return [signal for signal in self.signals if signal.WhichOneof("kind") == kind]


class _Step:
    def __init__(self, core: CoreMesh) -> None:
        self._core = core

    def __enter__(self) -> State:
        return self._core.state

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._core.finish_step()


class CoreMesh:
    """A node's state with the processes and the store around it."""

    def __init__(self, seed: int = 1, *, nonce: bytes = b"noncenon", **rules: object) -> None:
        self.rng = Random(seed)
        self.state = State(
            Rules(**rules),  # type: ignore[arg-type]
            rng=Random(seed + 1),
            nonce=nonce,
            lineage=LineageKeys((1, b"k" * 32)),
            now=1000.0,
            unix=1_800_000_000.0,
        )
        self.processes: list[Process] = []
        self.pins: dict[tuple[str, str, str, str], Holder] = {}
        self.snapshots: dict[str, bytes] = {}
        self.snapshots_up = True
        self.revision = 1_000_000
        self.registry_up = True
        """False: pins cannot be written and registrations fail."""
        self.holds_pins = False
        self.holds_registrations = False
        self.held: deque[CreatePin | ReadPin | StoreSnapshot | LoadSnapshot | RegisterAgents] = deque()
        """What the store has not answered yet."""
        self.deregistered: list[tuple[str, int]] = []
        self.refreshed: list[RefreshPin] = []
        self.logs: list[LogLine] = []

    # ---- the cast ----

    def process(self, name: str = "p", *agents: AgentRecord, who: Identity = ANYBODY, env: str = "") -> Process:
        """A process with its link up and its agents ready."""
        process = Process(self, name, who, env)
        self.processes.append(process)
        process.connect(*agents)
        return process

    def caller(self, name: str = "caller", who: Identity = ANYBODY) -> Process:
        """A process without agents."""
        return self.process(name, who=who)

    def agent(self, agent_id: str = "echo/1", who: Identity = ANYBODY, **fields: object) -> Process:
        """A process with one agent."""
        return self.process(agent_id.replace("/", "-"), record(agent_id, **fields), who=who)

    def envelope(self, text: str = "hi", **fields: object) -> Envelope:
        """A fresh REQUEST; fields of Target may be named among its own."""
        target = Target()
        values: dict[str, object] = {"message_id": f"m{self.rng.getrandbits(60):x}", "timeout_ms": 5000, "fresh": True}
        for name, value in fields.items():
            if name in Target.DESCRIPTOR.fields_by_name:
                if isinstance(value, (list, tuple)):
                    getattr(target, name).extend(value)
                elif isinstance(value, dict):
                    getattr(target, name).update(value)
                else:
                    setattr(target, name, value)
            else:
                values[name] = value
        if not target.ListFields():
            target.agent_type = "echo"
        return Envelope(type=pb.REQUEST, target=target, payload=Payload(text=text), **values)  # type: ignore[arg-type]

    def call(
        self, text: str = "hi", who: Identity = ANYBODY, *, streaming: bool = False, **fields: object
    ) -> tuple[Call, Envelope]:
        """A request by Invoke."""
        call, envelope = Call(self.state, streaming=streaming), self.envelope(text, **fields)
        with self.step() as state:
            mesh.invoke(state, call, who, envelope)
        self.pump()
        return call, envelope

    # ---- steps, frames, time ----

    def step(self) -> _Step:
        """Change the state; its effects are carried out at the end."""
        return _Step(self)

    def finish_step(self) -> None:
        """Carry out what the state asks for."""
        state = self.state
        mesh.finish_step(state)
        while state.effects:
            self._carry_out(state.effects.popleft())
            mesh.finish_step(state)
        state.woken.clear()
        state.calls.clear()

    def _carry_out(self, effect: object) -> None:
        match effect:
            case LogLine():
                self.logs.append(effect)
            case EndStream(peer):
                process = peer.stream
                if isinstance(process, Process) and process.peer is peer:
                    self._flush(process, peer)
                    process.connected = False
            case DeregisterAgent(agent, generation):
                self.deregistered.append((agent.agent_id, generation))
            case RefreshPin():
                self.refreshed.append(effect)
            case DropSnapshot(reference):
                self.snapshots.pop(reference, None)
            case RegisterAgents():
                self.held.append(effect)
                if not self.holds_registrations:
                    self.answer_store()
            case VoidPin(lane, epoch):
                pin = self.pins.get(lane.key)
                if pin is not None and pin.epoch == epoch:
                    self.pins[lane.key] = replace(pin, incarnation=b"")
            case CreatePin() | ReadPin() | StoreSnapshot() | LoadSnapshot():
                self.held.append(effect)
                if not self.holds_pins:
                    self.answer_store()

    def answer_store(self) -> None:
        """Let the store answer everything that was asked of it."""
        while self.held:
            effect = self.held.popleft()
            if isinstance(effect, RegisterAgents):
                self._register(effect.arrival)
                arrivals.registered(self.state, effect.peer, effect.arrival)
            elif isinstance(effect, CreatePin):
                self._pin(effect)
            elif isinstance(effect, ReadPin):
                why = "" if self.registry_up else "the store is away"
                homes.pin_read(self.state, effect.lane, None if why else self.pins.get(effect.lane.key), why)
            else:
                self._snapshot(effect)

    def _register(self, arrival: Arrival) -> None:
        for each in arrival.agents:
            if each.agent is not None and each.attachment is None and each.error is None and not each.agent.generation:
                if not self.registry_up:
                    each.error = failure(codes.REGISTRY_UNAVAILABLE, "the store is away")
                    continue
                self.revision += 1
                each.agent.generation = self.revision

    def _pin(self, effect: CreatePin) -> None:
        lane, state = effect.lane, self.state
        if not self.registry_up:
            owners.not_pinned(state, lane, "the store is away")
            return
        pin = self.pins.get(lane.key)
        if pin is None or pin.epoch == effect.replaces_epoch:
            self.revision = 1 + max(self.revision, pin.epoch if pin is not None else 0)  # other nodes write pins, too
            agent = effect.attachment.agent
            turn, snapshot, since = effect.turn, effect.snapshot, effect.since
            if pin is not None and pin.snapshot and not effect.forsaken:
                turn, snapshot, since = pin.turn, pin.snapshot, pin.since
            holder = self.pins[lane.key] = Holder(
                agent.agent_id,
                agent.incarnation,
                effect.epoch or self.revision,
                home=agent.node_id,
                turn=turn,
                snapshot=snapshot,
                since=since or self.revision,
            )
            owners.pinned(state, lane, effect.attachment, holder)
        else:
            owners.pinned_elsewhere(state, lane, pin)

    def _snapshot(self, effect: StoreSnapshot | LoadSnapshot) -> None:
        state = self.state
        if isinstance(effect, LoadSnapshot):
            why = "" if self.snapshots_up else "the store is away"
            moves.loaded(state, effect, self.snapshots.get(effect.reference) if not why else None, why)
            return
        if not self.snapshots_up:
            moves.stored(state, effect, "", "the store is away")
            return
        key = effect.lane.key
        pin = self.pins.get(key)
        if pin is None or pin.epoch != effect.epoch or pin.turn > effect.turn:
            moves.fenced(state, effect)
            return
        reference = f"{'/'.join(key)} {effect.epoch} {effect.turn}"
        self.snapshots.pop(pin.snapshot, None)
        self.snapshots[reference] = effect.data
        self.pins[key] = replace(pin, turn=effect.turn, snapshot=reference)
        moves.stored(state, effect, reference, "")

    def pump(self) -> None:
        """Carry frames both ways until nobody has anything to say."""
        self.finish_step()
        carried = 0
        moved = True
        while moved:
            moved = False
            for process in self.processes:
                moved = self._carry(process) or moved
                carried += 1
            assert carried < _FRAMES_MAX, "two ends answer each other for ever"

    def _carry(self, process: Process) -> bool:
        peer = process.peer
        if peer is None or not process.connected or process.frozen or peer.stream is not process:
            return False
        moved = False
        data = peer.link.next_frame(self.state.now)
        if data is not None:
            moved = True
            process.take(data)
        if process.connected and process.welcome is not None:
            data = process.link.next_frame(self.state.now)
            if data is not None:
                moved = True
                with self.step() as state:
                    mesh.frame(state, peer, Frame.FromString(data), 0, len(data))
        return moved

    def _flush(self, process: Process, peer: Peer) -> None:
        """Give a process that is being told goodbye what its stream still holds."""
        if not process.connected or process.frozen:
            return
        while (data := peer.link.next_frame(self.state.now)) is not None:
            process.take(data)

    def advance(self, seconds: float) -> None:
        """Let time pass, from one timer to the next; connected processes send heartbeats."""
        state, end = self.state, self.state.now + seconds
        self.pump()
        while True:
            due = [process.beat_at for process in self.processes if process.beating]
            at = mesh.next_tick_at(state)
            if at is not None:
                due.append(at)
            if not due or (when := min(due)) > end:
                break
            state.now = max(state.now, when)
            for process in self.processes:
                if process.beating and process.beat_at <= state.now:
                    process.beat_at = state.now + BEAT_S
                    if process.agents and process.connected and not process.frozen:
                        process.beat()
            with self.step():
                mesh.tick(state)
            self.pump()
        state.now = end
        self.pump()

    # ---- looking ----

    def attachment(self, agent_id: str, env: str = "production", tenant: str = "default") -> Attachment:
        """An agent that is attached."""
        agent = self.state.directory.get(tenant, env, agent_id)
        assert agent is not None and isinstance(agent.link, Attachment), f"{agent_id} is not attached"
        return agent.link

    def status(self, agent_id: str) -> int:
        """An agent's status."""
        return self.attachment(agent_id).agent.status

    def logged(self, event: str) -> list[LogLine]:
        """Log lines whose event holds this text."""
        return [line for line in self.logs if event in line.event]

    def assert_settled(self) -> None:
        """Nothing of any request is left anywhere: every gauge is back to 0."""
        self.pump()
        state = self.state
        assert not state.requests, [r.message_id for r in state.requests.values()]
        assert not state.by_key and not state.relayed
        assert not any(orphan.attempts for orphan in state.orphans.values())
        assert not state.wants.granted and not state.wants.wishes
        assert not state.inquiries and not state.asking and not state.crossings
        assert not state.lines and not state.lines_ready
        assert state.unsettled == 0
        assert len(state.wheel) == 0
        assert not state.lanes_ready
        assert not state.queue and state.queue.held_elsewhere == 0
        assert state.snapshots_held == 0
        assert state.budget.in_flight == 0
        assert not state.directory.freed and not state.directory.wanted
        for name, numbers in state.stats.types():
            assert numbers.in_flight == 0, name
        for agent in state.directory:
            assert agent.in_flight == 0, agent
            attachment = agent.link
            assert isinstance(attachment, Attachment)
            assert not attachment.attempts
            assert not attachment.lanes_waiting and not attachment.moving
            assert agent.pinned_sessions == len(attachment.pinned)
            if not attachment.remote:
                assert state.peers.get(attachment.peer.link_id) is attachment.peer
        for node in state.nodes.values():
            assert not node.visiting
        for lane in state.lanes.values():
            assert not lane.running and not lane.waiting and not lane.pinning and not lane.in_turn, lane.key
            assert lane.move is None and not lane.storing, lane.key
        for peer in state.peers.values():
            assert not peer.requests
            if peer.connected and isinstance(peer.stream, Process) and not peer.stream.frozen:
                assert peer.link.waiting == 0 and peer.link.unacked == 0 and peer.link.waiting_bytes == 0
        assert set(map(id, state.tokens.values())) == set(map(id, state.peers.values()))


def record(agent_id: str = "echo/1", **fields: object) -> AgentRecord:
    """An agent's registration."""
    values = {"agent_type": agent_id.partition("/")[0], **fields}
    return AgentRecord(agent_id=agent_id, **values)  # type: ignore[arg-type]
