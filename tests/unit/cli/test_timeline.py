"""What a trace's picture says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.admin_pb2 import GetTraceReply, TracedMessage
from reach.cli import timeline

START_US = 1_800_000_000_000_000


def message(
    name: str, stages: list[tuple[str, int, int, str]], parent: str = "", outcome: str = "OK", at_us: int = 0
) -> TracedMessage:
    made = TracedMessage(message_id=name, parent_message_id=parent, source="caller/x", agent_id="a/1", outcome=outcome)
    for stage_name, offset_us, attempt, detail in stages:
        stage = made.stages.add(name=stage_name, offset_us=offset_us, attempt=attempt, detail=detail)
        stage.at.FromMicroseconds(START_US + at_us + offset_us)
    return made


def plain(*names: tuple[str, int]) -> list[tuple[str, int, int, str]]:
    return [(name, offset, 1, "") for name, offset in names]


def spans(found: timeline.Message) -> list[tuple[str, int]]:
    return [(span.where, span.end_us - span.begin_us) for span in found.spans]


def test_five_seconds_in_the_agents_queue_and_eighteen_in_the_handler_are_read_off_at_a_glance() -> None:
    slow = message(
        "m1",
        plain(
            ("received", 0), ("routed", 100), ("delivered", 300), ("accepted", 20_300), ("started", 5_020_300),
            ("replied", 23_020_300),
        ),
    )  # fmt: skip
    (found,) = timeline.messages(GetTraceReply(messages=[slow]))
    assert ("in the agent's local queue", 5_000_000) in spans(found)
    assert ("in the handler", 18_000_000) in spans(found)


def test_an_acknowledgement_that_comes_after_the_handler_began_does_not_move_the_message_back() -> None:
    early = message(
        "m1", plain(("received", 0), ("delivered", 10), ("started", 20), ("accepted", 40), ("replied", 100))
    )
    (found,) = timeline.messages(GetTraceReply(messages=[early]))
    assert spans(found) == [("at the node", 10), ("on its way to the agent", 10), ("in the handler", 80)]


def test_a_message_that_crossed_nodes_is_shown_from_node_to_node_and_what_the_home_saw_counts() -> None:
    crossed = TracedMessage(message_id="m1", source="caller/x", agent_id="a/1", outcome="OK")
    for node_id, name, offset_us in (
        ("n1", "received", 0), ("n1", "routed", 10), ("n1", "delivered", 20),
        ("n2", "received", 320), ("n2", "routed", 330), ("n2", "delivered", 340), ("n2", "started", 800),
        ("n1", "started", 900), ("n1", "accepted", 950), ("n2", "accepted", 960),
        ("n2", "replied", 5_000), ("n1", "replied", 5_400),
    ):  # fmt: skip
        stage = crossed.stages.add(name=name, node_id=node_id, offset_us=offset_us, attempt=1)
        stage.at.FromMicroseconds(START_US + offset_us)
    (found,) = timeline.messages(GetTraceReply(messages=[crossed]))
    assert spans(found) == [
        ("at n1", 10), ("in the link's outbox", 10), ("on its way to n2", 300),
        ("at n2", 10), ("in the link's outbox", 10), ("on its way to the agent", 460),
        ("in the handler", 4_200), ("on its way to n1", 400),
    ]  # fmt: skip


def test_a_second_attempt_has_spans_of_its_own() -> None:
    stages = [
        ("received", 0, 0, ""),
        ("delivered", 1, 1, "a/1"),
        ("started", 2, 1, ""),
        ("failed", 4, 1, "AGENT_LOST at a/1"),
        ("retried", 5, 1, "link lost"),
        ("delivered", 9, 2, "a/2"),
        ("accepted", 10, 2, ""),
        ("started", 12, 2, ""),
        ("replied", 20, 2, ""),
    ]
    (found,) = timeline.messages(GetTraceReply(messages=[message("m1", stages)]))
    assert ("the attempt failed", 1) in spans(found)
    assert ("before the next attempt", 4) in spans(found)
    assert ("in the agent's local queue", 2) in spans(found)


def test_messages_are_nested_below_the_one_that_caused_them_and_placed_in_time() -> None:
    reply = GetTraceReply(
        messages=[
            message("child", plain(("received", 0), ("replied", 10)), parent="top", at_us=50),
            message("top", plain(("received", 0), ("replied", 100))),
            message("other", plain(("received", 0), ("replied", 5)), at_us=200),
        ]
    )
    found = timeline.messages(reply)
    assert [(each.message_id, each.depth, each.begin_us) for each in found] == [
        ("top", 0, 0), ("child", 1, 50), ("other", 0, 200),
    ]  # fmt: skip
    assert timeline.whole_us(found) == 205


def test_a_running_message_says_where_it_is() -> None:
    running = message("m1", plain(("received", 0), ("delivered", 10), ("accepted", 20)), outcome="")
    (found,) = timeline.messages(GetTraceReply(messages=[running]))
    assert found.spans[-1].where == "still in the agent's local queue"


def test_times_that_the_picture_shows_are_not_repeated_and_reasons_are_kept() -> None:
    failed = message(
        "m1",
        [
            ("received", 0, 1, ""),
            ("started", 5, 1, "after 0.001 s in the agent's queue"),
            ("failed", 9, 1, "the handler failed, after 0.004 s in the handler"),
        ],
        outcome="AGENT_ERROR",
    )
    (found,) = timeline.messages(GetTraceReply(messages=[failed]))
    assert [span.detail for span in found.spans] == ["", ""]
    assert found.ending == "the handler failed"


names = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.tuples(names, names, st.integers(0, 1000)), max_size=8))
def test_every_message_is_shown_once_even_if_parents_form_a_ring(links: list[tuple[str, str, int]]) -> None:
    reply = GetTraceReply(
        messages=[
            message(name, plain(("received", 0), ("replied", 10)), parent=parent, at_us=at_us)
            for name, parent, at_us in links
        ]
    )
    found = timeline.messages(reply)
    assert sorted(each.message_id for each in found) == sorted(name for name, _, _ in links)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 2 * 10**9), st.integers(5, 80))
def test_a_bar_is_as_wide_as_its_place_and_never_invisible(begin: int, length: int, whole: int, width: int) -> None:
    span = timeline.Span("in the handler", begin, begin + length, "", 1)
    drawn = timeline.bar(span, max(whole, begin + length), width)
    assert len(drawn) == width
    assert drawn.strip()


def test_an_answer_without_messages_or_stages_is_an_empty_picture() -> None:
    assert timeline.messages(GetTraceReply()) == []
    (found,) = timeline.messages(GetTraceReply(messages=[TracedMessage(message_id="m")]))
    assert found.spans == ()
