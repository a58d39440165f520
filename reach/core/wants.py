"""Waiting over nodes (behaviour.md §6): a freed slot goes to the best that waits for it, at whichever node that waits.

An entry with requests that wait for a slot tells the homes of those who are full: so many, at this level, the first
for so long (`want`). When a slot comes free, its home compares the best of its own waiters with what the others want,
and gives it to the higher, then older one: its own goes there at once, another node gets a `grant`, and the slot is
kept for it for two seconds. A grant is no promise of a request: whoever has no use for it any more lets it end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from agentreach.v1.envelope_pb2 import Priority, Target
from agentreach.v1.frame_pb2 import Grant, Signal, Want
from reach.core import admit, nodes, waiting
from reach.core.agents import FULL, USABLE_TIERS, Agent
from reach.core.requests import Attachment
from reach.core.selector import Selector, SelectorError, parse_selector

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.nodes import NodePeer
    from reach.core.pool import Pool
    from reach.core.state import State

GRANT_S = 2.0
WANTS_PER_NODE_MAX = 1_000  # selectors of one node; beyond, it hears of free slots by `loads` only
WANTED_MAX = 10_000  # requests behind one want, as many as a node lets wait

_PRIORITY = {0: Priority.HIGH, 1: Priority.NORMAL, 2: Priority.LOW}  # by level

UNKNOWN = -1  # how many it was told: what was under way when its link was cut may come or not, so it is told again


class Wish:
    """What a node wants of a selector: how many, and how good its first is."""

    __slots__ = ("count", "level", "node", "selector", "since", "target")

    def __init__(self, node: NodePeer, selector: Selector, target: bytes) -> None:
        self.node = node
        self.selector = selector
        self.target = target
        self.count = 0
        self.level = 0
        self.since = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller goes first."""
        return (self.level, self.since)


class Granted:
    """A slot that is kept for another node."""

    __slots__ = ("agent", "node", "timer")

    def __init__(self, agent: Agent, node: NodePeer) -> None:
        self.agent = agent
        self.node = node
        self.timer: Token | None = None


class Wants:
    """What other nodes want here, what was granted to them, and what they were told is wanted of theirs."""

    __slots__ = ("granted", "told", "wishes")

    def __init__(self) -> None:
        self.wishes: dict[tuple[NodePeer, Selector], Wish] = {}
        self.granted: dict[tuple[NodePeer, Agent], deque[Granted]] = {}
        self.told: dict[tuple[NodePeer, Selector], int] = {}


# ---- the entry: what is wanted of others ----


def wish(state: State, pool: Pool) -> None:
    """A request waits for this selector: tell the homes of those who lack only a slot, if they were not told yet."""
    told = state.wants.told
    for node in _homes(pool):
        if (node, pool.selector) not in told:
            _tell(state, node, pool.selector)


def _homes(pool: Pool) -> dict[NodePeer, None]:
    homes: dict[NodePeer, None] = {}
    for agent in pool.tiers[FULL].agents:
        attachment = agent.link
        if isinstance(attachment, Attachment) and attachment.remote and isinstance(attachment.peer, nodes.NodePeer):
            homes[attachment.peer] = None
    return homes


def _tell(state: State, node: NodePeer, selector: Selector) -> None:
    first = state.queue.first(selector, state.now)
    count = state.queue.size(selector)
    want = Want(selector=_target(selector), n=count, tenant=selector.tenant, env=selector.env)
    if first is not None:
        want.priority = _PRIORITY[state.queue.level_of(first)]
        want.waited_ms = int((state.now - first.received) * 1000)
    if count:
        state.wants.told[node, selector] = count
    else:
        state.wants.told.pop((node, selector), None)
    node.link.signal(Signal(want=want))
    state.woken.add(node)


def tell_again(state: State) -> None:
    """Let homes know how many wait now, or that nobody does; called a few times a second."""
    told = state.wants.told
    wanted: set[tuple[NodePeer, Selector]] = set()
    for selector, _ in state.queue.keys_now():
        wanted.update((node, selector) for node in _homes(state.directory.pool(selector)) if node.connected)
    for key in wanted | set(told):
        node, selector = key
        if state.nodes.get(node.node_id) is not node:
            told.pop(key, None)
        elif node.connected and state.queue.size(selector) != told.get(key, 0):
            _tell(state, node, selector)


def _target(selector: Selector) -> bytes:
    target = Target(agent_id=selector.agent_id, agent_type=selector.agent_type, version=selector.version)
    target.capabilities.extend(sorted(selector.capabilities))
    target.labels.update(dict(selector.labels))
    target.among.extend(selector.among)
    return target.SerializeToString()


def granted(state: State, node: NodePeer, grant: Grant) -> None:
    """A home keeps a slot of one of its agents for this node: the best that waits for that agent goes there."""
    agent = state.directory.get(grant.tenant, grant.env, grant.agent_id)
    attachment = agent.link if agent is not None else None
    if agent is None or not isinstance(attachment, Attachment) or attachment.peer is not node:
        return
    for _ in range(grant.n):
        request = state.queue.take(agent, state.now)
        if request is None:
            return
        waiting.start(state, request, agent)


# ---- the home: what others want ----


def heard(state: State, node: NodePeer, want: Want) -> None:
    """A node says what it wants here; n = 0: nothing more of this selector."""
    try:
        selector = parse_selector(Target.FromString(want.selector), want.tenant, want.env, state.directory.aliases)
    except (SelectorError, DecodeError):
        return
    wishes = state.wants.wishes
    key = (node, selector)
    if not want.n:
        wishes.pop(key, None)
        waiting.watch(state)
        return
    found = wishes.get(key)
    if found is None:
        if sum(1 for other, _ in wishes if other is node) >= WANTS_PER_NODE_MAX:
            return
        found = wishes[key] = Wish(node, selector, want.selector)
    found.count = min(want.n, WANTED_MAX)
    found.level = admit.PRIORITY_LANE.get(want.priority, 1)
    found.since = state.now - want.waited_ms / 1000
    waiting.watch(state)
    usable = [agent for tier in state.directory.pool(selector).tiers[:USABLE_TIERS] for agent in tier.agents]
    state.directory.freed.extend(agent for agent in usable if not _is_remote(agent))


def _is_remote(agent: Agent) -> bool:
    return isinstance(agent.link, Attachment) and agent.link.remote


def outranks(state: State, agent: Agent) -> Wish | None:
    """The wish that a free slot of this agent goes to, before all who wait here; None: to these, if there are any."""
    if _is_remote(agent):
        return None
    best: Wish | None = None
    for each in state.wants.wishes.values():
        if each.selector.matches(agent) and (best is None or each.rank < best.rank):
            best = each
    if best is None:
        return None
    head = state.queue.head(agent, state.now)
    if head is not None and (state.queue.level_of(head), head.received) <= best.rank:
        return None
    return best


def grant(state: State, wish: Wish, agent: Agent) -> None:
    """Keep a slot of the agent for the node that wants one most."""
    wish.count -= 1
    if wish.count <= 0:
        state.wants.wishes.pop((wish.node, wish.selector), None)
    state.directory.reserve(agent)
    given = Granted(agent, wish.node)
    given.timer = state.checks.schedule(given, state.now + GRANT_S)
    state.wants.granted.setdefault((wish.node, agent), deque()).append(given)
    word = Grant(selector=wish.target, n=1, agent_id=agent.agent_id, tenant=agent.tenant, env=agent.env)
    wish.node.link.signal(Signal(grant=word))
    state.woken.add(wish.node)


def redeem(state: State, node: NodePeer, agent: Agent) -> bool:
    """A node's request for this agent has come: True if a slot was kept for it, which is free for it now."""
    kept = state.wants.granted.get((node, agent))
    if not kept:
        return False
    given = kept.popleft()
    if given.timer is not None:
        state.checks.cancel(given.timer, given)
    _give_back(state, given, kept)
    return True


def _give_back(state: State, given: Granted, kept: deque[Granted]) -> None:
    given.timer = None
    if not kept:
        state.wants.granted.pop((given.node, given.agent), None)
    state.directory.release(given.agent)


def on_timer(state: State, given: Granted) -> None:
    """The node had no use for its grant: the slot goes to the next."""
    kept = state.wants.granted.get((given.node, given.agent))
    if kept is not None and given in kept:
        kept.remove(given)
        _give_back(state, given, kept)


def node_lost(state: State, node: NodePeer) -> None:
    """The link to a node was cut: it wants nothing here, and knows of no wish of ours."""
    wants = state.wants
    for key in [key for key in wants.wishes if key[0] is node]:
        del wants.wishes[key]
    for key in wants.told:
        if key[0] is node:
            wants.told[key] = UNKNOWN
    waiting.watch(state)
