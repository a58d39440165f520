"""Links between nodes: hello, resume, cut, the wait for the other node to come back, and its end.

Each pair of nodes keeps one link; the node with the smaller id dials. What its agents are is `remote`'s, what comes
from its callers `visiting`'s; which frame means what is `between`'s. A node is known by its id and, like a process, by
the incarnation of its start: another incarnation has forgotten all that the former had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.limits import PROTOCOL_VERSION
from agentreach.wire.names import is_name
from reach.core import (
    drains,
    elsewhere,
    interest,
    loads,
    lookups,
    outcomes,
    rebalance,
    remote,
    returning,
    vanished,
    visiting,
    wants,
)
from reach.core.effects import EndStream, Forwarding
from reach.core.peers import Peer
from reach.core.ports import Identity

if TYPE_CHECKING:
    from agentreach.v1.registry_pb2 import AgentLoad
    from reach.core.requests import Attachment
    from reach.core.state import State
    from reach.core.visiting import NodePort

AgentKey = tuple[str, str, str]
"""(tenant, env, agent_id)."""

_RANDOM_BITS = 128
NODES_MAX = 1_000  # that are known at once, registered or not
_BEAT_S = 5.0  # a node says something at least so often
_SILENT_S = 4 * _BEAT_S  # a link that says nothing for so long is cut


class NodePeer(Peer):
    """Another node: this end of the link to it, and its agents. It is there from the first that is heard of it on."""

    __slots__ = (
        "address",
        "agents",
        "broker",
        "dead",
        "draining",
        "gone_at",
        "honoured_at",
        "node_id",
        "record",
        "said_at_us",
        "seen_at",
        "since",
        "told",
        "unregistered",
        "visiting",
        "why_down",
    )

    def __init__(self, state: State, node_id: str) -> None:
        super().__init__(state, f"node/{node_id}", b"", Identity(tenant="", principal=f"node/{node_id}"))
        self.connected = False
        self.numbers_items = True
        self.node_id = node_id
        self.address = ""
        """From its record in the store; empty while that is not there."""
        self.record = NodeRecord(node_id=node_id)
        """As it stood in the store last."""
        self.agents: dict[AgentKey, Attachment] = {}
        self.told: dict[AgentKey, AgentLoad] = {}
        """What it said last of each of its agents, also of those whose records have not come yet."""
        self.unregistered: dict[AgentKey, None] = {}
        """Of its agents those whose keys have vanished from the store, though it says that it has them."""
        self.visiting: dict[bytes, NodePort] = {}
        """By its entry: requests that it gave to agents of this node."""
        self.broker: Attachment | None = None
        """What stands for it where it is given messages to own."""
        self.dead = False
        """Nobody listens at its address: its process is gone."""
        self.draining = False
        self.seen_at = state.now
        """When the store first showed it, in its present life."""
        self.gone_at = 0.0
        """When its key vanished from the store."""
        self.honoured_at = 0.0
        """It is known to have honoured this node's pins at this time."""
        self.said_at_us = 0
        """When it said last that it honours them, by its own clock."""
        self.since = state.now
        """Since when it is linked, or not."""
        self.why_down = "not linked yet"

    @property
    def is_registered(self) -> bool:
        """Whether it may live though it is not linked: its key stands, and its address does not refuse."""
        return bool(self.address) and not self.dead


def of(state: State, node_id: str) -> NodePeer:
    """The node of this id, made if it is the first that is heard of it."""
    node = state.nodes.get(node_id)
    if node is None:
        node = state.nodes[node_id] = NodePeer(state, node_id)
        state.met_nodes = True
    return node


def hello_for(state: State, node: NodePeer) -> pb.NodeHello:
    """What to say first on a stream that this node dialled."""
    return pb.NodeHello(
        node_id=state.rules.node_id,
        incarnation=state.incarnation,
        protocol_version=PROTOCOL_VERSION,
        resume_token=node.token,
        last_seq=node.link.last_accepted if node.token else 0,
        to_node_id=node.node_id,
    )


def unlike(state: State, node: NodePeer) -> str:
    """Why this node may not be linked with that one, by what that one's record says; empty if it may."""
    if state.rules.auth != "none" and node.record.auth in ("", "none"):
        return (
            f"node {node.node_id} lets in anybody (auth = none) and node {state.rules.node_id} does not: whoever "
            f"reaches that one would reach all; give it auth = {state.rules.auth} too"
        )
    return ""


def refusal(state: State, message: pb.NodeHello) -> str:
    """Why a node's hello cannot be taken; empty if it can.

    Who is not in the store, or stands there as another start, is no node of the mesh: unless the view is too old to
    know. One that has just started is seen there a moment later, and dials again.
    """
    own = state.rules.node_id
    if message.protocol_version > PROTOCOL_VERSION:
        return f"protocol version {message.protocol_version} is newer than this node's"
    if not is_name(message.node_id) or not message.incarnation:
        return "node_hello names no node"
    if message.to_node_id != own:
        return f"this is node {own}, not {message.to_node_id}"
    if message.node_id >= own:
        return f"node {own} dials node {message.node_id}, not the other way round"
    if lookups.age_s(state) == float("inf"):
        return f"node {own} is starting, and has not seen the registry yet"
    known = state.nodes.get(message.node_id)
    if known is None and len(state.nodes) >= NODES_MAX:
        return f"node {own} knows {len(state.nodes)} other nodes, as many as it may"
    why = unlike(state, known) if known is not None and known.address else ""
    if why:
        return why
    registered = known is not None and known.address and known.record.incarnation == message.incarnation
    linked_before = known is not None and known.incarnation == message.incarnation  # and has lost its registry since
    if not registered and not linked_before and lookups.age_s(state) <= lookups.OLD_S:
        return f"node {message.node_id} is not registered (yet), or it is another start of it that is"
    return ""


def hello(state: State, message: pb.NodeHello) -> NodePeer:
    """A node has dialled this one: go on with its link, or begin a new one, and welcome it."""
    node = of(state, message.node_id)
    node.hellos += 1
    node.link.cut()
    resumed = (
        bool(message.resume_token)
        and message.resume_token == node.token
        and message.incarnation == node.incarnation
        and node.link.resume(message.last_seq)
    )
    if not resumed:
        _begin_again(state, node, message.incarnation)
        node.token = state.secrets.getrandbits(_RANDOM_BITS).to_bytes(16, "big")
    welcome = pb.Welcome(
        link_id=node.link_id,
        resume_token=node.token,
        resumed=resumed,
        last_seq=node.link.last_accepted,
        node_id=state.rules.node_id,
        incarnation=state.incarnation,
    )
    node.link.signal(Signal(welcome=welcome))
    _up(state, node, resumed)
    return node


def welcomed(state: State, node: NodePeer, welcome: pb.Welcome) -> bool:
    """The node that this one dialled has answered. False: its numbers do not fit, dial again from scratch."""
    if welcome.resumed:
        if welcome.incarnation != node.incarnation or not node.link.resume(welcome.last_seq):
            node.token = b""
            return False
    else:
        _begin_again(state, node, welcome.incarnation)
    node.token = welcome.resume_token
    _up(state, node, welcome.resumed)
    return True


def _begin_again(state: State, node: NodePeer, incarnation: bytes) -> None:
    if node.connected:  # the end of its former stream was not seen
        cut(state, node, "it dialled anew")
    if node.incarnation and incarnation != node.incarnation:
        outcomes.keep_all_unconfirmed(state, node.link.outstanding())
        visiting.entry_lost(state, node, "its node was started anew")
        remote.forgotten(state, node)
    node.incarnation = incarnation
    node.link.restart()
    remote.drop_unregistered(state, node)
    node.told.clear()
    node.said_at_us = 0
    node.draining = False


def _up(state: State, node: NodePeer, resumed: bool) -> None:
    node.connected = True
    node.closing = node.dead = False
    node.cut_at, node.why_down = 0.0, ""
    node.heard_at = node.back_at = node.since = state.now
    if resumed:
        state.stats.link_resumes += 1
    remote.link_back(state, node, resumed=resumed)
    # Also on a resumed link: what changed while it was cut was told to nobody.
    loads.tell_all(state, node)
    interest.tell_all(state, node)
    if not resumed:
        drains.node_came(state)
        elsewhere.node_came(state)  # its former start may have been leaving, and was told to nobody
    rebalance.begin(state)
    state.woken.add(node)
    state.log("info", "node linked", node=node.node_id, resumed=resumed)
    _check_at(state, node, state.now + _BEAT_S)


def cut(state: State, node: NodePeer, why: str) -> None:
    """The stream between the nodes ended: nothing new for its agents, and a while to come back."""
    if not node.connected:
        node.why_down = why or node.why_down
        return
    node.connected = False
    node.cut_at = node.since = state.now
    node.why_down = why or "its stream ended"
    node.link.cut()
    vanished.home_cut(state, node)
    wants.node_lost(state, node)
    returning.node_lost(state)
    remote.link_cut(state, node)
    state.effects.append(Forwarding(node))
    state.log("warning", "node link cut", node=node.node_id, why=node.why_down, agents=len(node.agents))
    _check_at(state, node, state.now + state.rules.resume_window_s)


def _check_at(state: State, node: NodePeer, when: float) -> None:
    if node.timer is not None:
        state.checks.cancel(node.timer, node)
    node.timer = state.checks.schedule(node, when)


def on_timer(state: State, node: NodePeer) -> None:
    """Judge the link: silent, or not back in time; a node whose key stands is not lost, though nobody hears of it."""
    node.timer = None
    now = state.now
    if node.connected:
        if now - node.heard_at > _SILENT_S:
            cut(state, node, f"nothing heard for {_SILENT_S:g} s")
            state.effects.append(EndStream(node))
        else:
            node.link.signal(Signal(heartbeat=pb.Heartbeat()))
            state.woken.add(node)
            _check_at(state, node, now + _BEAT_S)
        return
    if now < node.cut_at + state.rules.resume_window_s:
        _check_at(state, node, node.cut_at + state.rules.resume_window_s)
        return
    if node.is_registered:
        _check_at(state, node, now + state.rules.resume_window_s)
        return
    visiting.entry_lost(state, node, "its node's link did not come back")
    state.interests.forget(node)
    remote.given_up(state, node, "its node's link did not come back")
    left = list(node.link.outstanding())
    outcomes.keep_all_unconfirmed(state, left)
    for item in left:
        node.link.withdraw(item)
    node.token = b""
    if not (node.dead or node.closing) and now < (until := _remembered_until(state, node)):
        _check_at(state, node, until)
    forget_if_gone(state, node)


def _remembered_until(state: State, node: NodePeer) -> float:
    """Until when a node counts that fell silent: it may live, and have messages of which nobody else knows."""
    return max(node.cut_at + state.rules.resume_window_s, node.gone_at) + vanished.REMEMBERED_S


def forget_if_gone(state: State, node: NodePeer) -> None:
    """A node without a key in the store, a link or an agent is no node any more."""
    if not node.connected and not node.address and not node.agents and node.timer is None:
        state.nodes.pop(node.node_id, None)


def end(state: State, node: NodePeer, code: pb.Goodbye.Code.ValueType, reason: str) -> None:
    """End the stream from this side, saying why; the link may begin anew on another."""
    if node.closing:
        return
    node.closing = True
    node.link.signal(Signal(goodbye=pb.Goodbye(code=code, reason=reason)))
    state.woken.add(node)
    node.token = b""
    node.why_down = reason
    if node.stream is None:
        cut(state, node, reason)
    else:  # it is cut when the goodbye has gone out and the stream is over
        state.effects.append(EndStream(node))


def farewell(state: State) -> None:
    """This node leaves, and all that can be said to others has been: tell them that nothing more will come."""
    goodbye = Signal(goodbye=pb.Goodbye(code=pb.Goodbye.SHUTDOWN, reason=f"node {state.rules.node_id} is leaving"))
    for node in state.nodes.values():
        if node.connected and not node.closing:
            node.closing = True
            node.link.signal(goodbye)
            state.woken.add(node)
            state.effects.append(EndStream(node))


def said_goodbye(state: State, node: NodePeer, message: pb.Goodbye) -> None:
    """The other node leaves, or cannot go on with this link."""
    name = pb.Goodbye.Code.Name(message.code) if message.code in pb.Goodbye.Code.values() else str(message.code)
    node.closing = True
    state.effects.append(EndStream(node))
    cut(state, node, f"it said goodbye: {name} {message.reason[:100]}".rstrip())
    node.token = b""
    if message.code == pb.Goodbye.SHUTDOWN:
        vanished.home_left(state, node)
        remote.given_up(state, node, "its node has left")  # its callers may come by another node, for the same messages
