"""Requests of other nodes' callers for agents of this node: this node is their home, not their entry.

A visiting request is an ordinary `Request` with one peculiarity: who waits for it is its entry node (`NodePort`). The
home gives it a slot, delivers it, and tells what came of it; deadline, retries, breaker and outcome are the entry's. So
nothing is retried here, an outcome is kept only until its entry has it (`outcomes`), and an end that is no answer of
the agent goes back as `attempt_state`: REFUSED when the agent never had it, LOST when it did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import AttemptState, Progress, Signal, StreamCredit
from agentreach.v1.peer_pb2 import Lineage
from agentreach.wire.content import content_digest
from agentreach.wire.errors import failure
from agentreach.wire.limits import OUTBOX_BYTES_HARD_MAX, OUTBOX_BYTES_MAX
from agentreach.wire.names import normalise_env
from agentreach.wire.outbox import Item
from reach.core import admit, credit, deadlines, homes, loops, once, outcomes, route, settle, waiters, wants, writing
from reach.core.agents import DEGRADED, HEALTHY, Agent
from reach.core.lineage import valid_until_unix_ms
from reach.core.requests import Attachment, MessageKey, Request, Stage, Waiter

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.core.state import State

SLACK_S = 0.25  # the entry's own deadline comes first; this node's is for an entry that says nothing more

REFUSED, LOST = int(AttemptState.REFUSED), int(AttemptState.LOST)

_NOT_GIVEN = frozenset(
    {
        codes.CONNECT_FAILED,
        codes.OVERLOADED,
        codes.NO_AGENT_AVAILABLE,
        codes.NO_ROUTE,
        codes.SHUTTING_DOWN,
        codes.FENCED,
    }
)
"""What this node, not the agent, says of a request that it did not give to the agent."""


class NodePort:
    """Where the replies of a visiting request go: back to its entry node, under that node's own entry and attempt."""

    __slots__ = ("attempt", "entry", "node", "request", "state")

    streaming = True

    def __init__(self, state: State, node: NodePeer, entry: bytes, attempt: int) -> None:
        self.state = state
        self.node = node
        self.entry = entry
        self.attempt = attempt
        self.request: Request | None = None

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Send a reply on; the end of a request that no agent answered as `attempt_state`."""
        node, state = self.node, self.state
        if final:
            node.visiting.pop(self.entry, None)
        state.woken.add(node)
        verdict = self.request.verdict if self.request is not None else 0
        if verdict:
            tell(state, node, self.entry, self.attempt, verdict, Envelope.FromString(reply).error)
            return None
        link = node.link
        item = link.put_bytes(reply + writing.returned(self.entry, self.attempt), state.now, priority)
        waiting_bytes = link.waiting_bytes
        if waiting_bytes >= OUTBOX_BYTES_MAX and (waiting_bytes >= OUTBOX_BYTES_HARD_MAX or state.outboxes.full):
            state.overrun.add(node)
        return item


def tell(state: State, node: NodePeer, entry: bytes, attempt: int, verdict: int, why: Error) -> None:
    """Tell an entry node what became of an attempt of its."""
    word = AttemptState(entry=entry, attempt=attempt, state=AttemptState.State.ValueType(verdict), why=why)
    node.link.signal(Signal(attempt_state=word))
    state.woken.add(node)


def verdict_of(request: Request, error: Error) -> int:
    """How an error that this node made of a visiting request is told; 0: as its reply."""
    if request.items:
        return 0  # a signal would overtake the items
    if error.code in _NOT_GIVEN:
        return REFUSED
    return LOST if error.code == codes.AGENT_LOST else 0


def admit_from(state: State, node: NodePeer, envelope: Envelope, spent_ms: int) -> None:
    """A node gives this one a request for one of its agents."""
    entry, attempt = envelope.entry, envelope.attempt
    known = node.visiting.get(entry)
    if known is not None and known.attempt == attempt:
        return  # sent again by a link that began anew: it is under way
    env = normalise_env(envelope.env)
    key = (envelope.tenant, envelope.principal, env, envelope.message_id)
    agent = state.directory.get(envelope.tenant, env, envelope.recipient)
    attachment = agent.link if agent is not None else None
    if agent is None or not isinstance(attachment, Attachment) or attachment.remote:
        gone = f"{envelope.recipient} is not attached to node {state.rules.node_id}"
        tell(state, node, entry, attempt, REFUSED, failure(codes.NO_ROUTE, gone))
        return
    left_s = (envelope.timeout_ms - spent_ms) / 1000
    port = NodePort(state, node, entry, attempt)
    twin = state.by_key.get(key)
    if twin is not None and once.is_given(state, twin, node):
        twin = None
    if twin is not None and twin.stage is not Stage.SETTLED:
        _join(state, port, envelope, twin, left_s)
        return
    if state.wants.granted and not envelope.session_id:
        wants.redeem(state, node, agent)
    if _waits_for_itself(envelope, agent, attachment):
        state.stats.loops["would_deadlock"] += 1
        *callers, _ = envelope.path
        error = loops.deadlock(callers, agent.agent_id, "every slot")
        port.deliver(settle.error_reply(error, envelope.message_id, envelope.trace_id).SerializeToString(), 1)
        return
    fault = _refusal(state, envelope, agent, attachment)
    if fault is not None:
        tell(state, node, entry, attempt, REFUSED, fault)
        state.loads.told.pop(agent, None)  # the entry counts it as it was told now: it must hear when that changes
        return
    if twin is not None:
        outcomes.keep_unconfirmed(state, twin)
    if attempt > 1 and envelope.idempotent:
        state.replay.reopen(key, state.now)  # its entry takes the failure of an earlier attempt for no outcome
    request = _open(state, port, envelope, key, left_s)
    if left_s <= 0:
        settle.fail(state, request, deadlines.timed_out(request))
    elif envelope.session_id and (envelope.epoch or not envelope.resent):
        homes.visit(state, request, envelope, attachment)
    else:  # without an epoch: its agent was found to have it, and joins or replays
        request.reentrant = not agent.has_slot  # `_refusal` says why it may
        hand_over(state, request, envelope, attachment)


def _open(state: State, port: NodePort, envelope: Envelope, key: MessageKey, left_s: float) -> Request:
    request = admit.open_request(state, port, envelope, key, max(left_s, 0.0) + SLACK_S, None, envelope.fresh)
    request.visitor = port
    port.request = request
    port.node.visiting[port.entry] = port
    request.node_made_id = True  # its outcome is its entry's to keep
    request.retriable = False
    if envelope.resent:
        request.credit = credit.UNBOUNDED  # what the agent keeps comes all at once
    return request


def _join(state: State, port: NodePort, envelope: Envelope, twin: Request, left_s: float) -> None:
    """The same message is at work here for another who waits."""
    if content_digest(envelope) != content_digest(Envelope.FromString(twin.data)):
        error = failure(codes.IDEMPOTENCY_CONFLICT, f"message {twin.message_id} was sent before with other content")
    elif twin.items:
        error = admit.streams_already(twin)
    else:
        state.stats.duplicates["joined"] += 1
        twin.fresh = False
        twin.waiters.append(Waiter(port, twin.message_id, state.now + left_s + SLACK_S))
        port.request = twin
        port.node.visiting[port.entry] = port
        twin.deadline = max(twin.deadline, state.now + left_s)
        deadlines.reschedule(state, twin)
        return
    port.deliver(settle.error_reply(error, twin.message_id, twin.trace_id).SerializeToString(), 1)


def _refusal(state: State, envelope: Envelope, agent: Agent, attachment: Attachment) -> Error | None:
    """Why the agent cannot be given this request now. What waits in a session's lane is judged there."""
    node_id = state.rules.node_id
    if state.draining and state.now >= state.moved_by and envelope.hop_count <= 1:
        return failure(codes.SHUTTING_DOWN, f"node {node_id}, the home of {agent.agent_id}, is leaving")
    if state.unsettled >= state.rules.requests_in_flight_max:
        return failure(codes.OVERLOADED, f"node {node_id} has {state.unsettled} requests in flight, its limit")
    if envelope.session_id or envelope.resent:
        return None  # sent to this process before: it may have it in its table, and counts its slots by itself
    if agent.status not in (HEALTHY, DEGRADED) or not attachment.peer.connected:
        return failure(codes.NO_AGENT_AVAILABLE, f"{agent.agent_id} cannot be given work now", agent_id=agent.agent_id)
    if agent.saturated:
        return failure(codes.OVERLOADED, f"the link of {agent.agent_id} takes nothing more", agent_id=agent.agent_id)
    if agent.has_slot or _tree_holds(envelope, agent, attachment):
        return None
    return failure(codes.OVERLOADED, f"every slot of {agent.agent_id} is taken", agent_id=agent.agent_id)


def _waits_for_itself(envelope: Envelope, agent: Agent, attachment: Attachment) -> bool:
    """It would wait for a slot, and its own callers hold them all."""
    if envelope.session_id or envelope.resent or agent.has_slot or agent.reentrant:
        return False
    callers = loops.ancestors(envelope.path) - {envelope.message_id}
    return loops.would_deadlock(callers, [held.message_id for held in attachment.attempts.values()])


def _tree_holds(envelope: Envelope, agent: Agent, attachment: Attachment) -> bool:
    """A reentrant agent may use the slot again that its own call tree holds."""
    if not agent.reentrant:
        return False
    ancestors = loops.ancestors(envelope.path)
    return any(held.message_id in ancestors for held in attachment.attempts.values())


def as_sent(state: State, request: Request) -> tuple[Envelope, Lineage | None]:
    """A visiting request as if it had been sent to this node: without what its entry wrote, and the call it is from."""
    envelope = Envelope.FromString(request.data)
    *path, _ = envelope.path
    parent = None
    if path:
        deadline_ms = int((request.deadline + state.unix_offset) * 1000)
        parent = Lineage(
            message_id=path[-1].message_id,
            trace_id=request.trace_id,
            path=path,
            hop_count=envelope.hop_count - 1,
            deadline_unix_ms=deadline_ms,
            valid_until_unix_ms=valid_until_unix_ms(deadline_ms),
            tenant=request.key[0],
            principal=request.key[1],
            env=request.key[2],
            actors=envelope.actors,
        )
    for name in ("path", "actors", "hop_count", "recipient", "entry", "attempt", "resent", "lineage"):
        envelope.ClearField(name)
    if parent is not None:
        envelope.lineage = state.lineage.sign(parent, request.key[1])
    return envelope, parent


def hand_over(state: State, request: Request, envelope: Envelope, attachment: Attachment) -> None:
    """Give a visiting request to its agent."""
    agent = attachment.agent
    request.agent, request.attachment, request.agent_type = agent, attachment, agent.agent_type
    if not request.reentrant:
        state.directory.reserve(agent)
        request.holds_slot = True
    attachment.attempts[request.number] = request
    request.attempt = envelope.attempt
    envelope.fresh = request.fresh
    request.data = writing.passed_on(state, request, envelope)
    route.put_on_link(state, request, attachment)


def cancel(state: State, node: NodePeer, envelope: Envelope) -> None:
    """The entry wants no answer any more."""
    port = node.visiting.get(envelope.entry)
    if port is not None:
        _leave(state, port, "the caller cancelled the request")


def _leave(state: State, port: NodePort, why: str) -> None:
    request = request_of(port)
    waiter = next((each for each in request.waiters if each.port is port), None) if request is not None else None
    if request is None or waiter is None:
        port.node.visiting.pop(port.entry, None)
        return
    waiters.leave(state, request, waiter, failure(codes.CANCELLED, why, retryable=False))


def request_of(port: NodePort) -> Request | None:
    """The request that this port waits for: its own, or the one that it joined."""
    return None if port.request is None or port.request.is_settled else port.request


def _is_with_its_agent(request: Request) -> bool:
    item = request.item
    return request.stage is Stage.DELIVERED and item is not None and item.seq > 0


def grant(state: State, node: NodePeer, message: StreamCredit) -> None:
    """The entry's callers take more items."""
    port = node.visiting.get(message.entry)
    request = request_of(port) if port is not None else None
    if request is None:
        return
    for waiter in request.waiters:
        if waiter.port is port and message.up_to > waiter.credit:
            credit.take_more(state, request, waiter, message.up_to)


def progressed(state: State, request: Request, progress: Progress) -> None:
    """Let the entries of a request see how far it is."""
    for waiter in request.waiters:
        port = waiter.port
        if isinstance(port, NodePort):
            told = Progress()
            told.CopyFrom(progress)
            told.entry = port.entry
            port.node.link.signal(Signal(progress=told))
            state.woken.add(port.node)


def entry_lost(state: State, node: NodePeer, why: str) -> None:
    """The entry node is gone for good: nobody waits for its requests here.

    Their callers go to other nodes and send them again. What an agent has got is this node's to keep from now on:
    copies are found here. They join it until the time is over in which callers come back, and get its outcome later.
    """
    for port in list(node.visiting.values()):
        request = request_of(port)
        waiter = next((each for each in request.waiters if each.port is port), None) if request is not None else None
        if request is None or waiter is None or not _is_with_its_agent(request) or len(request.waiters) > 1:
            _leave(state, port, why)
            continue
        request.visitor = port.request = None
        request.node_made_id = False
        waiters.keep_for_who_comes_back(state, request, waiter, node.cut_at + state.rules.resume_window_s)
    node.visiting.clear()
