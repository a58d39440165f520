"""Two links whose stream may do what no stream does: repeat, swap and invent frames, and lie about the last one.

Beside `test_link.py`, where the stream is honest and nothing may be lost: here a peer may be a liar. Whatever comes is
acted on, dropped or refused with `LinkError`; the books stay true in any case; nothing is acted on twice in one
numbering; and two ends that begin anew after a lie understand one another again.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentreach.v1.frame_pb2 import Frame, Goodbye, Signal, StatusChange
from agentreach.wire import limits
from agentreach.wire.link import Link, LinkError
from agentreach.wire.outbox import HIGH, LOW, NORMAL, Item
from tests.unit.wire.test_link import envelope, recount

SIDE = st.integers(0, 1)
NUMBER = st.one_of(st.integers(0, 12), st.sampled_from([2**32, 2**63, 2**64 - 1]))
SIZE = st.sampled_from([0, 0, 10, 5000, limits.FRAME_BYTES_MAX + 1])


class TwoEnds(RuleBasedStateMachine):
    """The links, what is under way from each, and what each has acted on."""

    @initialize()
    def begin(self) -> None:
        self.links = (Link(), Link())
        self.flights: tuple[list[bytes], list[bytes]] = ([], [])
        self.items: tuple[dict[str, Item], dict[str, Item]] = ({}, {})
        self.withdrawn: set[str] = set()
        self.acted: tuple[list[str], list[str]] = ([], [])
        """Names of envelopes that this end acted on in the present numbering."""
        self.lied = False
        self.restarted = False
        self.count = 0
        self.now = 0.0

    # ---- what an honest owner does ----

    @rule(side=SIDE, size=SIZE, priority=st.sampled_from([HIGH, NORMAL, LOW]))
    def put(self, side: int, size: int, priority: int) -> None:
        self.count += 1
        name = f"m{self.count}"
        self.items[side][name] = self.links[side].put(envelope(name, size), self.now, priority)

    @rule(side=SIDE, goodbye=st.booleans())
    def signal(self, side: int, goodbye: bool) -> None:
        kind = Signal(goodbye=Goodbye()) if goodbye else Signal(status_change=StatusChange(agent_id="a/1"))
        self.links[side].signal(kind)

    @rule(side=SIDE, data=st.data())
    def withdraw(self, side: int, data: st.DataObject) -> None:
        if self.items[side]:
            name = data.draw(st.sampled_from(sorted(self.items[side])))
            self.links[side].withdraw(self.items[side][name])
            self.withdrawn.add(name)

    @rule(side=SIDE)
    def write(self, side: int) -> None:
        self.now += 0.004
        frame = self.links[side].next_frame(self.now)
        if frame is not None:
            self.flights[side].append(frame)

    @rule(side=SIDE)
    def read(self, side: int) -> None:
        """The other end takes the oldest frame of this one."""
        if self.flights[side]:
            self.arrive(1 - side, Frame.FromString(self.flights[side].pop(0)))

    @rule()
    def cut_and_resume(self) -> None:
        self.cut()
        one, other = self.links
        fits = one.fits(other.last_accepted) and other.fits(one.last_accepted)
        assert fits or self.lied, "honest ends always fit"
        if not (one.resume(other.last_accepted) and other.resume(one.last_accepted)):
            self.restart()

    # ---- what a liar does ----

    @rule(side=SIDE, at=st.integers(0, 20), to=st.integers(0, 20))
    def repeat(self, side: int, at: int, to: int) -> None:
        """A frame that is under way comes once more, earlier or later."""
        flight = self.flights[side]
        if flight:
            flight.insert(to % (len(flight) + 1), flight[at % len(flight)])

    @rule(side=SIDE, at=st.integers(0, 20), to=st.integers(0, 20))
    def swap(self, side: int, at: int, to: int) -> None:
        flight = self.flights[side]
        if flight:
            at, to = at % len(flight), to % len(flight)
            flight[at], flight[to] = flight[to], flight[at]

    @rule(side=SIDE, seq=NUMBER, ack=NUMBER, envelopes=st.integers(0, 2))
    def invent(self, side: int, seq: int, ack: int, envelopes: int) -> None:
        self.lied = True
        forged = [envelope(f"forged {number}") for number in range(envelopes)]
        self.arrive(side, Frame(seq=seq, ack=ack, envelopes=forged))

    @rule(side=SIDE, last_seq=NUMBER)
    def resume_with_a_lie(self, side: int, last_seq: int) -> None:
        """One end is told something else than what the other accepted."""
        self.cut()
        link, other = self.links[side], self.links[1 - side]
        self.lied |= last_seq != other.last_accepted
        fits = link.fits(last_seq)
        before = link.acknowledged
        assert link.resume(last_seq) is fits
        assert link.acknowledged == (max(before, last_seq) if fits else before)
        if not fits or not other.resume(link.last_accepted):
            self.restart()

    # ---- inside ----

    def arrive(self, side: int, frame: Frame) -> None:
        link = self.links[side]
        last = link.last_accepted
        breaks = link._next_seq <= frame.ack or frame.seq > last + 1 or (frame.seq == 0 and len(frame.envelopes) > 0)
        try:
            acts = link.receive(frame, self.now)
        except LinkError:
            assert breaks
            self.check_books()
            self.restart()  # what both shells do after goodbye PROTOCOL_ERROR
            return
        assert not breaks
        assert acts is (frame.seq in (0, last + 1))
        assert link.last_accepted == (last + 1 if acts and frame.seq else last)
        if acts:
            self.acted[side].extend(each.message_id for each in frame.envelopes)

    def cut(self) -> None:
        for link, flight in zip(self.links, self.flights, strict=True):
            link.cut()
            flight.clear()

    def restart(self) -> None:
        for link, flight, acted in zip(self.links, self.flights, self.acted, strict=True):
            flight.clear()
            link.cut()
            link.restart()
            acted.clear()
        self.lied, self.restarted = False, True

    # ---- what holds ----

    @invariant()
    def check_books(self) -> None:
        for link in getattr(self, "links", ()):
            recount(link)

    @invariant()
    def nothing_is_acted_on_twice(self) -> None:
        for acted in getattr(self, "acted", ()):
            honest = [name for name in acted if not name.startswith("forged")]
            assert len(honest) == len(set(honest))

    def teardown(self) -> None:
        """The lies are over: begin anew, and everything that waits arrives."""
        if not hasattr(self, "links"):
            return
        taken = [set(acted) for acted in self.acted]
        lied = self.lied or self.restarted
        self.restart() if lied else self.cut_and_resume()
        for _ in range(4 * self.count + 8):
            for side in (0, 1):
                self.write(side)
                while self.flights[side]:
                    self.read(side)
        for side, link in enumerate(self.links):
            assert link.idle and not link.unacked and not link.waiting_bytes
            arrived = taken[1 - side] | set(self.acted[1 - side])
            for name, item in self.items[side].items():
                assert item.accepted or name in self.withdrawn
                assert lied or name in arrived or name in self.withdrawn


TwoEnds.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestTwoEnds = TwoEnds.TestCase
