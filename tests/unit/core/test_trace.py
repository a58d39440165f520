"""Traces: what is kept, for how long, and that a slow message can be read at a glance."""

from __future__ import annotations

import gc
import inspect

from hypothesis import given
from hypothesis import strategies as st

from reach.core import trace
from reach.core.trace import TraceBook, Traced, put_journey, to_proto

WALL = 1_764_500_000.25
ROUTED_TEXT = "RANDOM, 2 candidates"


def traced(message_id: str = "m-1", trace_id: str = "t-1", received: float = 100.0) -> Traced:
    return Traced(message_id, "", trace_id, "caller/c", received, WALL)


def end(book: TraceBook, message: Traced, now: float, *, failed: bool = False) -> None:
    """As the reducer does it: the ordinary ones by their facts, the others as they are."""
    if failed or book.is_slow(now - message.received):
        book.keep(message, now)
        return
    book.finished(
        message.trace_id,
        message.message_id,
        message.parent_message_id,
        message.source,
        message.tenant,
        message.env,
        message.agent_id,
        "OK",
        message.received,
        message.received_unix,
        (ROUTED_TEXT, 100.1, 100.2, now, 1, 1_000, 2_000, ()),
    )


def add_timing(message: Traced, replied_at: float, queue_us: int, handler_us: int, attempt: int) -> None:
    message.timings += ((replied_at, queue_us, handler_us, attempt),)


def ids(found: list[Traced]) -> list[str]:
    return [message.message_id for message in found]


def test_messages_of_a_trace_come_in_the_order_of_their_receipt() -> None:
    book = TraceBook()
    for n in range(5):
        end(book, traced(f"m-{n}", received=100.0 + n), 106.0, failed=n == 2)
        end(book, traced("other", f"t-other-{n}"), 100.1)
    assert ids(book.find("t-1")) == ["m-0", "m-1", "m-2", "m-3", "m-4"]


def test_finished_messages_give_way_to_newer_ones() -> None:
    book = TraceBook(recent_max=2)
    for n in range(4):
        message = traced(f"m-{n}", f"t-{n}")
        end(book, message, 100.1)
    assert [len(book.find(f"t-{n}")) for n in range(4)] == [0, 0, 1, 1]
    assert len(book) == 2


def test_failed_and_slow_messages_survive_the_normal_traffic() -> None:
    book = TraceBook(recent_max=1)
    failed, slow = traced("failed", "t-failed"), traced("slow", "t-slow")
    end(book, failed, 100.1, failed=True)
    end(book, slow, 105.0)
    for n in range(10):
        message = traced(f"m-{n}", "t-n", received=106.0)
        end(book, message, 106.1)
    assert ids(book.find("t-failed")) == ["failed"]
    assert ids(book.find("t-slow")) == ["slow"]
    assert ids(book.find("t-n")) == ["m-9"]


def test_failed_messages_go_by_age_and_by_number() -> None:
    book = TraceBook(kept_max=2, kept_s=900.0)
    for n in range(3):
        message = traced(f"m-{n}", f"t-{n}")
        end(book, message, 100.0 + n, failed=True)
    assert [len(book.find(f"t-{n}")) for n in range(3)] == [0, 1, 1]
    book.expire(1001.0)
    assert [len(book.find(f"t-{n}")) for n in range(3)] == [0, 0, 1]
    book.expire(1002.0)
    assert len(book) == 0


def test_a_trace_id_used_by_a_hundred_thousand_messages_breaks_nothing() -> None:
    book = TraceBook(recent_max=1_000)
    for n in range(100_000):
        message = traced(f"m-{n}")
        end(book, message, 100.1)
    assert len(book) == 1_000
    assert ids(book.find("t-1", limit=3)) == ["m-99997", "m-99998", "m-99999"]
    assert len(book.find("t-1")) == 1_000


def test_a_finished_message_is_found_with_all_that_was_known_of_it() -> None:
    book = TraceBook()
    message = Traced("m", "parent", "t", "caller/c", 100.0, WALL, "acme", "staging")
    message.agent_id = "ner/1"
    end(book, message, 100.5)
    (found,) = book.find("t")
    message.outcome = "OK"
    put_journey(message, (ROUTED_TEXT, 100.1, 100.2, 100.5, 1, 1_000, 2_000, ()))
    fields = [name for name in dir(Traced) if inspect.isdatadescriptor(getattr(Traced, name)) and name[0] != "_"]
    assert "message_id" in fields
    for field in fields:
        assert getattr(found, field) == getattr(message, field), field
    assert [stage[0] for stage in found.timeline()] == [
        trace.RECEIVED,
        trace.ROUTED,
        trace.DELIVERED,
        trace.ACCEPTED,
        trace.STARTED,
        trace.REPLIED,
    ]


def test_what_becomes_known_of_a_failed_message_later_is_still_shown() -> None:
    book = TraceBook()
    message = traced()
    end(book, message, 100.1, failed=True)
    message.stages.append((trace.REPLIED, 101.0, 1, "late"))
    assert book.find("t-1")[0].timeline() == [(trace.REPLIED, 101.0, 1, "late")]


def test_normal_messages_are_kept_in_a_form_that_the_garbage_collector_passes_over() -> None:
    def seen() -> int:
        gc.collect()
        return sum(
            isinstance(thing, Traced) or (isinstance(thing, tuple) and thing[:1] == (ROUTED_TEXT,))
            for thing in gc.get_objects()
        )

    before = seen()  # other tests of this process may have left some
    book = TraceBook(recent_max=100)
    for n in range(100):
        message = traced(f"m-{n}")
        end(book, message, 100.5)
    del message
    assert seen() <= before


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "good", "bad", "expire"]), st.integers(0, 3), st.integers(0, 5)),
        max_size=80,
    )
)
def test_the_book_finds_exactly_what_it_holds(steps: list[tuple[str, int, int]]) -> None:
    """Beside a dumb twin of plain lists."""
    book = TraceBook(recent_max=4, kept_max=3, kept_s=10.0, slow_s=100.0)
    flying: list[Traced] = []
    recent: list[Traced] = []
    kept: list[tuple[float, Traced]] = []
    now = 0.0
    for number, (step, trace_number, pick) in enumerate(steps):
        now += 1.0
        if step == "begin":
            message = Traced(str(number), "", f"t-{trace_number}", "", now, WALL)
            flying.append(message)
        elif step == "expire":
            book.expire(now)
            kept = [(at, message) for at, message in kept if at > now - 10.0]
        elif flying:
            message = flying.pop(pick % len(flying))
            end(book, message, now, failed=step == "bad")
            if step == "bad":
                kept = [(at, old) for at, old in [*kept, (now, message)] if at > now - 10.0][-3:]
            else:
                recent = [*recent, message][-4:]
    held = [*recent, *(message for _, message in kept)]
    assert len(book) == len(held)
    for trace_number in range(4):
        name = f"t-{trace_number}"
        expected = sorted((m for m in held if m.trace_id == name), key=lambda m: m.received)
        assert ids(book.find(name)) == ids(expected)


def test_five_seconds_in_the_agents_queue_and_eighteen_in_the_handler_read_at_a_glance() -> None:
    message = traced(received=100.0)
    message.agent_id = "thinker/7f9c5d"
    message.stages += [
        (trace.RECEIVED, 100.0, 0, ""),
        (trace.ROUTED, 100.0001, 1, "LEAST_ACTIVE, 1 of 1"),
        (trace.DELIVERED, 100.0002, 1, ""),
        (trace.ACCEPTED, 100.001, 1, ""),
    ]
    add_timing(message, replied_at=123.001, queue_us=5_000_000, handler_us=18_000_000, attempt=1)
    message.stages.append((trace.REPLIED, 123.001, 1, ""))
    message.outcome = "OK"

    reply = to_proto([message], "node-1")

    (shown,) = reply.messages
    assert [(stage.name, stage.offset_us, stage.detail) for stage in shown.stages] == [
        ("received", 0, ""),
        ("routed", 100, "LEAST_ACTIVE, 1 of 1"),
        ("delivered", 200, ""),
        ("accepted", 1_000, ""),
        ("started", 5_001_000, "after 5.000 s in the agent's queue"),
        ("replied", 23_001_000, "after 18.000 s in the handler"),
    ]
    assert {stage.node_id for stage in shown.stages} == {"node-1"}
    assert shown.agent_id == "thinker/7f9c5d"
    assert shown.outcome == "OK"


def test_times_are_on_the_wall_clock() -> None:
    message = traced(received=100.0)
    message.stages += [(trace.RECEIVED, 100.0, 0, ""), (trace.REPLIED, 101.5, 1, "")]
    stages = to_proto([message], "n").messages[0].stages
    assert (stages[0].at.seconds, stages[0].at.nanos) == (1_764_500_000, 250_000_000)
    assert (stages[1].at.seconds, stages[1].at.nanos) == (1_764_500_001, 750_000_000)


def test_a_started_signal_is_kept_and_corrected_by_the_timing() -> None:
    message = traced()
    message.stages += [
        (trace.DELIVERED, 100.0, 1, ""),
        (trace.STARTED, 100.1, 1, ""),  # sent at 100 ms although the handler began at once
        (trace.REPLIED, 102.0, 1, ""),
    ]
    add_timing(message, 102.0, queue_us=0, handler_us=2_000_000, attempt=1)
    assert message.timeline() == [
        (trace.DELIVERED, 100.0, 1, ""),
        (trace.STARTED, 100.0, 1, "after 0.000 s in the agent's queue"),
        (trace.REPLIED, 102.0, 1, "after 2.000 s in the handler"),
    ]


def test_each_attempt_has_its_own_start() -> None:
    message = traced()
    message.stages += [(trace.DELIVERED, 100.0, 1, ""), (trace.FAILED, 101.0, 1, "AGENT_ERROR")]
    add_timing(message, 101.0, 0, 500_000, attempt=1)
    message.stages += [(trace.DELIVERED, 102.0, 2, ""), (trace.REPLIED, 103.0, 2, "")]
    add_timing(message, 103.0, 0, 250_000, attempt=2)
    assert [(name, at, attempt) for name, at, attempt, _ in message.timeline()] == [
        (trace.DELIVERED, 100.0, 1),
        (trace.STARTED, 100.5, 1),
        (trace.FAILED, 101.0, 1),
        (trace.DELIVERED, 102.0, 2),
        (trace.STARTED, 102.75, 2),
        (trace.REPLIED, 103.0, 2),
    ]
    assert message.timeline()[2][3] == "AGENT_ERROR, after 0.500 s in the handler"


@given(
    queue_us=st.integers(0, 2**64 - 1),
    handler_us=st.integers(0, 2**64 - 1),
    replied_at=st.floats(100.0, 700.0),
)
def test_whatever_an_agent_claims_the_stages_stay_in_order(queue_us: int, handler_us: int, replied_at: float) -> None:
    message = traced()
    message.stages += [(trace.DELIVERED, 100.0, 1, ""), (trace.REPLIED, replied_at, 1, "")]
    add_timing(message, replied_at, queue_us, handler_us, attempt=1)
    timeline = message.timeline()
    assert [stage[0] for stage in timeline] == [trace.DELIVERED, trace.STARTED, trace.REPLIED]
    assert [stage[1] for stage in timeline] == sorted(stage[1] for stage in timeline)
    assert len(to_proto([message], "n").messages[0].stages) == 3
