"""Plays: an operator drains an agent, a node leaves, and nothing is lost by it."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import DRAINING, HEALTHY
from reach.core import drains
from tests.support.core import CoreMesh, Process, record


def _drain(core: CoreMesh, agent_id: str, limit_s: float = 55.0, reason: str = "") -> None:
    with core.step() as state:
        drains.agent(state, core.attachment(agent_id), limit_s, reason)
    core.pump()


def _gone(core: CoreMesh, agent_id: str) -> bool:
    return core.state.directory.get("default", "production", agent_id) is None


def test_a_drained_agent_gets_nothing_new_ends_what_it_has_and_is_detached() -> None:
    core = CoreMesh()
    one, caller = core.agent("echo/1"), core.caller()
    running = caller.request(timeout_ms=60_000)
    two = core.agent("echo/2")
    _drain(core, "echo/1", reason="new version")
    assert core.status("echo/1") == DRAINING
    order = one.got_signals("drain")[0].drain
    assert (order.agent_id, order.env, order.deadline_ms) == ("echo/1", "production", 55_000)
    assert order.reason == "new version"
    for _ in range(5):
        two.answer(caller.request())
    core.advance(10)
    assert not _gone(core, "echo/1"), "it still works on one"
    one.answer(running)
    assert caller.text_of(running) == "ok"
    core.advance(1)
    assert _gone(core, "echo/1")
    detached = one.got_signals("detached")[0].detached
    assert (detached.agent_id, detached.code) == ("echo/1", frames.Goodbye.DRAINED)
    assert one.connected, "only the agent goes: its link may carry others"
    core.assert_settled()


def test_a_drained_agent_that_calls_itself_healthy_stays_drained_also_after_a_cut() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    running = caller.request(timeout_ms=60_000)
    _drain(core, "echo/1")
    agent.say(HEALTHY)
    assert core.status("echo/1") == DRAINING
    agent.cut()
    agent.restart_numbering()
    agent.connect()
    assert core.status("echo/1") == DRAINING
    assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE
    agent.answer(running)
    core.advance(1)
    assert _gone(core, "echo/1")
    core.assert_settled()


def test_what_outlives_the_time_of_a_drain_is_told_to_be_lost_after_the_grace_of_a_cancel() -> None:
    core = CoreMesh(cancel_grace_s=5.0)
    agent, caller = core.agent(), core.caller()
    running = caller.request(timeout_ms=600_000)
    _drain(core, "echo/1", limit_s=20)
    core.advance(24)
    assert not caller.replies_to(running)
    core.advance(2)
    error = caller.error_of(running)
    assert error.code == codes.AGENT_LOST and error.may_have_executed
    assert _gone(core, "echo/1")
    agent.answer(running)  # too late: nobody waits
    core.assert_settled()


def test_a_second_order_gives_a_drain_another_time() -> None:
    core = CoreMesh(cancel_grace_s=5.0)
    agent, caller = core.agent(), core.caller()
    running = caller.request(timeout_ms=600_000)
    _drain(core, "echo/1", limit_s=10)
    _drain(core, "echo/1", limit_s=60)
    core.advance(30)
    assert not _gone(core, "echo/1")
    agent.answer(running)
    core.advance(1)
    assert _gone(core, "echo/1")
    core.assert_settled()


def test_an_idle_agent_that_is_drained_is_gone_at_once() -> None:
    core = CoreMesh()
    core.agent()
    _drain(core, "echo/1")
    core.advance(1)
    assert _gone(core, "echo/1")
    core.assert_settled()


def test_an_agent_that_leaves_by_itself_while_it_is_drained_is_not_detached_twice() -> None:
    core = CoreMesh()
    agent = core.agent()
    _drain(core, "echo/1")
    agent.signal(Signal(detach=frames.Detach(agent_id="echo/1", reason="drained")))
    core.advance(5)
    assert [each.detached.code for each in agent.got_signals("detached")] == [frames.Goodbye.NORMAL]
    core.assert_settled()


def test_a_successor_under_the_same_name_is_not_drained() -> None:
    core = CoreMesh()
    core.agent()
    _drain(core, "echo/1")
    successor, caller = core.agent("echo/1"), core.caller()
    core.advance(5)
    assert core.status("echo/1") == HEALTHY
    successor.answer(caller.request())
    core.assert_settled()


def test_an_agent_that_says_at_its_attach_that_it_drains_gets_nothing() -> None:
    """It was drained at a node that is gone, and finishes there what the node's successor does not know."""
    core = CoreMesh()
    agent, caller = core.process("p", record("echo/1", status=DRAINING)), core.caller()
    assert core.status("echo/1") == DRAINING
    assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE
    assert not agent.requests
    core.assert_settled()


class TestSessions:
    """Conversations of an agent that drains."""

    def conversation(self, core: CoreMesh, caller: Process, agents: list[Process]) -> Process:
        """Begin a session; who holds it."""
        first = caller.request(session_id="s")
        owner = next(agent for agent in agents if agent.has(first))
        owner.answer(first)
        return owner

    def test_an_idle_one_goes_on_at_another_agent_and_says_that_the_state_is_lost(self) -> None:
        core = CoreMesh()
        agents = [core.agent("echo/1"), core.agent("echo/2")]
        caller = core.caller()
        owner = self.conversation(core, caller, agents)
        busy = caller.request(agent_id=next(iter(owner.agents)), timeout_ms=60_000)
        other = agents[0] if owner is agents[1] else agents[1]
        _drain(core, next(iter(owner.agents)))
        message = caller.request(session_id="s")
        other.answer(message)
        assert caller.reply_to(message).session_event == pb.LOST
        owner.answer(busy)
        core.advance(1)
        core.assert_settled()

    def test_a_running_turn_ends_first_and_what_waits_behind_it_keeps_its_order(self) -> None:
        core = CoreMesh()
        agents = [core.agent("echo/1"), core.agent("echo/2")]
        caller = core.caller()
        owner = self.conversation(core, caller, agents)
        other = agents[0] if owner is agents[1] else agents[1]
        turn = caller.request(session_id="s", timeout_ms=60_000)
        waiting = [caller.request(session_id="s", timeout_ms=60_000) for _ in range(3)]
        _drain(core, next(iter(owner.agents)))
        core.advance(5)
        assert owner.has(turn) and not any(agent.has(each) for agent in agents for each in waiting)
        owner.answer(turn)
        assert not caller.reply_to(turn).session_event
        for message in waiting:
            assert other.requests[-1].message_id == message
            other.answer(message)
        events = [caller.reply_to(message).session_event for message in waiting]
        assert events == [pb.LOST, 0, 0]
        core.advance(1)
        core.assert_settled()

    def test_a_strict_caller_is_told_at_once(self) -> None:
        core = CoreMesh()
        agents = [core.agent("echo/1"), core.agent("echo/2")]
        caller = core.caller()
        owner = self.conversation(core, caller, agents)
        running = caller.request(agent_id=next(iter(owner.agents)), timeout_ms=60_000)
        _drain(core, next(iter(owner.agents)))
        strict = caller.request(session_id="s", strict_session=True)
        assert caller.error_of(strict).code == codes.SESSION_LOST
        owner.answer(running)
        core.advance(1)
        core.assert_settled()

    def test_without_another_agent_they_wait_for_a_successor_as_long_as_the_owner_is_there(self) -> None:
        core = CoreMesh()
        owner, caller = core.agent("echo/1"), core.caller()
        self.conversation(core, caller, [owner])
        running = caller.request(agent_id="echo/1", timeout_ms=60_000)
        _drain(core, "echo/1")
        message = caller.request(session_id="s", timeout_ms=60_000)
        core.advance(5)
        assert not caller.replies_to(message) and not owner.has(message)
        successor = core.agent("echo/2")
        owner.answer(running)
        core.advance(1)
        successor.answer(message)
        assert caller.reply_to(message).session_event == pb.LOST
        core.assert_settled()


def _leave(core: CoreMesh, limit_s: float = 55.0) -> None:
    with core.step() as state:
        drains.node(state, limit_s)
    core.pump()


def test_a_node_that_leaves_tells_every_link_also_those_that_come_meanwhile() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    _leave(core, 30)
    for process in (agent, caller):
        order = process.got_signals("drain")[0].drain
        assert (order.agent_id, order.deadline_ms) == ("", 30_000)
        assert "leaving" in order.reason
    core.advance(10)
    late = core.caller("late")
    assert late.got_signals("drain")[0].drain.deadline_ms == 20_000
    caller.cut()
    caller.connect()
    assert len(caller.got_signals("drain")) == 1, "a link that goes on knows it"
    agent.cut()
    agent.restart_numbering()
    agent.connect()
    assert len(agent.got_signals("drain")) == 2
    core.assert_settled()


def test_a_node_that_leaves_takes_what_its_last_requests_need_and_nothing_else() -> None:
    core = CoreMesh()
    outer, inner, caller = core.agent("outer/1"), core.agent("inner/1"), core.caller()
    message = caller.request(agent_type="outer", timeout_ms=60_000)
    _leave(core)
    assert caller.error_of(caller.request(agent_type="inner")).code == codes.SHUTTING_DOWN
    nested = outer.call_from(message, agent_type="inner")
    inner.answer(nested, "for you")
    assert outer.text_of(nested) == "for you"
    outer.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()
