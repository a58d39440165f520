"""A node with more agents than its part lets idle ones go to nodes that have less (failures G4)."""

from __future__ import annotations

from tests.support.core import Process
from tests.support.cores import Cores, NodeCore


def counts(cores: Cores) -> list[int]:
    return [len(core.state.directory) - core.state.remote_agents for core in cores.nodes]


def follow(cores: Cores, processes: list[Process]) -> None:
    """Let every process that was asked to go do so, to the first node that it was told of."""
    homes = {f"{core.node_id}:1": core for core in cores.nodes}
    for number, process in enumerate(processes):
        orders = process.got_signals("drain")
        if orders:
            processes[number] = moved(process, homes[orders[-1].drain.peers[0]])


def moved(process: Process, to: NodeCore) -> Process:
    again = to.process(process.name)
    again.incarnation = process.incarnation
    again.forget()
    again.connect(*process.agents.values())
    process.connected = False
    return again


def test_after_a_restart_a_node_gets_its_part_again() -> None:
    cores = Cores(3)
    first, second, _ = cores.nodes
    processes = [core.agent(f"echo/{core.node_id}-{number}") for core in (first, second) for number in range(15)]
    assert counts(cores) == [15, 15, 0]
    for _ in range(24):  # two minutes
        cores.advance(5.0)
        follow(cores, processes)
    assert max(counts(cores)) <= 0.45 * 30 and sum(counts(cores)) == 30
    settled = counts(cores)
    cores.advance(30.0)
    follow(cores, processes)
    assert counts(cores) == settled, "nobody moves for ever"


def test_who_is_at_work_waits_for_answers_or_listens_is_left_where_it_is() -> None:
    cores = Cores(2)
    first, _ = cores.nodes
    busy = [first.agent(f"echo/{number}") for number in range(6)]
    caller = first.caller()
    for number in range(2):
        caller.request(agent_id=f"echo/{number}", timeout_ms=600_000)
    for number in (2, 3):
        busy[number].subscribe("news")
    for number in (4, 5):
        busy[number].request(agent_id="echo/0", timeout_ms=600_000)
    cores.advance(60.0)
    assert not any(process.got_signals("drain") for process in busy)


def test_a_small_difference_moves_nobody() -> None:
    cores = Cores(3)
    processes = [cores.nodes[place].agent(f"echo/{number}") for number, place in enumerate((0, 0, 0, 1, 1, 2))]
    cores.advance(60.0)
    assert not any(process.got_signals("drain") for process in processes)


def test_nobody_is_asked_while_nodes_come_and_go() -> None:
    cores = Cores(3)
    first, _, third = cores.nodes
    processes = [first.agent(f"echo/{number}") for number in range(9)]
    for _ in range(8):
        cores.advance(5.0)
        cores.cut(first, third)
        cores.link(first, third)
    assert not any(process.got_signals("drain") for process in processes)
