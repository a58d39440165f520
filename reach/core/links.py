"""The life of a process's link at the node: hello, resume, cut, the wait for it to come back, goodbye, removal.

Decides whether a stream goes on with a known link or begins anew, and when a link is silent, stuck or over. Of the
agents on it, it only knows that they share its fate: who they are is `arrivals`'. What is numbered and sent again is
the wire's `Link`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire import limits
from agentreach.wire.names import as_name, is_name, normalise_env
from reach.core import (
    arrivals,
    credit,
    departures,
    drains,
    elsewhere,
    events,
    health,
    heartbeats,
    leaving,
    losses,
    outcomes,
    owners,
    quotas,
    waiters,
)
from reach.core.effects import EndStream
from reach.core.peers import Peer
from reach.core.requests import Request
from reach.core.topics import Publishing

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item
    from reach.core.ports import Identity
    from reach.core.state import State

_RANDOM_BITS = 128


def hello(state: State, who: Identity, message: pb.Hello) -> Peer | None:
    """A stream said hello: go on with its link, or begin a new one. None: the node takes no more links."""
    peer = state.tokens.get(bytes(message.resume_token)) if message.resume_token else None
    same = (
        peer is not None
        and peer.who == who
        and peer.who.rights == who.rights
        and message.incarnation in (peer.incarnation, b"")
    )
    if peer is not None and same:
        peer.who = who  # it may show another of its keys now
        peer.hellos += 1
        peer.link.cut()
        resumed = not peer.restarts and peer.link.resume(message.last_seq)
        peer.restarts = not resumed
        _back(state, peer)
        confirmed(state, peer.link.confirmed)
        if resumed:
            state.stats.link_resumes += 1
            welcome(state, peer, arrivals.Arrival(resumed=True))
            return peer
        _dismiss_undeclared(state, peer, message)
    else:
        if no_room(state, who):
            if len(state.peers) < state.rules.links_max:
                state.stats.quota_refusals[quotas.LINKS] += 1
            return None
        peer = _new_peer(state, who, message)
    events.drop_subscriptions(state, peer)
    arrivals.arrive(state, peer, message.agents, with_welcome=True)
    return peer


def no_room(state: State, who: Identity) -> str:
    """Why the node takes no more links, of this principal at least; empty: it does."""
    if len(state.peers) >= state.rules.links_max:
        return "this node carries as many links as it may; try another node, or later"
    if state.quotas is None:
        return ""
    return quotas.why_full(state.quotas.of((who.tenant, who.principal), state.now), quotas.LINKS)


def _dismiss_undeclared(state: State, peer: Peer, message: pb.Hello) -> None:
    """A link that begins anew declares its agents anew: whoever is not among them has left meanwhile."""
    declared = {(normalise_env(each.record.env or peer.env), each.record.agent_id) for each in message.agents}
    for key, attachment in list(peer.attachments.items()):
        if key not in declared:
            departures.dismiss(state, attachment, "not declared again by its process")


def _new_peer(state: State, who: Identity, message: pb.Hello) -> Peer:
    link_id = f"{state.rng.getrandbits(64):016x}"
    token = state.secrets.getrandbits(_RANDOM_BITS).to_bytes(16, "big")
    peer = Peer(state, link_id, token, who)
    # Who is known is called by that name: it could call itself by another's.
    name = message.name if who.rights is None and is_name(message.name) else as_name(who.principal)
    peer.caller_id = f"caller/{name}-{link_id[:8]}"
    peer.env, peer.numbers_items = normalise_env(message.env), bool(message.sdk)
    # Hand-written processes may leave it out; they must not all be taken for one and the same.
    peer.incarnation = bytes(message.incarnation) or state.rng.getrandbits(_RANDOM_BITS).to_bytes(16, "big")
    state.peers[link_id] = peer
    state.tokens[token] = peer
    if state.quotas is not None:
        peer.account = state.quotas.of((who.tenant, who.principal), state.now)
        peer.account.take(quotas.LINKS)
    state.log("info", "link opened", link=link_id, caller=peer.caller_id, sdk=message.sdk[:64])
    peer.timer = state.checks.schedule(peer, state.now + state.rules.heartbeat_interval_s)
    return peer


def welcome(state: State, peer: Peer, arrival: arrivals.Arrival) -> None:
    """Answer hello. It is the first thing on the new stream."""
    if peer.restarts:  # only now: nothing numbered may come before the welcome that says so
        peer.restarts = False
        peer.link.restart()
        for attachment in peer.attachments.values():
            credit.grant_again(state, attachment)
            leaving.again(state, attachment)
    rules = state.rules
    interval_s, ttl_s = heartbeats.times(state)
    message = pb.Welcome(
        link_id=peer.link_id,
        resume_token=peer.token,
        resumed=arrival.resumed,
        last_seq=peer.link.last_accepted,
        node_id=rules.node_id,
        agents=[arrivals.attached(each) for each in arrival.agents],
        caller_id=peer.caller_id,
        heartbeat_interval_ms=int(interval_s * 1000),
        lease_ttl_ms=int(ttl_s * 1000),
        config_version=state.configs.version,
        limits=pb.Limits(
            payload_bytes_max=rules.payload_bytes_max,
            frame_envelopes_max=limits.FRAME_ENVELOPES_MAX,
            frame_bytes_max=limits.FRAME_BYTES_MAX,
            timeout_ms_min=limits.TIMEOUT_MS_MIN,
            timeout_ms_max=limits.TIMEOUT_MS_MAX,
            headers_max=limits.HEADERS_MAX,
            headers_bytes_max=limits.HEADERS_BYTES_MAX,
            resume_window_ms=int(rules.resume_window_s * 1000),
        ),
        peers=elsewhere.welcomed(state, peer),
    )
    peer.welcomed = True
    peer.heard_at = state.now  # it had nothing to say until now, however long the registry took
    peer.link.signal(Signal(welcome=message))
    if state.draining and not arrival.resumed:
        drains.tell(state, peer)
    state.woken.add(peer)


def confirmed(state: State, items: list[Item]) -> None:
    """The peer acknowledged these: replies of fresh ids are done with, events are counted."""
    for item in items:
        owner = item.owner
        item.owner = None
        if isinstance(owner, Request):
            outcomes.confirmed(state, owner)
        elif isinstance(owner, Publishing):
            events.acknowledged(state, owner, item)
    items.clear()


def cut(state: State, peer: Peer) -> None:
    """The stream ended without goodbye: no new work, and a while to come back."""
    if not peer.connected:
        return
    peer.connected = False
    peer.cut_at = state.now
    peer.link.cut()
    for attachment in peer.attachments.values():
        health.out_of_sight(state, attachment)
        losses.link_cut(state, attachment)
    state.log("info", "link cut", link=peer.link_id, agents=len(peer.attachments))
    _check_at(state, peer, state.now + state.rules.resume_window_s)


def _back(state: State, peer: Peer) -> None:
    """A new stream carries the link again, whether or not the old one was seen to end."""
    peer.connected = True
    peer.cut_at = 0.0
    peer.heard_at = peer.acked_seen_at = peer.back_at = state.now
    for attachment in peer.attachments.values():
        losses.link_back(state, attachment, resumed=not peer.restarts)
        health.in_sight(state, attachment)
        health.unsaturate(state, attachment)  # what was overdue may have been acknowledged while the link was down
        owners.changed(state, attachment)
    _check_at(state, peer, state.now + state.rules.heartbeat_interval_s)


def _check_at(state: State, peer: Peer, when: float) -> None:
    if peer.timer is not None:
        state.checks.cancel(peer.timer, peer)
    peer.timer = state.checks.schedule(peer, when)


def on_timer(state: State, peer: Peer) -> None:
    """Judge the link: not back in time, silent, or not taking anything."""
    if state.peers.get(peer.link_id) is not peer:
        return  # it was removed in this very tick
    peer.timer = None
    now, rules = state.now, state.rules
    if not peer.connected:
        if now >= peer.cut_at + rules.resume_window_s:
            remove(state, peer, "its link was cut and did not come back")
        else:
            _check_at(state, peer, peer.cut_at + rules.resume_window_s)
        return
    interval_s, _ = heartbeats.times(state)
    if peer.attachments and now - peer.heard_at > 3 * interval_s:
        state.log("warning", "nothing heard for three heartbeats: link counted as cut", link=peer.link_id)
        cut(state, peer)
        state.effects.append(EndStream(peer))
        return
    if peer.link.acknowledged != peer.acked_seen or not peer.link.unacked:
        peer.acked_seen, peer.acked_seen_at = peer.link.acknowledged, now
    elif now - peer.acked_seen_at > rules.slow_consumer_s:
        state.stats.slow_consumers += 1
        farewell(state, peer, pb.Goodbye.SLOW_CONSUMER, f"nothing acknowledged for {rules.slow_consumer_s:g} s")
        return
    _check_at(state, peer, now + min(rules.slow_consumer_s, interval_s) / 3)


def farewell(state: State, peer: Peer, code: pb.Goodbye.Code.ValueType, reason: str) -> None:
    """End a link from this side, saying why."""
    if peer.closing:
        return
    peer.closing = True
    peer.link.signal(Signal(goodbye=pb.Goodbye(code=code, reason=reason)))
    state.woken.add(peer)
    state.effects.append(EndStream(peer))
    name = pb.Goodbye.Code.Name(code)
    state.log(
        "info" if code == pb.Goodbye.SHUTDOWN else "warning", "link ended", link=peer.link_id, code=name, why=reason
    )
    remove(state, peer, f"its link was ended with {name}")


def goodbye(state: State, peer: Peer, message: pb.Goodbye) -> None:
    """The process leaves for good. What its final ack does not cover was never accepted."""
    peer.closing = True
    remove(state, peer, f"said goodbye ({message.reason[:100] or 'no reason given'})", said_goodbye=True)
    state.effects.append(EndStream(peer))


def remove(state: State, peer: Peer, why: str, *, said_goodbye: bool = False) -> None:
    """Forget a link and everything that hangs on it."""
    peer.closing = True
    if state.peers.pop(peer.link_id, None) is None:
        return
    state.tokens.pop(peer.token, None)
    if peer.account is not None:
        peer.account.give_back(quotas.LINKS)
    if peer.timer is not None:
        state.checks.cancel(peer.timer, peer)
        peer.timer = None
    for attachment in list(peer.attachments.values()):
        departures.dismiss(state, attachment, why, said_goodbye=said_goodbye)
    waiters.port_gone(state, peer, list(peer.requests.values()), said_goodbye=said_goodbye)
    events.drop_subscriptions(state, peer)
    confirmed(state, peer.link.confirmed)  # by a frame that was not acted on: seen before, or the one that broke it
    for item in peer.link.outstanding():
        owner, item.owner = item.owner, None
        if isinstance(owner, Request):
            outcomes.keep_unconfirmed(state, owner)
        elif isinstance(owner, Publishing) and item.seq == 0:
            events.never_sent(state, owner, item)
    peer.link.give_up()
    state.log("info", "link closed", link=peer.link_id, why=why)
