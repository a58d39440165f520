from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from reach.core.profiles import PROFILES
from reach.core.retry import (
    LEFT_MIN_S,
    PATIENCE,
    Decision,
    Failed,
    GiveUp,
    Reason,
    Retry,
    Wait,
    attempt_timeout_s,
    decide,
    failed_as,
    patience,
)

FAR = 1000.0
CANNOT_KNOW = (Failed.UNKNOWN, Failed.LOST, Failed.TIMEOUT)


class Middle:
    """Chance without surprises: no jitter, or half of it."""

    def random(self) -> float:
        return 0.5


def after(
    failed: Failed,
    profile: int = pb.RPC,
    *,
    attempt: int = 1,
    idempotent: bool = False,
    pinned: bool = False,
    now: float = 0.0,
    deadline: float = FAR,
    excluded: frozenset[str] = frozenset(),
    error: Error | None = None,
) -> Decision:
    return decide(
        failed,
        profile=profile,
        attempt=attempt,
        agent_id="a/1",
        excluded=excluded,
        idempotent=idempotent,
        pinned=pinned,
        now=now,
        deadline=deadline,
        rng=Middle(),
        error=error,
    )


def retried(decision: Decision) -> Retry:
    assert isinstance(decision, Retry)
    return decision


# ---- the outcome table ----


def test_what_was_never_handed_over_goes_elsewhere_at_once_and_to_the_same_after_the_back_off() -> None:
    retry = retried(after(Failed.CONNECT, now=5.0))
    assert retry == Retry(5.0, 5.2, frozenset({"a/1"}))
    assert not retry.same_agent_allowed


@pytest.mark.parametrize("failed", [Failed.LOST, Failed.TIMEOUT])
def test_what_may_have_run_is_made_again_only_if_it_is_idempotent(failed: Failed) -> None:
    assert after(failed) == GiveUp(Reason.NOT_IDEMPOTENT)
    assert after(failed, idempotent=True) == Retry(0.2, 0.2, frozenset({"a/1"}))


def test_an_unacknowledged_one_goes_elsewhere_if_idempotent_and_is_waited_for_otherwise() -> None:
    assert after(Failed.UNKNOWN) == Wait()
    assert after(Failed.UNKNOWN, idempotent=True) == Retry(0.2, None, frozenset({"a/1"}))
    assert after(Failed.UNKNOWN, idempotent=True, attempt=3) == Wait()
    assert after(Failed.UNKNOWN, idempotent=True, deadline=0.1) == Wait()


def test_a_full_agent_is_asked_again_when_it_said_and_another_after_the_back_off() -> None:
    error = failure(codes.OVERLOADED, "full", retry_after_ms=700)
    assert after(Failed.OVERLOADED, error=error) == Retry(0.2, 0.7, frozenset({"a/1"}))
    assert after(Failed.OVERLOADED, error=error, deadline=0.6) == Retry(0.2, None, frozenset({"a/1"}))
    assert after(Failed.OVERLOADED, error=error, pinned=True) == Retry(0.7, 0.7)
    assert after(Failed.OVERLOADED, error=error, pinned=True, deadline=0.6) == GiveUp(Reason.DEADLINE)


def test_a_refusal_is_final() -> None:
    error = failure(codes.REJECTED, "no", retryable=True)
    assert after(Failed.REJECTED, idempotent=True, error=error) == GiveUp(Reason.NEVER)


def test_a_handlers_failure_is_retried_only_if_it_said_so() -> None:
    assert after(Failed.AGENT_ERROR, idempotent=True) == GiveUp(Reason.NOT_RETRYABLE)
    said = failure(codes.AGENT_ERROR, "busy", retryable=True, may_have_executed=True)
    assert retried(after(Failed.AGENT_ERROR, error=said)).at == 0.2


def test_an_error_that_passed_through_the_handler_is_retried_only_if_idempotent_too() -> None:
    passed_on = failure(codes.AGENT_ERROR, "busy", retryable=True, may_have_executed=True, details={"via": "b/1"})
    assert after(Failed.AGENT_ERROR, error=passed_on) == GiveUp(Reason.NOT_IDEMPOTENT)
    assert retried(after(Failed.AGENT_ERROR, error=passed_on, idempotent=True))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failure(codes.OVERLOADED, ""), Failed.OVERLOADED),
        (failure(codes.OVERLOADED, "", may_have_executed=True, details={"via": "b/1"}), Failed.AGENT_ERROR),
        (failure(codes.REJECTED, ""), Failed.REJECTED),
        (failure(codes.INVALID_ENVELOPE, ""), Failed.REJECTED),
        (failure(codes.AGENT_ERROR, "", may_have_executed=True), Failed.AGENT_ERROR),
        (failure(codes.TIMEOUT, "", may_have_executed=True, details={"via": "b/1"}), Failed.AGENT_ERROR),
    ],
)
def test_an_agents_answer_has_its_class(error: Error, expected: Failed) -> None:
    assert failed_as(error) is expected


# ---- the profiles ----


def test_the_profiles_are_those_that_the_whole_timeout_is_added_up_from() -> None:
    assert PATIENCE.keys() == PROFILES.keys()
    for number, settings in PATIENCE.items():
        profile = PROFILES[number]
        assert settings.attempt_timeout_s == profile.attempt_timeout_s
        assert settings.attempts(pinned=False) == profile.attempts
        assert len(settings.back_off_s) == settings.retries == len(profile.back_off_s)
        longest = [wait_s + settings.jitter_s for wait_s in settings.back_off_s]
        assert longest == pytest.approx(profile.back_off_s)
    assert patience(0) is PATIENCE[pb.RPC]


def test_llm_is_not_retried_on_timeout_but_where_it_has_not_run() -> None:
    assert after(Failed.TIMEOUT, pb.LLM, idempotent=True) == GiveUp(Reason.NOT_IN_PROFILE)
    assert retried(after(Failed.CONNECT, pb.LLM)).same_at == 5.0
    assert after(Failed.CONNECT, pb.LLM, attempt=2) == GiveUp(Reason.EXHAUSTED)


def test_task_waits_1_2_and_4_seconds_then_shuts_the_failed_ones_out_for_a_minute() -> None:
    waits = [retried(after(Failed.LOST, pb.TASK, attempt=n, idempotent=True)).at for n in (1, 2, 3)]
    assert waits == [1.1, 2.1, 4.1]
    last = after(Failed.LOST, pb.TASK, attempt=4, idempotent=True, excluded=frozenset({"a/0"}), now=7.0)
    assert last == Retry(7.0, 67.0, frozenset({"a/0", "a/1"}), is_reroute=True, shut_out=True)
    assert after(Failed.LOST, pb.TASK, attempt=5, idempotent=True) == GiveUp(Reason.EXHAUSTED)
    near = retried(after(Failed.LOST, pb.TASK, attempt=4, idempotent=True, deadline=30.0))
    assert near.same_at is None


def test_a_sessions_message_stays_with_its_owner_and_is_not_rerouted() -> None:
    assert after(Failed.CONNECT, pinned=True, now=1.0) == Retry(1.2, 1.2)
    assert after(Failed.CONNECT, pb.TASK, attempt=4, pinned=True) == GiveUp(Reason.EXHAUSTED)
    assert after(Failed.UNKNOWN, pinned=True, idempotent=True) == Wait()


# ---- whatever happens ----

failures = st.sampled_from(list(Failed))
profiles = st.sampled_from([0, *PATIENCE])


@given(
    failures,
    profiles,
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1e6),
    st.floats(0, 100),
    st.booleans(),
    st.integers(0, 100_000),
    st.integers(0, 99),
)
def test_no_retry_breaks_the_rules(
    failed: Failed,
    profile: int,
    attempt: int,
    idempotent: bool,
    pinned: bool,
    now: float,
    left_s: float,
    retryable: bool,
    retry_after_ms: int,
    seed: int,
) -> None:
    deadline = now + left_s
    answered = failed in (Failed.OVERLOADED, Failed.REJECTED, Failed.AGENT_ERROR)
    error = failure(codes.AGENT_ERROR, "", retryable=retryable, retry_after_ms=retry_after_ms) if answered else None
    decision = decide(
        failed,
        profile=profile,
        attempt=attempt,
        agent_id="a/1",
        excluded=frozenset({"a/0"}),
        idempotent=idempotent,
        pinned=pinned,
        now=now,
        deadline=deadline,
        rng=Random(seed),
        error=error,
    )
    if isinstance(decision, Wait):
        assert failed is Failed.UNKNOWN
        return
    if isinstance(decision, GiveUp):
        return
    assert failed is not Failed.REJECTED
    assert idempotent or failed not in CANNOT_KNOW
    assert attempt < patience(profile).attempts(pinned=pinned)
    assert now <= decision.at <= deadline - LEFT_MIN_S
    if decision.same_at is not None:
        assert decision.at <= decision.same_at <= deadline - LEFT_MIN_S
    if pinned:
        assert not decision.exclude and not decision.is_reroute and decision.same_agent_allowed
    else:
        assert decision.exclude == {"a/0", "a/1"}
        assert decision.shut_out == decision.is_reroute == (attempt > patience(profile).retries)


@given(profiles, st.integers(1, 3), st.integers(0, 9999))
def test_the_back_off_is_within_its_jitter(profile: int, retry: int, seed: int) -> None:
    settings = patience(profile)
    base_s = settings.back_off_s[min(retry, settings.retries) - 1]
    wait_s = settings.wait_s(retry, Random(seed))
    if profile == pb.TASK:
        assert base_s <= wait_s <= base_s + 0.2
    else:
        assert 0.8 * base_s <= wait_s <= 1.2 * base_s


# ---- the time of one attempt ----


@pytest.mark.parametrize(
    ("profile", "attempt", "left_s", "idempotent", "expected"),
    [
        (pb.RPC, 1, 3.0, True, 1.0),  # a third of what is left
        (pb.RPC, 1, 60.0, True, 5.0),  # the profile's
        (pb.RPC, 2, 3.0, True, 1.5),
        (pb.RPC, 3, 40.0, True, 40.0),  # the last one: nothing comes after it
        (pb.RPC, 1, 3.0, False, 3.0),  # a TIMEOUT would not be retried
        (pb.LLM, 1, 300.0, True, 300.0),
        (pb.TASK, 1, 600.0, True, 60.0),
        (pb.TASK, 1, 100.0, True, 20.0),
    ],
)
def test_an_attempt_gets_its_part_of_the_time_where_a_timeout_can_be_retried(
    profile: int, attempt: int, left_s: float, idempotent: bool, expected: float
) -> None:
    assert attempt_timeout_s(profile, attempt, left_s, idempotent=idempotent) == pytest.approx(expected)


@given(profiles, st.floats(0.01, 600), st.booleans(), st.booleans())
def test_attempts_never_take_more_than_there_is(profile: int, whole_s: float, idempotent: bool, pinned: bool) -> None:
    left_s = whole_s
    for attempt in range(1, patience(profile).attempts(pinned=pinned) + 1):
        took = attempt_timeout_s(profile, attempt, left_s, idempotent=idempotent, pinned=pinned)
        assert 0 <= took <= left_s
        left_s -= took
    assert left_s == pytest.approx(0, abs=1e-9)
