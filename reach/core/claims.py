"""What this node says when another asks who has a message: its own books first, then the agents that may have it.

An answer is given within a moment or not at all: while a process stays silent, or one is remembered that is gone
together with its home, this node cannot say that nobody has the message, and is asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from agentreach.v1.envelope_pb2 import Target
from agentreach.v1.frame_pb2 import Found, Lookup, Signal
from reach.core import outcomes, vanished
from reach.core.peers import Peer
from reach.core.requests import Attachment, MessageKey, Request
from reach.core.selector import SelectorError

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.nodes import NodePeer
    from reach.core.pool import Pool
    from reach.core.state import State

ROUND_BITS = 8  # of a question's nonce count its rounds; the rest is a number of this node
PROCESSES_WAIT_S = 0.4  # less than a round of the asking node
ASKING_MAX = 10_000  # questions of other nodes under way here; beyond, they get no answer and ask again


class Inquiry:
    """A message that waits at its owner until others have said whether they have it."""

    __slots__ = ("missing", "nonce", "orphans", "request", "rounds", "target", "timer", "until", "waiting")

    def __init__(self, request: Request, target: Target, until: float) -> None:
        self.request = request
        self.target = Target()
        self.target.CopyFrom(target)
        self.until = until
        self.rounds = 0
        self.nonce = 0
        """Of the present round."""
        self.waiting: set[Peer] = set()
        """Nodes and processes that were asked in this round and have not answered."""
        self.missing: list[str] = []
        """Who may have it and cannot be asked now."""
        self.orphans: set[tuple[str, bytes]] = set()
        """Processes that are gone with what they had, and have not come to another node: up to the end nobody knows."""
        self.timer: Token | None = None


class Asking:
    """A question of another node, for which this one asks its processes."""

    __slots__ = ("answer", "node", "nonce", "timer", "waiting")

    def __init__(self, node: NodePeer, answer: Found, nonce: int) -> None:
        self.node = node
        self.nonce = nonce
        self.answer = answer
        self.waiting: set[Peer] = set()
        self.timer: Token | None = None


def asked(state: State, node: NodePeer, lookup: Lookup) -> None:
    """A node asks for messages."""
    answer = Found(nonce=lookup.nonce)
    unknown = []
    for key in lookup.keys:
        item = answer.items.add(key=key)
        if not _from_books(state, node, (key.tenant, key.principal, key.env, key.message_id), item):
            unknown.append(key)
    if not unknown:
        _say(state, node, answer)
        return
    pool = _candidates(state, lookup, unknown[0].tenant, unknown[0].env)
    if len(state.asking) >= ASKING_MAX or (pool is not None and vanished.among(state, pool.selector, node.seen_at)):
        return  # a node that was there already remembers by itself who is gone
    nonce = state.next_number << ROUND_BITS  # a number that is no request's
    state.next_number += 1
    asking = Asking(node, answer, nonce)
    for peer in _processes(pool) if pool is not None else ():
        peer.link.signal(Signal(lookup=Lookup(nonce=nonce, keys=unknown)))
        state.woken.add(peer)
        asking.waiting.add(peer)
    if asking.waiting:
        state.asking[nonce] = asking
        asking.timer = state.checks.schedule(asking, state.now + PROCESSES_WAIT_S)
    else:
        _say(state, node, answer)


def _from_books(state: State, node: NodePeer, key: MessageKey, item: Found.Item) -> bool:
    """Whether this node knows of the message by itself."""
    request = state.by_key.get(key)
    if request is not None and not request.is_settled:
        inquiry = state.inquiries.get(request.number)
        if inquiry is not None:  # both ask: the smaller id owns it
            if state.rules.node_id > node.node_id:
                return False
            item.state = Found.RUNNING
            return True
        item.state = Found.RUNNING
        if request.visitor is not None and request.agent is not None:
            item.agent_id, item.incarnation = request.agent.agent_id, request.agent.incarnation
        return True
    if outcomes.is_known(state, key):
        item.state = Found.DONE
        return True
    held = state.returning.held.get(key, state.now) if len(state.returning.held) else None
    if held is not None:
        agent = held.attachment.agent
        item.state = Found.RUNNING if held.running else Found.DONE
        item.agent_id, item.incarnation = agent.agent_id, agent.incarnation
        return True
    return False


def _candidates(state: State, lookup: Lookup, tenant: str, env: str) -> Pool | None:
    """The agents that may have it."""
    try:
        return state.directory.pool_for(Target.FromString(lookup.target), tenant, env)
    except (SelectorError, DecodeError):
        return None


def _processes(pool: Pool) -> set[Peer]:
    """The processes of those of this node."""
    found: set[Peer] = set()
    for agent in pool:
        attachment = agent.link
        assert isinstance(attachment, Attachment)
        if not attachment.remote and attachment.peer.connected:
            found.add(attachment.peer)
    return found


def told(state: State, peer: object, found: Found) -> None:
    """A process answers."""
    asking = state.asking.get(found.nonce)
    if asking is None or not isinstance(peer, Peer) or peer not in asking.waiting:
        return
    asking.waiting.discard(peer)
    for item in found.items:
        if item.state == Found.NO or not may_speak_for(state, peer, item.key.tenant, item.key.env, item.agent_id):
            continue
        for known in asking.answer.items:
            if known.key == item.key and known.state == Found.NO:
                known.CopyFrom(item)
    if not asking.waiting or all(item.state != Found.NO for item in asking.answer.items):
        _over(state, asking)


def may_speak_for(state: State, peer: Peer, tenant: str, env: str, agent_id: str) -> bool:
    """Whether a process may say what this agent has: not of one that is another principal's."""
    agent = state.directory.get(tenant, env, agent_id)
    return agent is None or (agent.tenant, agent.principal) == (peer.who.tenant, peer.who.principal)


def on_timer(state: State, asking: Asking) -> None:
    """Somebody stays silent, so this node does too: it cannot say that nobody here has the message."""
    asking.timer = None
    state.asking.pop(asking.nonce, None)


def _over(state: State, asking: Asking) -> None:
    state.asking.pop(asking.nonce, None)
    if asking.timer is not None:
        state.checks.cancel(asking.timer, asking)
        asking.timer = None
    _say(state, asking.node, asking.answer)


def _say(state: State, node: NodePeer, answer: Found) -> None:
    if node.connected:
        node.link.signal(Signal(found=answer))
        state.woken.add(node)
