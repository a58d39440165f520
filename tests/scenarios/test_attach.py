"""Plays: processes come, go, break, come back, and take over from one another."""

from __future__ import annotations

import base64

import pytest

from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.frame_pb2 import Frame, Signal
from agentreach.v1.registry_pb2 import DRAINING, HEALTHY, STARTING, UNREACHABLE
from reach.core import arrivals, links, mesh, takeover
from reach.core.effects import RegisterAgents
from reach.core.ports import Identity
from tests.support.core import CoreMesh, Process, record

SOMEBODY_ELSE = Identity("default", "mallory")


def test_a_heartbeat_of_an_unknown_agent_is_answered_so() -> None:
    core = CoreMesh()
    process = core.agent()
    process.beat(agents=["echo/1", "ghost/1"])
    acks = process.got_signals("heartbeat_ack")
    assert list(acks[-1].heartbeat_ack.unknown) == ["ghost/1"]


def test_an_agent_that_is_being_registered_is_not_told_that_it_is_unknown() -> None:
    core = CoreMesh()
    process = core.caller()
    core.holds_registrations = True
    process.signal(Signal(attach=frames.Attach(record=record("echo/1"))))
    core.pump()
    process.beat(agents=["echo/1"])
    assert not process.got_signals("heartbeat_ack")[-1].heartbeat_ack.unknown
    core.answer_store()
    core.pump()
    assert process.got_signals("attached")[-1].attached.generation > 0


def test_answers_to_attaches_come_in_their_order_with_the_ids_the_node_assigned() -> None:
    core = CoreMesh()
    process = Process(core, "p", Identity(), "")
    core.processes.append(process)
    process.agents = {"a": record("echo/1"), "b": record("Bad Type/1"), "c": record("")}
    process.agents["c"].agent_type = "maker"
    process.agents["c"].agent_id = ""
    welcome = process.connect()
    assert welcome is not None
    first, second, third = welcome.agents
    assert first.agent_id == "echo/1" and first.generation
    assert second.error.code == codes.INVALID_ENVELOPE
    assert third.agent_id.startswith("maker/") and len(third.agent_id) == len("maker/") + 8


def test_an_attach_that_needs_no_store_is_answered_after_those_before_it_that_do() -> None:
    core = CoreMesh()
    process = core.agent("known/1")
    core.holds_registrations = True
    for name in ("new/1", "known/1", "Bad Type/1"):
        process.signal(Signal(attach=frames.Attach(record=record(name))))
    core.pump()
    assert not process.got_signals("attached")
    core.answer_store()
    core.pump()
    answers = [signal.attached for signal in process.got_signals("attached")]
    assert [(each.agent_id, each.HasField("error")) for each in answers] == [
        ("new/1", False), ("known/1", False), ("Bad Type/1", True),
    ]  # fmt: skip


def test_another_process_of_the_same_principal_takes_over_and_the_former_is_told() -> None:
    core = CoreMesh()
    old, caller = core.agent(), core.caller()
    running = caller.request()
    new = core.agent()
    detached = old.got_signals("detached")[0].detached
    assert detached.code == frames.Goodbye.REPLACED and detached.incarnation == new.incarnation
    assert caller.error_of(running).code == codes.AGENT_LOST
    message = caller.request()
    assert new.has(message) and not old.has(message)
    old.beat(agents=["echo/1"])
    assert list(old.got_signals("heartbeat_ack")[-1].heartbeat_ack.unknown) == ["echo/1"]
    old.answer(running)  # too late
    new.answer(message)
    core.advance(60)
    core.assert_settled()


def test_another_principal_is_refused_even_while_the_first_is_being_registered() -> None:
    core = CoreMesh()
    core.holds_registrations = True
    first = Process(core, "first", Identity(), "")
    second = Process(core, "second", SOMEBODY_ELSE, "")
    core.processes += [first, second]
    first.connect(record("echo/1"))
    second.connect(record("echo/1"))
    core.holds_registrations = False
    core.answer_store()
    core.pump()
    assert first.welcome is not None and not first.welcome.agents[0].HasField("error")
    assert second.welcome is not None and second.welcome.agents[0].error.code == codes.PERMISSION_DENIED
    assert core.attachment("echo/1").peer is first.peer
    assert not core.state.arriving


def test_a_registration_that_was_overtaken_in_the_store_is_fenced() -> None:
    core = CoreMesh()
    current = core.agent()
    core.holds_registrations = True
    late = Process(core, "late", Identity(), "")
    core.processes.append(late)
    late.connect(record("echo/1"))
    effect = core.held[0]
    assert isinstance(effect, RegisterAgents)
    overtaken = effect.arrival.agents[0].agent
    assert overtaken is not None
    overtaken.generation = 5  # the store took it before the other
    core.answer_store()
    core.pump()
    assert late.welcome is not None and late.welcome.agents[0].error.code == codes.FENCED
    assert core.attachment("echo/1").peer is current.peer


def test_a_process_is_there_while_the_stream_lives_on_which_it_asked() -> None:
    core = CoreMesh()
    core.holds_registrations = True
    process = Process(core, "process", Identity(), "")
    core.processes.append(process)
    process.connect(record("echo/1"))
    effect = core.held[0]
    assert isinstance(effect, RegisterAgents)
    assert arrivals.is_there(core.state, effect.peer, effect.arrival)
    process.cut()
    assert not arrivals.is_there(core.state, effect.peer, effect.arrival)
    process.connect()
    assert not arrivals.is_there(core.state, effect.peer, effect.arrival)  # it has asked once more
    later = core.held[-1]
    assert isinstance(later, RegisterAgents) and later is not effect
    assert arrivals.is_there(core.state, later.peer, later.arrival)


def test_the_cleanup_of_an_old_attachment_names_its_generation() -> None:
    core = CoreMesh()
    old = core.agent()
    generation = core.attachment("echo/1").agent.generation
    old.leave()
    assert core.deregistered == [("echo/1", generation)]


def test_processes_without_an_incarnation_are_not_taken_for_one_and_the_same() -> None:
    core = CoreMesh()
    one, two = (Process(core, name, Identity(), "") for name in ("one", "two"))
    core.processes += [one, two]
    one.incarnation = two.incarnation = b""
    one.connect(record("echo/1"))
    two.connect(record("echo/1"))
    assert one.got_signals("detached")
    assert core.attachment("echo/1").peer is two.peer
    one.cut()
    one.agents.clear()
    welcome = one.connect()
    assert welcome is not None and welcome.resumed


def test_a_cut_stream_loses_nothing_within_the_resume_window() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    agent.cut()
    assert core.status("echo/1") == UNREACHABLE
    core.advance(3)
    welcome = agent.connect()
    assert welcome is not None and welcome.resumed
    assert core.status("echo/1") == HEALTHY
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    assert len(agent.requests) == 1
    core.assert_settled()


def test_a_reply_waits_for_its_caller_on_a_cut_link() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    caller.cut()
    agent.answer(message)
    core.advance(5)
    caller.connect()
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_caller_that_does_not_come_back_has_its_requests_cancelled() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    caller.cut()
    core.advance(11)
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    core.assert_settled()


@pytest.mark.parametrize("seen", [True, False])
def test_a_link_that_begins_anew_sends_again_what_was_not_accepted(seen: bool) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    if seen:
        message = caller.request(timeout_ms=60_000)
        agent.cut()
    else:
        agent.frozen = True
        message = caller.request(timeout_ms=60_000)
        assert agent.peer is not None
        agent.peer.link.next_frame(core.state.now)  # given to the transport, and lost with it
        agent.cut()
    agent.restart_numbering()
    agent.connect()
    assert [each.message_id for each in agent.requests] == [message]
    assert agent.requests[0].fresh is seen
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_a_request_that_ended_during_a_cut_is_not_sent_again() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.frozen = True
    message = caller.request(timeout_ms=60_000)
    assert agent.peer is not None
    agent.peer.link.next_frame(core.state.now)  # lost with its stream
    agent.cut()
    caller.cancel(message)
    agent.connect()
    assert not agent.has(message)
    assert core.attachment("echo/1").agent.in_flight == 0  # it cannot confirm what it never got
    core.advance(6)
    assert core.state.stats.forced_releases == 0
    core.assert_settled()


def test_an_agent_that_a_restarted_link_does_not_declare_again_is_gone() -> None:
    core = CoreMesh()
    process = core.process("p", record("echo/1"), record("echo/2"))
    caller = core.caller()
    process.cut()
    del process.agents["echo/2"]
    process.restart_numbering()
    process.connect()
    assert core.state.directory.get("default", "production", "echo/2") is None
    process.answer(caller.request())
    core.assert_settled()


def test_nothing_numbered_comes_before_the_welcome_of_a_restarted_link() -> None:
    core = CoreMesh()
    other = core.agent("other/1")
    process = core.agent("echo/1")
    pending = process.request(agent_type="other", timeout_ms=60_000)
    process.cut()
    process.restart_numbering()
    core.holds_registrations = True
    process.connect(record("echo/2"))  # its registration takes a while
    other.answer(pending)
    assert process.peer is not None
    frame = process.peer.link.next_frame(core.state.now)
    assert frame is None
    core.holds_registrations = False
    core.answer_store()
    core.pump()
    assert process.text_of(pending) == "ok"
    core.assert_settled()


def test_an_agent_dismissed_while_its_hello_was_being_registered_is_registered_again() -> None:
    core = CoreMesh()
    process = core.agent("echo/1")
    core.holds_registrations = True
    newer = Process(core, "p2", Identity(), "")
    core.processes.append(newer)
    newer.incarnation = process.incarnation
    newer.connect(record("echo/1"), record("echo/2"))
    process.leave()  # the old link takes echo/1 with it
    core.holds_registrations = False
    core.answer_store()
    core.pump()
    assert core.attachment("echo/1").peer is newer.peer
    caller = core.caller()
    newer.answer(caller.request(agent_id="echo/1"))
    core.assert_settled()


def test_the_same_process_on_a_new_link_keeps_slots_status_and_what_is_in_flight() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=2), core.caller()
    message = caller.request(timeout_ms=60_000)
    agent.cut()
    agent.forget()
    agent.connect()
    attachment = core.attachment("echo/1")
    assert attachment.agent.status == HEALTHY and attachment.agent.in_flight == 1
    assert len(agent.requests) == 2 and not agent.requests[-1].fresh  # its own table joins it
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    core.advance(11)
    core.assert_settled()


def test_a_cancel_follows_an_agent_to_its_new_link() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    agent.cut()
    caller.cancel(message)
    agent.forget()
    agent.connect()
    assert [cancel.correlation_id for cancel in agent.cancels] == [message]
    core.advance(11)
    assert core.state.stats.forced_releases == 0
    core.assert_settled()


def test_other_capabilities_of_the_same_process_replace_its_record_and_nothing_else() -> None:
    core = CoreMesh()
    agent, caller = core.agent(max_concurrency=1), core.caller()
    running = caller.request(timeout_ms=60_000)
    waiting = caller.request(session_id="s", timeout_ms=60_000)
    changed = record("echo/1", capabilities=["new"], max_concurrency=2)
    agent.agents["echo/1"] = changed
    agent.signal(Signal(attach=frames.Attach(record=changed)))
    core.pump()
    assert core.status("echo/1") == HEALTHY
    assert agent.has(waiting)
    agent.answer(running)
    agent.answer(waiting)
    agent.answer(caller.request(capabilities=["new"]))
    core.assert_settled()


@pytest.mark.parametrize(("acked", "code"), [(True, codes.AGENT_LOST), (False, codes.CONNECT_FAILED)])
def test_a_goodbye_tells_what_was_accepted(acked: bool, code: int) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    if acked:
        message = caller.request()
        agent.leave()
    else:
        agent.frozen = True
        message = caller.request()
        assert agent.peer is not None
        agent.peer.link.next_frame(core.state.now)
        goodbye = Frame(ack=agent.link.last_accepted, signals=[Signal(goodbye=frames.Goodbye())])
        with core.step():
            mesh.frame(core.state, agent.peer, goodbye, 0)
        core.pump()
    core.advance(2)  # the one that has not run waits a while for somebody else
    error = caller.error_of(message)
    assert error.code == code and error.may_have_executed is acked
    core.assert_settled()


def test_what_comes_after_a_goodbye_counts_for_nothing() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    peer = caller.peer
    assert peer is not None
    caller.connected = False  # it has half-closed; what the test sends were its last frames
    last = Frame(seq=peer.link.last_accepted + 1, signals=[Signal(goodbye=frames.Goodbye())])
    last.envelopes.add().CopyFrom(core.envelope())
    with core.step():
        mesh.frame(core.state, peer, last, 0)
    later = Frame(signals=[Signal(subscribe=frames.Subscribe(topics=["news"]))])
    with core.step():
        mesh.frame(core.state, peer, later, 0)
    assert core.state.topics.count == 0
    assert not agent.requests
    core.assert_settled()


def test_farewell_twice_says_it_once() -> None:
    core = CoreMesh()
    agent = core.agent()
    assert agent.peer is not None
    for _ in range(2):
        with core.step() as state:
            links.farewell(state, agent.peer, frames.Goodbye.SHUTDOWN, "leaving")
    assert agent.goodbye is not None and agent.goodbye.code == frames.Goodbye.SHUTDOWN
    assert len(agent.got_signals("goodbye")) == 1
    core.assert_settled()


def test_a_draining_node_takes_nothing_new_and_finishes_what_runs() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request(timeout_ms=60_000)
    core.state.draining = True
    assert caller.error_of(caller.request()).code == codes.SHUTTING_DOWN
    newcomer = core.agent("late/1")
    assert newcomer.welcome is not None and newcomer.welcome.agents[0].error.code == codes.SHUTTING_DOWN
    agent.cut()
    agent.restart_numbering()
    agent.connect()  # a link that breaks meanwhile may come back
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    core.assert_settled()


def test_agents_on_one_link_are_bounded_however_they_come() -> None:
    core = CoreMesh(agents_per_link_max=3)
    process = core.process("p", record("echo/1"), record("echo/2"))
    core.holds_registrations = True
    for number in range(3, 8):
        process.signal(Signal(attach=frames.Attach(record=record(f"echo/{number}"))))
    core.pump()
    core.holds_registrations = False
    core.answer_store()
    core.pump()
    answers = [each.attached for each in process.got_signals("attached")]
    assert [each.HasField("error") for each in answers].count(False) == 1
    assert len(core.state.directory) == 3
    process.cut()
    process.restart_numbering()
    del process.agents["echo/2"]
    process.connect()
    assert len(core.state.directory) == 1 + 0  # the three it did not declare again are gone


def test_a_detached_agent_is_gone_and_the_link_goes_on() -> None:
    core = CoreMesh()
    process = core.process("p", record("echo/1"), record("echo/2"))
    caller = core.caller()
    process.signal(Signal(detach=frames.Detach(agent_id="echo/1")))
    core.pump()
    message = caller.request()
    assert process.got(message).recipient == "echo/2"
    process.answer(message)
    core.assert_settled()


def test_a_registry_that_is_away_is_told_to_the_agent_and_the_link_stays() -> None:
    core = CoreMesh()
    core.registry_up = False
    process = core.agent()
    assert process.welcome is not None
    assert process.welcome.agents[0].error.code == codes.REGISTRY_UNAVAILABLE
    assert process.connected and not core.state.arriving


def test_a_silent_process_with_agents_is_counted_as_cut_after_three_heartbeats() -> None:
    core = CoreMesh()
    agent = core.agent()
    agent.frozen = True
    core.advance(60)
    assert core.state.directory.get("default", "production", "echo/1") is None
    assert not agent.connected
    core.assert_settled()


def test_a_draining_agent_gets_no_new_work_and_finishes_what_it_has() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    agent.say(DRAINING)
    assert caller.error_of(caller.request()).code == codes.NO_AGENT_AVAILABLE
    agent.answer(message)
    assert caller.text_of(message) == "ok"
    agent.say(HEALTHY)
    agent.answer(caller.request())
    core.assert_settled()


def test_an_agent_that_says_draining_before_it_was_ready_is_not_ready_afterwards() -> None:
    core = CoreMesh()
    process = Process(core, "p", Identity(), "")
    process.answers_probes = False
    core.processes.append(process)
    process.connect(record("echo/1"))
    process.say(DRAINING)
    process.say(HEALTHY)
    assert core.status("echo/1") == STARTING


def test_frames_of_an_unknown_kind_are_ignored() -> None:
    core = CoreMesh()
    caller = core.caller()
    caller.signal(Signal(grant=frames.Grant()))
    caller.send(pb.Envelope(type=pb.CALLBACK))
    core.pump()
    core.assert_settled()


def test_answers_to_signals_do_not_pile_up_for_a_peer_that_reads_nothing() -> None:
    core = CoreMesh()
    flood, agent = core.caller("flood"), core.agent()
    peer = flood.peer
    assert peer is not None
    flood.frozen = True
    detaches = [Signal(detach=frames.Detach(agent_id="ghost/1"))] * 6000
    for number in (1, 2):
        with core.step() as state:
            mesh.frame(state, peer, Frame(seq=peer.link.last_accepted + 1, signals=detaches), 0)
        assert peer.closing is (number == 2)
    caller = core.caller()
    agent.answer(caller.request())
    core.assert_settled()


def test_what_a_hello_acknowledges_is_not_kept_although_no_frame_follows() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request()
    caller.frozen = True
    agent.answer(message)
    assert caller.peer is not None
    reply = caller.peer.link.next_frame(core.state.now)
    assert reply is not None
    caller.take(reply)
    caller.cut()
    caller.connected = False
    assert caller.welcome is not None
    hello = frames.Hello(
        incarnation=caller.incarnation, resume_token=caller.welcome.resume_token, last_seq=caller.link.last_accepted
    )
    with core.step() as state:
        peer = links.hello(state, caller.who, hello)
        assert peer is caller.peer and peer is not None
        links.cut(state, peer)
    core.advance(11)
    core.assert_settled()


@pytest.mark.parametrize(
    "stranger", [Identity(principal="mallory"), Identity(tenant="other")], ids=["principal", "tenant"]
)
def test_a_resume_token_is_good_only_for_its_principal(stranger: Identity) -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.cut()
    thief = Process(core, "thief", stranger, "")
    thief.incarnation, thief.welcome = agent.incarnation, agent.welcome
    core.processes.append(thief)
    assert agent.welcome is not None
    token = agent.welcome.resume_token
    welcome = thief.connect()
    assert welcome is not None and not welcome.resumed
    assert welcome.resume_token != token and thief.peer is not agent.peer
    again = agent.connect()
    assert again is not None and again.resumed
    agent.answer(caller.request())
    core.assert_settled()


def test_a_resume_token_stands_in_no_line_of_the_log() -> None:
    core = CoreMesh()
    agent = core.agent()
    assert agent.welcome is not None
    token = bytes(agent.welcome.resume_token)
    agent.cut()
    agent.connect()
    agent.cut()
    agent.restart_numbering()
    agent.connect()
    agent.leave()
    shown = repr(core.logs)
    assert core.logged("link opened") and core.logged("link closed")
    forms = (repr(token)[2:-1], token.hex(), base64.b64encode(token).decode(), str(int.from_bytes(token, "big")))
    assert [form for form in forms if form in shown] == []


@pytest.mark.parametrize(
    ("same", "event"), [(True, "agent went to another node"), (False, "agent replaced by another process")]
)
def test_only_another_process_is_called_a_replacement(same: bool, event: str) -> None:
    core = CoreMesh()
    core.agent("echo/1")
    attachment = core.attachment("echo/1")
    with core.step() as state:
        takeover.replaced(state, attachment, attachment.agent.incarnation if same else b"another")
    told = [
        line for line in core.logs if line.event in ("agent went to another node", "agent replaced by another process")
    ]
    assert [(line.event, line.level) for line in told] == [(event, "info" if same else "warning")]
