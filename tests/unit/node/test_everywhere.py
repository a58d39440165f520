"""Who is asked what, in which order, and what is made of silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from google.protobuf.message import Message

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1.error_pb2 import CONNECT_FAILED, INTERNAL, NO_ROUTE, REJECTED
from agentreach.wire.errors import failure
from reach.core import nodes
from reach.core.ports import Identity, MeshFailure, NoAnswer
from reach.node.everywhere import Everywhere
from tests.support.core import CoreMesh

Answer = Message | Exception
NOWHERE = MeshFailure(failure(NO_ROUTE, "not here"))


class Answers:
    """Other nodes by address, each with what it says to anything; a `Peers`."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.kept: set[str] = set()
        self.together = 0
        self.most_together = 0

    async def ask(
        self, address: str, method: str, request: Message, reply_type: type[Any], limit_s: float, who: Identity
    ) -> Any:
        self.asked.append(address)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        await asyncio.sleep(0)
        self.together -= 1
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, reply_type)
        return answer

    async def keep_only(self, addresses: Iterable[str]) -> None:
        self.kept = set(addresses)

    async def close(self) -> None:
        self.kept = set()


def mesh(peers: Answers) -> Everywhere:
    """A node that knows the others by their addresses, which are their ids."""
    state = CoreMesh().state
    for address in peers.answers:
        nodes.of(state, address).address = address
    nodes.of(state, "unregistered")  # a node without a key in the registry is not asked
    return Everywhere(state, peers)


def says(answer: Answer) -> Callable[[], Message]:
    def own() -> Message:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return own


def sessions(*ids: str) -> admin.ListSessionsReply:
    return admin.ListSessionsReply(sessions=[admin.SessionInfo(session_id=each, agent_id="w/1") for each in ids])


class TestQuestions:
    async def test_all_are_asked_at_once_and_those_that_are_silent_or_broken_are_named(self) -> None:
        broken = MeshFailure(failure(INTERNAL, "a fault"))
        peers = Answers(b=sessions("s2"), c=NoAnswer("c: no"), d=broken, e=sessions("s3"))
        reply = await mesh(peers).ask("ListSessions", admin.ListSessionsRequest(), says(sessions("s1")))
        assert sorted(each.session_id for each in reply.sessions) == ["s1", "s2", "s3"]
        assert sorted(reply.silent_nodes) == ["c", "d"]
        assert peers.most_together == 4
        assert peers.kept == {"b", "c", "d", "e"}

    async def test_a_question_that_this_node_refuses_is_put_to_nobody(self) -> None:
        peers = Answers(b=sessions("s2"))
        with pytest.raises(MeshFailure, match="not here"):
            await mesh(peers).ask("ListSessions", admin.ListSessionsRequest(), says(NOWHERE))
        assert not peers.asked

    async def test_alone_it_gives_its_own_answer_as_it_is(self) -> None:
        own = sessions("s1")
        assert await mesh(Answers()).ask("ListSessions", admin.ListSessionsRequest(), says(own)) is own


class TestOrders:
    async def test_one_after_another_is_asked_until_one_has_it(self) -> None:
        peers = Answers(b=NOWHERE, c=admin.RedriveDeadLetterReply(message_id="m2"), d=admin.RedriveDeadLetterReply())
        reply = await mesh(peers).ask("RedriveDeadLetter", admin.RedriveDeadLetterRequest(), says(NOWHERE))
        assert (reply.message_id, peers.asked) == ("m2", ["b", "c"])

    async def test_what_is_here_is_done_here(self) -> None:
        peers = Answers(b=admin.RedriveDeadLetterReply())
        own = admin.RedriveDeadLetterReply(message_id="m1")
        assert await mesh(peers).ask("RedriveDeadLetter", admin.RedriveDeadLetterRequest(), says(own)) is own
        assert not peers.asked

    async def test_a_refusal_by_who_has_it_is_the_answer(self) -> None:
        peers = Answers(b=MeshFailure(failure(REJECTED, "redriven before")), c=admin.RedriveDeadLetterReply())
        with pytest.raises(MeshFailure, match="redriven before"):
            await mesh(peers).ask("RedriveDeadLetter", admin.RedriveDeadLetterRequest(), says(NOWHERE))
        assert peers.asked == ["b"]

    async def test_the_home_that_this_node_names_is_asked_and_nobody_else(self) -> None:
        elsewhere = MeshFailure(failure(NO_ROUTE, "w/1 is attached to node c", details={"node_id": "c"}))
        peers = Answers(b=admin.DrainAgentReply(), c=admin.DrainAgentReply(in_flight=3))
        reply = await mesh(peers).ask("DrainAgent", admin.DrainAgentRequest(), says(elsewhere))
        assert (reply.in_flight, peers.asked) == (3, ["c"])

    async def test_nobody_has_it_is_this_nodes_refusal_and_silence_is_told_with_it(self) -> None:
        with pytest.raises(MeshFailure, match=r"^not here$"):
            await mesh(Answers(b=NOWHERE)).ask("DrainAgent", admin.DrainAgentRequest(), says(NOWHERE))
        with pytest.raises(MeshFailure, match="not here; no answer from node c, which may have done it") as told:
            peers = Answers(b=NOWHERE, c=NoAnswer("c: no"))
            await mesh(peers).ask("DrainAgent", admin.DrainAgentRequest(), says(NOWHERE))
        assert told.value.error.code == NO_ROUTE and told.value.error.may_have_executed

    async def test_a_breaker_is_reset_everywhere_if_anybody_knows_the_agent(self) -> None:
        peers = Answers(b=admin.ResetBreakerReply(), c=NoAnswer("c: no"), d=NOWHERE)
        reply = await mesh(peers).ask("ResetBreaker", admin.ResetBreakerRequest(), says(NOWHERE))
        assert list(reply.silent_nodes) == ["c"]
        with pytest.raises(MeshFailure, match="not here"):
            await mesh(Answers(b=NOWHERE)).ask("ResetBreaker", admin.ResetBreakerRequest(), says(NOWHERE))

    async def test_a_node_is_drained_by_its_name(self) -> None:
        peers = Answers(b=admin.DrainNodeReply(node_id="b"), c=NoAnswer("c: no"))
        own = says(admin.DrainNodeReply(node_id="node"))
        everywhere = mesh(peers)
        for node_id, answers in (("", "node"), ("node", "node"), ("b", "b")):
            reply = await everywhere.ask("DrainNode", admin.DrainNodeRequest(node_id=node_id), own)
            assert reply.node_id == answers
        with pytest.raises(MeshFailure, match="there is no node x; those known here are b, c, node"):
            await everywhere.ask("DrainNode", admin.DrainNodeRequest(node_id="x"), own)
        with pytest.raises(MeshFailure, match="may have begun") as told:
            await everywhere.ask("DrainNode", admin.DrainNodeRequest(node_id="c"), own)
        assert told.value.error.code == CONNECT_FAILED and told.value.error.may_have_executed
