"""Plays: every process is told where the other nodes are, when it comes, as long as it stays, and when it must go."""

from __future__ import annotations

from agentreach.wire.limits import PEERS_MAX
from reach.core import drains, nodes
from tests.support.core import CoreMesh, Process
from tests.support.cores import Cores

TWO = ("10.0.0.2:7070", "10.0.0.3:7070")


def _acked(process: Process) -> list[str]:
    process.signals.clear()
    process.beat()
    (ack,) = [signal.heartbeat_ack for signal in process.got_signals("heartbeat_ack")]
    return list(ack.peers)


def test_welcome_heartbeat_and_drain_name_the_other_nodes_as_they_are_then() -> None:
    core = CoreMesh()
    early = core.agent("echo/1")
    assert early.welcome is not None and not early.welcome.peers
    core.state.peer_addresses = TWO
    late = core.agent("echo/2")
    assert late.welcome is not None and tuple(late.welcome.peers) == TWO
    assert tuple(_acked(early)) == TWO, "a node that came later is known to who was there before"
    core.state.peer_addresses = TWO[:1]
    assert tuple(_acked(early)) == TWO[:1]
    with core.step() as state:
        drains.node(state, 5.0)
    core.pump()
    assert tuple(early.got_signals("drain")[0].drain.peers) == TWO[:1]


def test_of_a_large_mesh_each_process_is_told_a_bounded_number_and_not_all_the_same() -> None:
    core = CoreMesh()
    everybody = core.state.peer_addresses = tuple(f"10.0.0.{n}:7070" for n in range(3 * PEERS_MAX))
    process = core.agent()
    told = [tuple(_acked(process)) for _ in range(40)]
    assert {len(set(each)) for each in told} == {PEERS_MAX}
    assert set().union(*told) == set(everybody)


def test_nobody_is_told_of_a_node_that_is_leaving() -> None:
    cores = Cores(3)
    one, two, three = cores.nodes
    one.state.peer_addresses = tuple(nodes.of(one.state, core.node_id).address for core in (two, three))
    agent = one.agent("echo/1")
    with two.step() as state:
        drains.node(state, 5.0)
    cores.pump()
    assert _acked(agent) == [nodes.of(one.state, three.node_id).address]


def test_who_was_told_of_nowhere_to_go_to_is_told_of_a_node_that_comes_while_this_one_leaves() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    agent = home.agent("echo/1")
    cores.kill(other)
    with home.step() as state:
        drains.node(state, 5.0)
    cores.pump()
    assert [list(signal.drain.peers) for signal in agent.got_signals("drain")] == [[]]
    home.state.peer_addresses = TWO[:1]
    cores.start_again(other)
    *_, last = agent.got_signals("drain")
    assert tuple(last.drain.peers) == TWO[:1] and 0 < last.drain.deadline_ms <= 5000
