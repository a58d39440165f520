"""Loops die young: the hop limit, the repeat limit, and the call that would wait for itself (behaviour.md §7).

The path of a message lists the agents that its call tree went through, the one it is delivered to last. A call from
an agent's handler has that delivery's path (from its signed lineage) as its parent path; a call from outside has none.
So a root message is delivered with one hop, and `hop_count` is the number of agents passed through, the chosen one
included: a chain of exactly `max_hops` agents works.

Decided here is only what to refuse. Which step a message is (`dedup_key`) is said by its sender; an empty key names
no step, so only the hop limit stops such a loop. Whether a call waits at all is the caller's knowledge: an event
waits for nobody and cannot deadlock, nor can a call to a reentrant agent that holds its own slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from agentreach.v1 import error_pb2
from agentreach.v1.envelope_pb2 import Hop
from agentreach.wire.errors import failure

ARROW = " → "


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """`max_hops`: agents in one call tree's line. `max_repeats`: how often one step may stand in it.

    Too low, and deep workflows end with an error; too high, and a loop costs that many calls before it is cut.
    """

    max_hops: int = 10
    max_repeats: int = 2


DEFAULT_LIMITS = LoopLimits()


def check_hop(
    path: Sequence[Hop],
    hop_count: int,
    target_type: str,
    dedup_key: str,
    limits: LoopLimits = DEFAULT_LIMITS,
    target: str = "",
) -> error_pb2.Error | None:
    """HOP_LIMIT or LOOP_DETECTED if a message must not go one agent further, else None.

    `path` and `hop_count` are the parent's, `target_type` the type of the agent that would get it. An empty
    `target_type` (a target by capability, before an agent is chosen) checks the hop limit only; check again with the
    chosen agent's type. `target` is how to name the target in the error, if not by its type.

    The hop limit goes first: at the point where a cycle of five agents or more would repeat a step the third time, it
    has already used up its hops, and the two answers shall not depend on the length of the cycle.
    """
    if hop_count >= limits.max_hops:
        return _hop_limit(path, target or target_type, limits.max_hops)
    if not dedup_key or not target_type:
        return None
    repeats = 0
    prefix = target_type + "/"
    for hop in path:
        if hop.dedup_key == dedup_key and hop.agent_id.startswith(prefix):
            repeats += 1
    if repeats >= limits.max_repeats:
        return _loop_detected(path, target or target_type, dedup_key, repeats)
    return None


def next_path(parent_path: Iterable[Hop], agent_id: str, message_id: str, session_id: str, dedup_key: str) -> list[Hop]:
    """The path to deliver a message with: its parent's, then the agent that gets it. Its length is its `hop_count`."""
    hop = Hop(agent_id=agent_id, message_id=message_id, session_id=session_id, dedup_key=dedup_key)
    return [*parent_path, hop]


def ancestors(path: Iterable[Hop]) -> frozenset[str]:
    """The message_ids whose handlers wait, directly or not, for what is sent with this parent path.

    For a detached hop (an event, a request with a reply_topic) nobody before it waits.
    """
    waiting: list[str] = []
    for hop in path:
        if hop.detached:
            waiting.clear()
        waiting.append(hop.message_id)
    return frozenset(waiting)


def would_deadlock(
    ancestor_ids: Collection[str],
    holders: Iterable[str],
    waiting: Iterable[Collection[str]] = (),
) -> bool:
    """True if a call would wait for ever for a lane or for slots.

    `holders` are the message_ids that hold what it would wait for: the running messages of its session's lane, or those
    in every slot of every candidate. `waiting` gives, for each call that waits in that same queue already, its own
    ancestors. A holder can finish unless it is an ancestor of this call or of one that waits there: then it is itself
    waiting for the queue to move. With one holder that can finish, or with a free place (no holders), waiting is safe.
    """
    queue = [ancestor_ids, *waiting]
    held = False
    for holder in holders:
        held = True
        if not any(holder in ids for ids in queue):
            return False
    return held


def deadlock(path: Sequence[Hop], target: str, held: str) -> error_pb2.Error:
    """The WOULD_DEADLOCK error: `target` is whom the call was for, `held` what it would wait for ("session s-1")."""
    shown = readable(path, target)
    return failure(
        error_pb2.WOULD_DEADLOCK,
        f"{target} would never answer: {held} is held by calls that wait for this one ({shown}); "
        "declare the agent reentrant, raise its max_concurrency or session_concurrency, or do not wait for the answer",
        details={"path": shown, "held": held},
    )


def readable(path: Iterable[Hop], target: str) -> str:
    """The path as people read it, the agents in order and then the target: `a/1 → b/2 → a`."""
    return ARROW.join([*(hop.agent_id for hop in path), target or "?"])


def _hop_limit(path: Sequence[Hop], target: str, max_hops: int) -> error_pb2.Error:
    shown = readable(path, target)
    return failure(
        error_pb2.HOP_LIMIT,
        f"the call went through {len(path)} agents and max_hops is {max_hops}: {shown}; "
        "shorten the chain, or raise max_hops on the node if it is meant to be this deep",
        details={"path": shown, "max_hops": str(max_hops)},
    )


def _loop_detected(path: Sequence[Hop], target: str, dedup_key: str, repeats: int) -> error_pb2.Error:
    shown = readable(path, target)
    return failure(
        error_pb2.LOOP_DETECTED,
        f"the same step was sent to {target} {repeats} times before in this call: {shown}; "
        "give each round a dedup_key of its own if it is meant to repeat",
        details={"path": shown, "dedup_key": dedup_key, "repeats": str(repeats)},
    )
