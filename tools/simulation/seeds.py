"""Running seeds: one, or many over several processes of the machine, and telling what came of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .ledger import Violation
from .world import World

EVENTS_TOLD = 25


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one seed."""

    seed: int
    digest: str
    steps: int
    asks: int
    runs: int
    outcomes: dict[str, int]
    faults: tuple[str, ...]
    took_s: float  # of processor time
    invariant: str = ""
    report: str = ""
    """Empty if all invariants held."""


def run_seed(seed: int, *, trace: bool = False, nodes: int | None = None) -> Found:
    """Live through one seed; a violation is told with the last events of the message concerned.

    `nodes` overrides how many nodes it draws.
    """
    began = time.process_time()
    world = World(seed, trace=trace, nodes=nodes)
    try:
        world.run()
    except Violation as violation:
        report = _told(world, violation, _followed(seed, violation, nodes))
        return _found(world, began, violation.invariant, report)
    return _found(world, began)


def _followed(seed: int, violation: Violation, nodes: int | None) -> list[str]:
    """The events of the message concerned: the seed is run again with an eye on it."""
    if violation.group is None:
        return []
    world = World(seed, follow=violation.group, nodes=nodes)
    try:
        world.run()
    except Violation:
        return world.ledger.of_followed
    return ["(it did not come out again: the simulation is not deterministic)"]


def _told(world: World, violation: Violation, followed: list[str]) -> str:
    events = followed[-EVENTS_TOLD:] or list(world.ledger.last)[-EVENTS_TOLD:]
    return "\n".join(
        (
            f"seed {world.seed}, step {world.ledger.steps}, {violation.at:.4f} s: {violation.invariant}",
            f"  invariant: {violation.statement}",
            f"  violated:  {violation.detail}",
            f"  faults:    {', '.join(world.fault_names) or 'none'}; settings {world.node_flags}",
            "  last events of the message:" if followed else "  last events:",
            *(f"    {line}" for line in events),
            f"  replay: python tools/sim.py --seed {world.seed} --nodes {world.sharing} --trace",
        )
    )


def _found(world: World, began: float, invariant: str = "", report: str = "") -> Found:
    outcomes: dict[str, int] = {}
    for ask in world.ledger.asks.values():
        name = ask.outcome or "(its process died)"
        outcomes[name] = outcomes.get(name, 0) + 1
    return Found(
        world.seed,
        world.ledger.digest,
        world.ledger.steps,
        len(world.ledger.asks),
        len(world.ledger.all_runs),
        outcomes,
        tuple(world.fault_names),
        time.process_time() - began,
        invariant,
        report,
    )
