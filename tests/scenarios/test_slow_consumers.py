"""Plays: peers that do not take what they are sent cost themselves something, and nobody else (behaviour.md §6)."""

from __future__ import annotations

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Goodbye, Signal, StreamCredit
from agentreach.wire import limits
from tests.support.core import CoreMesh, Process

BIG = "x" * (256 << 10)


def held(core: CoreMesh) -> int:
    """Bytes that all outboxes hold, counted one by one."""
    return sum(peer.link.waiting_bytes + peer.link.unacked_bytes for peer in core.state.peers.values())


def flood(core: CoreMesh, caller: Process, count: int, text: str = BIG, **target: object) -> list[int]:
    """Requests to a peer that takes none; the codes of those that were refused at once."""
    found: list[int] = []
    for _ in range(count):
        message = caller.request(text, timeout_ms=20_000, **target)
        if caller.replies_to(message):
            found.append(caller.error_of(message).code)
        caller.replies.clear()
    return found


class TestOutboxes:
    def test_a_full_outbox_makes_an_agent_count_as_full_and_room_makes_it_usable_again(self) -> None:
        core = CoreMesh(queue_max=0, accept_timeout_s=60)
        agent, caller = core.agent(), core.caller()
        agent.frozen = True
        refused = flood(core, caller, limits.OUTBOX_ENVELOPES_MAX + 10, "small")
        assert refused == [codes.OVERLOADED] * 10
        agent.frozen = False
        core.pump()
        agent.answer(caller.request())
        for request in list(agent.running.values()):
            agent.answer(request, pump=False)
        core.advance(1)
        core.assert_settled()

    def test_many_frozen_agents_together_hold_what_all_may_and_a_healthy_one_is_served(self) -> None:
        core = CoreMesh(queue_max=0, accept_timeout_s=60, outboxes_bytes_max=8 << 20)
        caller, healthy = core.caller(), core.agent("well/1")
        frozen = [core.agent(f"echo/{number}") for number in range(40)]
        for each in frozen:
            each.frozen = True
        refused = flood(core, caller, 200)
        assert held(core) == core.state.outboxes.bytes_held
        assert held(core) < (8 << 20) + len(frozen) * (limits.OUTBOX_BYTES_SHARE + len(BIG) + 4096)
        assert refused and set(refused) == {codes.OVERLOADED}
        for _ in range(50):
            healthy.answer(caller.request(BIG, agent_type="well"))
        core.advance(60)  # they are judged dead, and what they held is free
        assert core.state.outboxes.bytes_held == held(core) < 1 << 20
        core.assert_settled()

    def test_a_large_request_is_let_go_of_when_its_time_is_over_though_its_slot_is_not_free_yet(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        agent.confirms_cancels = False
        caller.request(BIG, timeout_ms=1000)
        core.advance(1.5)
        (request,) = core.state.requests.values()
        assert not request.data and request.digest
        core.advance(6)
        core.assert_settled()

    def test_a_link_that_acknowledges_nothing_for_30_s_is_told_goodbye(self) -> None:
        core = CoreMesh(accept_timeout_s=600, probe_timeout_s=600, heartbeat_interval_s=20)
        agent, caller = core.agent(), core.caller()
        agent.beating = False
        agent.frozen = True
        message = caller.request(timeout_ms=600_000)
        assert agent.peer is not None and agent.peer.link.next_frame(core.state.now)
        core.advance(29)
        assert not caller.replies_to(message)
        core.advance(25)
        assert core.state.stats.slow_consumers == 1
        (line,) = core.logged("link ended")
        assert line.fields["code"] == Goodbye.Code.Name(Goodbye.SLOW_CONSUMER)
        assert caller.error_of(message).code == codes.AGENT_LOST
        core.assert_settled()

    def test_one_that_acknowledges_slowly_goes_on(self) -> None:
        core = CoreMesh(accept_timeout_s=600, probe_timeout_s=600)
        agent, caller = core.agent(), core.caller()
        messages = []
        for _ in range(6):
            agent.frozen = True
            messages.append(caller.request(timeout_ms=600_000))
            core.advance(20)
            agent.frozen = False
            core.pump()
        assert not core.state.stats.slow_consumers
        for message in messages:
            agent.answer(message)
        core.assert_settled()


class TestEvents:
    def test_a_frozen_subscriber_loses_the_oldest_is_told_how_many_and_costs_a_bound(self) -> None:
        core = CoreMesh(slow_consumer_s=1e6, heartbeat_interval_s=1e6)
        slow, quick, publisher = core.caller("slow"), core.caller("quick"), core.caller("publisher")
        slow.subscribe("news")
        quick.subscribe("news")
        slow.frozen = True
        count, most = 10_000, 0
        for number in range(count):
            event = core.envelope(f"{number}", topic="news", timeout_ms=0, fresh=False)
            event.type = pb.EVENT
            publisher.send(event)
            if number % 50 == 49:
                core.pump()
                assert slow.peer is not None
                most = max(most, slow.peer.link.waiting)
                publisher.replies.clear()
        assert len(quick.events) == count
        assert most <= limits.OUTBOX_ENVELOPES_MAX
        assert core.state.stats.events_dropped == count - limits.OUTBOX_ENVELOPES_MAX
        slow.frozen = False
        core.pump()
        slow.signal(Signal())
        core.pump()
        got = [int(each.payload.text) for each in slow.events]
        assert got == list(range(count - len(got), count))
        assert sum(each.gap.dropped for each in slow.got_signals("gap")) == count - len(got)
        core.advance(5)
        core.assert_settled()


class TestStreams:
    def test_a_consumer_that_grants_nothing_loses_only_that_stream(self) -> None:
        core = CoreMesh()
        agent, caller = core.agent(), core.caller()
        stalled, other = caller.request(timeout_ms=300_000), caller.request(timeout_ms=300_000)
        for number in range(limits.STREAM_CREDIT_INITIAL):
            agent.answer(stalled, sequence=number, more=True)
        for number in range(8):
            core.advance(5)
            agent.answer(other, sequence=number, more=True)
        assert "took no item" in caller.error_of(stalled).message
        entry = caller.replies_to(other)[-1].entry
        caller.signal(Signal(stream_credit=StreamCredit(correlation_id=other, entry=entry, up_to=200)))
        agent.answer(other, sequence=8)
        assert not core.state.stats.slow_consumers and caller.connected
        core.assert_settled()
