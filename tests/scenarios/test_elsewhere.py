"""Plays: every process is told where the other nodes are, when it comes, as long as it stays, and when it must go."""

from __future__ import annotations

from agentreach.wire.limits import PEERS_MAX
from reach.core import drains, elsewhere, nodes
from tests.support.core import CoreMesh, Process
from tests.support.cores import Cores

TWO = ("10.0.0.2:7070", "10.0.0.3:7070")


def _acked(process: Process) -> list[str]:
    process.signals.clear()
    process.beat()
    (ack,) = [signal.heartbeat_ack for signal in process.got_signals("heartbeat_ack")]
    return list(ack.peers)


def _come(core: CoreMesh, addresses: tuple[str, ...]) -> None:
    """These are the other nodes from now on."""
    with core.step() as state:
        state.peer_addresses = addresses
        elsewhere.node_came(state)
    core.pump()


def _told(process: Process) -> list[tuple[str, ...]]:
    """What it was told without having asked, since the last time."""
    told = [tuple(signal.peers.addresses) for signal in process.got_signals("peers")]
    process.signals.clear()
    return told


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


def test_who_knows_of_nobody_is_told_at_once_of_who_comes_and_nobody_else_is() -> None:
    """The node may be killed before the next heartbeat."""
    core = CoreMesh()
    early = core.agent("echo/1")
    _come(core, TWO[:1])
    assert _told(early) == [TWO[:1]]
    late = core.agent("echo/2")
    _come(core, TWO)
    assert _told(early) == _told(late) == [], "they know where to go, and the heartbeat tells the rest"


def test_who_was_told_by_a_heartbeat_is_not_told_again() -> None:
    core = CoreMesh()
    agent = core.agent()
    core.state.peer_addresses = TWO
    assert _acked(agent) == list(TWO)
    _come(core, TWO)
    assert _told(agent) == []


def test_it_is_sent_at_once_and_not_with_whatever_comes_next() -> None:
    core = CoreMesh()
    agent = core.agent()
    with core.step() as state:
        state.peer_addresses = TWO
        elsewhere.node_came(state)
        assert state.woken == {agent.peer}


def test_who_knows_of_nobody_who_is_still_there_is_told_as_well() -> None:
    core = CoreMesh()
    _come(core, TWO[:1])
    agent = core.agent("echo/1")
    assert agent.welcome is not None and tuple(agent.welcome.peers) == TWO[:1]
    _come(core, ())
    assert _acked(agent) == [] and _told(agent) == []
    _come(core, TWO[:1])
    assert _told(agent) == [], "it has kept the address: it was told of no other since"
    _come(core, TWO[1:])
    assert _told(agent) == [TWO[1:]]
    _come(core, ())
    agent.cut()
    agent.connect()
    _come(core, TWO[1:])
    assert _told(agent) == [TWO[1:]], "a welcome without addresses says that there is nobody"


def test_who_is_not_linked_when_a_node_comes_is_told_with_the_welcome() -> None:
    core = CoreMesh()
    agent = core.agent("echo/1")
    agent.cut()
    _come(core, TWO)
    agent.connect()
    core.pump()
    assert agent.welcome is not None and agent.welcome.resumed and tuple(agent.welcome.peers) == TWO
    _come(core, TWO[1:])
    assert _told(agent) == []


def test_of_a_large_mesh_it_is_told_a_bounded_number_at_once_too() -> None:
    core = CoreMesh()
    agent = core.agent()
    _come(core, tuple(f"10.0.0.{n}:7070" for n in range(3 * PEERS_MAX)))
    assert [len(set(told)) for told in _told(agent)] == [PEERS_MAX]
    _come(core, core.state.peer_addresses[1:])
    assert _told(agent) == []


def test_a_node_that_left_and_is_linked_again_is_told_to_who_came_while_it_was_leaving() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    address = nodes.of(home.state, other.node_id).address
    home.state.peer_addresses = (address,)
    with other.step() as state:
        drains.node(state, 5.0)
    cores.pump()
    agent = home.agent("echo/1")
    assert agent.welcome is not None and not agent.welcome.peers
    cores.kill(other)
    assert _told(agent) == []
    cores.start_again(other)
    assert _told(agent) == [(address,)]
