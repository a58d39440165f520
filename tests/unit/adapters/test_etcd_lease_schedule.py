"""When which lease is renewed."""

from hypothesis import given
from hypothesis import strategies as st

from reach.adapters.etcd.lease_schedule import IN_FLIGHT_MAX, Answer, LeaseSchedule


def test_a_lease_is_due_at_a_third_of_its_ttl_and_again_after_the_answer() -> None:
    schedule = LeaseSchedule()
    schedule.add(1, 9.0, 100.0)
    assert schedule.next_due() == 103.0
    assert schedule.take_due(102.9) == []
    assert schedule.take_due(103.5) == [1]
    assert schedule.take_due(110.0) == []  # in flight
    assert schedule.answered(1, 9.0, 103.6) == (Answer.KEPT, 112.5)  # from when it was sent, not answered
    assert schedule.next_due() == 106.5


def test_a_lease_that_etcd_does_not_know_is_gone_unless_it_is_very_young() -> None:
    schedule = LeaseSchedule()
    schedule.add(1, 2.1, 100.0)
    assert schedule.take_due(100.8) == [1]
    assert schedule.answered(1, 0.0, 100.9)[0] is Answer.UNKNOWN
    assert schedule.take_due(101.3) == [1]
    assert schedule.answered(1, 0.0, 101.4)[0] is Answer.GONE
    assert not len(schedule)


def test_an_answer_for_a_forgotten_lease_or_out_of_turn_means_nothing() -> None:
    schedule = LeaseSchedule()
    schedule.add(1, 9.0, 100.0)
    assert schedule.answered(1, 9.0, 101.0)[0] is Answer.UNKNOWN
    schedule.take_due(103.0)
    schedule.remove(1)
    assert schedule.answered(1, 9.0, 103.1)[0] is Answer.UNKNOWN
    assert schedule.next_due() is None
    assert schedule.answer_due() is None


def test_after_a_reconnection_what_was_in_flight_is_due_at_once() -> None:
    schedule = LeaseSchedule()
    schedule.add(1, 9.0, 100.0)
    schedule.add(2, 30.0, 100.0)
    schedule.take_due(103.0)
    schedule.reconnected(104.0)
    assert schedule.answer_due() is None
    assert schedule.take_due(104.0) == [1]


def test_an_answer_is_awaited_for_two_seconds_and_less_for_short_leases() -> None:
    schedule = LeaseSchedule()
    schedule.add(1, 30.0, 100.0)
    schedule.take_due(110.0)
    assert schedule.answer_due() == 112.0
    schedule = LeaseSchedule()
    schedule.add(2, 3.0, 100.0)
    schedule.take_due(101.0)
    assert schedule.answer_due() == 102.0


def test_never_more_than_the_maximum_is_in_flight() -> None:
    schedule = LeaseSchedule()
    for lease_id in range(2 * IN_FLIGHT_MAX):
        schedule.add(lease_id, 9.0, 100.0)
    first = schedule.take_due(103.0)
    assert len(first) == IN_FLIGHT_MAX
    assert schedule.next_due() is None  # an answer must come first
    schedule.answered(first[0], 9.0, 103.1)
    assert len(schedule.take_due(103.1)) == 1


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "send", "answer", "reconnect"]), st.integers(0, 5))))
def test_no_lease_is_ever_forgotten(steps: list[tuple[str, int]]) -> None:
    """Whatever happens, each lease is either planned or in flight, and never twice in flight."""
    schedule, alive, in_flight, now = LeaseSchedule(), set[int](), set[int](), 0.0
    for step, lease_id in steps:
        now += 1.0
        match step:
            case "add" if lease_id not in alive:
                schedule.add(lease_id, 3.0, now)
                alive.add(lease_id)
            case "remove":
                schedule.remove(lease_id)
                alive.discard(lease_id)
                in_flight.discard(lease_id)
            case "send":
                sent = schedule.take_due(now)
                assert not in_flight & set(sent)
                assert len(sent) == len(set(sent))
                in_flight |= set(sent)
            case "answer":
                kept, _ = schedule.answered(lease_id, 3.0, now)
                assert (kept is Answer.KEPT) == (lease_id in in_flight)
                in_flight.discard(lease_id)
            case "reconnect":
                schedule.reconnected(now)
                in_flight.clear()
    assert set(schedule.take_due(now + 100.0)) == alive - in_flight
