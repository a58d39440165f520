"""What one routing decision costs: find the pool, choose, reserve (and give the slot back, outside the measure).

Prints a table in microseconds. The bounds (behaviour.md §2): at most 20 µs with 100 types of 100 and with 10,000 of
one type, and at most 1.5 times as much with 10,000 agents as with 10.

    python tools/bench_decision.py
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from time import perf_counter_ns

from agentreach.v1.envelope_pb2 import RoutingPolicy, Target
from agentreach.v1.registry_pb2 import HEALTHY, AgentRecord
from reach.core.agents import Agent
from reach.core.balance import choose
from reach.core.directory import Directory

BOUND_US = 20.0
GROWTH_MAX = 1.5
ROUNDS = 20
DECISIONS = 1_000  # in a round; the best round counts, so that other work on the machine does not


def population(types: int, instances: int, max_concurrency: int = 0) -> Directory:
    """A directory of `types` types with `instances` each, all healthy, some of them busy."""
    directory = Directory()
    rng = random.Random(1)
    for agent_type in range(types):
        for instance in range(instances):
            record = AgentRecord(
                agent_id=f"type{agent_type}/{instance}",
                tenant="t",
                capabilities=["ner", f"skill{agent_type}"],
                version="2.1.0",
                status=HEALTHY,
                max_concurrency=max_concurrency,
            )
            agent = Agent.from_record(record)
            agent.in_flight = 0 if max_concurrency else rng.randrange(1, 8)
            agent.load = rng.random()
            directory.add(agent)
    return directory


def decision_us(directory: Directory, targets: list[Target], policy: int) -> float:
    """Microseconds of pool_for + choose + reserve; the best of the rounds."""
    rng = random.Random(2)
    for target in targets:
        choose(directory.pool_for(target, "t", ""), policy, now=0.0, rng=rng, hash_key="warm")
    keys = [f"key{n}" for n in range(DECISIONS)]
    best = float("inf")
    for _ in range(ROUNDS):
        spent = 0
        for number in range(DECISIONS):
            target = targets[number % len(targets)]
            begin = perf_counter_ns()
            agent = choose(directory.pool_for(target, "t", ""), policy, now=1.0, rng=rng, hash_key=keys[number])
            if agent is not None:
                directory.reserve(agent)
            spent += perf_counter_ns() - begin
            if agent is not None:
                directory.release(agent)
        best = min(best, spent / DECISIONS / 1000)
    return best


def reserve_us(directory: Directory) -> float:
    """Microseconds of reserve and release together, where no tier changes."""
    agent = next(iter(directory))
    best = float("inf")
    for _ in range(ROUNDS):
        begin = perf_counter_ns()
        for _ in range(DECISIONS):
            directory.reserve(agent)
            directory.release(agent)
        best = min(best, (perf_counter_ns() - begin) / DECISIONS / 1000)
    return best


def rows(policies: Iterable[int]) -> list[tuple[str, list[float]]]:
    """For each policy the costs with 10, 100, 10,000 of one type, and 100 types of 100."""
    sizes = [population(1, size) for size in (10, 100, 10_000)]
    many = population(100, 100)
    one_type = [Target(agent_type="type0", capabilities=["ner"], version=">=2.1,<3")]
    each_type = [Target(agent_type=f"type{n}", capabilities=["ner"]) for n in range(100)]
    table = []
    for policy in policies:
        costs = [decision_us(directory, one_type, policy) for directory in sizes]
        costs.append(decision_us(many, each_type, policy))
        table.append((RoutingPolicy.Name(RoutingPolicy.ValueType(policy)), costs))
    return table


def main() -> int:
    """Print the table; exit 1 if the default policy is out of its bounds."""
    table = rows(value for value in RoutingPolicy.values() if value)
    print(f"{'µs a decision':<18}{'10':>9}{'100':>9}{'10,000':>9}{'100 x 100':>11}{'growth':>9}")
    for name, costs in table:
        print(f"{name:<18}" + "".join(f"{cost:>9.2f}" for cost in costs[:3]) + f"{costs[3]:>11.2f}", end="")
        print(f"{costs[2] / costs[0]:>8.2f}x")
    slots = decision_us(population(1, 10_000, max_concurrency=1), [Target(agent_type="type0")], 0)
    print(f"one slot each, 10,000 of a type (each decision moves a tier): {slots:.2f} µs")
    print(f"reserve + release without a change of tier: {reserve_us(population(1, 10)):.3f} µs")
    costs = dict(table)["LEAST_ACTIVE"]
    return 0 if max(costs) <= BOUND_US and costs[2] <= GROWTH_MAX * costs[0] else 1


if __name__ == "__main__":
    sys.exit(main())
