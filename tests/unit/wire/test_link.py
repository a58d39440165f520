"""Two links, a stream between them that breaks at any point, and what must hold all the same."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.frame_pb2 import (
    Frame,
    Goodbye,
    Heartbeat,
    Hello,
    Probe,
    SessionSnapshot,
    SessionState,
    Signal,
    StatusChange,
    StreamCredit,
    Welcome,
)
from agentreach.wire import framing, limits, link
from agentreach.wire.link import Link, LinkError
from agentreach.wire.outbox import HIGH, LOW, NORMAL, Item, Shared


def envelope(name: str, size: int = 0, fresh: bool = True) -> Envelope:
    env = Envelope(message_id=name, fresh=fresh)
    if size:
        env.payload.body = bytes(size)
    return env


def taken(sender: Link, now: float = 0.0) -> Frame:
    data = sender.next_frame(now)
    assert data is not None
    return Frame.FromString(data)


def names(frame: Frame) -> list[str]:
    return [env.message_id for env in frame.envelopes]


@dataclass
class Sent:
    """One envelope as the test knows it: the oracle beside the link's own account."""

    name: str
    priority: int
    item: Item
    exposed: bool = False
    """Given to a transport at any time."""
    withdrawn: bool = False
    restarts_since_exposed: int = 0
    arrived: bool = False
    """Accepted by the peer in the present numbering, or acknowledged in an earlier one."""


@dataclass
class End:
    link: Link = field(default_factory=Link)
    identity: int = 0
    """Which life of this process it is: what the resume token stands for."""
    peer_identity: int | None = None
    """The life of the peer that this link was agreed with."""
    flight: deque[bytes] = field(default_factory=deque)
    """Frames on their way to the other end, in order."""
    sent: dict[str, Sent] = field(default_factory=dict)
    received: list[tuple[str, bool]] = field(default_factory=list)
    """(message_id, fresh) in the order of acceptance by this life of the process."""


class World:
    """Two ends and a stream. The test plays the IO shells: handshake, reader and writer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ends = (End(), End())
        self.connected = False
        self.now = 100.0
        self.count = 0
        self.lives = 0
        self.connect()

    def connect(self) -> None:
        """The handshake: both tell their last accepted frame; both resume or both restart."""
        for end in self.ends:
            end.flight.clear()
        one, other = self.ends
        acquainted = one.peer_identity == other.identity and other.peer_identity == one.identity
        fits = one.link.fits(other.link.last_accepted) and other.link.fits(one.link.last_accepted)
        for end, peer in (self.ends, self.ends[::-1]):
            last_seq = peer.link.last_accepted
            if acquainted:
                assert fits, "two links that know each other always fit"
                continue
            if not end.link.fits(last_seq):
                assert not end.link.resume(last_seq)
        lasts = [end.link.last_accepted for end in self.ends]
        for end, last_seq in zip(self.ends, reversed(lasts), strict=True):
            if acquainted:
                assert end.link.resume(last_seq)
            else:
                end.link.restart()
                for sent in end.sent.values():
                    sent.restarts_since_exposed += sent.exposed
                    sent.arrived = sent.item.accepted
        one.peer_identity, other.peer_identity = other.identity, one.identity
        self.connected = True

    def put(self) -> None:
        end = self.rng.choice(self.ends)
        self.count += 1
        name = f"m{self.count}"
        priority = self.rng.choice((HIGH, NORMAL, LOW))
        size = self.rng.choice((0, 0, 0, 100, 5000, limits.FRAME_BYTES_MAX + 1))
        item = end.link.put(envelope(name, size), self.now, priority)
        end.sent[name] = Sent(name, priority, item)

    def signal(self) -> None:
        end = self.rng.choice(self.ends)
        end.link.signal(Signal(status_change=StatusChange(agent_id="a/1")))

    def write(self) -> None:
        """Give some frames to the transport."""
        if not self.connected:
            return
        end = self.rng.choice(self.ends)
        for _ in range(self.rng.randint(1, 3)):
            data = end.link.next_frame(self.now)
            if data is None:
                break
            end.flight.append(data)
            for env in Frame.FromString(data).envelopes:
                sent = end.sent[env.message_id]
                sent.exposed = True
                assert sent.item.seq > 0 and not sent.withdrawn

    def read(self) -> None:
        """The other end takes some frames off the stream."""
        if not self.connected:
            return
        at = self.rng.randrange(2)
        sender, reader = self.ends[at], self.ends[1 - at]
        for _ in range(self.rng.randint(1, 3)):
            if not sender.flight:
                break
            frame = Frame.FromString(sender.flight.popleft())
            accept(sender, reader, frame)

    def withdraw(self) -> None:
        end = self.rng.choice(self.ends)
        if not end.sent:
            return
        sent = end.sent[self.rng.choice(sorted(end.sent))]
        held = sent.item.data is not None
        never_given = end.link.withdraw(sent.item)
        assert never_given == (held and not sent.exposed)
        if held:
            sent.withdrawn = True

    def cut(self) -> None:
        """The stream breaks; what is under way is lost, or arrives in part before the break is noticed."""
        if not self.connected:
            return
        self.connected = False
        for end in self.ends:
            end.flight.clear()
            end.link.cut()
            assert end.link.next_frame(self.now) is None and not end.link.ready and not end.link.ack_owed

    def restart(self) -> None:
        """One process dies and starts anew."""
        self.cut()
        at = self.rng.randrange(2)
        self.lives += 1
        self.ends[at].link = Link()
        self.ends[at].identity = self.lives
        self.ends[at].peer_identity = None
        self.ends[at].sent.clear()
        self.ends[at].received.clear()

    def reconnect(self) -> None:
        if not self.connected:
            self.connect()

    def settle(self) -> None:
        """Let everything arrive."""
        self.reconnect()
        for _ in range(10_000):
            moved = False
            for sender, reader in (self.ends, self.ends[::-1]):
                while (data := sender.link.next_frame(self.now)) is not None:
                    sender.flight.append(data)
                    for env in Frame.FromString(data).envelopes:
                        sender.sent[env.message_id].exposed = True
                    moved = True
                while sender.flight:
                    frame = Frame.FromString(sender.flight.popleft())
                    accept(sender, reader, frame)
                    moved = True
            if not moved:
                return
        raise AssertionError("the links do not come to rest")

    def check(self) -> None:
        for sender, reader in (self.ends, self.ends[::-1]):
            recount(sender.link)
            self.check_received(sender, reader)
            for sent in sender.sent.values():
                item = sent.item
                assert (item.seq > 0) == sent.exposed, "seq tells whether it was ever handed over"
                assert item.doubtful <= sent.exposed
                if item.accepted:
                    assert item.data is None and sent.exposed
                    assert sent.arrived or sent.withdrawn, "what counts as accepted did arrive"

    def check_received(self, sender: End, reader: End) -> None:
        ours = [(name, fresh) for name, fresh in reader.received if name in sender.sent]
        seen: set[str] = set()
        order: dict[int, list[int]] = {HIGH: [], NORMAL: [], LOW: []}
        for name, fresh in ours:
            sent = sender.sent[name]
            if name in seen:
                assert not fresh and sent.restarts_since_exposed, f"{name} came twice without a restart"
            else:
                order[sent.priority].append(int(name[1:]))
            seen.add(name)
        for numbers in order.values():
            assert numbers == sorted(numbers), "order within a priority"

    def check_all_arrived(self) -> None:
        for sender in self.ends:
            for sent in sender.sent.values():
                assert sent.withdrawn or (sent.item.accepted and sent.arrived), f"{sent.name} was lost"
            link_ = sender.link
            assert (link_.waiting, link_.waiting_bytes, link_.unacked, link_.unacked_bytes) == (0, 0, 0, 0)
            assert link_.idle and not link_.ready and not list(link_.outstanding())
            assert link_._withdrawn == sum(len(lane) for lane in link_._lanes)


def accept(sender: End, reader: End, frame: Frame) -> None:
    if reader.link.receive(frame):
        for env in frame.envelopes:
            reader.received.append((env.message_id, env.fresh))
            sender.sent[env.message_id].arrived = True


def recount(subject: Link) -> None:
    """The link's running totals against what it really holds."""
    waiting = [item for lane in subject._lanes for item in lane if item.data is not None]
    assert all(item.waits and not item.accepted for item in waiting)
    assert subject.waiting == len(waiting)
    assert subject.waiting_bytes == sum(len(item.data or b"") for item in waiting)
    assert subject.unacked == sum(len(frame.items) for frame in subject._kept)
    assert subject.unacked_bytes == sum(frame.bytes_held for frame in subject._kept)
    assert subject._withdrawn == sum(item.data is None for lane in subject._lanes for item in lane)
    assert [frame.seq for frame in subject._kept] == list(range(subject.acknowledged + 1, subject._next_seq))
    assert not any(item.waits for frame in subject._kept for item in frame.items)
    assert len(list(subject.outstanding())) == subject.waiting + sum(
        item.data is not None for frame in subject._kept for item in frame.items
    )
    assert subject.shared.bytes_held == subject.waiting_bytes + subject.unacked_bytes


STEPS = ["put"] * 6 + ["write"] * 6 + ["read"] * 6 + ["signal", "withdraw", "withdraw", "cut", "reconnect", "reconnect"]


def walk(world: World, steps: list[str]) -> None:
    for step in steps:
        world.now += 0.003
        getattr(world, step)()
        world.check()
    world.settle()
    world.check()
    world.check_all_arrived()


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(STEPS), max_size=80))
def test_cuts_anywhere_lose_nothing_double_nothing_and_keep_order(rng: random.Random, steps: list[str]) -> None:
    world = World(rng)
    walk(world, steps)
    for sender, reader in (world.ends, world.ends[::-1]):
        arrived = [name for name, _ in reader.received]
        assert len(arrived) == len(set(arrived))
        assert {sent.name for sent in sender.sent.values() if not sent.withdrawn} <= set(arrived)
        assert all(fresh for _, fresh in reader.received)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from([*STEPS, "restart"]), max_size=80))
def test_restarts_of_either_end_lose_nothing_of_the_end_that_lives(rng: random.Random, steps: list[str]) -> None:
    walk(World(rng), steps)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk_with_everything_keeps_its_books(seed: int) -> None:
    rng = random.Random(seed)
    walk(World(rng), [rng.choice([*STEPS, "restart"]) for _ in range(600)])


@pytest.mark.parametrize("lost", range(6))
def test_a_cut_after_each_frame_is_made_good_by_a_resume(lost: int) -> None:
    sender, receiver = Link(), Link()
    frames = []
    for n in range(5):
        sender.put(envelope(f"m{n}"), 0.0)
        frames.append(sender.next_frame(0.0))
    got = []
    for data in frames[:lost]:
        frame = Frame.FromString(data or b"")
        assert receiver.receive(frame)
        got += names(frame)
    sender.cut()
    receiver.cut()
    assert sender.resume(receiver.last_accepted) and receiver.resume(sender.last_accepted)
    while sender.ready:
        frame = taken(sender)
        assert receiver.receive(frame)
        got += names(frame)
    assert got == [f"m{n}" for n in range(5)]


def test_a_frame_that_was_seen_is_dropped() -> None:
    sender, receiver = Link(), Link()
    sender.put(envelope("m"), 0.0)
    frame = taken(sender)
    assert receiver.receive(frame)
    assert not receiver.receive(frame)


def test_a_resent_frame_keeps_its_number_also_when_it_is_empty_by_now() -> None:
    sender, receiver = Link(), Link()
    item = sender.put(envelope("m1"), 0.0)
    taken(sender)
    sender.put(envelope("m2"), 0.0)
    taken(sender)
    sender.cut()
    assert not sender.withdraw(item)
    assert sender.resume(0)
    first, second = taken(sender), taken(sender)
    assert (first.seq, names(first)) == (1, [])
    assert (second.seq, names(second)) == (2, ["m2"])
    assert receiver.receive(first) and receiver.receive(second)


def test_what_was_sent_before_a_restart_is_never_again_taken_for_unsent() -> None:
    sender = Link()
    item = sender.put(envelope("m"), 0.0)
    taken(sender)
    sender.cut()
    sender.restart()
    assert item.seq == 1 and item.doubtful and item.waits
    assert sender.withdraw(item) is False
    assert (sender.waiting, sender.waiting_bytes) == (0, 0)
    assert sender.next_frame(0.0) is None


def test_after_a_restart_only_what_was_sent_before_loses_its_fresh_mark() -> None:
    sender = Link()
    sender.put(envelope("sent"), 0.0)
    taken(sender)
    sender.put(envelope("unsent"), 0.0)
    sender.cut()
    sender.restart()
    frame = taken(sender)
    assert frame.seq == 1
    assert [(env.message_id, env.fresh) for env in frame.envelopes] == [("sent", False), ("unsent", True)]


def test_between_cut_and_handshake_only_the_handshake_is_spoken() -> None:
    sender, receiver = Link(), Link()
    receiver.put(envelope("m"), 0.0)
    assert sender.receive(taken(receiver))
    sender.put(envelope("reply"), 0.0)
    sender.cut()
    sender.signal(Signal(hello=Hello(last_seq=sender.last_accepted)))
    assert sender.ready
    frame = taken(sender)
    assert frame.signals[0].HasField("hello") and (frame.seq, frame.ack) == (0, 0)
    assert Link().receive(frame), "a node that knows nothing of the old link can take it"
    assert not sender.ready and sender.next_frame(0.0) is None
    assert sender.resume(0)
    frame = taken(sender)
    assert (frame.seq, frame.ack, names(frame)) == (1, 1, ["reply"])


def test_large_signals_share_no_frame_come_before_what_waits_and_know_their_numbers() -> None:
    sender = Link()
    sender.put(envelope("after"), 0.0)
    large = [
        Signal(
            session_snapshot=SessionSnapshot(turn=turn, state=SessionState(inline=bytes(limits.FRAME_BYTES_MAX // 2)))
        )
        for turn in range(3)
    ]
    small = Signal(status_change=StatusChange(agent_id="a/1"))
    numbers = [sender.signal(each) for each in (small, large[0], large[1], large[2], small)]
    frames = [taken(sender) for _ in range(3)]
    assert [[each.WhichOneof("kind") for each in frame.signals] for frame in frames] == [
        ["status_change", "session_snapshot"],
        ["session_snapshot"],
        ["session_snapshot", "status_change"],
    ]
    assert numbers == [1, 1, 2, 3, 3]
    assert [names(frame) for frame in frames] == [[], [], ["after"]]
    assert sender.signals_waiting == 0


def test_signals_that_are_not_numbered_do_not_outlive_a_cut() -> None:
    sender = Link()
    sender.signal(Signal(heartbeat=Heartbeat()))
    sender.signal(Signal(stream_credit=StreamCredit(up_to=64)))
    sender.cut()
    assert sender.resume(0)
    frame = taken(sender)
    assert [signal.WhichOneof("kind") for signal in frame.signals] == ["stream_credit"] and frame.seq == 1
    assert sender.next_frame(0.0) is None


@pytest.mark.parametrize(
    "signal",
    [Signal(hello=Hello()), Signal(welcome=Welcome()), Signal(probe=Probe())],
)
def test_the_signals_of_the_stream_itself_have_no_number(signal: Signal) -> None:
    sender = Link()
    sender.put(envelope("m"), 0.0)
    sender.signal(signal)
    frame = taken(sender)
    assert frame.seq == 0 and list(frame.signals) == [signal] and not frame.envelopes
    assert sender.acknowledged == 0 and taken(sender).seq == 1


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Frame(seq=2), "frame 2 came after frame 0"),
        (Frame(seq=0, envelopes=[Envelope()]), "without seq"),
        (Frame(ack=1), "never sent"),
        (Frame(seq=1, ack=1 << 63), "never sent"),
    ],
)
def test_a_peer_that_breaks_the_numbering_is_told_apart(frame: Frame, reason: str) -> None:
    subject = Link()
    with pytest.raises(LinkError, match=reason):
        subject.receive(frame)
    assert subject.last_accepted == 0
    recount(subject)


def test_an_ack_frees_what_it_covers_and_an_old_one_frees_nothing_more() -> None:
    sender = Link()
    items = []
    for n in range(3):
        items.append(sender.put(envelope(f"m{n}", 100), 0.0))
        taken(sender)
    sender.receive(Frame(ack=2))
    assert [item.accepted for item in items] == [True, True, False]
    sender.receive(Frame(ack=1))
    assert sender.acknowledged == 2 and sender.unacked == 1
    recount(sender)


def test_the_time_of_an_ack_is_kept_with_what_it_covers() -> None:
    sender = Link()
    first, second = sender.put(envelope("a"), 1.0), sender.put(envelope("b"), 5.0)
    taken(sender, 5.0)
    sender.receive(Frame(ack=1), 7.0)
    assert (first.accepted_at, second.accepted_at) == (7.0, 0.0)


def test_an_ack_rides_on_whatever_is_sent_and_is_owed_until_then() -> None:
    sender, receiver = Link(), Link()
    sender.put(envelope("m"), 0.0)
    receiver.receive(taken(sender))
    assert receiver.ack_owed and not receiver.ready
    frame = taken(receiver)
    assert (frame.seq, frame.ack) == (0, 1)
    assert not receiver.ack_owed and receiver.next_frame(0.0) is None
    receiver.cut()
    assert receiver.resume(0)
    assert receiver.ack_owed, "after a cut nobody knows whether it arrived"


def test_an_ack_becomes_urgent_after_many_envelopes() -> None:
    sender, receiver = Link(), Link()
    for n in range(limits.ACK_ENVELOPES):
        sender.put(envelope(f"m{n}"), 0.0)
    while sender.ready:
        assert not receiver.ack_urgent
        receiver.receive(taken(sender))
    assert receiver.ack_urgent
    taken(receiver)
    assert not receiver.ack_urgent


def test_a_frame_holds_many_small_envelopes_or_one_large_one() -> None:
    sender = Link()
    for n in range(300):
        sender.put(envelope(f"s{n}"), 0.0)
    sender.put(envelope("large", limits.FRAME_BYTES_MAX * 2), 0.0)
    sender.put(envelope("last"), 0.0)
    counts = []
    while sender.ready:
        counts.append(len(taken(sender).envelopes))
    assert counts == [limits.FRAME_ENVELOPES_MAX, 300 - limits.FRAME_ENVELOPES_MAX, 1, 1], "never with a large one"


def test_a_frame_holds_at_most_256_envelopes() -> None:
    sender = Link()
    for n in range(2_000):
        sender.put(envelope(f"s{n}"), 0.0)
    assert len(taken(sender).envelopes) == limits.FRAME_ENVELOPES_MAX


def test_who_owns_a_link_may_have_smaller_frames_but_no_larger_ones() -> None:
    sender = Link()
    for number in range(600):
        sender.put(envelope(f"{number}"), 0.0)
    counts = []
    for sender.enough in (32, 100, 10_000):
        counts.append(len(taken(sender).envelopes))
    assert counts == [32, 100, limits.FRAME_ENVELOPES_MAX]


def test_small_and_urgent_envelopes_go_before_a_large_one_of_lower_priority() -> None:
    sender = Link()
    sender.put(envelope("large", limits.FRAME_BYTES_MAX), 0.0, LOW)
    sender.put(envelope("small"), 0.0, NORMAL)
    sender.put(envelope("urgent"), 0.0, HIGH)
    assert names(taken(sender)) == ["urgent", "small"]


def test_age_is_told_in_every_sending_and_envelopes_of_different_ages_travel_apart() -> None:
    sender = Link()
    sender.put(envelope("old"), 10.0)
    sender.put(envelope("new"), 11.0)
    first, second = taken(sender, 11.0), taken(sender, 11.0)
    assert (names(first), first.age_ms) == (["old"], 1000)
    assert (names(second), second.age_ms) == (["new"], 0)
    sender.cut()
    assert sender.resume(0)
    assert taken(sender, 15.0).age_ms == 5000


def test_writing_pauses_when_too_much_is_unacknowledged_and_goes_on_with_the_ack() -> None:
    sender = Link()
    size = limits.UNACKED_BYTES_MAX // 4
    for n in range(6):
        sender.put(envelope(f"m{n}", size), 0.0)
    sent = 0
    while sender.ready:
        taken(sender)
        sent += 1
    assert sent == 4 and sender.waiting == 2 and sender.next_frame(0.0) is None
    sender.receive(Frame(ack=1))
    assert sender.ready and names(taken(sender)) == ["m4"]


def test_the_outbox_says_when_it_is_full_and_when_it_is_overrun() -> None:
    sender = Link()
    for n in range(limits.OUTBOX_ENVELOPES_MAX):
        assert not sender.full
        sender.put(envelope(f"m{n}"), 0.0)
    assert sender.full and not sender.overrun
    by_bytes = Link()
    while not by_bytes.overrun:
        by_bytes.put_bytes(bytes(limits.PAYLOAD_BYTES_CEILING), 0.0)
    assert by_bytes.full and by_bytes.waiting_bytes == limits.OUTBOX_BYTES_HARD_MAX


def test_envelopes_withdrawn_while_nothing_is_written_do_not_pile_up() -> None:
    sender = Link()
    kept = sender.put(envelope("kept"), 0.0)
    for n in range(5000):
        assert sender.withdraw(sender.put(envelope(f"m{n}"), 0.0))
    assert sum(len(lane) for lane in sender._lanes) <= limits.FRAME_ENVELOPES_MAX + 2
    recount(sender)
    assert names(taken(sender)) == ["kept"] and kept.seq == 1


def test_when_all_links_together_hold_too_much_those_that_hold_much_are_full_and_no_other() -> None:
    shared = Shared(3 << 20)
    stalled = [Link(shared) for _ in range(12)]
    for each in stalled:
        while not each.full:
            each.put_bytes(bytes(64 << 10), 0.0)
            each.next_frame(0.0)
    assert 3 << 20 <= shared.bytes_held <= (3 << 20) + 12 * (limits.OUTBOX_BYTES_SHARE + (64 << 10))
    assert not any(each.ready for each in stalled if each.unacked_bytes >= limits.OUTBOX_BYTES_SHARE)
    healthy, receiver = Link(shared), Link()
    for _ in range(100):  # it goes on at its own pace: what it holds is acknowledged
        assert not healthy.full
        healthy.put_bytes(envelope("m").SerializeToString(), 0.0)
        for data in iter(lambda: healthy.next_frame(0.0), None):
            receiver.receive(Frame.FromString(data))
            healthy.receive(Frame(ack=receiver.last_accepted))
    for each in stalled:
        each.give_up()
    assert shared.bytes_held == 0


def test_of_events_the_oldest_that_still_waits_is_dropped() -> None:
    sender = Link()
    events = deque([sender.put(envelope("sent"), 0.0)])
    taken(sender)
    events += [sender.put(envelope("first"), 0.0), sender.put(envelope("second"), 0.0)]
    first = events[1]
    assert sender.drop_oldest(events) is first
    assert [item.data is not None for item in events] == [True]
    assert names(taken(sender)) == ["second"]
    assert sender.drop_oldest(events) is None and sender.drop_oldest(deque()) is None


@given(st.integers(0, (1 << 64) - 1))
@example((1 << 14) - 1)
@example(1 << 14)
@example((1 << 21) - 1)
@example(1 << 21)
def test_varints_are_protobufs(number: int) -> None:
    assert Frame.FromString(b"\x08" + framing.varint(number)).seq == number


def test_the_hand_made_field_keys_are_those_of_the_contract() -> None:
    fields = Frame.DESCRIPTOR.fields_by_name
    for name, key, wire_type in (
        ("seq", framing.SEQ, 0),
        ("ack", framing.ACK, 0),
        ("age_ms", framing.AGE, 0),
        ("envelopes", framing.ENVELOPES, 2),
        ("signals", framing.SIGNALS, 2),
    ):
        assert key == bytes([fields[name].number << 3 | wire_type])
    assert Envelope.DESCRIPTOR.fields_by_name["fresh"].number << 3 == framing.NOT_FRESH[0]
    kinds = {name.name for name in Signal.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds >= link.UNNUMBERED_SIGNALS


def test_a_goodbye_goes_after_what_waits_and_at_once_where_nothing_else_can() -> None:
    link = Link()
    link.signal(Signal(goodbye=Goodbye(reason="done")))
    link.put(Envelope(message_id="last"), 1.0)
    seen = []
    while (data := link.next_frame(1.0)) is not None:
        frame = Frame.FromString(data)
        seen.append(([each.message_id for each in frame.envelopes], len(frame.signals)))
    assert seen == [(["last"], 0), ([], 1)]
    stuck = Link()
    for number in range(limits.UNACKED_ENVELOPES_MAX + 1):
        stuck.put(Envelope(message_id=str(number)), 1.0)
    while stuck.ready:
        stuck.next_frame(1.0)
    stuck.signal(Signal(goodbye=Goodbye(reason="done")))
    assert stuck.ready and stuck.waiting
    data = stuck.next_frame(1.0)
    assert data is not None and Frame.FromString(data).signals[0].goodbye.reason == "done"
