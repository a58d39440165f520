"""Plays: what operators order by AdminService, and what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.registry_pb2 import DRAINING
from reach.core.access import Rights
from reach.core.breaker import Breaker
from reach.core.ports import ANYBODY, Identity, MeshFailure
from reach.core.state import State
from reach.node.operations import DRAIN_TIMEOUT_MS_MAX, Operations
from tests.support.core import CoreMesh


class Desk(Operations):
    """The operators' half of a node, over a core on virtual time."""

    def __init__(self, core: CoreMesh) -> None:
        super().__init__(core.state)
        self.core = core

    @contextmanager
    def step(self) -> Iterator[State]:
        """As the engine does."""
        with self.core.step() as state:
            yield state


def _trip(core: CoreMesh, agent_id: str, times: int = 1) -> Breaker:
    """An agent's breaker, opened by failures in a row; tripped again as soon as it would let a probe through."""
    agent = core.attachment(agent_id).agent
    breaker = agent.breaker = agent.breaker or Breaker()
    for _ in range(times):
        core.advance(breaker.next_probe_s(core.state.now))
        for _ in range(5):
            breaker.outcome(False, core.state.now, core.state.now)
    return breaker


def _states(desk: Desk, **request: int) -> list[tuple[str, str, int]]:
    reply = desk.list_breakers(admin.ListBreakersRequest(**request), ANYBODY)
    return [(each.agent_id, each.state, each.trips) for each in reply.breakers]


class TestBreakers:
    """ListBreakers and ResetBreaker."""

    def test_those_that_are_not_closed_or_have_tripped_lately_are_listed_the_worst_first(self) -> None:
        core = CoreMesh()
        desk = Desk(core)
        for number in range(1, 5):
            core.agent(f"echo/{number}")
        core.attachment("echo/1").agent.breaker = Breaker()  # it works, and never failed
        assert _states(desk) == []
        ramping = _trip(core, "echo/2")
        core.advance(31)
        ramping.outcome(True, core.state.now, core.state.now)
        _trip(core, "echo/4")
        _trip(core, "echo/3")
        assert _states(desk) == [("echo/3", "OPEN", 1), ("echo/4", "OPEN", 1), ("echo/2", "RAMPING", 1)]
        assert _states(desk, limit=1) == [("echo/3", "OPEN", 1)]
        core.advance(31)
        assert _states(desk) == [("echo/3", "HALF_OPEN", 1), ("echo/4", "HALF_OPEN", 1), ("echo/2", "CLOSED", 1)]

    def test_the_next_probe_is_told_in_milliseconds(self) -> None:
        core = CoreMesh()
        core.agent()
        _trip(core, "echo/1")
        core.advance(10)
        (info,) = Desk(core).list_breakers(admin.ListBreakersRequest(), ANYBODY).breakers
        assert info.next_probe_ms == pytest.approx(20_000, abs=5)
        assert info.env == "production"

    def test_a_reset_one_is_closed_and_its_trips_are_forgotten(self) -> None:
        core = CoreMesh()
        desk = Desk(core)
        agent, caller = core.agent(), core.caller()
        _trip(core, "echo/1", times=3)
        assert _states(desk) == [("echo/1", "OPEN", 3)]
        desk.reset_breaker(admin.ResetBreakerRequest(agent_id="echo/1"), ANYBODY)
        core.pump()
        assert _states(desk) == []
        agent.answer(caller.request())
        core.assert_settled()

    def test_an_agent_that_never_failed_may_be_reset_and_one_that_is_not_there_not(self) -> None:
        core = CoreMesh()
        desk = Desk(core)
        core.agent()
        desk.reset_breaker(admin.ResetBreakerRequest(agent_id="echo/1"), ANYBODY)
        for agent_id, env, who in (
            ("echo/2", "", ANYBODY),
            ("echo/1", "staging", ANYBODY),
            ("echo/1", "", Identity(tenant="other")),
        ):
            with pytest.raises(MeshFailure) as refused:
                desk.reset_breaker(admin.ResetBreakerRequest(agent_id=agent_id, env=env), who)
            assert refused.value.error.code == codes.NO_ROUTE

    def test_another_tenants_are_not_listed(self) -> None:
        core = CoreMesh()
        core.agent()
        _trip(core, "echo/1")
        reply = Desk(core).list_breakers(admin.ListBreakersRequest(), Identity(tenant="other"))
        assert not reply.breakers

    def test_those_of_an_env_without_rights_are_not_listed(self) -> None:
        core = CoreMesh()
        core.agent()
        _trip(core, "echo/1")
        for env, listed in (("staging", 0), ("production", 1)):
            who = Identity(rights=Rights(envs=frozenset({env}), admin=True))
            assert len(Desk(core).list_breakers(admin.ListBreakersRequest(), who).breakers) == listed


class TestDraining:
    """DrainAgent and DrainNode."""

    def test_the_reply_says_what_the_agent_still_has_and_how_long_it_may_take(self) -> None:
        core = CoreMesh(drain_timeout_s=55.0)
        agent, caller = core.agent(), core.caller()
        talk = caller.request(session_id="s")
        agent.answer(talk)
        running = caller.request(timeout_ms=60_000)
        desk = Desk(core)
        reply = desk.drain_agent(admin.DrainAgentRequest(agent_id="echo/1"), ANYBODY)
        core.pump()
        assert (reply.in_flight, reply.sessions, reply.timeout_ms) == (1, 1, 55_000)
        assert reply.incarnation == agent.incarnation
        assert core.status("echo/1") == DRAINING
        reply = desk.drain_agent(admin.DrainAgentRequest(agent_id="echo/1", timeout_ms=2_500), ANYBODY)
        assert reply.timeout_ms == 2_500
        agent.answer(running)
        core.advance(1)
        core.assert_settled()

    @pytest.mark.parametrize("agent_id", ["", "echo", "echo/", "/1", "echo/1/2", "Echo/1", "echo/1\n"])
    def test_what_is_no_agents_name_is_said_to_be_none(self, agent_id: str) -> None:
        desk = Desk(CoreMesh())
        for order in (
            lambda: desk.drain_agent(admin.DrainAgentRequest(agent_id=agent_id), ANYBODY),
            lambda: desk.reset_breaker(admin.ResetBreakerRequest(agent_id=agent_id), ANYBODY),
        ):
            with pytest.raises(MeshFailure, match="agent_id: ") as refused:
                order()
            assert refused.value.error.code == codes.INVALID_ENVELOPE

    def test_an_unknown_agent_and_a_time_beyond_the_bound_are_refused(self) -> None:
        core = CoreMesh()
        core.agent()
        desk = Desk(core)
        with pytest.raises(MeshFailure) as refused:
            desk.drain_agent(admin.DrainAgentRequest(agent_id="echo/9"), ANYBODY)
        assert refused.value.error.code == codes.NO_ROUTE
        assert refused.value.error.message.endswith("in env production; see: reach agents")
        with pytest.raises(MeshFailure) as refused:
            long = admin.DrainAgentRequest(agent_id="echo/1", timeout_ms=DRAIN_TIMEOUT_MS_MAX + 1)
            desk.drain_agent(long, ANYBODY)
        assert refused.value.error.code == codes.INVALID_ENVELOPE
        assert core.status("echo/1") != DRAINING

    def test_a_node_is_drained_by_its_name_or_without_and_not_by_another_ones(self) -> None:
        core = CoreMesh(node_id="node-1")
        desk = Desk(core)
        core.caller()
        with pytest.raises(MeshFailure) as refused:
            desk.drain_node(admin.DrainNodeRequest(node_id="node-2"), ANYBODY)
        assert refused.value.error.code == codes.NO_ROUTE and not core.state.draining
        reply = desk.drain_node(admin.DrainNodeRequest(node_id="node-1", timeout_ms=20_000), ANYBODY)
        assert (reply.node_id, reply.timeout_ms) == ("node-1", 20_000)
        assert core.state.draining and desk.leaving.is_set() and desk.leave_within_s == 20
        core.advance(5)
        again = desk.drain_node(admin.DrainNodeRequest(), ANYBODY)
        assert again.timeout_ms == 15_000, "the first order counts"


class TestReleaseSession:
    """ReleaseSession."""

    def test_the_move_begins_and_the_operator_is_told_from_where(self) -> None:
        core = CoreMesh()
        desk = Desk(core)
        agents, caller = [core.agent(f"echo/{number}") for number in range(2)], core.caller()
        message = caller.request(session_id="s")
        owner = next(each for each in agents if each.has(message))
        owner.releases = None
        owner.answer(message)
        order = admin.ReleaseSessionRequest(session_id="s", agent_type="Echo")
        reply = desk.release_session(order, ANYBODY)
        assert (reply.agent_id, reply.epoch) == (next(iter(owner.agents)), caller.reply_to(message).epoch)
        core.pump()
        asked = owner.got_signals("session_release")[0].session_release
        assert (asked.session_id, asked.epoch) == ("s", reply.epoch)
        core.advance(11)  # it does not know the word: nothing has become of it
        owner.answer(caller.request(session_id="s"))
        core.assert_settled()

    def test_an_agent_that_cannot_hand_it_over_keeps_it_and_the_operator_learns_it_the_next_time(self) -> None:
        core = CoreMesh()
        desk = Desk(core)
        agents, caller = [core.agent(f"echo/{number}") for number in range(2)], core.caller()
        message = caller.request(session_id="s")
        owner = next(each for each in agents if each.has(message))
        owner.answer(message)
        order = admin.ReleaseSessionRequest(session_id="s", agent_type="echo")
        desk.release_session(order, ANYBODY)
        core.pump()
        following = caller.request(session_id="s")
        owner.answer(following)
        assert not caller.reply_to(following).session_event
        with pytest.raises(MeshFailure, match="no hook"):
            desk.release_session(order, ANYBODY)
        core.assert_settled()

    def test_an_order_that_names_no_type_or_no_session_says_which(self) -> None:
        desk = Desk(CoreMesh())
        for order, field in (
            (admin.ReleaseSessionRequest(session_id="s"), "agent_type: "),
            (admin.ReleaseSessionRequest(session_id="s", agent_type="a b"), "agent_type: "),
            (admin.ReleaseSessionRequest(agent_type="echo"), "session_id: "),
        ):
            with pytest.raises(MeshFailure, match=field) as refused:
                desk.release_session(order, ANYBODY)
            assert refused.value.error.code == codes.INVALID_ENVELOPE

    def test_sessions_that_are_not_here_or_of_others_are_unknown(self) -> None:
        core = CoreMesh()
        desk = Desk(core)
        agent, caller = core.agent(), core.caller()
        agent.answer(caller.request(session_id="s"))
        for order, who in (
            (admin.ReleaseSessionRequest(session_id="t", agent_type="echo"), ANYBODY),
            (admin.ReleaseSessionRequest(session_id="s", agent_type="echo", env="test"), ANYBODY),
            (admin.ReleaseSessionRequest(session_id="s", agent_type="echo"), Identity("others")),
        ):
            with pytest.raises(MeshFailure, match="no agent of type") as refused:
                desk.release_session(order, who)
            assert refused.value.error.code == codes.NO_ROUTE
        core.assert_settled()
