"""Found by reading the cluster's code as the failure: each of these failed before."""

from __future__ import annotations

from dataclasses import replace

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.frame_pb2 import Frame, Signal, StreamCredit
from reach.core import between, fence, nodes, once, remote
from reach.core.ports import ANYBODY
from tests.scenarios.test_fence import fenced
from tests.scenarios.test_sessions_between_nodes import KEY, ask, nodes_of
from tests.support.core import Process
from tests.support.cores import Cores, NodeCore
from tests.support.keepers import Keeper


def gone(core: NodeCore, other: NodeCore, agent_id: str = "") -> None:
    """The registry shows this node another one, and its agent, no more."""
    with core.step() as state:
        remote.node_gone(state, other.node_id)
        if agent_id:
            remote.agent_gone(state, "default", "production", agent_id, 1 << 60)


def test_a_process_that_brings_a_session_along_serves_it_only_if_the_store_says_so() -> None:
    cores = nodes_of(3)
    home, other, entry = cores.nodes
    former, caller = Keeper(home, "former"), entry.caller()
    first = ask(caller)
    former.handle_all()
    heir = Keeper(entry, "heir")
    key = (*KEY, "s")
    pin = home.pins[key]
    home.pins[key] = replace(
        pin, agent_id=heir.agent_id, incarnation=heir.process.incarnation, epoch=pin.epoch + 1000, home=entry.node_id
    )  # it was away for so long that another node gave its session away
    process = former.process
    home.processes.remove(process)
    process.cut()
    process.forget()
    process.core = former.core = other
    other.processes.append(process)
    process.connect(holds=[("s", caller.reply_to(first).epoch)])
    message = ask(other.caller("local"))
    cores.advance(1)
    assert not process.has(message) and heir.process.has(message)
    heir.handle_all()
    cores.assert_settled()


def test_a_home_that_a_newer_node_never_heard_of_serves_no_session_by_the_others_word() -> None:
    cores = nodes_of(3)
    home, other, newer = cores.nodes
    fenced(home, 3.0)
    fenced(other, 1e6)
    fenced(newer, 1e6)
    keeper, local = Keeper(home, "k"), home.caller()
    ask(local)
    keeper.handle_all()
    cores.advance(0.5)
    cores.cut(home, newer)
    gone(home, newer)  # the home's view is of before it came
    gone(newer, home, keeper.agent_id)
    gone(other, home, keeper.agent_id)
    cores.advance(30.0)
    assert home.node_id not in newer.state.nodes
    served = ask(local)
    keeper.handle_all()
    assert not local.reply_to(served).HasField("error"), "the only other node that there was honours its pins"
    record = NodeRecord(node_id=newer.node_id, address="n2:1")
    record.started_at.FromSeconds(1)
    with other.step() as state:
        remote.node_seen(state, record)
    heir, caller = Keeper(newer, "heir"), newer.caller()
    message = ask(caller)
    cores.advance(15.0)
    assert heir.process.has(message)
    heir.handle_all()
    refused = ask(local)
    assert not keeper.process.has(refused) and local.reply_to(refused).HasField("error")
    cores.assert_settled()


def test_a_home_that_nobody_knows_is_waited_for_like_one_that_is_cut_off() -> None:
    (core,) = nodes_of(1).nodes
    assert not fence.may_void(core.state, "unheard-of", 9.9)
    assert fence.may_void(core.state, "unheard-of", 10.0)


def silence(cores: Cores, one: NodeCore, other: NodeCore) -> None:
    """Nothing that they say from now on arrives; neither has noticed yet."""
    cores._cut.add(frozenset((one.node_id, other.node_id)))


def anew(cores: Cores, one: NodeCore, other: NodeCore) -> None:
    """Their link is numbered anew, though both are the processes that they were (a slow consumer, a broken frame)."""
    cores.cut(one, other)
    for core, peer in ((one, other), (other, one)):
        core.state.nodes[peer.node_id].token = b""
    cores.link(one, other)


def test_what_a_home_said_of_an_attempt_is_asked_for_again_when_the_link_begins_anew() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    silence(cores, entry, home)
    agent.cut()
    cores.advance(9.0)
    assert not home.state.nodes[entry.node_id].visiting, "it has said that the agent was lost; that was not heard"
    anew(cores, entry, home)
    cores.advance(12.0)
    assert caller.error_of(message).code == codes.AGENT_LOST
    cores.advance(60.0)
    cores.assert_settled()


def test_what_is_at_work_at_a_home_is_not_given_to_its_agent_twice_when_the_link_begins_anew() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message, streamed = caller.request(timeout_ms=60_000), caller.request(timeout_ms=60_000)
    agent.answer(streamed, "item 0", more=True)
    anew(cores, entry, home)
    agent.answer(message, "once")
    agent.answer(streamed, "item 1")
    assert len(agent.requests) == 2 and not home.state.stats.duplicates["joined"]
    assert caller.text_of(message) == "once"
    assert [reply.payload.text for reply in caller.replies_to(streamed)] == ["item 0", "item 1"]
    cores.assert_settled()


def test_a_producer_at_another_node_is_told_again_how_much_it_may_send_when_the_link_begins_anew() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = caller.request(timeout_ms=60_000)
    for number in range(60):
        agent.answer(message, f"item {number}", more=True)
    silence(cores, entry, home)
    more = StreamCredit(correlation_id=message, entry=caller.replies_to(message)[0].entry, up_to=200)
    caller.signal(Signal(stream_credit=more))
    cores.pump()
    anew(cores, entry, home)
    assert [signal.stream_credit.up_to for signal in agent.got_signals("stream_credit")] == [200]
    agent.answer(message, "end")
    cores.assert_settled()


def test_a_node_that_is_started_anew_before_its_link_was_seen_to_end_has_forgotten_all_that_it_owned() -> None:
    cores = Cores(3)
    owner, entry, home = cores.nodes
    agent, caller = home.agent("echo/1"), entry.caller()
    message = _owned_by(owner, entry, caller)
    assert agent.has(message) and entry.state.relayed
    owner.alive = False
    life = NodeCore(cores, owner.node_id, 77)
    with entry.step() as state:
        nodes.hello(state, nodes.hello_for(life.state, nodes.of(life.state, entry.node_id)))
    owners = [each.attachment.peer for each in entry.state.relayed.values() if each.attachment is not None]
    assert entry.state.nodes[owner.node_id] not in owners, "it is another node's now"


def _owned_by(owner: NodeCore, entry: NodeCore, caller: Process) -> str:
    """A message that was sent before, and that this node owns."""
    while True:
        envelope = entry.envelope(fresh=False, timeout_ms=60_000)
        found = once.owner(entry.state, (ANYBODY.tenant, ANYBODY.principal, "production", envelope.message_id))
        if found is not None and found.node_id == owner.node_id:
            break
    caller.send(envelope)
    entry.pump()
    return envelope.message_id


def test_a_node_whose_key_vanished_before_those_of_its_agents_is_forgotten_with_the_last_of_them() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    home.agent("echo/1")
    cores.kill(home)
    cores.advance(15.0)
    gone(entry, home)
    assert home.node_id in entry.state.nodes, "its agents may be there"
    gone(entry, home, "echo/1")
    assert home.node_id not in entry.state.nodes


def test_an_owner_that_leaves_and_has_not_said_so_yet_is_followed_by_another() -> None:
    cores = Cores(2)
    owner, entry = cores.nodes
    agent, caller = entry.agent("echo/1"), entry.caller()
    owner.state.draining = True
    message = _owned_by(owner, entry, caller)
    agent.answer(message, "here")
    assert caller.text_of(message) == "here"
    cores.assert_settled()


def test_words_that_waited_while_a_home_stood_still_let_it_serve_no_session() -> None:
    cores = nodes_of(2)
    home, other = cores.nodes
    fenced(home, 8.0)
    fenced(other, 1e6)
    keeper, local = Keeper(home, "k"), home.caller()
    ask(local)
    keeper.handle_all()
    cores.advance(3.0)
    there = other.state.nodes[home.node_id].link
    home.alive = False  # it is stopped, and what the other says waits at its socket
    cores.advance(10.0)
    home.alive = True
    home.state.now = cores.now
    frames = []
    while (data := there.next_frame(cores.now)) is not None:
        frames.append(Frame.FromString(data))
    assert any(signal.HasField("pins_honoured") for frame in frames for signal in frame.signals)
    with home.step() as state:
        for frame in frames:
            between.frame(state, state.nodes[other.node_id], frame, 0)
        assert not fence.holds(state)
    cores.advance(3.0)
    served = ask(local)
    keeper.handle_all()
    assert not local.reply_to(served).HasField("error"), "by now the other has heard of it, and says so anew"


def test_a_home_is_told_of_the_highest_that_waits_elsewhere_not_of_the_oldest() -> None:
    cores = Cores(2)
    entry, home = cores.nodes
    agent = home.agent("echo/1", max_concurrency=1)
    far, near = entry.caller("far"), home.caller("near")
    held = near.request(timeout_ms=60_000)
    cores.advance(1.0)
    older = near.request(timeout_ms=60_000)
    cores.advance(1.0)
    younger = far.request(timeout_ms=60_000)
    cores.advance(1.0)
    high = far.request(timeout_ms=60_000, priority=pb.HIGH)
    cores.advance(1.0)
    order = []
    for _ in range(4):
        (running,) = agent.running.values()
        order.append(running.message_id)
        agent.answer(running)
        cores.advance(1.0)
    assert order == [held, high, older, younger]
    cores.advance(3.0)
    cores.assert_settled()
