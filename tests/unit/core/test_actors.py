"""On whose behalf: the actors of a call, and that the chain of them allows no more than each does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Target
from agentreach.v1.peer_pb2 import Lineage
from reach.core import access, actors
from reach.core.access import Patterns, Rights
from reach.core.ports import Identity
from tests.unit.core.test_access import AGENTS, RIGHTS, TARGETS, twin_allows


def state_with(**principals: Rights) -> Any:
    return SimpleNamespace(
        principals={("t", name): rights for name, rights in principals.items()},
        named=None,
        stats=SimpleNamespace(denied=0),
    )


def test_actors_are_those_before_and_whoever_sent_what_is_handled() -> None:
    assert actors.behind(None, "me") == ()
    assert actors.behind(Lineage(principal="alice"), "me") == ("alice",)
    assert actors.behind(Lineage(principal="svc", actors=["alice"]), "me") == ("alice", "svc")
    assert actors.behind(Lineage(principal="me", actors=["alice"]), "me") == ("alice",)  # its own calls add nobody
    assert actors.behind(Lineage(), "me") == ()


@given(st.lists(RIGHTS, min_size=1, max_size=4), TARGETS, st.sampled_from(["production", "staging"]))
def test_a_chain_reaches_no_agent_that_one_of_it_may_not(chain: list[Rights], target: Target, env: str) -> None:
    *behind, sender = chain
    names = [f"p{number}" for number in range(len(behind))]
    state = state_with(**dict(zip(names, behind, strict=True)))
    parent = Lineage(principal=names[-1], actors=names[:-1]) if names else None
    envelope = Envelope(target=target, env=env)
    fault = actors.call_fault(state, Identity("t", "me", sender), envelope, target.SerializeToString(), parent)
    reached = [] if fault is not None else [each for each in AGENTS if _matches(envelope.target, each)]
    for agent_id in reached:
        assert all(twin_allows(rights, target, env, agent_id) for rights in chain), (agent_id, envelope.target)
    assert state.stats.denied == (fault is not None)


def _matches(target: Target, agent_id: str) -> bool:
    if target.agent_id:
        return agent_id == target.agent_id
    typed = not target.agent_type or agent_id.startswith(f"{target.agent_type}/")
    return typed and access.fits(target.among, agent_id)


def test_an_actor_that_is_not_known_any_more_allows_nothing() -> None:
    everything = Rights(call=Patterns(["*"]), publish=Patterns(["*"], topics=True))
    state, who = state_with(), Identity("t", "me", everything)
    parent = Lineage(principal="gone")
    target = Target(agent_type="a")
    fault = actors.call_fault(state, who, Envelope(target=target), target.SerializeToString(), parent)
    assert fault is not None and fault.code == codes.PERMISSION_DENIED and "gone" in fault.message
    topic = actors.topic_fault(state, who, "t", "", parent)
    assert topic is not None and topic.code == codes.PERMISSION_DENIED


def test_decisions_are_kept_within_a_bound_and_by_target_and_env() -> None:
    who = Identity("t", "me", Rights(envs=frozenset({"production"}), call=Patterns(["a*"])))
    state = state_with()
    for number in range(2 * actors.DECISIONS_KEPT):
        target = Target(agent_type=f"a{number}")
        assert actors.call_fault(state, who, Envelope(target=target), target.SerializeToString(), None) is None
    assert len(who.decisions) <= actors.DECISIONS_KEPT
    target = Target(agent_type="a1")
    for env, allowed in (("production", True), ("staging", False), ("", True), ("staging", False)):
        envelope = Envelope(target=target, env=env)
        assert (actors.call_fault(state, who, envelope, target.SerializeToString(), None) is None) == allowed


def test_whom_a_sender_claims_to_be_allowed_is_written_anew() -> None:
    who = Identity("t", "me", Rights(call=Patterns(["a"])))
    envelope = Envelope(target=Target(capabilities=["c"], among=["*"]))
    assert actors.call_fault(state_with(), who, envelope, envelope.target.SerializeToString(), None) is None
    assert list(envelope.target.among) == ["a"]
