"""Plays: replies in items, at the pace of who takes them."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Progress, Signal, StreamCredit
from agentreach.wire.errors import failure
from tests.support.core import CoreMesh, Process, record
from tests.support.cores import Cores


def _credits(agent: Process) -> list[int]:
    return [signal.stream_credit.up_to for signal in agent.got_signals("stream_credit")]


def _grant(core: CoreMesh, caller: Process, message: str, up_to: int) -> None:
    entry = caller.replies_to(message)[0].entry
    caller.signal(Signal(stream_credit=StreamCredit(correlation_id=message, entry=entry, up_to=up_to)))
    core.pump()


def test_items_come_in_order_with_their_numbers() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    for number in range(3):
        agent.answer(message, str(number), more=True, sequence=77)
    agent.answer(message, "end", sequence=3)
    replies = caller.replies_to(message)
    assert [(reply.sequence, reply.more, reply.payload.text) for reply in replies] == [
        (0, True, "0"),
        (1, True, "1"),
        (2, True, "2"),
        (3, False, "end"),
    ]
    core.assert_settled()


def test_credit_goes_on_to_the_producer_as_all_who_wait_grant_it() -> None:
    core = CoreMesh()
    agent, one, two = core.agent(), core.caller("one"), core.caller("two")
    message = one.request()
    two.send(core.envelope(message_id=message, fresh=False))
    core.pump()
    agent.answer(message, "0", more=True)
    _grant(core, one, message, 200)
    assert _credits(agent) == []
    _grant(core, two, message, 150)
    assert _credits(agent) == [150]
    two.cancel(message)
    assert _credits(agent) == [150, 200]
    agent.answer(message)
    core.assert_settled()


def test_a_grant_for_somebody_elses_stream_counts_for_nothing() -> None:
    core = CoreMesh()
    agent, caller, mallory = core.agent(), core.caller(), core.caller("mallory")
    message = caller.request()
    agent.answer(message, "0", more=True)
    entry = caller.replies_to(message)[0].entry
    mallory.signal(Signal(stream_credit=StreamCredit(correlation_id=message, entry=entry, up_to=500)))
    core.pump()
    assert _credits(agent) == []
    agent.answer(message)
    core.assert_settled()


def test_a_producer_that_ignores_credit_loses_its_stream() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    for number in range(65):
        agent.answer(message, str(number), more=True)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_ERROR and error.details["items"] == "64"
    core.assert_settled()


def test_a_unary_call_takes_items_as_they_come() -> None:
    core = CoreMesh()
    agent = core.agent()
    call, envelope = core.call()
    for number in range(300):
        agent.answer(envelope.message_id, str(number), more=True)
    agent.answer(envelope.message_id, "end")
    assert len(call.replies) == 301 and call.done
    core.assert_settled()


def test_an_item_over_the_limit_ends_that_stream_with_its_error() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    agent.answer(message, "0", more=True)
    agent.answer(message, "x" * (2 << 20), more=True)
    error = caller.error_of(message)
    assert error.code == codes.PAYLOAD_TOO_LARGE and error.details["items"] == "1"
    core.assert_settled()


def test_an_agent_that_dies_midway_is_lost_after_n_items() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    agent.answer(message, "0", more=True)
    agent.answer(message, "1", more=True)
    agent.cut()
    core.advance(11)
    error = caller.error_of(message)
    assert error.code == codes.AGENT_LOST and error.details["items"] == "2"
    core.assert_settled()


def test_a_gap_between_items_counts_and_the_wait_for_the_first_does_not() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=300_000)
    core.advance(60)
    agent.answer(message, "0", more=True)
    core.advance(25)
    agent.signal(Signal(progress=Progress(message_id=message, entry=agent.got(message).entry, text="thinking")))
    core.advance(25)
    assert len(caller.replies) == 1
    core.advance(6)
    error = caller.error_of(message)
    assert error.code == codes.TIMEOUT and "no item" in error.message and error.agent_id == "echo/1"
    core.assert_settled()


def test_a_consumer_that_grants_nothing_loses_that_stream_only() -> None:
    core = CoreMesh()
    agent, stalled, brisk = core.agent(), core.caller("stalled"), core.caller("brisk")
    message = stalled.request(timeout_ms=300_000)
    brisk.send(core.envelope(message_id=message, fresh=False, timeout_ms=300_000))
    core.pump()
    other = stalled.request(timeout_ms=300_000)
    for number in range(64):
        agent.answer(message, str(number), more=True)
    _grant(core, brisk, message, 500)
    core.advance(31)
    assert "took no item" in stalled.error_of(message).message
    assert _credits(agent) == [500]
    for number in range(64, 200):
        agent.answer(message, str(number), more=True)
    agent.answer(message, "end")
    agent.answer(other)
    assert brisk.reply_to(message).payload.text == "end"
    assert stalled.text_of(other) == "ok"
    core.assert_settled()


def test_the_producers_idle_time_does_not_run_while_the_consumer_pauses() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=300_000)
    for number in range(64):
        agent.answer(message, str(number), more=True)
    core.advance(25)
    _grant(core, caller, message, 128)
    core.advance(25)
    agent.answer(message, "64", more=True)
    agent.answer(message, "end")
    assert caller.reply_to(message).payload.text == "end"
    core.assert_settled()


def test_cancel_midway_ends_the_stream() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    agent.answer(message, "0", more=True)
    agent.confirms_cancels = False
    caller.cancel(message)
    agent.answer(message, "1", more=True)
    agent.answer(message, "end")
    assert len(caller.replies) == 2
    assert caller.error_of(message).code == codes.CANCELLED
    core.assert_settled()


def test_an_item_that_is_an_error_ends_the_stream() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    agent.answer(message, "0", more=True)
    error = Error()
    error.CopyFrom(failure(codes.AGENT_ERROR, "boom"))
    agent.answer(message, error=error, more=True)
    assert caller.error_of(message).code == codes.AGENT_ERROR
    core.assert_settled()


def test_a_link_that_begins_anew_is_told_the_credit_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    agent.answer(message, "0", more=True)
    _grant(core, caller, message, 300)
    agent.cut()
    agent.restart_numbering()
    agent.connect()
    assert _credits(agent) == [300, 300]
    agent.answer(message)
    core.assert_settled()


@pytest.mark.parametrize("entry", [0, 1])
@pytest.mark.parametrize("came", [1, 3])
def test_items_that_come_once_more_are_given_once(entry: int, came: int) -> None:
    """A process whose link began anew, or that has gone round by another node, begins again with all that it keeps."""
    cores = Cores(2)
    core, caller = cores.nodes[0], cores.nodes[entry].caller()
    agent = core.process("echo-1")
    agent.forget()
    agent.sdk = "with numbers"
    agent.connect(record("echo/1"))
    message = caller.request(timeout_ms=60_000)
    for number in range(came):
        agent.answer(message, str(number), more=True, sequence=number)
    agent.cut()
    agent.forget()
    agent.connect()
    first, again = agent.requests
    assert again.message_id == first.message_id and again.entry == first.entry
    for _ in range(2):  # what was not acknowledged is sent again, and then all for the request that came again
        for number in range(came):
            agent.answer(again, str(number), more=True, sequence=number)
    agent.answer(again, str(came), more=True, sequence=came)
    agent.answer(again, "end")
    assert [reply.payload.text for reply in caller.replies] == [*map(str, range(came + 1)), "end"]
    assert [reply.sequence for reply in caller.replies] == list(range(came + 2))
    cores.assert_settled()
