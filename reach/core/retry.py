"""Whether a failed attempt is followed by another: the outcome table and the profiles of behaviour.md §4, as data.

Decided here is only what this message may do next, and when. Breaker and budget are asked first, by the caller
("breaker, then budget, then retry"); which instance it becomes is the choice's affair. A retry has two moments:
`at`, when another instance may get it, and `same_at`, when an instance that failed it may get it again, if nobody else
is usable. For a session's message the pin's owner is the only instance there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes

if TYPE_CHECKING:
    from agentreach.v1.error_pb2 import Error

LEFT_MIN_S = 0.010  # an attempt with less time left is not worth making; the bound that resent calls have anyway
JITTER_SHARE = 0.2  # a back-off is drawn from ± 20 % of it


class Rng(Protocol):
    """Where chance comes from; `random.Random` is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


class Failed(Enum):
    """What one failed attempt means."""

    CONNECT = "connect"  # never handed over; it has not run
    UNKNOWN = "unknown"  # handed over, not acknowledged in time
    LOST = "lost"  # its link was lost, and not back in the settle window
    TIMEOUT = "timeout"  # the attempt's time passed
    OVERLOADED = "overloaded"  # the agent is full or rate-limited; it has not run
    REJECTED = "rejected"  # the agent refused
    AGENT_ERROR = "agent_error"  # the handler raised


class Reason(Enum):
    """Why there is no other attempt."""

    NEVER = "this kind of failure is never retried"
    NOT_IDEMPOTENT = "it may have executed and is not idempotent"
    NOT_RETRYABLE = "the agent did not say that it can be retried"
    NOT_IN_PROFILE = "the profile does not retry this kind of failure"
    EXHAUSTED = "the profile's attempts are used up"
    DEADLINE = "the back-off would pass the deadline"


@dataclass(frozen=True, slots=True)
class Retry:
    """Make another attempt. Times are the node's boot clock, in seconds, and leave room before the deadline.

    `same_at` None: an instance in `exclude` must not get this message again before the deadline. `shut_out` (TASK's
    re-route): none in `exclude` may get it before `same_at`, whoever else is usable or not. Without `shut_out` they are
    passed over while another usable candidate exists.
    """

    at: float
    same_at: float | None
    exclude: frozenset[str] = frozenset()
    is_reroute: bool = False
    shut_out: bool = False

    @property
    def same_agent_allowed(self) -> bool:
        """Whether an instance that failed it may get it again at `at` already, for want of another."""
        return self.same_at is not None and self.same_at <= self.at


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the attempt as it is: the acknowledgement, the answer or the deadline ends it."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The failure is the request's outcome. A TASK that is EXHAUSTED is one for the dead letters."""

    reason: Reason


Decision = Retry | Wait | GiveUp


@dataclass(frozen=True, slots=True)
class Patience:
    """What a profile allows. `jitter_s`: added at random instead of the share, where the table says so."""

    attempt_timeout_s: float
    retries: int
    back_off_s: tuple[float, ...]
    on_timeout: bool = True
    jitter_s: float = 0.0
    reroutes: int = 0

    def attempts(self, *, pinned: bool) -> int:
        """The first try, the retries, and the re-route where there is an elsewhere."""
        return 1 + self.retries + (0 if pinned else self.reroutes)

    def wait_s(self, retry: int, rng: Rng) -> float:
        """The back-off before the retry of this number, from 1, jitter included."""
        base_s = self.back_off_s[min(retry, len(self.back_off_s)) - 1]
        if self.jitter_s:
            return base_s + self.jitter_s * rng.random()
        return base_s * (1 - JITTER_SHARE + 2 * JITTER_SHARE * rng.random())


PATIENCE: dict[int, Patience] = {
    pb.CACHE: Patience(0.5, 1, (0.05,)),
    pb.RPC: Patience(5.0, 2, (0.2, 0.4)),
    pb.LLM: Patience(120.0, 1, (5.0,), on_timeout=False),
    pb.EXTERNAL: Patience(30.0, 1, (1.0,)),
    pb.TASK: Patience(60.0, 3, (1.0, 2.0, 4.0), jitter_s=0.2, reroutes=1),
}
"""By CallProfile. No profile counts as RPC."""

REROUTE_SHUT_OUT_S = 60.0

_RPC = PATIENCE[pb.RPC]
_HAS_NOT_RUN = frozenset({Failed.CONNECT, Failed.OVERLOADED})
_REFUSALS = frozenset(
    {codes.REJECTED, codes.INVALID_ENVELOPE, codes.PAYLOAD_TOO_LARGE, codes.UNAUTHENTICATED, codes.PERMISSION_DENIED}
)


def patience(profile: int) -> Patience:
    """The settings of a profile."""
    return PATIENCE.get(profile, _RPC)


def failed_as(error: Error) -> Failed:
    """The class of an error that an agent answered with.

    An error of a nested call on its way up, whatever its code, is an answer of the handler: it has run.
    """
    if "via" in error.details or error.may_have_executed:
        return Failed.AGENT_ERROR
    if error.code == codes.OVERLOADED:
        return Failed.OVERLOADED
    return Failed.REJECTED if error.code in _REFUSALS else Failed.AGENT_ERROR


def attempt_timeout_s(profile: int, attempt: int, left_s: float, *, idempotent: bool, pinned: bool = False) -> float:
    """How long the attempt of this number, from 1, may take of the `left_s` seconds up to the deadline.

    A part of it where a TIMEOUT could be followed by another attempt; all of it where it could not, or is the last.
    """
    settings = patience(profile)
    attempts_left = settings.attempts(pinned=pinned) - attempt + 1
    if not idempotent or not settings.on_timeout or attempts_left <= 1:
        return left_s
    return min(settings.attempt_timeout_s, left_s / attempts_left)


def decide(
    failed: Failed,
    *,
    profile: int,
    attempt: int,
    agent_id: str,
    excluded: frozenset[str],
    idempotent: bool,
    pinned: bool,
    now: float,
    deadline: float,
    rng: Rng,
    error: Error | None = None,
) -> Decision:
    """What follows the failure of the attempt of this number (from 1) at `agent_id`.

    `excluded` are the instances that failed this message before; `pinned` says that it is a session's; `error` is what
    an agent answered with (`retryable` and `retry_after_ms` count), None where it did not answer.
    """
    if failed is Failed.UNKNOWN and pinned:
        return Wait()  # another instance is no choice, and this one gets no new work until it acknowledges
    settings = patience(profile)
    reason = _forbidden(failed, settings, idempotent, error)
    decision: Decision
    if reason is not None:
        decision = GiveUp(reason)
    elif attempt <= settings.retries:
        wait_s, retry_after_s = settings.wait_s(attempt, rng), _retry_after_s(error)
        decision = _retry(failed, agent_id, excluded, pinned, now, deadline, wait_s, retry_after_s)
    elif attempt < settings.attempts(pinned=pinned):
        decision = _reroute(agent_id, excluded, now, deadline)
    else:
        decision = GiveUp(Reason.EXHAUSTED)
    if failed is Failed.UNKNOWN and isinstance(decision, GiveUp):
        return Wait()  # the acknowledgement may still come
    return decision


def _forbidden(failed: Failed, settings: Patience, idempotent: bool, error: Error | None) -> Reason | None:
    """Why the outcome table allows no other attempt, or None."""
    if failed in _HAS_NOT_RUN:
        return None
    if failed is Failed.REJECTED:
        return Reason.NEVER
    if failed is Failed.AGENT_ERROR:
        if error is None or not error.retryable:
            return Reason.NOT_RETRYABLE
        # A handler's own AgentError says itself that it may be run again; one that passed through it does not.
        own = error.code == codes.AGENT_ERROR and "via" not in error.details
        return None if own or idempotent else Reason.NOT_IDEMPOTENT
    if not idempotent:
        return Reason.NOT_IDEMPOTENT
    if failed is Failed.TIMEOUT and not settings.on_timeout:
        return Reason.NOT_IN_PROFILE
    return None


def _retry_after_s(error: Error | None) -> float:
    return error.retry_after_ms / 1000 if error is not None else 0.0


def _retry(
    failed: Failed,
    agent_id: str,
    excluded: frozenset[str],
    pinned: bool,
    now: float,
    deadline: float,
    wait_s: float,
    retry_after_s: float,
) -> Decision:
    """A retry of the profile: elsewhere after the back-off (CONNECT: at once), at the same instance by its wish."""
    last = deadline - LEFT_MIN_S
    same_at = now + max(wait_s, retry_after_s)
    at = now if failed is Failed.CONNECT else now + wait_s
    if pinned:
        at = same_at
    if at > last:
        return GiveUp(Reason.DEADLINE)
    if pinned:
        return Retry(at, at)
    never = failed is Failed.UNKNOWN or same_at > last
    return Retry(at, None if never else same_at, excluded | {agent_id})


def _reroute(agent_id: str, excluded: frozenset[str], now: float, deadline: float) -> Decision:
    """TASK's last attempt: at once, and for a minute at none of the instances that failed it."""
    last = deadline - LEFT_MIN_S
    if now > last:
        return GiveUp(Reason.DEADLINE)
    back_at = now + REROUTE_SHUT_OUT_S
    same_at = back_at if back_at <= last else None
    return Retry(now, same_at, excluded | {agent_id}, is_reroute=True, shut_out=True)
