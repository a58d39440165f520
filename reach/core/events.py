"""EVENTs: to every subscriber of a topic, or to one match (or all, with `broadcast`) of a selector.

An event waits for nobody. Its publisher is told how many links acknowledged it within its time. A subscriber whose
outbox is full loses its oldest events, and is told how many (`gap`); a publisher never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf.struct_pb2 import Value

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Hop, Payload
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Gap, Signal, Subscribe, Unsubscribe, Unsubscribed
from agentreach.v1.mesh_pb2 import PublishReply
from agentreach.v1.peer_pb2 import Lineage
from agentreach.wire import ids, limits
from agentreach.wire.checks import event_fault
from agentreach.wire.errors import failure
from agentreach.wire.names import is_topic, normalise_env
from agentreach.wire.outbox import Item
from reach.core import access, actors, admit, auditing, crossing, loops, nodes, quotas, route, senders, signed, writing
from reach.core.agents import FULL
from reach.core.lineage import valid_until_unix_ms
from reach.core.requests import Attachment, Port
from reach.core.topics import Publishing

if TYPE_CHECKING:
    from reach.core.peers import Peer, Subscription
    from reach.core.ports import Identity
    from reach.core.state import State

SUBSCRIBE_RETRY_AFTER_MS = 5_000
COUNTS = ("matched", "accepted", "dropped", "unknown")


class Nobody:
    """The `Port` of an event whose publisher is the node itself: nobody asks how many took it."""

    streaming = False

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Let it go."""
        return None


NOBODY = Nobody()


def publish(
    state: State, port: Port, who: Identity, envelope: Envelope, spent_ms: int, peer: Peer | None, caller_id: str
) -> None:
    """Send one EVENT on; its counts come back on `port` as a RESPONSE with the payload {"matched": …}."""
    unsigned = signed.fault(state, who, envelope, peer) if who.rights is not None and who.rights.signs else None
    if not envelope.message_id:
        envelope.message_id = admit.new_id(state)
    envelope.tenant, envelope.principal = who.tenant, who.principal
    source = senders.stamp_source(state, who, envelope, peer, caller_id)
    fault = (
        (quotas.request_fault(state, who, envelope) if state.quotas is not None else None)
        or event_fault(envelope, state.rules.payload_bytes_max, nested=bool(envelope.lineage))
        or _oversize(state, envelope)
    )
    fault = fault or unsigned
    if fault is not None:
        admit.deny(state, port, envelope, source, fault, who, peer)
        return
    parent: Lineage | None = None
    if envelope.lineage:
        parent, fault = senders.called_from(state, envelope.lineage, envelope, who)
    fault = fault or _access_fault(state, who, envelope, parent)
    if fault is not None:
        admit.deny(state, port, envelope, source, fault, who, peer)
        return
    if not envelope.trace_id:
        envelope.trace_id = ids.trace_id(state.rng.getrandbits(128))
    wait_s = envelope.timeout_ms / 1000 or state.rules.publish_timeout_s
    publishing = Publishing(port, envelope, state.now + wait_s - spent_ms / 1000)
    envelope.type = pb.EVENT
    _take_what_nodes_write(envelope)
    envelope.actors.extend(actors.behind(parent, who.principal))
    env = normalise_env(envelope.env)
    spread(state, publishing, list(_receivers(state, envelope, who, env)), envelope, parent)


def _take_what_nodes_write(envelope: Envelope) -> None:
    envelope.ClearField("entry")
    envelope.ClearField("attempt")
    envelope.ClearField("epoch")
    envelope.ClearField("session_event")
    envelope.ClearField("actors")


def call_back(state: State, envelope: Envelope, parent: Lineage | None) -> int:
    """Send a CALLBACK, made by this node, to its topic's subscribers; returns how many there are.

    `parent` is the call that it is the outcome of: what the subscribers' handlers do is part of that call's tree.
    """
    publishing = Publishing(NOBODY, envelope, state.now + state.rules.publish_timeout_s)
    key = (envelope.tenant, envelope.env, envelope.target.topic)
    receivers = [*state.topics.subscribers(key), *crossing.receivers_elsewhere(state, envelope, envelope.env)]
    spread(state, publishing, receivers, envelope, parent)
    return publishing.matched + len(publishing.awaiting)


def spread(
    state: State,
    publishing: Publishing,
    receivers: list[tuple[Peer, str]],
    envelope: Envelope,
    parent: Lineage | None,
) -> None:
    """Give an event to all who receive it; nodes first, for what is sent to a process is written into the envelope."""
    here: list[tuple[Peer, str]] = []
    for subscriber, agent_id in receivers:
        if isinstance(subscriber, nodes.NodePeer):
            crossing.send(state, publishing, subscriber, agent_id, envelope, parent)
        else:
            here.append((subscriber, agent_id))
    for subscriber, agent_id in here:
        _send(state, publishing, subscriber, agent_id, envelope, parent)
    state.stats.events_published += 1
    if publishing.items or publishing.awaiting:
        publishing.timer = state.checks.schedule(publishing, publishing.deadline)
    else:
        finish(state, publishing)


def _oversize(state: State, envelope: Envelope) -> Error | None:
    """The payload is within its limit; what stands around it must be too."""
    size, bound = envelope.ByteSize(), state.rules.payload_bytes_max + writing.CONTROL_BYTES_MAX
    if size <= bound:
        return None
    return failure(codes.INVALID_ENVELOPE, f"the envelope is {size} bytes; the limit, payload included, is {bound}")


def _access_fault(state: State, who: Identity, envelope: Envelope, parent: Lineage | None) -> Error | None:
    if who.rights is None:
        return None
    target = envelope.target
    if target.topic:
        return actors.topic_fault(state, who, target.topic, envelope.env, parent)
    return actors.call_fault(state, who, envelope, target.SerializeToString(), parent)


def _receivers(state: State, envelope: Envelope, who: Identity, env: str) -> Iterable[tuple[Peer, str]]:
    target = envelope.target
    if target.topic:
        here = state.topics.subscribers((who.tenant, env, target.topic))
        return [*here, *crossing.receivers_elsewhere(state, envelope, env)]
    pool = state.directory.pool_for(target, who.tenant, env)
    if target.broadcast:
        agents = [agent for tier in pool.tiers[: FULL + 1] for agent in tier.agents]
    else:
        chosen = route.choose(state, pool, target, envelope.session_id, route.policy_of(state, pool, target))
        if chosen is None:  # an event takes no slot: busy agents are as good
            chosen = next(iter(pool.tiers[FULL].agents), None)
        agents = [chosen] if chosen is not None else []
    return [(agent.link.peer, agent.agent_id) for agent in agents if isinstance(agent.link, Attachment)]


def _send(
    state: State, publishing: Publishing, peer: Peer, agent_id: str, envelope: Envelope, parent: Lineage | None
) -> None:
    publishing.matched += 1
    hop_count = parent.hop_count if parent is not None else 0
    path = parent.path if parent is not None else ()
    if hop_count and envelope.type != pb.CALLBACK:  # what was accepted is told; whoever calls on from there is cut
        agent_type = agent_id.partition("/")[0]
        fault = loops.check_hop(path, hop_count, agent_type, envelope.dedup_key, state.loop_limits)
        if fault is not None:
            kind = "hop_limit" if fault.code == codes.HOP_LIMIT else "loop_detected"
            state.stats.loops[kind] += 1
            state.log("warning", "loop of events cut", envelope.trace_id, path=fault.details["path"], kind=kind)
            publishing.dropped += 1
            return
    hop = Hop(
        agent_id=agent_id or peer.caller_id,
        message_id=envelope.message_id,
        dedup_key=envelope.dedup_key,
        detached=True,  # an event waits for nobody
    )
    deadline_unix_ms = int(state.unix * 1000) + limits.TIMEOUT_MS_MAX
    lineage = Lineage(
        message_id=envelope.message_id,
        trace_id=envelope.trace_id,
        path=(*path, hop),
        hop_count=hop_count + 1,
        valid_until_unix_ms=valid_until_unix_ms(deadline_unix_ms),
        tenant=envelope.tenant,
        principal=envelope.principal,
        env=envelope.env,
        actors=envelope.actors,
    )
    envelope.lineage = state.lineage.sign(lineage, peer.who.principal)
    envelope.hop_count = hop_count + 1
    envelope.ClearField("path")
    envelope.path.extend(lineage.path)
    envelope.recipient = agent_id
    if not make_room(state, peer):
        publishing.dropped += 1
        count_gap(state, peer, agent_id, publishing.topic)
        return
    item = peer.link.put(envelope, state.now, admit.PRIORITY_LANE[envelope.priority])
    item.owner = publishing
    publishing.items.add(item)
    remember(peer, item)
    state.woken.add(peer)


def make_room(state: State, peer: Peer) -> bool:
    """Let a full link's oldest events give way to a new one. False: nothing of it can."""
    while peer.link.full and _drop_oldest(state, peer):
        pass
    return not peer.link.full


def remember(peer: Peer, item: Item) -> None:
    """Note an event in the outbox: it may have to give way."""
    events = peer.event_items
    while events and not events[0].waits:
        events.popleft()
    if len(events) > 2 * limits.OUTBOX_ENVELOPES_MAX:  # its head waits, behind others' urgent ones, and hides the sent
        events = peer.event_items = deque(each for each in events if each.waits)
    events.append(item)


def _drop_oldest(state: State, peer: Peer) -> bool:
    """A subscriber that does not keep up loses its oldest event that waits, and will be told. False: none waits."""
    events = peer.event_items
    while events and not events[0].waits:
        events.popleft()
    if not events:
        return False
    item = events[0]
    publishing, item.owner = item.owner, None
    agent_id = Envelope.FromString(item.data or b"").recipient if peer.attachments else ""
    peer.link.drop_oldest(events)
    if isinstance(publishing, Publishing):
        if item in publishing.items:
            publishing.items.discard(item)
            publishing.dropped += 1
            finish_if_all_is_known(state, publishing)
        count_gap(state, peer, agent_id, publishing.topic)
    return True


def count_gap(state: State, peer: Peer, agent_id: str, topic: str) -> None:
    """One event less for a subscriber, who will be told. (What does not cross to a node is only counted.)"""
    state.stats.events_dropped += 1
    if isinstance(peer, nodes.NodePeer):
        return
    peer.gaps[agent_id, topic] = peer.gaps.get((agent_id, topic), 0) + 1


def never_sent(state: State, publishing: Publishing, item: Item) -> None:
    """A subscriber's link ended before the event was given to it."""
    if item in publishing.items:
        publishing.items.discard(item)
        publishing.dropped += 1
        finish_if_all_is_known(state, publishing)


def acknowledged(state: State, publishing: Publishing, item: Item) -> None:
    """A subscriber's link has accepted an event."""
    state.stats.events_delivered += 1
    if item in publishing.items:
        publishing.items.discard(item)
        publishing.accepted += 1
        finish_if_all_is_known(state, publishing)


def finish_if_all_is_known(state: State, publishing: Publishing) -> None:
    """End a publishing of which nothing is under way any more."""
    if (
        not publishing.items and not publishing.awaiting and publishing.timer is not None
    ):  # without a timer it is still being sent
        finish(state, publishing)


def tell_gaps(state: State, peer: Peer) -> None:
    """Tell a subscriber how much it missed, once it has room again."""
    if peer.link.full:
        return
    for (agent_id, topic), count in peer.gaps.items():
        peer.link.signal(Signal(gap=Gap(topic=topic, dropped=count, agent_id=agent_id)))
    peer.gaps.clear()
    state.woken.add(peer)


def finish(state: State, publishing: Publishing) -> None:
    """All is acknowledged, or the time is over: what is not acknowledged now counts as unknown."""
    if publishing.timer is not None:
        state.checks.cancel(publishing.timer, publishing)
        publishing.timer = None
    silent = crossing.over(state, publishing)
    unknown = len(publishing.items) + publishing.lost + silent
    publishing.items.clear()
    counts = (publishing.matched + silent, publishing.accepted, publishing.dropped, unknown)
    value = Value()
    for name, count in zip(COUNTS, counts, strict=True):
        value.struct_value.fields[name].number_value = count
    reply = Envelope(
        type=pb.RESPONSE,
        correlation_id=publishing.message_id,
        trace_id=publishing.trace_id,
        payload=Payload(content_type="application/json", json=value),
    )
    publishing.port.deliver(reply.SerializeToString(), 0)


def counts_of(reply: Envelope) -> PublishReply:
    """The counts that a publishing's RESPONSE carries."""
    fields = reply.payload.json.struct_value.fields
    return PublishReply(**{name: int(fields[name].number_value) for name in COUNTS})


def subscribe(state: State, peer: Peer, signal: Subscribe) -> None:
    """A process (or one of its agents) wants these topics. Illegal ones are logged; repeats change nothing."""
    env = normalise_env(signal.env) if signal.env else peer.env
    arriving = (peer.who.tenant, env, signal.agent_id) in state.arriving
    if signal.agent_id and (env, signal.agent_id) not in peer.attachments and not arriving:
        state.log("warning", "subscription for an agent that is not on this link", agent=signal.agent_id)
        gone = failure(codes.INVALID_ENVELOPE, f"{signal.agent_id} is not on this link")
        _refuse_topics(state, peer, signal, list(signal.topics), gone)
        return
    for topic in signal.topics:
        full = (
            len(peer.subscriptions) >= limits.TOPICS_PER_SUBSCRIBER_MAX or state.topics.count >= state.rules.topics_max
        )
        if not is_topic(topic) or full:
            why = "too many topics" if full else "not a legal topic"
            state.log("warning", "subscription refused", topic=topic[:100], why=why, link=peer.link_id)
            code = codes.OVERLOADED if full else codes.INVALID_ENVELOPE
            error = failure(code, f"no subscription: {why}", retry_after_ms=SUBSCRIBE_RETRY_AFTER_MS if full else 0)
            _refuse_topics(state, peer, signal, [topic], error)
            continue
        if peer.account is not None and (env, topic, signal.agent_id) not in peer.subscriptions:
            too_many = quotas.fault(state, peer.account, quotas.TOPICS)
            if too_many is not None:
                _refuse_topics(state, peer, signal, [topic], too_many)
                continue
        if peer.who.rights is not None:
            decision = access.may_subscribe(peer.who.rights, topic, env, who=f"principal {peer.who.principal}")
            if not decision.allowed:
                _refuse_topics(state, peer, signal, [topic], actors.denied(state, decision))
                about = {"topic": topic, "env": env}
                auditing.denied(state, "topic.denied", peer.who, peer, about, decision.why)
                continue
        if state.topics.subscribe((peer.who.tenant, env, topic), peer, signal.agent_id):
            peer.subscriptions.add((env, topic, signal.agent_id))
            if peer.account is not None:
                peer.account.take(quotas.TOPICS)


def _refuse_topics(state: State, peer: Peer, signal: Subscribe, topics: list[str], error: Error) -> None:
    told = Unsubscribed(agent_id=signal.agent_id, env=signal.env, topics=topics, error=error)
    peer.link.signal(Signal(unsubscribed=told))
    state.woken.add(peer)


def unsubscribe(state: State, peer: Peer, signal: Unsubscribe) -> None:
    """The reverse."""
    env = normalise_env(signal.env) if signal.env else peer.env
    for topic in signal.topics:
        _unsubscribe(state, peer, (env, topic, signal.agent_id))


def drop_subscriptions(state: State, peer: Peer, agent_id: str | None = None) -> None:
    """Forget all subscriptions of a process, or those of one of its agents."""
    for subscription in list(peer.subscriptions):
        if agent_id is None or subscription[2] == agent_id:
            _unsubscribe(state, peer, subscription)


def _unsubscribe(state: State, peer: Peer, subscription: Subscription) -> None:
    env, topic, agent_id = subscription
    if state.topics.unsubscribe((peer.who.tenant, env, topic), peer, agent_id):
        peer.subscriptions.discard(subscription)
        if peer.account is not None:
            peer.account.give_back(quotas.TOPICS)
