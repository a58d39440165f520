"""Answers of several nodes made one."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.v1 import admin_pb2 as admin
from reach.node import merged

Stage = tuple[str, int, str]
"""(name, µs since the message was received, detail)."""


def moment(us: int) -> Timestamp:
    return Timestamp(seconds=us // 1_000_000, nanos=us % 1_000_000 * 1_000)


def traced(
    node_id: str, began_us: int, *stages: Stage, message_id: str = "m1", outcome: str = "OK", agent_id: str = "w/1"
) -> admin.GetTraceReply:
    """What one node tells of one message."""
    message = admin.TracedMessage(message_id=message_id, source="caller/1", outcome=outcome, agent_id=agent_id)
    for name, offset_us, detail in stages:
        message.stages.add(
            name=name, node_id=node_id, offset_us=offset_us, detail=detail, at=moment(began_us + offset_us)
        )
    return admin.GetTraceReply(messages=[message])


ENTRY: tuple[Stage, ...] = (
    ("received", 0, ""), ("routed", 10, "LEAST_ACTIVE"), ("delivered", 10, "w/1"), ("replied", 1_000, ""),
)  # fmt: skip
HOME: tuple[Stage, ...] = (("received", 0, ""), ("routed", 5, ""), ("delivered", 5, "w/1"), ("replied", 600, ""))


def shown(reply: admin.GetTraceReply) -> list[str]:
    (message,) = reply.messages
    assert [stage.offset_us for stage in message.stages] == sorted(stage.offset_us for stage in message.stages)
    return [f"{stage.node_id} {stage.name}" for stage in message.stages]


IN_ORDER = [
    "a received", "a routed", "a delivered", "b received", "b routed", "b delivered", "b replied", "a replied",
]  # fmt: skip


class TestTraces:
    def test_a_message_of_two_nodes_is_one_with_the_stages_of_both_whoever_is_asked(self) -> None:
        entry, home = traced("a", 5_000_000, *ENTRY), traced("b", 5_000_200, *HOME)
        assert shown(merged.traces([entry, home])) == IN_ORDER
        assert shown(merged.traces([home, entry])) == IN_ORDER

    def test_clocks_that_differ_do_not_put_a_home_before_or_after_its_entry(self) -> None:
        for skew_us in (-3_000_000, -300, 300, 3_000_000):
            reply = merged.traces([traced("b", 5_000_200 + skew_us, *HOME), traced("a", 5_000_000, *ENTRY)])
            found = shown(reply)
            assert found[0] == "a received"
            assert found.index("b replied") <= found.index("a replied")
            told = next(stage for stage in reply.messages[0].stages if stage.node_id == "b")
            assert told.at == moment(5_000_200 + skew_us)  # what that node said stays

    def test_the_entry_tells_the_outcome_also_while_it_still_waits(self) -> None:
        entry = traced("a", 5_000_000, *ENTRY[:3], outcome="")
        (message,) = merged.traces([traced("b", 5_000_200, *HOME), entry]).messages
        assert message.outcome == ""
        assert message.stages[-1].name == "replied"

    def test_messages_of_one_trace_stand_in_the_order_of_their_receipt_and_the_newest_are_kept(self) -> None:
        replies = [
            traced("a", 3_000_000, *ENTRY, message_id="late"),
            traced("b", 1_000_000, *ENTRY, message_id="early"),
        ]
        assert [each.message_id for each in merged.traces(replies).messages] == ["early", "late"]
        assert [each.message_id for each in merged.traces(replies, 1).messages] == ["late"]


class TestSessions:
    def test_a_session_stands_once_under_its_latest_epoch_the_longest_idle_last(self) -> None:
        def told(session_id: str, agent_id: str, epoch: int, idle_s: float, **more: int) -> admin.ListSessionsReply:
            info = admin.SessionInfo(session_id=session_id, agent_id=agent_id, epoch=epoch, idle_s=idle_s, **more)
            return admin.ListSessionsReply(sessions=[info])

        reply = merged.sessions(
            [
                told("s1", "w/1", 1, 1.0),
                told("s2", "w/1", 1, 9.0),
                told("s1", "w/2", 2, 5.0),
                told("s2", "w/1", 1, 2.0),
            ],
            0,
        )
        assert [(each.session_id, each.agent_id, each.idle_s) for each in reply.sessions] == [
            ("s2", "w/1", 2.0), ("s1", "w/2", 5.0)
        ]  # fmt: skip
        other_type = merged.sessions([told("s1", "w/1", 1, 1.0), told("s1", "x/1", 1, 1.0)], 0)
        assert len(other_type.sessions) == 2
        assert len(merged.sessions([told(f"s{number}", "w/1", 1, 1.0) for number in range(9)], 4).sessions) == 4

    def test_what_waits_at_several_nodes_is_added_up(self) -> None:
        info = admin.SessionInfo(session_id="s", agent_id="w/1", epoch=1, waiting=2)
        home = admin.SessionInfo(session_id="s", agent_id="w/1", epoch=1, waiting=1, turn=7, moving=True)
        (found,) = merged.sessions(
            [admin.ListSessionsReply(sessions=[info]), admin.ListSessionsReply(sessions=[home])], 0
        ).sessions
        assert (found.waiting, found.turn, found.moving) == (3, 7, True)


class TestBreakers:
    def test_the_worst_stand_first_one_row_a_node(self) -> None:
        def told(node_id: str, state: str, agent_id: str = "w/1") -> admin.ListBreakersReply:
            return admin.ListBreakersReply(
                breakers=[admin.BreakerInfo(agent_id=agent_id, state=state, node_id=node_id)]
            )

        replies = [told("a", "CLOSED"), told("b", "RAMPING"), told("c", "OPEN"), told("a", "OPEN", "w/0")]
        found = [(each.agent_id, each.node_id) for each in merged.breakers(replies, 0).breakers]
        assert found == [("w/0", "a"), ("w/1", "c"), ("w/1", "b"), ("w/1", "a")]
        assert len(merged.breakers(replies, 2).breakers) == 2


class TestDeadLetters:
    def test_the_youngest_stand_first_within_limit_and_bytes_and_all_are_counted(self) -> None:
        def told(*seconds: int, text: str = "") -> admin.ListDeadLettersReply:
            letters = [admin.DeadLetter(message_id=f"m{at}", at=Timestamp(seconds=at), reason=text) for at in seconds]
            return admin.ListDeadLettersReply(dead_letters=letters, kept=len(letters) + 5)

        reply = merged.dead_letters([told(5, 1), told(7, 3)], 3)
        assert [each.message_id for each in reply.dead_letters] == ["m7", "m5", "m3"]
        assert reply.kept == 14
        large = merged.dead_letters([told(1, text="x" * (3 << 20)), told(2, text="x" * (3 << 20))], 0)
        assert [each.message_id for each in large.dead_letters] == ["m2"]
        assert large.ByteSize() < 4 << 20
