"""What is measured, and the bounds that a change must keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

ALONE, LOAD, STREAM = "alone", "load", "stream"
CROWD = 50
"""Agents of the row with many connections; each has one of its own."""
STREAMS, ITEMS = 8, 200
"""Streamed replies at once, and items in each."""
IDLE_BYTES_MAX = 60_000
DECISION_US_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, made of each system in turn.

    `bound` and `aim` are ratios to direct unary calls in the same row; where `less_is_better`, upper ones.
    """

    name: str
    title: str
    unit: str
    kind: str
    in_flight: int
    payload_bytes: int
    crowd: bool = False
    bound: float | None = None
    aim: float | None = None
    less_is_better: bool = False

    def holds(self, ratio: float) -> bool | None:
        """Whether a ratio keeps the bound; None where there is none."""
        if self.bound is None:
            return None
        return ratio <= self.bound if self.less_is_better else ratio >= self.bound


ROWS = (
    Row("alone", "alone, 256 B, p50", "ms", ALONE, 1, 256, bound=1.5, less_is_better=True),
    Row("c64", "64 in flight, 256 B", "requests/s", LOAD, 64, 256, bound=4.0, aim=7.0),
    Row("c512", "512 in flight, 256 B", "requests/s", LOAD, 512, 256, bound=7.0, aim=14.0),
    Row("c16_64k", "16 in flight, 64 KiB", "requests/s", LOAD, 16, 64 << 10, bound=0.4, aim=0.7),
    Row("fan50", f"256 in flight, {CROWD} agents on {CROWD} connections", "requests/s", LOAD, 256, 256, True, 1.2, 2.0),
    Row("stream", f"{STREAMS} streamed replies at once, 256 B items", "items/s", STREAM, STREAMS, 256),
)
ACROSS = tuple(row for row in ROWS if row.name in ("alone", "c64"))
"""What is measured with caller and agent at the same node and at two."""
MEMORY, DECISION = "memory", "decision"
"""The two rows that measure the node alone."""
RECOVERY, FROZEN, AMPLIFICATION = "recovery", "frozen", "amplification"
"""The rows with faults."""
FAULTS = (RECOVERY, FROZEN, AMPLIFICATION)
NODES, NODE_KILLED, LEADER, ETCD, CROWD_BACK = "nodes", "node_killed", "leader", "etcd", "crowd"
SEVERAL = (NODES, NODE_KILLED, LEADER, ETCD, CROWD_BACK)
"""The rows of several nodes on one etcd. They take minutes: a quick run has them only if they are named."""
SECURED = "secured"
"""The row with TLS and keys."""
NAMES = (*(row.name for row in ROWS), MEMORY, DECISION, *FAULTS, SECURED, *SEVERAL)
FROZEN_RATIO_MAX = 1.3
AMPLIFICATION_MAX = 1.25
OTHER_NODE_RATIOS = {"c64": 0.45, "alone": 2.0}
"""Caller and agent at different nodes over the same one: throughput at least, latency at most."""
REACHABLE_S_MAX = 5.0
REGISTERED_S_MAX = 7.0
"""The default election_ttl_s and 2 s."""
WRITES_PER_AGENT_MINUTE_MAX = 1.0
CROWD_BACK_S_MAX = 15.0
CROWD_RATIO_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How long it may take. `fresh` starts all processes anew in each round."""

    rounds: int
    seconds: float
    alone_requests: int
    warm_requests: int
    idle_agents: int
    fresh: bool


FULL = Scale(rounds=5, seconds=3.0, alone_requests=2_000, warm_requests=1_000, idle_agents=2_000, fresh=True)
QUICK = Scale(rounds=2, seconds=0.5, alone_requests=200, warm_requests=200, idle_agents=200, fresh=False)


def wanted(named: tuple[str, ...] | None, quick: bool) -> tuple[str, ...]:
    """The names of the rows to measure: those that were named, else all that the scale has time for."""
    return named or tuple(name for name in NAMES if not quick or name not in SEVERAL)


def scale(quick: bool, rounds: int | None, seconds: float | None) -> Scale:
    """The scale that the command line asks for."""
    chosen = QUICK if quick else FULL
    if seconds is not None:
        share = seconds / chosen.seconds
        requests = max(20, round(chosen.alone_requests * share))
        chosen = replace(
            chosen,
            seconds=seconds,
            alone_requests=requests,
            warm_requests=max(20, min(chosen.warm_requests, round(chosen.warm_requests * share))),
        )
    return replace(chosen, rounds=rounds) if rounds else chosen
