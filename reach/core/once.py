"""Once means once over nodes (behaviour.md §5): who owns a message that was sent before, and who may have it.

A fresh id is its entry's and costs nothing more. Any other message is owned by the node that the rendezvous hash of its
key picks among the linked nodes; others relay it there, so that copies meet. An owner that does not know the message
asks the other nodes, and through them the agents that may have it, also those that are still on their way back. Who has
it gets it, and joins or replays. If all have answered and nobody knows it, it runs; if somebody stays silent it runs
only if it is `idempotent`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, assert_never

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.frame_pb2 import Found, Lookup, MessageKey, Signal
from agentreach.wire.content import content_digest
from agentreach.wire.errors import failure
from agentreach.wire.names import normalise_env, shown
from reach.core import (
    admit,
    claims,
    credit,
    nodes,
    order,
    outcomes,
    relays,
    returning,
    route,
    settle,
    vanished,
    visiting,
)
from reach.core.agents import UNREACHABLE
from reach.core.peers import Peer
from reach.core.ports import Identity
from reach.core.replay import Conflict, Elsewhere, Stored, TooOld
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from agentreach.v1.peer_pb2 import Lineage
    from reach.core.nodes import NodePeer
    from reach.core.requests import MessageKey as Key
    from reach.core.state import State

PATIENCE_S = 10.0  # so long an owner waits for those who have not answered
LEFT_S = 0.1  # of the request's time, for saying so
ROUND_S = 0.5  # who has not answered is asked again so often
INQUIRIES_MAX = 10_000  # beyond, it cannot be known whether a message has run


# ---- whose it is ----


def owner(state: State, key: Key, session_id: str = "") -> NodePeer | None:
    """The node that owns a message which is not fresh; None: this one. All of one sender's session have the same."""
    of = (*key[:3], "", session_id) if session_id else key
    salt = "\0".join(of).encode("utf-8", "surrogateescape")
    best, rank = None, _rank(salt, state.rules.node_id)
    for node in state.nodes.values():
        if node.connected and not node.draining and (other := _rank(salt, node.node_id)) > rank:
            best, rank = node, other
    return best


def _rank(salt: bytes, node_id: str) -> bytes:
    return blake2b(salt + b"\0" + node_id.encode(), digest_size=8).digest()


def place(state: State, request: Request, envelope: Envelope, parent: Lineage | None) -> None:
    """Give a message that is not fresh to its owner, which may be this node."""
    said_so = any(isinstance(each.port, visiting.NodePort) for each in request.waiters)  # by the node that relayed it
    here = said_so or bool(envelope.reply_topic) or outcomes.is_known(state, request.key)
    other = owner(state, request.key, envelope.session_id) if not here else None
    if other is not None:
        request.parent = parent
        if not order.applies(envelope, parent) or order.may_follow(state, request, envelope, other):
            relays.relay(state, request, envelope, other)
    else:
        target = envelope.target
        route.route(state, request, envelope, target, target.SerializeToString(), parent)


def admit_relayed(state: State, node: NodePeer, envelope: Envelope, spent_ms: int) -> None:
    """Another node says that this one owns the message."""
    if envelope.entry in node.visiting:
        return  # sent again by a link that began anew
    port = visiting.NodePort(state, node, envelope.entry, envelope.attempt)
    node.visiting[envelope.entry] = port
    who = Identity(tenant=envelope.tenant, principal=envelope.principal)
    envelope.fresh = False
    admit.admit(state, port, who, envelope, spent_ms, None, envelope.source)
    found = state.by_key.get((who.tenant, who.principal, normalise_env(envelope.env), envelope.message_id))
    if found is not None and any(waiter.port is port for waiter in found.waiters):
        port.request = found


# ---- who has it ----


def took(state: State, request: Request, envelope: Envelope, target: Target, parent: Lineage | None) -> bool:
    """True if this message, which this node owns and does not know, waits until others have said whether they do."""
    if request.inquired or request.visitor is not None or not state.met_nodes:
        return False  # of a node that was always alone nobody knows more than it does
    if len(state.inquiries) >= INQUIRIES_MAX:
        _give_up(state, request, ["this node, which is asked too much"])
        return True
    request.data = envelope.SerializeToString()
    request.parent = parent
    request.note("asking", state.now, "sent before: who has it?")
    left_s = min(PATIENCE_S, request.deadline - state.now - LEFT_S)
    inquiry = claims.Inquiry(request, target, state.now + left_s)
    state.inquiries[request.number] = inquiry
    if order.applies(envelope, parent):
        order.asks(state, request, envelope.session_id)
    _ask(state, inquiry)
    return True


def _may_know(node: NodePeer) -> bool:
    """One whose key is gone has left, or it stands still and its processes are about to go elsewhere."""
    if node.connected or node.dead:
        return node.connected
    return bool(node.address) or (node.cut_at > 0 and not node.closing)


def _ask(state: State, inquiry: claims.Inquiry) -> None:
    """One round: everybody who may have it and can be asked is; who cannot be is missing."""
    request = inquiry.request
    if outcomes.is_known(state, request.key):
        _has_ended(state, inquiry)
        return
    tenant, principal, env, message_id = request.key
    inquiry.rounds += 1
    inquiry.nonce = request.number << claims.ROUND_BITS | inquiry.rounds & 0xFF
    inquiry.waiting.clear()
    inquiry.missing.clear()
    key = MessageKey(tenant=tenant, principal=principal, env=env, message_id=message_id)
    lookup = Lookup(nonce=inquiry.nonce, keys=[key], target=inquiry.target.SerializeToString())
    for node in state.nodes.values():
        if node.connected:
            node.link.signal(Signal(lookup=lookup))
            state.woken.add(node)
            inquiry.waiting.add(node)
        elif _may_know(node):
            inquiry.missing.append(f"node {node.node_id}")
    pool = state.directory.pool_for(inquiry.target, tenant, env)
    inquiry.orphans.update(vanished.among(state, pool.selector))
    inquiry.orphans.update(returning.gone_with(state, request))
    for agent in pool:
        attachment = agent.link
        assert isinstance(attachment, Attachment)
        process = (agent.agent_id, agent.incarnation)
        if attachment.remote and not _answers_for(attachment):
            inquiry.missing.append(agent.agent_id)
            continue
        inquiry.orphans.discard(process)
        if agent.status == UNREACHABLE or not attachment.peer.connected:
            inquiry.missing.append(agent.agent_id)
        elif not attachment.remote and attachment.peer not in inquiry.waiting:
            attachment.peer.link.signal(Signal(lookup=Lookup(nonce=inquiry.nonce, keys=[key])))
            state.woken.add(attachment.peer)
            inquiry.waiting.add(attachment.peer)
    inquiry.missing.extend(agent_id for agent_id, _ in inquiry.orphans)
    if inquiry.waiting:
        inquiry.timer = state.checks.schedule(inquiry, state.now + ROUND_S)
    else:
        _all_said(state, inquiry)


def _has_ended(state: State, inquiry: claims.Inquiry) -> None:
    """An agent of this node answered it for another node, which is lost: what became of it stands here."""
    request = inquiry.request
    if not _end(state, inquiry):
        return
    found = outcomes.find(state, request.key, content_digest(Envelope.FromString(request.data)))
    match found:
        case Stored():
            error = Envelope.FromString(found.outcome).error
            state.stats.duplicates["replayed"] += 1
            outcome = codes.ErrorCode.Name(error.code) if error.code else "OK"
            settle.answer(state, request, found.outcome, outcome, error if error.code else None)
            settle.release(state, request)
        case Conflict():
            state.stats.duplicates["conflict"] += 1
            settle.fail(state, request, admit.conflict(request.message_id))
        case Elsewhere():
            attachment = route.incarnation(state, request.key, found.agent_id, found.incarnation)
            if attachment is not None:
                _send_to(state, request, attachment, Found.DONE)
            elif request.idempotent:
                _run(state, inquiry)
            else:
                _give_up(state, request, [found.agent_id])
        case TooOld() | None:
            _give_up(state, request, ["its agent"])
        case _:
            assert_never(found)


def _answers_for(attachment: Attachment) -> bool:
    """Whether an agent's home can be asked, and says that it has it: its key alone is of before, or of soon."""
    node, agent = attachment.peer, attachment.agent
    assert isinstance(node, nodes.NodePeer)
    load = node.told.get((agent.tenant, agent.env, agent.agent_id))
    return node.connected and load is not None and load.incarnation == agent.incarnation


def told(state: State, peer: object, found: Found) -> None:
    """A node or a process answers."""
    inquiry = state.inquiries.get(found.nonce >> claims.ROUND_BITS)
    if inquiry is None:
        claims.told(state, peer, found)
        return
    if inquiry.nonce != found.nonce or peer not in inquiry.waiting:
        return
    inquiry.waiting.discard(peer)
    for item in found.items:
        if item.state in (Found.RUNNING, Found.DONE) and _to_who_has_it(state, inquiry, peer, item):
            return
    if not inquiry.waiting:
        _all_said(state, inquiry)


def _end(state: State, inquiry: claims.Inquiry) -> bool:
    """The inquiry is over. False: so is its request."""
    request = inquiry.request
    state.inquiries.pop(request.number, None)
    if inquiry.timer is not None:
        state.checks.cancel(inquiry.timer, inquiry)
        inquiry.timer = None
    request.inquired = True
    return state.requests.get(request.number) is request and request.stage is Stage.ADMITTED


def _to_who_has_it(state: State, inquiry: claims.Inquiry, peer: object, item: Found.Item) -> bool:
    request = inquiry.request
    if not item.agent_id:
        if not isinstance(peer, nodes.NodePeer):
            return False
        if item.state == Found.DONE and any(_is_of(each.port, peer) for each in request.waiters):
            inquiry.missing.append(f"node {peer.node_id}")  # each would wait for the other
            return False
        if _end(state, inquiry):
            relays.relay(state, request, Envelope.FromString(request.data), peer)
        return True
    if isinstance(peer, Peer) and not isinstance(peer, nodes.NodePeer):
        tenant, _, env, _ = request.key
        if not claims.may_speak_for(state, peer, tenant, env, item.agent_id):
            return False
    attachment = route.incarnation(state, request.key, item.agent_id, item.incarnation)
    if attachment is None:
        inquiry.missing.append(shown(item.agent_id))  # it has it, and cannot be reached yet; anybody may say so
        return False
    if _end(state, inquiry):
        _send_to(state, request, attachment, item.state)
    return True


def _is_of(port: object, node: NodePeer) -> bool:
    """Whether who waits there is a node that relayed the message."""
    return isinstance(port, visiting.NodePort) and port.node is node


def is_given(state: State, request: Request, node: NodePeer) -> bool:
    """A node gives this one a message for an agent. True if others were asked for it: they wait for that node now.

    Had it joined the one that is asked for, that would be found at that node, and each would wait for the other.
    """
    inquiry = state.inquiries.get(request.number)
    if inquiry is not None and _end(state, inquiry):
        relays.relay(state, request, Envelope.FromString(request.data), node)
    return inquiry is not None


def _send_to(state: State, request: Request, attachment: Attachment, found: Found.State.ValueType) -> None:
    """An agent has the message: it joins, or replays."""
    if request.line is not None:
        order.over(state, request)
    state.stats.duplicates["joined" if found == Found.RUNNING else "replayed"] += 1
    request.reentrant = True  # it has its slot, and its place in its lane
    envelope = Envelope.FromString(request.data)
    request.retriable = request.idempotent and not envelope.session_id  # nobody but its owner
    request.credit = credit.UNBOUNDED
    request.routed = "the agent that has it"
    request.tied = True
    envelope.resent, envelope.epoch = True, 0  # whoever has the session now: this process has the message
    route.hand_over(state, request, envelope, attachment, request.parent)


def _all_said(state: State, inquiry: claims.Inquiry) -> None:
    """Everybody who was asked has answered, and nobody has it."""
    request = inquiry.request
    if inquiry.missing and state.now < inquiry.until:
        if inquiry.timer is None:
            inquiry.timer = state.checks.schedule(inquiry, min(state.now + ROUND_S, inquiry.until))
        return
    if not _end(state, inquiry):
        return
    if inquiry.missing and not request.idempotent:
        _give_up(state, request, inquiry.missing)
        return
    _run(state, inquiry)


def _run(state: State, inquiry: claims.Inquiry) -> None:
    """It is decided: the message runs, in its turn."""
    request = inquiry.request
    if request.line is not None:
        order.decided(state, request)
        return
    envelope = Envelope.FromString(request.data)
    route.route(state, request, envelope, inquiry.target, inquiry.target.SerializeToString(), request.parent)


def _give_up(state: State, request: Request, silent: list[str]) -> None:
    names = ", ".join(sorted(set(silent))[:5])
    settle.fail(
        state,
        request,
        failure(
            codes.AGENT_LOST,
            f"message {request.message_id} was sent before, and whether it has run cannot be known: no answer from "
            f"{names}; it is not run again (idempotent requests are)",
            retryable=False,
            may_have_executed=True,
        ),
    )


def _silent_agents(state: State, inquiry: claims.Inquiry) -> list[str]:
    """The agents of this node's processes that have not answered, by the names by which its sender knows them."""
    tenant, _, env, _ = inquiry.request.key
    names = []
    for agent in state.directory.pool_for(inquiry.target, tenant, env):
        attachment = agent.link
        assert isinstance(attachment, Attachment)
        if not attachment.remote and attachment.peer in inquiry.waiting:
            names.append(agent.agent_id)
    gone = any(not isinstance(each, nodes.NodePeer) for each in inquiry.waiting)  # with all their agents, meanwhile
    return names or ["who was asked and has left"] * gone


def on_timer(state: State, inquiry: claims.Inquiry) -> None:
    """A round is over: ask again, or decide with what is known."""
    inquiry.timer = None
    if state.requests.get(inquiry.request.number) is not inquiry.request or inquiry.request.is_settled:
        _end(state, inquiry)
        return
    if state.now < inquiry.until:
        _ask(state, inquiry)
        return
    inquiry.missing.extend(f"node {each.node_id}" for each in inquiry.waiting if isinstance(each, nodes.NodePeer))
    inquiry.missing.extend(_silent_agents(state, inquiry))
    inquiry.waiting.clear()
    _all_said(state, inquiry)
