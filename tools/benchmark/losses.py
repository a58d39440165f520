"""The rows in which a node of several is killed: when its agents are back, who notices, what is lost or runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from . import cluster
from .cluster import Cluster
from .processes import Child, Failed, Used, raise_file_limit
from .rows import Scale

KILLS = 3
"""Times that a node is killed, on nodes started anew."""
AGENTS = 10
"""At the node that is killed, each on a connection of its own."""
PAUSE_S = 0.1
"""What their handlers take, so that some requests are under way at the kill."""
RATE = 40
"""Requests a second of each of three callers, one a node: half of them name an agent, half of them the type, of which
the other nodes have instances too. They are not idempotent."""
_KILL_AFTER_S = 1.0
_WATCH_S = 12.0
_SETTLE_S = 60.0

CROWD_AGENTS = 2_000
CROWD_KILLS = 3
_CROWD_HOLDERS = 4
"""Processes that hold them. They stand for processes of other machines: they take what the nodes and the pair leave."""
_CROWD_S = 15.0
_PAIR_RATE = 100
_BEFORE_S = 10.0
_ATTACH_S = 300.0
_LOOK_S = 1.0  # a page of metrics takes a node a millisecond
_OK = "OK"


async def node_killed(plan: Scale, tree: Path | None) -> dict[str, Any]:
    """Seconds from SIGKILL of a node that does not lead until its agents can be reached again. Raises `Failed`."""
    return _worst([await _kill(tree, leads=False) for _ in range(KILLS if plan.fresh else 1)])


async def leader(plan: Scale, tree: Path | None) -> dict[str, Any]:
    """The same for the node that leads; and when the first new agents are registered. Raises `Failed`."""
    return _worst([await _kill(tree, leads=True) for _ in range(KILLS if plan.fresh else 1)])


def _worst(kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"kills": list(kills)}
    for name in ("reachable_s", "registered_s"):
        found[name] = max(one[name] for one in kills)
    for name in ("requests", "failed", "twice"):
        found[name] = sum(one[name] for one in kills)
    return found


async def _kill(tree: Path | None, *, leads: bool) -> dict[str, Any]:
    async with cluster.running(3, tree) as mesh:
        leading = await mesh.leader()
        victim = leading if leads else (leading + 1) % 3
        others = [place for place in range(3) if place != victim]
        names = [f"back/{number}" for number in range(AGENTS)]
        urls = [mesh.urls_from(place, victim) for place in others]
        own = {"own_link": True, "pause_s": PAUSE_S}
        fleets = [
            await mesh.worker("agents", "agents", cluster.spread(names, [mesh.urls_from(victim)], **own)),
            await mesh.worker("other agents", "agents", cluster.spread(["back/one", "back/two"], urls, **own)),
        ]
        newcomers = [await mesh.worker("newcomers", "agents", cluster.spread([], [url], own_link=True)) for url in urls]
        callers = [await mesh.worker("caller", "caller", {"url": mesh.urls_from(place)}) for place in (victim, *others)]
        targets = [target for name in names for target in ({"agent_id": name}, {"agent_type": "back"})]
        load = {"do": "steady", "targets": targets, "rate": RATE, "idempotent": False,
                "seconds": _KILL_AFTER_S + _WATCH_S, "timeout": 20.0}  # fmt: skip
        asked = [
            asyncio.ensure_future(caller.ask({**load, "whose": str(number)}, load["seconds"] + _SETTLE_S))
            for number, caller in enumerate(callers)
        ]
        await asyncio.sleep(_KILL_AFTER_S)
        killed_at = time.monotonic()
        os.kill(mesh.nodes[victim].pid, signal.SIGKILL)
        told = await asyncio.gather(*(
            newcomer.ask({"do": "attach", "names": [f"new/{number}"]}, _SETTLE_S)
            for number, newcomer in enumerate(newcomers)
        ))  # fmt: skip
        requests = [(await each)["requests"] for each in asked]
        runs: Counter[str] = Counter()
        for fleet in fleets:
            runs.update((await fleet.ask({"do": "count"}, _SETTLE_S))["runs"])
    every = [(target % 2 == 0, outcome) for found in requests for _, _, outcome, target in found]
    failed = {named: Counter(outcome for by_name, outcome in every if by_name is named and outcome != _OK)
              for named in (True, False)}  # fmt: skip
    return {
        "reachable_s": max(reachable(found, killed_at) for found in requests[1:]) - killed_at,
        "registered_s": max(at for each in told for at in each["attached"]) - killed_at,
        "requests": sum(not by_name for by_name, _ in every),
        "failed": failed[False].total(),
        "failed_with": dict(failed[False]),
        "named_failed_with": dict(failed[True]),
        "twice": sum(1 for count in runs.values() if count > 1),
    }


def reachable(requests: Sequence[Sequence[Any]], since: float) -> float:
    """When each agent had answered a request to it that was made after that. Raises `Failed` if one never did."""
    first: dict[int, float] = {}
    for due, done, outcome, target in requests:
        if outcome == _OK and due >= since and target % 2 == 0:
            first[target] = min(first.get(target, done), done)
    if len(first) < AGENTS:
        raise Failed(f"{AGENTS - len(first)} of {AGENTS} agents were not reached again after the kill")
    return max(first.values())


async def crowd(plan: Scale, tree: Path | None) -> dict[str, Any]:
    """Of three nodes full of agents one is killed: when all are attached again, and what a pair at the others feels.

    Up to three times, for one pause of the machine is a p99: the slowest return, and the middle one of what was felt.
    """
    found = [await _crowd_once(plan, tree) for _ in range(min(plan.rounds, CROWD_KILLS) if plan.fresh else 1)]
    felt = sorted(found, key=lambda one: float(one["ratio"]))
    return felt[len(felt) // 2] | {
        "back_s": max(one["back_s"] for one in found),
        "failed": sum(one["failed"] for one in found),
        "ratios": [one["ratio"] for one in felt],
    }


async def _crowd_once(plan: Scale, tree: Path | None) -> dict[str, Any]:
    files = raise_file_limit()
    count = min(CROWD_AGENTS if plan.fresh else CROWD_AGENTS // 10, files - 200)
    async with cluster.running(3, tree) as mesh:
        urls = [mesh.urls_from(place) for place in range(3)]
        share = count // _CROWD_HOLDERS
        for number in range(_CROWD_HOLDERS):
            settings = {"urls": urls, "first": number * share, "count": share, "gives_way": True}
            await mesh.worker("crowd", "idle", settings, _ATTACH_S)
        await mesh.worker("agent", "agents", cluster.spread(["pair/one"], [mesh.addresses[2]]))
        caller = await mesh.worker("caller", "caller", {"url": mesh.addresses[1]})
        attached = [await mesh.agents(place) for place in range(3)]
        if sum(attached) != share * _CROWD_HOLDERS + 1:
            raise Failed(f"{sum(attached)} agents are attached of {share * _CROWD_HOLDERS + 1}")
        await _pair(caller, 2.0)
        calm = await _looked_at(mesh, _pair(caller, _BEFORE_S))
        asked = asyncio.ensure_future(_pair(caller, _CROWD_S))
        used, killed_at = Used.now({}, mesh.pids(0)), time.monotonic()
        os.kill(mesh.nodes[0].pid, signal.SIGKILL)
        back_s = await _all_back(mesh, sum(attached), killed_at)
        others = Used.now({}, mesh.pids(0))
        stirred = [one for one in await asked if killed_at <= one[0] <= killed_at + max(back_s, 1.0)]
    before_ms, during_ms = _p99_ms(calm), _p99_ms(stirred)
    return {
        "agents": sum(attached) - 1,
        "lost": attached[0],
        "back_s": back_s,
        "before_ms": before_ms,
        "during_ms": during_ms,
        "ratio": during_ms / before_ms,
        "failed": sum(1 for _, _, outcome, _ in (*calm, *stirred) if outcome != _OK),
        "foreign_cpu": others.foreign(used, back_s) if used and others else None,
    }


async def _looked_at(mesh: Cluster, pair: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """What a pair feels while the nodes are asked as often as they will be during the return of the crowd."""
    asked = asyncio.ensure_future(pair)
    while not asked.done():
        for place in (1, 2):
            await mesh.agents(place)
        await asyncio.wait([asked], timeout=_LOOK_S)
    return await asked


async def _pair(caller: Child, seconds: float) -> list[Any]:
    command = {"do": "steady", "targets": [{"agent_id": "pair/one"}], "rate": _PAIR_RATE, "seconds": seconds}
    requests: list[Any] = (await caller.ask(command, seconds + _SETTLE_S))["requests"]
    return requests


def _p99_ms(requests: Sequence[Sequence[Any]]) -> float:
    latencies = sorted(done - due for due, done, *_ in requests)
    return float(latencies[int(0.99 * len(latencies))] * 1e3)


async def _all_back(mesh: Cluster, wanted: int, killed_at: float) -> float:
    """Seconds until the other nodes have all agents. Raises `Failed` after a minute."""
    while time.monotonic() - killed_at < _SETTLE_S:
        found = sum([await mesh.agents(place) for place in (1, 2)])
        if found >= wanted:
            return time.monotonic() - killed_at
        await asyncio.sleep(_LOOK_S)
    raise Failed(f"{found} agents of {wanted} are back after {_SETTLE_S:.0f} s")
