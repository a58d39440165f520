"""Plays of principals who do not wish each other well: what each may, on whose behalf, and what it cannot pretend."""

from __future__ import annotations

from dataclasses import replace

from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.admin_pb2 import RedriveDeadLetterRequest
from agentreach.v1.envelope_pb2 import Envelope, Hop
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import AgentRecord
from reach.core import redriving, revoking
from reach.core.access import Patterns, Rights
from reach.core.ports import End, Identity
from reach.core.watching import Watcher
from tests.support.core import CoreMesh, Process, record

ALL = Rights(
    register=Patterns(["*"]),
    call=Patterns(["*"]),
    publish=Patterns(["*"], topics=True),
    subscribe=Patterns(["*"], topics=True),
)


def calls(*patterns: str, envs: tuple[str, ...] = ("*",)) -> Rights:
    return Rights(envs=frozenset(envs), call=Patterns(patterns), register=Patterns(["*"]))


def known(core: CoreMesh, principal: str, rights: Rights = ALL, tenant: str = "default", key: str = "") -> Identity:
    """A principal with one key, as the gate lets it in."""
    core.state.principals[tenant, principal] = rights
    return Identity(tenant, principal, rights, key)


def code_of(process: Process, message_id: str) -> str:
    """How a message ended."""
    reply = process.reply_to(message_id)
    return codes.ErrorCode.Name(reply.error.code) if reply.HasField("error") else "OK"


class TestOnWhoseBehalf:
    def test_a_call_from_a_handler_may_what_its_sender_and_all_its_actors_may(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("b", "c")))
        b = core.agent("b/1", known(core, "svc", calls("c")))
        c = core.agent("c/1", known(core, "other", calls()))

        first = alice.request(agent_type="b")
        nested = b.call_from(first, agent_type="c")
        assert c.got(nested).principal == "svc" and list(c.got(nested).actors) == ["alice"]
        c.answer(nested)
        assert code_of(b, nested) == "OK"
        b.answer(first)

    def test_nobody_gets_more_through_an_agent_than_by_calling_themselves(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("b")))
        b = core.agent("b/1", known(core, "svc", calls("c", "d")))
        c = core.agent("c/1", known(core, "other", calls("*")))
        core.agent("d/1", known(core, "other", calls("*")))

        nested = b.call_from(alice.request(agent_type="b"), agent_type="c")
        assert code_of(b, nested) == "PERMISSION_DENIED" and not c.has(nested)
        assert "alice, on whose behalf" in b.error_of(nested).message
        alone = b.request(agent_type="c")  # on its own behalf it may
        assert c.has(alone) and not list(c.got(alone).actors)

    def test_the_chain_grows_with_each_principal_and_a_link_in_the_middle_counts(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("*")))
        b = core.agent("b/1", known(core, "svc-b", calls("c")))
        c = core.agent("c/1", known(core, "svc-c", calls("*")))
        d = core.agent("d/1", known(core, "svc-d", calls("*")))

        to_c = b.call_from(alice.request(agent_type="b"), agent_type="c")
        to_d = c.call_from(to_c, agent_type="d")
        assert code_of(c, to_d) == "PERMISSION_DENIED" and not d.has(to_d)
        assert "svc-b" in c.error_of(to_d).message

    def test_an_actor_whose_keys_are_gone_has_no_rights_any_more(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("b", "c")))
        b = core.agent("b/1", known(core, "svc", calls("c")))
        core.agent("c/1", known(core, "other", calls()))
        first = alice.request(agent_type="b")
        del core.state.principals["default", "alice"]
        assert code_of(b, b.call_from(first, agent_type="c")) == "PERMISSION_DENIED"

    def test_an_event_from_a_handler_is_on_its_callers_behalf_too(self):
        core = CoreMesh()
        publisher = Rights(call=Patterns(["*"]), publish=Patterns(["t"], topics=True), register=Patterns(["*"]))
        alice = core.caller("alice", known(core, "alice", calls("b")))
        b = core.agent("b/1", known(core, "svc", publisher))
        handled = b.got(alice.request(agent_type="b"))
        event = b.publish("t", lineage=handled.lineage)
        assert code_of(b, event) == "PERMISSION_DENIED"
        assert code_of(b, b.publish("t")) == "OK"

    def test_so_is_the_callback_that_tells_how_a_call_from_a_handler_ended(self):
        """Found by attack: whoever heard it acted for the handler's principal alone, and no more for its caller."""
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", replace(ALL, call=Patterns(["b", "c"]))))
        b = core.agent("b/1", known(core, "svc", ALL))
        c = core.agent("c/1", known(core, "other", ALL))
        d = core.agent("d/1", known(core, "other", ALL))
        ear = core.caller("ear", known(core, "ear", ALL))
        ear.subscribe("r")
        first = alice.request(agent_type="b")
        detached = b.call_from(first, agent_type="c", reply_topic="r")
        lost = b.call_from(first, agent_type="c", reply_topic="r", timeout_ms=500, session_id="s")
        c.answer(detached)
        core.advance(2)
        assert {each.correlation_id for each in ear.callbacks} == {detached, lost}
        for heard in ear.callbacks:
            assert (heard.principal, list(heard.actors)) == ("svc", ["alice"])
            nested = ear.request(agent_type="d", lineage=heard.lineage)
            assert code_of(ear, nested) == "PERMISSION_DENIED" and not d.requests

    def test_a_selector_without_a_type_reaches_those_only_that_all_may_call(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("b", "x")))
        b = core.agent("b/1", known(core, "svc", calls("x", "y")))
        other = known(core, "other")
        x, y = core.agent("x/1", other, capabilities=["sum"]), core.agent("y/1", other, capabilities=["sum"])
        first = alice.request(agent_type="b")
        for _ in range(6):
            nested = b.call_from(first, capabilities=["sum"])
            x.answer(nested)
            assert code_of(b, nested) == "OK"
        assert not y.requests

    def test_whom_a_sender_says_it_may_call_counts_for_nothing(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("x")))
        other = known(core, "other")
        core.agent("y/1", other, capabilities=["sum"])
        forged = core.envelope("hi", capabilities=["sum"])
        forged.target.among.append("*")
        alice.send(forged)
        core.pump()
        assert code_of(alice, forged.message_id) == "PERMISSION_DENIED"


class TestLineages:
    """What is given to the handler of a call is its own, for a while."""

    def setup_method(self):
        self.core = CoreMesh()
        self.alice = self.core.caller("alice", known(self.core, "alice"))
        self.b = self.core.agent("b/1", known(self.core, "svc"))
        self.c = self.core.agent("c/1", known(self.core, "other"))
        self.handled = self.b.got(self.alice.request(agent_type="b"))

    def try_with(self, thief: Process, lineage: bytes) -> str:
        return code_of(thief, thief.request(agent_type="c", lineage=lineage))

    def test_another_principal_cannot_call_on_behalf_of_those_it_names(self):
        """Found by attack: C would have read `actors: [alice]` under a call that Mallory made."""
        mallory = self.core.caller("mallory", known(self.core, "mallory"))
        assert self.try_with(mallory, self.handled.lineage) == "PERMISSION_DENIED"
        assert not self.c.requests

    def test_not_even_the_one_whose_call_it_was(self):
        assert self.try_with(self.alice, self.handled.lineage) == "PERMISSION_DENIED"

    def test_another_tenants_is_refused(self):
        known(self.core, "alice", tenant="elsewhere")  # the actor's name is known there too
        self.core.agent("c/1", known(self.core, "other", tenant="elsewhere"))
        stranger = self.core.caller("svc", known(self.core, "svc", tenant="elsewhere"))
        assert self.try_with(stranger, self.handled.lineage) == "PERMISSION_DENIED"

    def test_one_of_an_event_is_its_subscribers(self):
        other, mallory = self.core.caller("o", known(self.core, "o")), self.core.caller("m", known(self.core, "m"))
        other.subscribe("t")
        self.alice.publish("t")
        lineage = other.events[0].lineage
        assert self.try_with(mallory, lineage) == "PERMISSION_DENIED"
        nested = other.request(agent_type="c", lineage=lineage)
        assert list(self.c.got(nested).actors) == ["alice"]

    def test_forged_and_expired_ones_are_refused(self):
        forged = bytearray(self.handled.lineage)
        forged[-1] ^= 1
        assert self.try_with(self.b, bytes(forged)) == "PERMISSION_DENIED"
        self.b.answer(self.handled)
        self.core.advance(16 * 60)
        assert self.try_with(self.b, self.handled.lineage) == "PERMISSION_DENIED"


class TestWhatNodesWrite:
    def test_a_request_carries_nothing_of_what_its_sender_claims_to_be(self):
        core = CoreMesh()
        mallory = core.caller("mallory", known(core, "mallory"))
        b = core.agent("b/1", known(core, "svc"))
        core.agent("c/1", known(core, "svc"))
        forged = core.envelope("hi", agent_type="b")
        forged.source, forged.tenant, forged.principal = "c/1", "elsewhere", "system"
        forged.actors.append("alice")
        forged.hop_count, forged.epoch, forged.attempt, forged.entry = 7, 9, 5, b"x" * 16
        forged.recipient = "c/1"
        forged.path.append(Hop(agent_id="c/1", message_id="m"))
        mallory.send(forged)
        core.pump()
        got = b.got(forged.message_id)
        assert got.source == mallory.peer.caller_id
        assert (got.tenant, got.principal, list(got.actors)) == ("default", "mallory", [])
        assert (got.recipient, got.hop_count, got.epoch, got.attempt) == ("b/1", 1, 0, 1)
        assert [hop.agent_id for hop in got.path] == ["b/1"] and got.entry != b"x" * 16

    def test_neither_does_an_event(self):
        core = CoreMesh()
        mallory, listener = core.caller("m", known(core, "mallory")), core.caller("l", known(core, "l"))
        listener.subscribe("t")
        forged = core.envelope("hi", topic="t", timeout_ms=0)
        forged.type = 3
        forged.source, forged.tenant, forged.principal = "system", "elsewhere", "system"
        forged.actors.append("alice")
        forged.hop_count, forged.epoch, forged.attempt, forged.entry, forged.session_event = 7, 9, 5, b"x" * 16, 3
        mallory.send(forged)
        core.pump()
        (got,) = listener.events
        assert (got.tenant, got.principal, list(got.actors)) == ("default", "mallory", [])
        assert got.source == mallory.peer.caller_id
        assert (got.hop_count, got.epoch, got.attempt, got.entry, got.session_event) == (1, 0, 0, b"", 0)

    def test_a_caller_that_is_known_cannot_call_itself_by_anothers_name(self):
        core = CoreMesh()
        mallory = core.caller("alice", known(core, "mallory"))
        assert mallory.welcome is not None and mallory.welcome.caller_id.startswith("caller/mallory-")
        nameless = core.caller("worker")
        assert nameless.welcome is not None and nameless.welcome.caller_id.startswith("caller/worker-")

    def test_an_answer_carries_nothing_that_its_agent_claims(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice"))
        b = core.agent("b/1", known(core, "svc"))
        sent = alice.request(agent_type="b")
        b.answer(sent, source="c/1", tenant="elsewhere", principal="system", session_event=3, hop_count=9)
        reply = alice.reply_to(sent)
        assert (reply.source, reply.tenant, reply.principal) == ("b/1", "", "")
        assert (reply.session_event, reply.hop_count) == (0, 0)


class TestAnotherPrincipalsBusiness:
    def setup_method(self):
        self.core = CoreMesh()
        self.alice = self.core.caller("alice", known(self.core, "alice"))
        self.b = self.core.agent("b/1", known(self.core, "svc"))
        self.mallory = self.core.agent("m/1", known(self.core, "mallory"))
        self.sent = self.alice.request(agent_type="b")

    def test_an_answer_counts_from_whom_it_is_due_only(self):
        request = self.b.got(self.sent)
        self.mallory.answer(request, "forged")
        unechoed = Envelope.FromString(request.SerializeToString())
        unechoed.ClearField("entry")
        self.mallory.answer(unechoed, "forged")
        for number in range(8):  # entries are counted: the next ones can be guessed
            guessed = Envelope.FromString(request.SerializeToString())
            guessed.entry = request.entry[:8] + number.to_bytes(8, "big")
            self.mallory.answer(guessed, "forged")
        self.b.answer(request, "true")
        assert self.alice.text_of(self.sent) == "true"

    def test_a_cancel_counts_from_whom_it_is_of_only(self):
        self.mallory.cancel(self.sent)
        stranger = self.core.caller("alice", known(self.core, "alice", tenant="elsewhere"))
        stranger.cancel(self.sent)
        self.alice.cancel(self.sent, env="staging")
        assert not self.b.cancels
        self.alice.cancel(self.sent)
        assert self.b.cancels

    def test_of_two_that_wait_for_one_message_a_cancel_ends_the_wait_of_whom_it_is_of(self):
        other = self.core.caller("alice-2", known(self.core, "alice"))
        other.request(agent_type="b", message_id=self.sent, fresh=False)
        other.cancel(self.sent)
        assert code_of(other, self.sent) == "CANCELLED" and not self.b.cancels
        self.b.answer(self.sent)
        assert code_of(self.alice, self.sent) == "OK"

    def test_progress_and_credit_are_for_whose_they_are(self):
        request = self.b.got(self.sent)
        self.mallory.signal(Signal(progress=frames.Progress(message_id=self.sent, entry=request.entry, started=True)))
        self.mallory.signal(Signal(stream_credit=frames.StreamCredit(entry=request.entry, up_to=10**6)))
        self.core.pump()
        assert not self.b.got_signals("stream_credit")
        (entered,) = self.core.state.requests.values()
        assert not entered.started
        self.b.answer(request)

    def test_equal_message_ids_of_two_principals_or_tenants_never_meet(self):
        others = [
            self.core.caller("o", known(self.core, "other")),
            self.core.caller("alice", known(self.core, "alice", tenant="elsewhere")),
        ]
        theirs = self.core.agent("b/1", known(self.core, "svc", tenant="elsewhere"))
        for other in others:  # other content, and no conflict; the same id, and no join
            other.request("their own", agent_type="b", message_id=self.sent)
        assert [each.payload.text for each in self.b.requests] == ["hi", "their own"]
        assert [each.payload.text for each in theirs.requests] == ["their own"]
        for agent in (self.b, theirs):
            for each in list(agent.requests):
                agent.answer(each, f"for {each.principal}")
        assert self.alice.text_of(self.sent) == "for alice"
        again = self.core.caller("n", known(self.core, "new"))
        again.request("a new one", agent_type="b", message_id=self.sent)  # nor is another's outcome replayed
        assert self.b.requests[-1].payload.text == "a new one"
        self.b.answer(self.b.requests[-1])

    def test_an_agent_is_its_processes_whatever_its_record_says(self):
        claimed = record("m/2", principal="svc", tenant="elsewhere")
        process = self.core.process("m-2", claimed, who=known(self.core, "mallory"))
        agent = self.core.attachment("m/2").agent
        assert (agent.tenant, agent.principal) == ("default", "mallory")
        process.leave()

    def test_an_agent_id_is_its_holders_also_while_its_link_is_cut(self):
        incarnation = self.b.incarnation
        self.b.cut()
        thief = Process(self.core, "thief", known(self.core, "mallory"), "")
        thief.incarnation = incarnation  # which everybody can read in the registry
        self.core.processes.append(thief)
        welcome = thief.connect(record("b/1"))
        assert welcome is not None and welcome.agents[0].error.code == codes.PERMISSION_DENIED
        assert not welcome.resumed
        self.b.connect()
        self.b.answer(self.sent)
        assert code_of(self.alice, self.sent) == "OK"

    def test_with_a_key_that_allows_something_else_a_process_begins_a_link_anew(self):
        """What is subscribed on a link, and attached to it, is so by the rights that it began with."""
        for who, resumed in ((self.b.who, True), (known(self.core, "svc", calls("c")), False)):
            self.b.cut()
            self.b.who = who
            welcome = self.b.connect()
            assert welcome is not None and welcome.resumed is resumed
        self.b.answer(self.sent)

    def test_a_stolen_resume_token_opens_nothing_to_another_principal(self):
        token = self.b.welcome.resume_token if self.b.welcome is not None else b""
        thief = Process(self.core, "thief", known(self.core, "mallory"), "")
        thief.incarnation = self.b.incarnation
        thief.welcome = frames.Welcome(resume_token=token)
        self.core.processes.append(thief)
        welcome = thief.connect()
        assert welcome is not None and not welcome.resumed and welcome.resume_token != token
        self.b.answer(self.sent)
        assert code_of(self.alice, self.sent) == "OK"

    def test_whoever_is_in_a_tenant_shares_its_sessions_and_nobody_else_does(self):
        """By design (behaviour.md §3): a session is named within tenant, env and type, not within a principal."""
        core = self.core
        self.b.answer(self.sent)
        mine = self.alice.request(agent_type="b", session_id="s")
        self.b.answer(mine)
        other = core.caller("o", known(core, "other"))
        joined = other.request(agent_type="b", session_id="s")
        self.b.answer(joined)
        assert other.reply_to(joined).epoch == self.alice.reply_to(mine).epoch
        theirs = core.agent("b/1", known(core, "svc", tenant="elsewhere"))
        stranger = core.caller("alice", known(core, "alice", tenant="elsewhere"))
        guessed = stranger.request(agent_type="b", session_id="s")
        assert theirs.has(guessed) and not self.b.has(guessed)
        theirs.answer(guessed)
        assert stranger.reply_to(guessed).epoch != self.alice.reply_to(mine).epoch

    def test_a_session_is_not_taken_by_claiming_it(self):
        self.b.answer(self.sent)
        mine = self.alice.request(agent_type="b", session_id="s")
        self.b.answer(mine)
        claimed = (1 << 64) - 1
        other = Process(self.core, "b-2", known(self.core, "mallory"), "")
        self.core.processes.append(other)
        other.connect(record("b/2"), holds=[("s", claimed)])
        after = self.alice.request(agent_type="b", session_id="s")
        assert self.b.has(after)
        self.b.answer(after)
        other.leave()


class TestTopics:
    def test_other_tenants_and_what_is_not_allowed_are_neither_heard_nor_told(self):
        core = CoreMesh()
        some = Rights(
            call=Patterns(["*"]), publish=Patterns(["a"], topics=True), subscribe=Patterns(["a"], topics=True)
        )
        alice = core.caller("alice", known(core, "alice", some))
        theirs = core.caller("alice", known(core, "alice", tenant="elsewhere"))
        theirs.subscribe("a", "b")
        alice.subscribe("a", "b")
        refused = alice.got_signals("unsubscribed")
        assert [list(each.unsubscribed.topics) for each in refused] == [["b"]]
        assert refused[0].unsubscribed.error.code == codes.PERMISSION_DENIED
        assert code_of(alice, alice.publish("b")) == "PERMISSION_DENIED"
        assert code_of(alice, alice.publish("a")) == "OK"
        theirs.publish("a")
        assert len(alice.events) == 1 and alice.events[0].principal == "alice"
        assert len(theirs.events) == 1 and theirs.events[0].tenant == "elsewhere"

    def test_a_topic_of_an_env_without_rights_is_not_listened_to(self):
        core = CoreMesh()
        some = Rights(envs=frozenset({"production"}), subscribe=Patterns(["*"], topics=True))
        alice = core.caller("alice", known(core, "alice", some))
        publisher = core.caller("p", known(core, "p"))
        alice.signal(Signal(subscribe=frames.Subscribe(topics=["t"], env="staging")))
        alice.subscribe("t")
        (refused,) = alice.got_signals("unsubscribed")
        assert refused.unsubscribed.error.code == codes.PERMISSION_DENIED and refused.unsubscribed.env == "staging"
        publisher.publish("t", env="staging")
        assert not alice.events
        publisher.publish("t")
        assert len(alice.events) == 1

    def test_a_reply_topic_needs_the_right_to_publish_and_stays_in_its_tenant(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("b")))
        rich = core.caller("rich", known(core, "rich"))
        b = core.agent("b/1", known(core, "svc"))
        theirs = core.caller("t", known(core, "t", tenant="elsewhere"))
        theirs.subscribe("r")
        denied = alice.request(agent_type="b", reply_topic="r")
        assert code_of(alice, denied) == "PERMISSION_DENIED" and not b.requests
        accepted = rich.request(agent_type="b", reply_topic="r")
        b.answer(accepted)
        assert not theirs.callbacks


class TestEnvs:
    def test_a_hint_names_no_env_that_its_reader_may_not_enter(self):
        core = CoreMesh()
        core.agent("b/1", known(core, "svc"), env="staging")
        alice = core.caller("alice", known(core, "alice", calls("*", envs=("production",))))
        rich = core.caller("rich", known(core, "rich"))
        assert "staging" not in alice.error_of(alice.request(agent_type="b")).message
        assert "staging" in rich.error_of(rich.request(agent_type="b")).message
        assert "staging" not in alice.error_of(alice.request(agent_type="b")).message  # what is remembered neither

    def test_a_watcher_is_told_of_its_own_envs(self):
        core = CoreMesh()
        watcher = Watcher(core.state, "default", "", None, 0, frozenset({"production"}))
        first = watcher.take()
        assert first is not None and first.begins and not first.snapshot
        core.agent("b/1", known(core, "svc"), env="staging")
        core.agent("c/1", known(core, "svc"))
        told = watcher.take()
        assert told is not None and {each.agent.agent_id for each in told.changes} == {"c/1"}
        again = Watcher(core.state, "default", "", None, 0, frozenset({"staging"})).take()
        assert again is not None and [each.agent_id for each in again.snapshot] == ["b/1"]

    def test_neither_registering_nor_calling_crosses_into_an_env_without_rights(self):
        core = CoreMesh()
        core.agent("b/1", known(core, "svc"), env="staging")
        alice = core.caller("alice", known(core, "alice", calls("*", envs=("production",))))
        assert code_of(alice, alice.request(agent_type="b", env="staging")) == "PERMISSION_DENIED"
        other = Process(core, "x", known(core, "alice", calls("*", envs=("production",))), "")
        core.processes.append(other)
        welcome = other.connect(record("x/1", env="staging"))
        assert welcome is not None and welcome.agents[0].error.code == codes.PERMISSION_DENIED


class TestTraces:
    def test_what_was_refused_to_a_tenant_is_shown_to_its_admins_alone(self):
        """Found by attack: a refusal had no tenant, and so was shown to those who run the mesh."""
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", calls("b"), tenant="elsewhere"))
        alice.request(agent_type="c", trace_id="t" * 32)
        (traced,) = core.state.traces.find("t" * 32)
        assert traced.tenant == "elsewhere" and traced.outcome == "PERMISSION_DENIED"


class TestDeadLetters:
    def test_a_letter_is_sent_once_more_with_the_rights_that_its_principal_has_now(self):
        """Found by reading: it was sent as if authentication were off."""
        core = CoreMesh(max_hops=1)
        admin = Identity("default", "root", Rights(admin=True))
        first = core.agent("first/1", known(core, "svc"))
        second = core.agent("second/1", known(core, "other"))
        outer = core.caller("alice", known(core, "alice")).request(agent_type="first")
        sent = first.call_from(outer, agent_type="second")
        assert code_of(first, sent) == "HOP_LIMIT"
        del core.state.principals["default", "svc"]
        with core.step() as state:
            refused = redriving.redrive(state, admin, RedriveDeadLetterRequest(message_id=sent))
        core.pump()
        assert isinstance(refused, codes.Error) and refused.code == codes.PERMISSION_DENIED
        assert not second.requests
        with core.step() as state:
            elsewhere = Identity("elsewhere", "root", Rights(admin=True))
            missing = redriving.redrive(state, elsewhere, RedriveDeadLetterRequest(message_id=sent))
        assert isinstance(missing, codes.Error) and missing.code == codes.NO_ROUTE

    def test_a_letter_of_an_env_without_rights_is_as_unknown_as_one_that_never_was(self):
        core = CoreMesh(max_hops=1)
        first = core.agent("first/1", known(core, "svc"))
        core.agent("second/1", known(core, "other"))
        outer = core.caller("alice", known(core, "alice")).request(agent_type="first")
        sent = first.call_from(outer, agent_type="second")
        staging = Identity("default", "root", Rights(envs=frozenset({"staging"}), admin=True))
        with core.step() as state:
            refused = redriving.redrive(state, staging, RedriveDeadLetterRequest(message_id=sent))
        assert isinstance(refused, codes.Error) and refused.code == codes.NO_ROUTE

    def test_a_letter_is_sent_once_more_on_behalf_of_the_same_actors(self):
        """Found by reading: its actors were forgotten, so an agent's call went where its caller might never call."""
        core = CoreMesh(max_hops=1)
        admin = Identity("default", "root", Rights(admin=True))
        first = core.agent("first/1", known(core, "svc"))
        second = core.agent("second/1", known(core, "other"))
        outer = core.caller("alice", known(core, "alice")).request(agent_type="first")
        sent = first.call_from(outer, agent_type="second")
        assert code_of(first, sent) == "HOP_LIMIT"
        with core.step() as state:
            redriven = redriving.redrive(state, admin, RedriveDeadLetterRequest(message_id=sent))
        core.pump()
        assert isinstance(redriven, redriving.Redriven)
        delivered = second.got(redriven.message_id)
        assert (delivered.principal, list(delivered.actors)) == ("svc", ["alice"])
        assert (delivered.hop_count, len(delivered.path), delivered.trace_id) == (1, 1, redriven.trace_id)

    def test_a_letter_is_not_sent_once_more_for_actors_who_may_not_any_more(self):
        core = CoreMesh(max_hops=1)
        admin = Identity("default", "root", Rights(admin=True))
        first = core.agent("first/1", known(core, "svc"))
        second = core.agent("second/1", known(core, "other"))
        outer = core.caller("alice", known(core, "alice")).request(agent_type="first")
        sent = first.call_from(outer, agent_type="second")
        assert code_of(first, sent) == "HOP_LIMIT"
        known(core, "alice", calls("first"))
        with core.step() as state:
            refused = redriving.redrive(state, admin, RedriveDeadLetterRequest(message_id=sent))
        core.pump()
        assert isinstance(refused, codes.Error) and refused.code == codes.PERMISSION_DENIED
        assert not second.requests
        known(core, "alice")
        core.state.draining = True
        with core.step() as state:
            refused = redriving.redrive(state, admin, RedriveDeadLetterRequest(message_id=sent))
        assert isinstance(refused, codes.Error) and refused.code == codes.SHUTTING_DOWN, "it is no call of a handler"


class TestRevocation:
    def test_a_key_that_ends_ends_what_it_opened_and_cancels_what_its_callers_had_under_way(self):
        core = CoreMesh()
        gone = core.caller("alice", known(core, "alice", key="k1"))
        stays = core.caller("alice-2", known(core, "alice", key="k2"))
        b = core.agent("b/1", known(core, "svc", key="k3"))
        core.agent("full/1", known(core, "svc", key="k4"), max_concurrency=1)
        theirs, others = gone.request(agent_type="b"), stays.request(agent_type="b")
        stays.request(agent_type="full")
        waiting = gone.request(agent_type="full")
        with core.step() as state:
            revoking.revoked(state, {"k1": End.KEY})
        core.pump()
        told = {each: gone.error_of(each) for each in (theirs, waiting)}
        assert {each.code for each in told.values()} == {codes.UNAUTHENTICATED}
        assert told[theirs].may_have_executed and not told[waiting].may_have_executed
        again = core.caller("alice-3", known(core, "alice", key="k5"))
        again.request(agent_type="b", message_id=theirs, fresh=False)
        assert again.error_of(theirs).code == codes.AGENT_LOST, "it may have run, and is not run again"
        assert gone.goodbye is not None and gone.goodbye.code == frames.Goodbye.UNAUTHENTICATED
        assert [each.correlation_id for each in b.cancels] == [theirs]
        assert stays.goodbye is None
        b.answer(others)
        assert code_of(stays, others) == "OK"

    def test_what_nobody_waits_for_on_a_link_ends_with_its_principals_last_key(self):
        """Found by attack: a stolen key could leave hours of work behind, on the principal's behalf."""
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", key="k1"))
        ear = core.caller("ear", known(core, "ear"))
        ear.subscribe("r")
        b = core.agent("b/1", known(core, "svc", key="k3"))
        accepted = alice.request(agent_type="b", reply_topic="r", timeout_ms=600_000)
        with core.step() as state:
            revoking.revoked(state, {"k0": End.KEY, "k1": End.KEY})  # another key of hers is left
        core.pump()
        assert not b.cancels
        known(core, "alice", tenant="elsewhere")  # whose name is no matter
        del core.state.principals["default", "alice"]
        with core.step() as state:
            revoking.revoked(state, {"k2": End.KEY})
        core.pump()
        assert [each.correlation_id for each in b.cancels] == [accepted]
        (told,) = ear.callbacks
        assert told.correlation_id == accepted and told.error.code == codes.CANCELLED

    def test_what_allows_something_else_now_ends_as_a_key_does_and_its_process_may_come_again(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice", key="k1"))
        b = core.agent("b/1", known(core, "svc", key="k3"))
        sent = alice.request(agent_type="b")
        with core.step() as state:
            revoking.revoked(state, {"k1": End.CHANGED})
        core.pump()
        assert alice.error_of(sent).code == codes.UNAUTHENTICATED
        assert [each.correlation_id for each in b.cancels] == [sent]
        assert alice.goodbye is not None and alice.goodbye.code == frames.Goodbye.PROTOCOL_ERROR
        assert not any(peer.who.key_id == "k1" for peer in core.state.peers.values())

    def test_what_is_done_for_who_is_called_as_its_certificate_is_goes_on_while_there_is_an_entry(self):
        core = CoreMesh()
        name = "spiffe://test/alice"
        who = known(core, name, key="k1")
        core.state.named = lambda tenant, principal: who.rights if principal == name else None
        del core.state.principals["default", name]
        alice = core.caller("alice", who)
        b = core.agent("b/1", known(core, "svc", key="k3"))
        accepted = alice.request(agent_type="b", reply_topic="r", timeout_ms=600_000)
        with core.step() as state:
            revoking.revoked(state, {"k7": End.CHANGED})
        core.pump()
        assert not b.cancels
        core.state.named = lambda tenant, principal: None
        with core.step() as state:
            revoking.revoked(state, {"k7": End.CHANGED})
        core.pump()
        assert [each.correlation_id for each in b.cancels] == [accepted]

    def test_agents_of_a_key_that_ends_are_gone_at_once_and_their_callers_told(self):
        core = CoreMesh()
        alice = core.caller("alice", known(core, "alice"))
        b = core.agent("b/1", known(core, "svc", key="k3"))
        sent = alice.request(agent_type="b")
        with core.step() as state:
            revoking.revoked(state, {"k3": End.KEY})
        core.pump()
        assert b.goodbye is not None
        core.advance(3)
        assert alice.error_of(sent).may_have_executed
        assert code_of(alice, alice.request(agent_type="b")) == "NO_ROUTE"

    def test_a_link_that_is_cut_when_its_key_ends_cannot_be_resumed(self):
        core = CoreMesh()
        who = known(core, "svc", key="k3")
        b = core.agent("b/1", who)
        token = b.welcome.resume_token if b.welcome is not None else b""
        b.cut()
        with core.step() as state:
            revoking.revoked(state, {"k3": End.KEY})
        core.pump()
        assert token not in core.state.tokens and not core.state.peers


def test_the_types_of_callers_cannot_be_registered():
    core = CoreMesh()
    process = Process(core, "p", known(core, "mallory"), "")
    core.processes.append(process)
    process.connect()
    forms = [AgentRecord(agent_id="caller/alice"), AgentRecord(agent_type="caller"), AgentRecord(agent_id="Caller/x")]
    for form in forms:
        process.signal(Signal(attach=frames.Attach(record=form)))
    core.pump()
    answers = [each.attached for each in process.got_signals("attached")]
    assert [each.error.code for each in answers] == [codes.INVALID_ENVELOPE] * 3
    assert not len(core.state.directory)
