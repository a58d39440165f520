"""Plays: three verdicts, kept apart: link dead, handlers stuck, busy."""

from __future__ import annotations

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.registry_pb2 import DEGRADED, HEALTHY, STARTING, UNREACHABLE
from reach.core.ports import Identity
from tests.support.core import CoreMesh, Process, record


def _starting(core: CoreMesh, *, answers: bool, ready: bool = True) -> Process:
    process = Process(core, "p", Identity(), "")
    process.answers_probes, process.ready = answers, ready
    core.processes.append(process)
    process.connect(record("echo/1"))
    return process


def test_an_agent_is_starting_until_a_probe_succeeds() -> None:
    core = CoreMesh()
    agent, caller = _starting(core, answers=False), core.caller()
    assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE
    core.advance(30)
    assert core.status("echo/1") == STARTING  # however often it is asked in vain
    agent.answers_probes = True
    core.advance(6)
    assert core.status("echo/1") == HEALTHY
    agent.answer(caller.request())
    core.assert_settled()


def test_an_agent_that_says_it_is_not_ready_is_asked_again() -> None:
    core = CoreMesh()
    agent = _starting(core, answers=True, ready=False)
    core.advance(12)
    assert core.status("echo/1") == STARTING
    agent.ready = True
    core.advance(12)
    assert core.status("echo/1") == HEALTHY
    attachment = core.attachment("echo/1")
    assert attachment.agent.warm_since >= core.state.now - 12


def test_a_change_of_status_is_logged_by_its_name() -> None:
    core = CoreMesh()
    _starting(core, answers=True)
    core.advance(6)
    assert [line.fields["was"] for line in core.logged("agent status")] == ["STARTING"]
    assert [line.fields["status"] for line in core.logged("agent status")] == ["HEALTHY"]


def test_one_missed_probe_is_degraded_two_are_unreachable_and_an_answer_heals() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=300_000)
    agent.answers_probes = False
    seen: list[int] = []
    for _ in range(25):
        core.advance(1)
        if not seen or seen[-1] != core.status("echo/1"):
            seen.append(core.status("echo/1"))
    assert seen == [HEALTHY, DEGRADED, UNREACHABLE]
    agent.answers_probes = True
    core.advance(6)
    assert core.status("echo/1") == HEALTHY
    agent.answer(message)
    core.assert_settled()


def test_a_degraded_agent_is_used_only_when_no_healthy_one_is_left() -> None:
    core = CoreMesh()
    weak, strong, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
    weak.say(DEGRADED)
    for _ in range(10):
        strong.answer(caller.request())
    strong.leave()
    weak.answer(caller.request())
    core.assert_settled()


def test_a_degraded_agent_is_used_when_the_healthy_ones_are_full_but_not_for_a_new_session() -> None:
    core = CoreMesh()
    weak, strong, caller = core.agent("echo/1"), core.agent("echo/2", max_concurrency=1), core.caller()
    weak.say(DEGRADED)
    held = caller.request()
    overflow = caller.request()
    assert strong.has(held) and weak.has(overflow)
    waits = caller.request(session_id="s")
    assert not weak.has(waits)
    strong.answer(held)
    assert strong.has(waits)
    strong.answer(waits)
    weak.answer(overflow)
    core.assert_settled()


def test_long_work_and_idleness_are_no_fault() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    message = caller.request(timeout_ms=600_000)
    core.advance(300)
    assert core.status("echo/1") == HEALTHY
    agent.answer(message)
    core.advance(600)
    assert core.status("echo/1") == HEALTHY
    core.assert_settled()


def test_an_idle_agent_is_probed_seldom_and_a_busy_one_often() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    core.advance(120)
    idle = len(agent.got_signals("probe"))
    assert 3 <= idle <= 6
    message = caller.request(timeout_ms=600_000)
    core.advance(120)
    assert 18 <= len(agent.got_signals("probe")) - idle <= 26
    agent.answer(message)


def test_a_status_change_counts_at_once() -> None:
    core = CoreMesh()
    agent = core.agent()
    agent.say(DEGRADED)
    assert core.status("echo/1") == DEGRADED
    agent.say(UNREACHABLE)  # not for it to say
    assert core.status("echo/1") == DEGRADED
    agent.say(HEALTHY)
    assert core.status("echo/1") == HEALTHY


def test_an_agent_that_does_not_acknowledge_gets_nothing_new_until_it_does() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.frozen = True
    message = caller.request(timeout_ms=60_000)
    assert agent.peer is not None
    held = agent.peer.link.next_frame(core.state.now)
    assert held is not None
    core.advance(11)
    waits = caller.request(timeout_ms=60_000)
    assert core.logged("does not acknowledge")
    agent.frozen = False
    agent.take(held)
    assert not agent.has(waits)
    core.advance(2)
    agent.answer(waits)
    agent.answer(message)
    core.assert_settled()


def test_what_was_sent_before_a_cut_is_not_overdue_the_moment_the_link_is_back() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=600_000)
    agent.cut()
    core.advance(9)
    agent.forget()
    agent.connect()
    agent.frozen = True
    core.advance(2)
    assert core.attachment("echo/1").overdue is None
    agent.frozen = False
    core.pump()
    agent.answer(message)
    core.advance(11)
    core.assert_settled()


def test_timers_of_agents_and_links_end_with_them() -> None:
    core = CoreMesh()
    for number in range(20):
        agent = core.agent(f"echo/{number}")
        core.advance(0.7)
        agent.cut()
    core.advance(200)
    assert len(core.state.checks) == 0 and not core.state.peers
    core.assert_settled()


def test_a_delivery_to_an_idle_agent_is_overdue_after_a_quarter_of_its_time() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    core.advance(20)  # idle: looked after seldom
    agent.frozen = True
    caller.request(timeout_ms=4000)
    assert agent.peer is not None and agent.peer.link.next_frame(core.state.now) is not None
    core.advance(0.9)
    assert core.attachment("echo/1").overdue is None
    core.advance(1.2)
    assert core.attachment("echo/1").overdue is not None
    caller.request()
    assert len(core.state.queue) == 1
