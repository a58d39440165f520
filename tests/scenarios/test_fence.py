"""No session has two owners: a home that may have lost its registrations serves none, until it knows better."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from reach.core import fence
from tests.support.cores import Cores, NodeCore


class Lease:
    """A node's lease, as the test says."""

    def __init__(self, valid_until: float) -> None:
        self.valid_until = valid_until


def fenced(core: NodeCore, valid_s: float) -> Lease:
    lease = Lease(core.state.now + valid_s)
    with core.step() as state:
        fence.use(state, lease)
    return lease


def test_with_a_good_lease_sessions_are_served() -> None:
    cores = Cores(1)
    (core,) = cores.nodes
    fenced(core, 20.0)
    agent, caller = core.agent("chat/1"), core.caller()
    message = caller.request(agent_type="chat", session_id="s")
    agent.answer(message)
    assert not caller.reply_to(message).HasField("error")


def test_a_node_that_is_alone_serves_them_without_the_store() -> None:
    cores = Cores(1)
    (core,) = cores.nodes
    fenced(core, -1.0)
    agent, caller = core.agent("chat/1"), core.caller()
    message = caller.request(agent_type="chat", session_id="s")
    agent.answer(message)
    assert not caller.reply_to(message).HasField("error")


def test_without_the_store_others_must_say_that_they_honour_its_pins() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    fenced(home, 3.0)
    fenced(other, 60.0)
    agent, caller = home.agent("chat/1"), home.caller()
    cores.advance(6.0)
    message = caller.request(agent_type="chat", session_id="s")
    agent.answer(message)
    assert not caller.reply_to(message).HasField("error")


def test_cut_from_store_and_nodes_it_serves_no_session_and_cancels_the_running_turn() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    fenced(home, 3.0)
    fenced(other, 60.0)
    agent, caller = home.agent("chat/1"), home.caller()
    running = caller.request(agent_type="chat", session_id="s", timeout_ms=60_000)
    cores.cut(home, other)
    cores.advance(8.0)
    error = caller.error_of(running)
    assert error.code == codes.REGISTRY_UNAVAILABLE and error.may_have_executed
    assert [cancel.correlation_id for cancel in agent.cancels] == [running]
    later = caller.request(agent_type="chat", session_id="s")
    assert caller.error_of(later).code == codes.REGISTRY_UNAVAILABLE
    plain = caller.request(agent_type="chat")
    agent.answer(plain)
    assert not caller.reply_to(plain).HasField("error")


def test_after_a_break_the_pin_is_read_again_before_the_next_message() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    lease = fenced(home, 3.0)
    fenced(other, 60.0)
    agent, caller = home.agent("chat/1"), home.caller()
    first = caller.request(agent_type="chat", session_id="s")
    agent.answer(first)
    cores.cut(home, other)
    cores.advance(8.0)
    lease.valid_until = home.state.now + 60.0
    cores.link(home, other)
    key = ("default", "production", "chat", "s")
    home.holds_pins = True
    message = caller.request(agent_type="chat", session_id="s")
    assert not agent.has(message) and home.held, "the store is asked first"
    home.answer_store()
    cores.pump()
    assert agent.has(message) and home.state.lanes[key].verified_at >= home.state.fence.broken_at


def test_when_a_session_may_be_taken_from_an_owner_that_cannot_be_seen() -> None:
    cores = Cores(2)
    one, two = cores.nodes
    state = one.state
    assert fence.may_void(state, "n0", 0.0), "its own"
    assert fence.may_void(state, "n1", 0.0), "the home is there and has let go of it"
    cores.cut(one, two)
    assert not fence.may_void(state, "n1", 60.0), "the home may believe a word that is six seconds old"
    cores.advance(6.1)
    assert not fence.may_void(state, "n1", 9.9)
    assert fence.may_void(state, "n1", 10.0)
    state.nodes["n1"].dead = True
    assert fence.may_void(state, "n1", 0.0), "its process is gone"
