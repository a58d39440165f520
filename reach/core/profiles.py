"""Call profiles: named settings for the time of one attempt, retries and back-off (behaviour.md §4)."""

from __future__ import annotations

from dataclasses import dataclass

from agentreach.v1 import envelope_pb2 as pb


@dataclass(frozen=True, slots=True)
class Profile:
    """`attempts`: the first try, the retries, and TASK's re-route; `back_off_s`: the wait before each but the first."""

    attempt_timeout_s: float
    attempts: int
    back_off_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Time for the whole request where the caller gave none."""
        return self.attempt_timeout_s * self.attempts + sum(self.back_off_s)


PROFILES: dict[int, Profile] = {
    pb.CACHE: Profile(0.5, 2, (0.05,)),
    pb.RPC: Profile(5.0, 3, (0.2, 0.4)),
    pb.LLM: Profile(120.0, 2, (5.0,)),
    pb.EXTERNAL: Profile(30.0, 2, (1.0,)),
    pb.TASK: Profile(60.0, 5, (1.2, 2.2, 4.2)),
}


def whole_timeout_ms(timeout_ms: int, profile: int) -> int:
    """The whole request's time: what the caller said, else what its profile adds up to."""
    return timeout_ms or int(PROFILES[profile].total_s * 1000)
