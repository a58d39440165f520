"""Plays: what makes an agent unusable, what does not, and how soon: behaviour.md §1, sentence by sentence."""

from __future__ import annotations

from typing import Any

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.envelope_pb2 import WEIGHTED_RANDOM
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import DEGRADED, DRAINING, HEALTHY, STARTING, UNREACHABLE, AgentLoad
from tests.support.core import CoreMesh, Process, record

LEAVES_ROUTING_S = 20.0


def tells(process: Process, agent_id: str = "echo/1", **fields: Any) -> None:
    """One heartbeat."""
    process.signal(Signal(heartbeat=frames.Heartbeat(agents=[AgentLoad(agent_id=agent_id, **fields)])))
    process.core.pump()


class TestRegisterAndHeartbeat:
    def test_a_heartbeat_for_an_unknown_agent_is_told_and_the_agent_attaches_from_scratch(self) -> None:
        core = CoreMesh()
        process = core.process("p")
        tells(process, "echo/1")
        (ack,) = (each.heartbeat_ack for each in process.got_signals("heartbeat_ack"))
        assert list(ack.unknown) == ["echo/1"]
        process.agents["echo/1"] = record("echo/1")
        process.signal(Signal(attach=frames.Attach(record=record("echo/1"))))
        core.pump()
        assert core.status("echo/1") == HEALTHY
        process.signals.clear()
        tells(process, "echo/1")
        assert not process.got_signals("heartbeat_ack")[0].heartbeat_ack.unknown

    def test_an_attach_under_way_is_not_unknown(self) -> None:
        core = CoreMesh()
        process = core.process("p")
        core.holds_registrations = True
        process.signal(Signal(attach=frames.Attach(record=record("echo/1"))))
        core.pump()
        tells(process, "echo/1")
        assert not process.got_signals("heartbeat_ack")[0].heartbeat_ack.unknown

    def test_reattaching_with_the_same_incarnation_keeps_status_warm_up_and_slots(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=2), core.caller()
        message = caller.request(timeout_ms=60_000)
        agent.say(DEGRADED)
        since = core.attachment("echo/1").agent.warm_since
        agent.cut()
        agent.forget()
        agent.connect()
        attachment = core.attachment("echo/1")
        assert (core.status("echo/1"), attachment.agent.warm_since, attachment.agent.in_flight) == (DEGRADED, since, 1)
        agent.answer(message)
        core.assert_settled()


class TestReadyLate:
    def test_the_first_agent_of_a_type_is_usable_at_once_after_its_probe(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        assert core.status("echo/1") == HEALTHY
        agent.answer(caller.request())
        core.assert_settled()

    def test_a_new_agents_share_grows_from_a_tenth_to_the_whole_in_ten_seconds(self) -> None:
        core = CoreMesh()
        core.agent("echo/1")
        core.advance(60)
        fresh = core.agent("echo/2")
        agent = core.attachment("echo/2").agent
        shares: list[float] = []
        for age_s in (0, 5, 10):
            shares.append(agent.warmth(core.state.now, core.state.rules.warm_up_s))
            caller = core.caller()
            before = len(fresh.requests)
            for _ in range(400):
                message = caller.request(agent_type="echo", policy=WEIGHTED_RANDOM)
                for process in core.processes:
                    if process.has(message):
                        process.answer(message)
            taken, weight = len(fresh.requests) - before, shares[-1]
            assert abs(taken / 400 - weight / (1 + weight)) < 0.06, age_s
            core.advance(5)
        assert shares == pytest.approx([0.1, 0.55, 1.0])

    def test_warm_up_can_be_switched_off(self) -> None:
        core = CoreMesh(warm_up_s=0.0)
        core.agent()
        assert core.attachment("echo/1").agent.warmth(core.state.now, 0.0) == 1.0


class TestThreeVerdicts:
    def test_link_dead_nothing_heard_for_three_heartbeats(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        agent.frozen = True
        core.advance(29)
        assert core.status("echo/1") != UNREACHABLE or core.attachment("echo/1").missed_probes >= 2
        core.advance(5)
        assert core.status("echo/1") == UNREACHABLE and core.logged("nothing heard for three heartbeats")
        assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE

    def test_link_dead_the_stream_broke(self) -> None:
        core = CoreMesh()
        agent = core.agent()
        agent.cut()
        assert core.status("echo/1") == UNREACHABLE
        agent.connect()
        assert core.status("echo/1") == HEALTHY

    @pytest.mark.parametrize("idle_s", [0, 3, 12, 29, 31])
    @pytest.mark.parametrize("timeout_ms", [300, 4000, 60_000])
    def test_handlers_stuck_leaves_routing_within_20_s_though_its_reader_acknowledges(
        self, idle_s: float, timeout_ms: int
    ) -> None:
        """Fake alive: the stream is up, frames are acknowledged, heartbeats come; only handlers never answer."""
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        core.advance(idle_s)
        agent.answers_probes = agent.confirms_cancels = False
        caller.request(timeout_ms=timeout_ms)
        waited = 0.0
        while core.status("echo/1") != UNREACHABLE:
            core.advance(0.5)
            waited += 0.5
            assert waited <= LEAVES_ROUTING_S
        assert agent.connected
        agent.answers_probes = True
        core.advance(6)
        assert core.status("echo/1") == HEALTHY

    def test_busy_is_healthy_however_long_the_work_and_however_full(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=2), core.caller()
        messages = [caller.request(timeout_ms=600_000) for _ in range(2)]
        for _ in range(100):
            core.advance(5)
            assert core.status("echo/1") == HEALTHY
        assert not core.logged("agent status")[1:]  # STARTING to HEALTHY, and nothing since
        for message in messages:
            agent.answer(message)
        core.assert_settled()

    def test_work_without_progress_only_brings_probes(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        message = caller.request(timeout_ms=600_000)
        agent.signals.clear()
        core.advance(60)
        assert len(agent.got_signals("probe")) >= 11 and core.status("echo/1") == HEALTHY
        agent.answer(message)

    def test_an_idle_agent_is_never_unhealthy_for_being_idle(self) -> None:
        core = CoreMesh()
        core.agent()
        for _ in range(100):
            core.advance(36)
            assert core.status("echo/1") == HEALTHY

    def test_a_late_answer_to_an_old_probe_is_a_sign_of_life(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        caller.request(timeout_ms=600_000)
        agent.answers_probes = False
        agent.signals.clear()
        core.advance(12)
        assert core.status("echo/1") == DEGRADED
        first = agent.got_signals("probe")[0].probe
        agent.signal(Signal(probe_reply=frames.ProbeReply(agent_id="echo/1", nonce=first.nonce, ready=True)))
        core.pump()
        assert core.status("echo/1") == HEALTHY

    def test_heartbeats_and_acknowledgements_keep_no_stuck_agent_alive(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        caller.request(timeout_ms=600_000)
        agent.answers_probes = False
        for _ in range(40):
            core.advance(0.5)
            tells(agent, status=HEALTHY, in_flight=1)
        assert core.status("echo/1") == UNREACHABLE


class TestStatusTravelsAtOnce:
    @pytest.mark.parametrize("status", [DRAINING, DEGRADED])
    def test_the_very_next_decision_knows_it(self, status: int) -> None:
        core = CoreMesh()
        one, two, caller = core.agent("echo/1"), core.agent("echo/2"), core.caller()
        one.say(status)
        for _ in range(20):
            two.answer(caller.request())
        assert not one.requests
        core.assert_settled()

    def test_an_agent_that_is_starting_again_keeps_its_name_from_routing_until_its_probe(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        agent.leave()
        again = Process(core, "again", agent.who, "")
        again.answers_probes = False
        core.processes.append(again)
        again.connect(record("echo/1"))
        assert core.status("echo/1") == STARTING
        assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE


class TestLeftovers:
    def _timed_out(self, core: CoreMesh, agent: Process, caller: Process) -> None:
        """A request whose handler did not end with its cancel."""
        agent.confirms_cancels = False
        caller.request(timeout_ms=1000)
        core.advance(1.2)

    def test_a_slot_is_taken_back_after_the_grace_and_counted(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=1), core.caller()
        self._timed_out(core, agent, caller)
        assert core.attachment("echo/1").agent.in_flight == 1
        core.advance(5.2)
        assert core.attachment("echo/1").agent.in_flight == 0
        assert core.state.stats.forced_releases == 1 and core.logged("slot taken back")
        core.assert_settled()

    def test_what_an_agent_reports_as_left_over_takes_a_slot_until_it_reports_none(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=2), core.caller()
        agent.beating = False
        tells(agent, leftovers=2, in_flight=2)
        waits = caller.request(timeout_ms=60_000)
        assert not agent.has(waits)
        tells(agent, leftovers=1, in_flight=1)
        assert agent.has(waits)
        agent.answer(waits)
        tells(agent)
        core.assert_settled()

    def test_one_that_still_has_its_time_to_end_is_not_counted_twice(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(max_concurrency=2), core.caller()
        agent.beating = False
        self._timed_out(core, agent, caller)
        tells(agent, leftovers=1, in_flight=1)
        second = caller.request(timeout_ms=60_000)
        assert agent.has(second)  # one slot is the leftover's, the other is free
        core.advance(5.2)
        tells(agent, leftovers=1, in_flight=2)
        third = caller.request(timeout_ms=60_000)
        assert not agent.has(third)
        tells(agent, leftovers=0, in_flight=1)
        assert agent.has(third)
        for message in (second, third):
            agent.answer(message)
        core.assert_settled()

    def test_after_a_forced_release_the_agent_is_probed_at_once(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        self._timed_out(core, agent, caller)
        core.advance(4.5)
        agent.signals.clear()
        core.advance(0.7)
        assert core.state.stats.forced_releases == 1 and agent.got_signals("probe")

    def test_an_agent_with_leftovers_is_probed_like_one_at_work(self) -> None:
        core = CoreMesh()
        agent = core.agent()
        agent.beating = False
        tells(agent, leftovers=1)
        agent.signals.clear()
        for _ in range(6):
            core.advance(5)
            tells(agent, leftovers=1)
        assert len(agent.got_signals("probe")) >= 5
