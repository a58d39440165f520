"""Whatever happens in whatever order: every request ends, once, and at the end nothing is left over.

A walk plays random callers, agents, sessions, cuts, restarts, crashes, cancels and deadlines. After every step the
node's books must agree with one another; after the walk everybody comes back, and every gauge must be 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.registry_pb2 import DRAINING, HEALTHY, AgentRecord
from agentreach.wire.errors import failure
from reach.core.agents import DEGRADED
from reach.core.requests import Attachment, Stage
from tests.support.core import CoreMesh, Process, record

Key = tuple[str, str, str, str]


class Handlers:
    """An agent process's own table, as an SDK keeps it: what runs, what it has answered, what it ran."""

    def __init__(self, process: Process, order: list[Envelope]) -> None:
        self.process = process
        self.order = order
        """Every delivery that started a handler, of all processes."""
        self.running: dict[Key, list[Envelope]] = {}
        self.deadlines: dict[Key, float] = {}
        self.done: dict[Key, codes.Error | None] = {}
        self.started: Counter[str] = Counter()
        self.items: Counter[Key] = Counter()
        process.handler = self.take

    def take(self, process: Process, envelope: Envelope) -> None:
        """Join, replay, or start."""
        key = (envelope.tenant, envelope.principal, envelope.env, envelope.message_id)
        if key in self.running:
            self.running[key].append(envelope)
        elif key in self.done and not envelope.fresh:
            process.answer(envelope, error=self.done[key], pump=False)
        else:
            assert key not in self.done, f"{envelope.message_id} came as fresh a second time"
            self.running[key] = [envelope]
            self.deadlines[key] = process.core.state.now + envelope.timeout_ms / 1000
            self.started[envelope.message_id] += 1
            self.order.append(envelope)

    def finish(self, key: Key, error: codes.Error | None = None) -> None:
        """End a handler: all who wait are answered."""
        for envelope in self.running.pop(key):
            self.process.answer(envelope, error=error, pump=False)
        if error is None or error.code != codes.CANCELLED:
            self.done[key] = error

    def end_overdue(self) -> None:
        """What is cancelled has ended; what is past its time ends by itself."""
        for key, waiting in list(self.running.items()):
            waiting[:] = [each for each in waiting if each.entry in self.process.running]
            if not waiting:
                del self.running[key]
            elif self.process.core.state.now > self.deadlines[key] + 1:
                self.finish(key, failure(codes.TIMEOUT, "overdue", may_have_executed=True))


class Walk:
    """One random walk."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.core = CoreMesh(seed, session_ttl_s=120.0)
        self.callers = [self.core.caller(f"caller{number}") for number in range(3)]
        self.agents: list[Handlers] = []
        self.gone: list[Handlers] = []
        self.order: list[Envelope] = []
        self.sent: dict[str, Envelope] = {}
        """In the order of sending."""
        self.sendings: Counter[str] = Counter()
        self.by: dict[str, set[int]] = defaultdict(set)
        self.cancelled: set[str] = set()
        self.restarted: set[int] = set()
        for number in range(3):
            self.agents.append(self.start(self.records(number)))

    def records(self, number: int) -> list[AgentRecord]:
        draw = self.rng.choice
        return [
            record(
                f"{kind}/{number}",
                capabilities=["talk"],
                max_concurrency=draw((0, 1, 2)),
                session_concurrency=draw((1, 1, 2)),
                reentrant=draw((True, False)),
            )
            for kind in ("echo", "other")[: 1 + number % 2]
        ]

    def start(self, records: list[AgentRecord]) -> Handlers:
        return Handlers(self.core.process("agents", *records), self.order)

    # ---- what may happen ----

    def step(self) -> None:
        """One random event, then the books are checked."""
        actions = (
            [self.request] * 8
            + [self.answer] * 8
            + [self.item, self.nested, self.cancel, self.resend, self.publish, self.subscribe] * 2
            + [self.cut, self.come_back, self.come_back, self.freeze, self.thaw, self.thaw]
            + [self.status, self.wait, self.wait, self.wait]
            + ([self.crash, self.leave, self.wait_long] if self.rng.random() < 0.3 else [])
        )
        self.rng.choice(actions)()
        for handlers in self.agents:
            handlers.end_overdue()
        self.core.pump()
        self.check()

    def envelope(self) -> Envelope:
        rng = self.rng
        fields: dict[str, object] = {"timeout_ms": rng.choice((200, 1000, 5000, 20_000))}
        fields |= rng.choice(
            ({"agent_type": "echo"}, {"capabilities": ["talk"]}, {"agent_id": f"echo/{rng.randrange(4)}"})
        )
        if rng.random() < 0.5:
            fields["session_id"] = f"s{rng.randrange(4)}"
            fields["strict_session"] = rng.random() < 0.2
            fields["epoch"] = rng.choice((0, 0, 5))
        fields["idempotent"] = rng.random() < 0.3
        fields["fresh"] = rng.random() < 0.5
        return self.core.envelope("x", **fields)

    def send(self, process: Process, envelope: Envelope) -> None:
        self.sent[envelope.message_id] = envelope
        self.sendings[envelope.message_id] += 1
        self.by[envelope.message_id].add(id(process))
        process.send(envelope)

    def request(self) -> None:
        caller = self.rng.choice(self.callers)
        for _ in range(self.rng.choice((1, 1, 3))):
            self.send(caller, self.envelope())

    def resend(self) -> None:
        # A fresh id is sent again only by who sent it, and only while its answer is not there.
        caller = self.rng.choice(self.callers)
        known = [message for message, each in self.sent.items() if not each.fresh or message in caller.sent]
        if known:
            self.send_again(caller, self.rng.choice(known))

    def send_again(self, process: Process, message: str) -> None:
        envelope = Envelope()
        envelope.CopyFrom(self.sent[message])
        envelope.fresh = False
        envelope.ClearField("lineage")
        self.sendings[message] += 1
        self.by[message].add(id(process))
        process.send(envelope)

    def cancel(self) -> None:
        caller = self.rng.choice(self.callers)
        if caller.sent:
            message = self.rng.choice(list(caller.sent))
            self.cancelled.add(message)
            caller.send(Envelope(type=pb.CANCEL, correlation_id=message))

    def _running(self) -> tuple[Handlers, Key] | None:
        running = [(handlers, key) for handlers in self.agents for key in handlers.running]
        return self.rng.choice(running) if running else None

    def answer(self) -> None:
        found = self._running()
        if found is not None:
            handlers, key = found
            roll = self.rng.random()
            error = failure(codes.AGENT_ERROR, "boom", may_have_executed=True) if roll < 0.2 else None
            if self.sent[key[3]].idempotent and roll < 0.4:
                error = failure(codes.AGENT_ERROR, "boom", retryable=True)
            handlers.finish(key, error)

    def item(self) -> None:
        found = self._running()
        if found is not None:
            handlers, key = found
            for envelope in handlers.running[key]:
                handlers.process.answer(envelope, more=True, pump=False)

    def nested(self) -> None:
        found = self._running()
        if found is not None:
            handlers, key = found
            parent = handlers.running[key][0]
            envelope = self.envelope()
            envelope.lineage, envelope.source = parent.lineage, parent.recipient
            self.send(handlers.process, envelope)

    def publish(self) -> None:
        envelope = self.core.envelope("e", topic="news", timeout_ms=500)
        envelope.type = pb.EVENT
        self.rng.choice(self.callers).send(envelope)

    def subscribe(self) -> None:
        self.rng.choice(self.callers).subscribe("news")

    @property
    def processes(self) -> list[Process]:
        return [*self.callers, *(handlers.process for handlers in self.agents)]

    def cut(self) -> None:
        self._cut(self.rng.choice(self.processes))

    def freeze(self) -> None:
        self.rng.choice(self.processes).frozen = True

    def thaw(self) -> None:
        self.rng.choice(self.processes).frozen = False

    def come_back(self) -> None:
        away = [process for process in self.processes if not process.connected]
        if away:
            self.return_of(self.rng.choice(away), anew=self.rng.random() < 0.3)

    def return_of(self, process: Process, *, anew: bool) -> None:
        if anew:
            process.restart_numbering()
        pending = list(process.sent)
        welcome = process.connect()
        assert welcome is not None
        if not welcome.resumed:
            self.restarted.add(id(process))
            for message in pending:  # what its SDK does
                if message in process.sent and message in self.sent:
                    self.send_again(process, message)

    def crash(self) -> None:
        self._end(self._cut)

    def leave(self) -> None:
        self._end(self._leave)

    def _leave(self, process: Process) -> None:
        self.cancelled.update(process.sent)  # who says goodbye wants no answer
        if process.connected and not process.frozen:
            process.leave()
        else:
            self._cut(process)

    def _cut(self, process: Process) -> None:
        if process.connected:
            process.cut()

    def _end(self, how: Callable[[Process], None]) -> None:
        handlers = self.rng.choice(self.agents)
        how(handlers.process)
        self.agents.remove(handlers)
        self.gone.append(handlers)
        handlers.process.connected = False
        self.agents.append(self.start(list(handlers.process.agents.values()) or self.records(self.rng.randrange(3))))

    def status(self) -> None:
        process = self.rng.choice(self.agents).process
        if process.connected and not process.frozen and process.agents:
            process.say(self.rng.choice((HEALTHY, HEALTHY, DRAINING)), self.rng.choice(list(process.agents)))

    def wait(self) -> None:
        self.core.advance(self.rng.random())

    def wait_long(self) -> None:
        for _ in range(12):
            self.core.advance(1.0)
            for handlers in self.agents:
                handlers.end_overdue()

    # ---- what must hold ----

    def check(self) -> None:
        """The books agree with one another."""
        state = self.core.state
        assert state.unsettled == sum(1 for each in state.requests.values() if each.stage is not Stage.SETTLED)
        for agent in state.directory:
            attachment = agent.link
            assert isinstance(attachment, Attachment)
            assert attachment.agent is agent and attachment.peer.link_id in state.peers
            held = sum(1 for each in attachment.attempts.values() if each.holds_slot)
            assert agent.in_flight == held, (agent, held)
            assert not agent.max_concurrency or held <= agent.max_concurrency, agent
            assert agent.pinned_sessions == len(attachment.pinned)
            for lane in attachment.lanes_waiting:
                assert lane.in_turn and lane.owner is attachment
        self.check_lanes()
        waits = Counter((id(w.port), r.number) for r in state.requests.values() for w in r.waiters)
        known = Counter((id(peer), number) for peer in state.peers.values() for number in peer.requests)
        assert waits == known
        for key, request in state.by_key.items():
            assert request.key == key and (request.stage is not Stage.SETTLED or request.reply is not None)

    def check_lanes(self) -> None:
        for lane in self.core.state.lanes.values():
            owner = lane.owner
            if owner is None:
                assert lane.pinning or not lane.waiting or lane.awaited_until
                continue
            agent = owner.agent
            ordinary = [each for each in lane.running if not each.reentrant]
            assert len(ordinary) <= agent.session_concurrency
            could = owner.peer.connected and agent.status in (HEALTHY, DEGRADED) and agent.has_slot
            due = lane.waiting and lane.waiting[0].retry_at <= self.core.state.now
            if due and could and not agent.saturated:
                assert len(lane.running) >= agent.session_concurrency, f"{lane.key} stands still"

    def finish(self) -> None:
        """Everybody comes back and answers; time passes; nothing may be left."""
        for process in self.processes:
            process.frozen = False
            if not process.connected:
                self.return_of(process, anew=False)
        for _ in range(60):
            for handlers in self.agents:
                handlers.end_overdue()
                for key in list(handlers.running):
                    handlers.finish(key)
            self.core.advance(1.0)
            self.check()
        self.core.assert_settled()
        self.check_endings()

    def check_endings(self) -> None:
        """Each message ended where it was sent from, and ran as often as it may."""
        alive = {id(process): process for process in self.processes}
        for message, senders in self.by.items():
            for sender in senders & alive.keys():
                final = [reply for reply in alive[sender].replies_to(message) if not reply.more]
                assert final, f"{message} never ended"
                if self.sendings[message] == 1 and sender not in self.restarted:
                    assert len(final) == 1, f"{message} ended {len(final)} times"
        self.check_order()
        ran: Counter[str] = Counter()
        for handlers in self.agents + self.gone:
            ran.update(handlers.started)
        for message, times in ran.items():
            harmless = self.sent[message].idempotent or message in self.cancelled
            assert times == 1 or harmless, f"{message} ran {times} times"

    def check_order(self) -> None:
        """One caller's messages of a session started in the order in which it sent them."""
        place = {message: number for number, message in enumerate(self.sent)}
        last: dict[tuple[int, str, str], int] = {}
        seen: set[str] = set()
        for envelope in self.order:
            message = envelope.message_id
            if message in seen:
                continue
            seen.add(message)
            (sender, *others) = self.by[message]
            ordinary = not others and self.sendings[message] == 1 and not self.sent[message].lineage
            if envelope.session_id and ordinary and sender not in self.restarted:
                lane = (sender, envelope.session_id, envelope.recipient.partition("/")[0])
                assert last.get(lane, -1) < place[message], f"{message} overtook another of {lane}"
                last[lane] = place[message]


@pytest.mark.parametrize("seed", range(12))
def test_after_any_walk_every_request_has_ended_once_and_nothing_is_left(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(200):
        walk.step()
    walk.finish()
