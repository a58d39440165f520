"""How far a session is on its way to another owner. Facts only; what is made of them is decided in `moves`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reach.core.requests import Attachment

CANDIDATES_MAX = 3  # besides the former owner: the one by ring and two others

UNKNOWN, HANDS_OVER, KEEPS = 0, 1, 2
"""What is known of an agent's hooks: nothing yet; it has handed a session over; it cannot."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a session by the store, and what its pin says of the state; `made`: it was written just now."""

    agent_id: str
    incarnation: bytes
    epoch: int
    made: bool = False
    home: str = ""
    turn: int = 0
    snapshot: str = ""
    since: int = 0


class Step(Enum):
    """What a moving session waits for."""

    BEGUN = "nothing yet"
    ENDING = "the end of its running turn"
    RELEASING = "its owner, to hand its state over"
    STORING = "the store, to keep its state"
    PINNING = "the registry, to name its next owner"
    LOADING = "the store, to give its state"
    RESTORING = "its next owner, to take its state over"


_NEXT = {
    Step.BEGUN: {Step.ENDING, Step.RELEASING, Step.PINNING},
    Step.ENDING: {Step.ENDING, Step.RELEASING, Step.PINNING},
    Step.RELEASING: {Step.STORING, Step.PINNING},
    Step.STORING: {Step.STORING, Step.PINNING, Step.RESTORING},
    Step.PINNING: {Step.PINNING, Step.LOADING, Step.RESTORING},
    Step.LOADING: {Step.PINNING, Step.RESTORING},
    Step.RESTORING: {Step.PINNING},
}


class Move:
    """One session on its way."""

    __slots__ = ("content", "failed", "left", "origin", "step", "tries", "turn", "until", "why")

    def __init__(self, origin: Attachment | None) -> None:
        self.step = Step.BEGUN
        self.origin = origin
        """Whom it leaves, as long as that is there; None for a session whose owner died."""
        self.left = origin
        """Whose moves it counts among."""
        self.until: float | None = None
        """When the present step has failed; None: its end always comes."""
        self.content = b""
        """Its state, a serialised `SessionSnapshot`."""
        self.turn = 0
        self.failed: set[str] = set()
        """agent_ids that could not take it over."""
        self.tries = 0
        """Candidates asked so far, the former owner not counted."""
        self.why = ""
        """Why the last one could not."""

    def to(self, step: Step) -> None:
        """The next step."""
        assert step in _NEXT[self.step], f"{self.step} → {step}"
        self.step = step
