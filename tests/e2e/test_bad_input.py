"""Whatever a peer sends, it alone gets the answer, the right one; a neighbour on other links is served throughout.

Raw clients against a real node process. Every test runs beside a `neighbour`, which fails it if it was disturbed.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from agent_sdk import AgentReplaced, ReachError, connect
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope, Hop, Payload
from agentreach.v1.frame_pb2 import Attach, Detach, Frame, Goodbye, Hello, Signal, StreamCredit, Subscribe
from agentreach.v1.registry_pb2 import AgentRecord
from tests.component.test_grpc_server_grpcurl import GRPCURL
from tests.support.agents import eventually, make, name, usable
from tests.support.neighbour import neighbour
from tests.support.node import NodeProcess, start_node
from tests.support.rawlink import RawLink, call, raw_link, raw_stream, record, refusal, request, response, to

HELLO_S = 1.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with start_node(hello_timeout_s=HELLO_S, probe_interval_busy_s=0.5) as node:
        yield node


@pytest.fixture(autouse=True)
async def undisturbed(node: NodeProcess) -> AsyncIterator[None]:
    """Every test of this file has a healthy neighbour."""
    async with neighbour(node):
        yield


async def answer_of(link: RawLink, envelope: Envelope) -> Envelope:
    """What a request on a shared stream is answered with."""
    envelope.message_id = envelope.message_id or secrets.token_hex(8)
    await link.send(envelope)
    reply = await link.envelope()
    assert reply.correlation_id == envelope.message_id
    return reply


class TestOneBadMessage:
    """Fails by itself; the stream that carried it goes on."""

    FAULTS: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({}, "INVALID_ENVELOPE", "target"),
        ({"target": pb.Target(agent_id="a/b", agent_type="a")}, "INVALID_ENVELOPE", "agent_id, agent_type"),
        ({"target": pb.Target(topic="t", capabilities=["c"])}, "INVALID_ENVELOPE", "topic, capabilities"),
        ({"target": to("nobody"), "timeout_ms": 0}, "INVALID_ENVELOPE", "timeout_ms"),
        ({"target": to("nobody"), "timeout_ms": 1}, "INVALID_ENVELOPE", "10 ms to 600000 ms"),
        ({"target": to("nobody"), "timeout_ms": 600_001}, "INVALID_ENVELOPE", "10 ms to 600000 ms"),
        ({"target": to("nobody"), "protocol_version": 2}, "INVALID_ENVELOPE", "protocol_version"),
        ({"target": to("nobody"), "priority": 77}, "INVALID_ENVELOPE", "priority"),
        ({"target": to("nobody"), "profile": 77}, "INVALID_ENVELOPE", "profile"),
        ({"target": to("nobody", policy=77)}, "INVALID_ENVELOPE", "policy"),
        ({"target": to("nobody"), "type": 77}, "INVALID_ENVELOPE", "type"),
        ({"target": to("No Body!")}, "INVALID_ENVELOPE", "agent_type"),
        ({"target": pb.Target(agent_id="../etc/passwd")}, "INVALID_ENVELOPE", "agent_id"),
        ({"target": to("nobody"), "env": "a b"}, "INVALID_ENVELOPE", "env"),
        ({"target": to("nobody"), "session_id": "s" * 257}, "INVALID_ENVELOPE", "session_id"),
        ({"target": to("nobody"), "session_id": "a\x00b"}, "INVALID_ENVELOPE", "session_id"),
        ({"target": to("nobody"), "headers": {str(n): "x" for n in range(100_000)}}, "INVALID_ENVELOPE", "headers"),
        ({"target": to("nobody"), "payload": Payload(body=bytes(5 * MIB))}, "PAYLOAD_TOO_LARGE", "1048576"),
        ({"target": to("nobody"), "payload": Payload(body=bytes(MIB + 1))}, "PAYLOAD_TOO_LARGE", "1048576"),
        ({"target": to("nobody"), "payload": Payload(body=bytes(MIB))}, "NO_ROUTE", "nobody"),
        ({"target": to("nobody"), "lineage": b"\x07forged"}, "NO_ROUTE", "nobody"),
    )

    async def test_on_a_shared_stream_it_is_answered_and_the_stream_goes_on(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            for fields, code, word in self.FAULTS:
                reply = await answer_of(link, request(**fields))
                assert (codes.ErrorCode.Name(reply.error.code), word in reply.error.message) == (code, True), (
                    str(fields)[:200], reply.error,
                )  # fmt: skip
                assert reply.trace_id and not reply.error.may_have_executed

    async def test_by_invoke_it_is_a_status_that_begins_with_the_code(self, node: NodeProcess) -> None:
        statuses = {
            "INVALID_ENVELOPE": "INVALID_ARGUMENT", "PAYLOAD_TOO_LARGE": "INVALID_ARGUMENT", "NO_ROUTE": "NOT_FOUND",
        }  # fmt: skip
        for fields, code, word in self.FAULTS:
            if fields.get("type") is None:
                status, text = await refusal(node.grpc, request(**fields))
                assert (status, text.startswith(code), word in text) == (statuses[code], True, True), (
                    str(fields)[:200], text,
                )  # fmt: skip

    async def test_the_largest_payload_passes_both_ways(self, node: NodeProcess) -> None:
        async with make(name("large"), node.grpc, own_link=True) as agent, connect(node.grpc) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            reply = await mesh.request(bytes(MIB), agent_id=agent.agent_id, timeout=20)
            assert reply.data == bytes(MIB)

    async def test_a_reply_of_5_mib_fails_its_request_and_the_agent_serves_on(self, node: NodeProcess) -> None:
        agent_id = name("heavy")

        def take(envelope: Envelope) -> Envelope:
            big = envelope.payload.body == b"big"
            return response(envelope, payload=Payload(body=bytes(5 * MIB if big else 10)))

        async with raw_link(node.grpc, agents=[agent_id], taker=take), connect(node.grpc) as mesh:
            await usable(mesh, agent_id=agent_id)
            for _ in range(2):
                with pytest.raises(ReachError) as caught:
                    await mesh.request("big", agent_id=agent_id, timeout=20)
                assert caught.value.code == "PAYLOAD_TOO_LARGE" and caught.value.may_have_executed
                assert (await mesh.request("small", agent_id=agent_id, timeout=20)).data == bytes(10)

    async def test_a_payload_that_is_not_what_it_says_is_that_messages_error(self, node: NodeProcess) -> None:
        agent = make(name("strict"), node.grpc, own_link=True)
        nan = Payload()
        nan.json.number_value = math.nan
        lies = (
            Payload(content_type="application/json", body=b"{not json"), nan,
            Payload(content_type="text/plain", body=b"\xff"), Payload(content_type="application/json", body=b"NaN"),
        )  # fmt: skip
        async with agent, connect(node.grpc) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            for payload in lies:
                lie = request(target=pb.Target(agent_id=agent.agent_id), payload=payload)
                status, text = await refusal(node.grpc, lie)
                assert status == "FAILED_PRECONDITION" and text.startswith("REJECTED"), text
                assert "payload" in text
            assert (await mesh.request("x", agent_id=agent.agent_id, timeout=20)).data == "x"

    async def test_bytes_that_are_no_envelope_are_an_invalid_argument_without_class_names(
        self, node: NodeProcess
    ) -> None:
        for garbage in (b"\xff" * 64, b"\x0a\x7f", secrets.token_bytes(4096)):
            status, text = await refusal(node.grpc, garbage)
            assert status in ("INVALID_ARGUMENT",) and text.startswith("INVALID_ENVELOPE")
            assert "Error" not in text and "google" not in text and "Traceback" not in text

    async def test_bad_events_are_refused(self, node: NodeProcess) -> None:
        for fields in (
            {"target": pb.Target(topic="a b")}, {"target": pb.Target(topic="t", agent_id="a/b")},
            {"target": pb.Target(topic="t"), "payload": Payload(body=bytes(5 * MIB))},
            {"target": pb.Target(topic="t"), "timeout_ms": 5},
        ):  # fmt: skip
            status, text = await refusal(node.grpc, Envelope(**fields), "MeshService/Publish")
            assert status == "INVALID_ARGUMENT", text


class TestABrokenStream:
    """Ends alone, told why by goodbye PROTOCOL_ERROR."""

    @staticmethod
    async def ends(link: RawLink, word: str) -> None:
        goodbye = await link.until("goodbye")
        assert goodbye.code == Goodbye.PROTOCOL_ERROR and word in goodbye.reason, goodbye
        await link.half_close()
        await link.over()
        assert await link.status() is grpc.StatusCode.OK

    async def test_a_hello_that_never_comes(self, node: NodeProcess) -> None:
        async with raw_stream(node.grpc) as link:
            await self.ends(link, "no hello within 1 s")

    async def test_something_else_instead_of_hello(self, node: NodeProcess) -> None:
        async with raw_stream(node.grpc) as link:
            await link.beat("a/b")
            await self.ends(link, "hello")

    async def test_garbage_instead_of_hello(self, node: NodeProcess) -> None:
        async with raw_stream(node.grpc) as link:
            await link.write(b"\xff\xff\xff")
            await self.ends(link, "not a Frame")

    async def test_a_hello_of_protocol_version_2(self, node: NodeProcess) -> None:
        async with raw_stream(node.grpc) as link:
            await link.write(Frame(signals=[Signal(hello=Hello(protocol_version=2))]))
            await self.ends(link, "protocol version 2")

    async def test_garbage_later(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await link.write(secrets.token_bytes(64) + b"\xff")
            await self.ends(link, "not a Frame")

    async def test_envelopes_without_a_number(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await link.write(Frame(envelopes=[request(target=to("nobody"))]))
            await self.ends(link, "without seq")

    async def test_a_gap_in_the_numbers(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await link.write(Frame(seq=7, envelopes=[request(target=to("nobody"))]))
            await self.ends(link, "frame 7")

    async def test_an_ack_of_what_was_never_sent(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await link.write(Frame(ack=1_000_000))
            await self.ends(link, "ack 1000000")

    async def test_a_frame_above_grpcs_own_limit(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await link.write(bytes(17 * MIB))
            await link.over()
            assert await link.status() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_a_number_seen_before_is_dropped_and_nothing_breaks(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await answer_of(link, request(target=to("nobody")))
            await link.write(Frame(seq=1, envelopes=[request(target=to("nobody"), message_id="again")]))
            reply = await answer_of(link, request(target=to("nobody"), message_id="other"))
            assert reply.correlation_id == "other"

    async def test_unknown_signals_and_fields_are_ignored(self, node: NodeProcess) -> None:
        unknown = b"\x2a\x04\xf2\x3f\x01x" + b"\xfa\x7f\x01y"  # a signal of number 1022, a field of number 2047
        async with raw_link(node.grpc) as link:
            await link.write(unknown)
            await link.signal(Signal())
            assert (await answer_of(link, request(target=to("nobody")))).error.code == codes.NO_ROUTE


class TestForgery:
    """What a peer claims of others, or of what only the node knows, counts for nothing."""

    async def test_source_path_hops_and_identity_are_the_nodes_word(self, node: NodeProcess) -> None:
        agent_id = name("judge")
        seen: asyncio.Queue[Envelope] = asyncio.Queue()

        def take(envelope: Envelope) -> Envelope:
            seen.put_nowait(envelope)
            return response(envelope, "ok")

        forged: dict[str, Any] = {
            "source": "boss/1", "path": [Hop(agent_id="boss/1")], "hop_count": 9, "tenant": "other",
            "principal": "root", "actors": ["human"], "entry": b"forged", "recipient": "boss/1", "attempt": 99,
            "session_event": pb.LOST,
        }  # fmt: skip
        async with raw_link(node.grpc, agents=[agent_id], taker=take), raw_link(node.grpc) as liar:
            async with connect(node.grpc) as mesh:
                await usable(mesh, agent_id=agent_id)
                await asyncio.wait_for(seen.get(), 10)
            message = request(target=pb.Target(agent_id=agent_id), **forged)
            assert (await answer_of(liar, message)).source == agent_id
            message.message_id = ""
            await call(node.grpc, "MeshService/Invoke", message)
            for source in (liar.welcome.caller_id, None):
                got = await asyncio.wait_for(seen.get(), 10)
                assert got.source == source or (source is None and got.source.startswith("caller/"))
                assert got.recipient == agent_id and got.attempt == 1
                assert got.hop_count <= 1 and "boss/1" not in [hop.agent_id for hop in got.path]
                assert (got.tenant, got.principal) != ("other", "root") and not got.actors
                assert got.entry != b"forged" and got.session_event == 0

    async def test_a_tampered_lineage_is_refused(self, node: NodeProcess) -> None:
        agent_id = name("witness")
        seen: asyncio.Queue[Envelope] = asyncio.Queue()

        def take(envelope: Envelope) -> Envelope:
            seen.put_nowait(envelope)
            return response(envelope, "ok")

        async with raw_link(node.grpc, agents=[agent_id], taker=take), connect(node.grpc) as mesh:
            await usable(mesh, agent_id=agent_id)
            lineage = (await asyncio.wait_for(seen.get(), 10)).lineage
            assert lineage
            for at in (1, len(lineage) // 2, -1):
                broken = bytearray(lineage)
                broken[at] ^= 1
                forged = request(target=pb.Target(agent_id=agent_id), lineage=bytes(broken))
                status, text = await refusal(node.grpc, forged)
                assert (status, text.startswith("PERMISSION_DENIED")) == ("PERMISSION_DENIED", True)
            assert await call(
                node.grpc, "MeshService/Invoke", request(target=pb.Target(agent_id=agent_id), lineage=lineage)
            )

    async def test_nobody_answers_or_cancels_or_feeds_somebody_elses_request(self, node: NodeProcess) -> None:
        agent_id = name("slow")
        held: asyncio.Queue[Envelope] = asyncio.Queue()

        def take(envelope: Envelope) -> Envelope | None:
            if envelope.type == pb.CANCEL or envelope.payload.body != b"hold":
                return None if envelope.type == pb.CANCEL else response(envelope, "ok")
            held.put_nowait(envelope)
            return None

        async with (
            raw_link(node.grpc, agents=[agent_id], taker=take) as honest, raw_link(node.grpc, agents=[name("thief")]) as
            thief, connect(node.grpc, own_link=True) as mesh,
        ):  # fmt: skip
            await usable(mesh, agent_id=agent_id)
            asked = asyncio.create_task(mesh.request("hold", agent_id=agent_id, timeout=20, message_id="guessed"))
            delivered = await asyncio.wait_for(held.get(), 10)
            stolen = response(delivered, "stolen")
            stolen.source = agent_id
            await thief.send(
                stolen, Envelope(type=pb.RESPONSE, correlation_id="guessed", payload=Payload(text="guess"))
            )
            credit = Signal(stream_credit=StreamCredit(entry=delivered.entry, correlation_id="guessed", up_to=1))
            await thief.send(signals=[credit, Signal(detach=Detach(agent_id=agent_id))])
            # in words of its own principal's the thief may cancel: open mesh, one principal; by another link it may not
            await thief.send(Envelope(type=pb.CANCEL, correlation_id="guessed"))
            assert (await answer_of(thief, request(target=to("nobody")))).error.code == codes.NO_ROUTE
            assert not asked.done()
            await honest.send(response(delivered, "mine"))
            assert (await asked).data == "mine"

    async def test_an_event_says_who_published_it(self, node: NodeProcess) -> None:
        async with connect(node.grpc) as mesh, mesh.subscribe("audit") as events, raw_link(node.grpc) as liar:
            event = Envelope(
                type=pb.EVENT, target=pb.Target(topic="audit"), payload=Payload(text="x"), source="system/1",
                principal="system",
            )  # fmt: skip
            await liar.send(event)
            async with asyncio.timeout(10):
                assert (await anext(events)).source == liar.welcome.caller_id

    async def test_loads_that_are_no_numbers_hurt_no_choice(self, node: NodeProcess) -> None:
        kind = f"nan{secrets.token_hex(3)}"
        ids = [f"{kind}/{n}" for n in range(3)]

        def take(envelope: Envelope) -> Envelope:
            return response(envelope, envelope.recipient)

        async with raw_link(node.grpc, agents=ids, taker=take) as link, connect(node.grpc) as mesh:
            for agent_id in ids:
                await usable(mesh, agent_id=agent_id)
            for load in (math.nan, math.inf, -math.inf, -5.0):
                await link.beat(ids[0], load=load)
                await link.beat(ids[1], ids[2], load=0.5)
                await link.until("heartbeat_ack")
                for policy in ("LEAST_LOAD", "SCORE", "WEIGHTED_RANDOM", "LEAST_ACTIVE"):
                    assert (await mesh.request("x", agent_type=kind, policy=policy, timeout=10)).data in ids


class TestRegistration:
    @pytest.mark.parametrize(
        ("bad", "word"),
        [
            (AgentRecord(agent_id="UPPER/1"), "agent_id"),
            (AgentRecord(agent_id="a/../b"), "agent_id"),
            (AgentRecord(agent_id="a/" + "x" * 64), "agent_id"),
            (AgentRecord(agent_id="caller/me"), "caller"),
            (AgentRecord(), "agent_id"),
            (AgentRecord(agent_id="a/1", agent_type="b"), "agent_type"),
            (AgentRecord(agent_id="a/1", capabilities=["no name"]), "capabilities"),
            (AgentRecord(agent_id="a/1", capabilities=[f"c{n}" for n in range(65)]), "capabilities"),
            (AgentRecord(agent_id="a/1", labels={"k": "v\n"}), "label"),
            (AgentRecord(agent_id="a/1", weight=0), "weight"),
            (AgentRecord(agent_id="a/1", weight=1_000_000_000), "weight"),
            (AgentRecord(agent_id="a/1", status=77), "status"),
            (AgentRecord(agent_id="a/1", description="\x1b[2J"), "description"),
            (AgentRecord(agent_id="a/1", env="../x"), "env"),
        ],
        ids=lambda value: None if isinstance(value, str) else str(value).replace("\n", " ")[:40],
    )
    async def test_a_record_that_cannot_be_is_refused_and_the_others_of_its_hello_are_not(
        self, node: NodeProcess, bad: AgentRecord, word: str
    ) -> None:
        good = name("good")
        async with raw_link(node.grpc, agents=[bad, good]) as link:
            refused, taken = link.welcome.agents
            assert refused.error.code == codes.INVALID_ENVELOPE and word in refused.error.message
            assert taken.agent_id == good and taken.generation and not taken.HasField("error")
            await link.send(signals=[Signal(attach=Attach(record=bad))])
            assert (await link.until("attached")).error.code == codes.INVALID_ENVELOPE

    async def test_the_younger_of_two_processes_with_one_id_has_it_and_they_do_not_take_turns(
        self, node: NodeProcess
    ) -> None:
        agent_id = name("twin")
        async with (
            raw_link(node.grpc, agents=[agent_id], taker=lambda each: response(each, "elder")) as elder,
            raw_link(node.grpc, agents=[agent_id], taker=lambda each: response(each, "younger")) as younger,
            connect(node.grpc) as mesh,
        ):
            detached = await elder.until("detached")
            assert (detached.agent_id, detached.code) == (agent_id, Goodbye.REPLACED)
            assert detached.incarnation and "another process" in detached.reason
            await usable(mesh, agent_id=agent_id)
            for _ in range(20):
                assert (await mesh.request("x", agent_id=agent_id, timeout=10)).data == "younger"
            assert younger.welcome.agents[0].generation > elder.welcome.agents[0].generation

    async def test_an_sdk_agent_that_is_replaced_by_a_raw_one_ends(self, node: NodeProcess) -> None:
        agent = make(name("fixed"), node.grpc, own_link=True)
        async with agent, raw_link(node.grpc, agents=[agent.agent_id]):
            with pytest.raises(AgentReplaced):
                async with asyncio.timeout(10):
                    await agent.ended()

    async def test_heartbeats_of_agents_that_are_not_ours_are_unknown(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc, agents=[name("own")]) as link:
            await link.beat("somebody/else")
            assert list((await link.until("heartbeat_ack")).unknown) == ["somebody/else"]

    async def test_a_hundred_thousand_agents_of_one_hello_are_bounded(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc, agents=[record(f"crowd/{n}") for n in range(3_000)]) as link:
            answers = link.welcome.agents
            assert len(answers) == 3_000
            assert all(each.HasField("error") or each.generation for each in answers)

    async def test_subscriptions_to_what_is_no_topic_count_for_nothing(self, node: NodeProcess) -> None:
        async with raw_link(node.grpc) as link:
            await link.send(signals=[Signal(subscribe=Subscribe(topics=["a b", "", "x" * 5_000]))])
            assert (await answer_of(link, request(target=to("nobody")))).error.code == codes.NO_ROUTE


async def test_secrets_of_an_exception_stay_with_the_agent(node: NodeProcess) -> None:
    secret = f"password-{secrets.token_hex(8)}"
    agent = make(name("leaky"), node.grpc, own_link=True)
    async with agent, connect(node.grpc) as mesh:
        await usable(mesh, agent_id=agent.agent_id)
        with pytest.raises(ReachError) as caught:
            await mesh.request({"raise": secret}, agent_id=agent.agent_id, timeout=10)
        assert caught.value.code == "AGENT_ERROR" and "RuntimeError" in str(caught.value)
        target = pb.Target(agent_id=agent.agent_id)
        asked = Payload(content_type="application/json", body=json.dumps({"raise": secret}).encode())
        _, text = await refusal(node.grpc, request(target=target, payload=asked))
        metrics = (await asyncio.to_thread(node.get, "/metrics"))[1]
        for place, shown in (("error", str(caught.value)), ("status", text), ("metrics", metrics), ("log", node.log)):
            assert secret not in shown, place


@pytest.mark.skipif(GRPCURL is None, reason="no grpcurl for this platform")
class TestTyped:
    """What a person types into grpcurl."""

    @staticmethod
    async def grpcurl(node: NodeProcess, method: str, typed: str, *before: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(str(GRPCURL), "-plaintext", *before, "-d", "@", node.grpc, f"agentreach.v1.{method}"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(20):
            out, _ = await process.communicate(typed.encode())
        return process.returncode or 0, out.decode()

    @pytest.mark.parametrize(
        "typed",
        [
            '{"timeoutMs": -1}', '{"timeoutMs": 99999999999}', '{"timeoutMs": true}', '{"timeoutMs": NaN}',
            '{"payload": {"json": NaN}}', '{"payload": {"json": Infinity}}', '{"priority": "URGENT"}',
            '{"nonsense": 1}', '{"payload": {"text": "a", "json": 1}}', '{"payload": {"body": "hello there"}}',
            '{"payload": {"body": "!!"}}', '{"createdAt": "yesterday"}', '{"target": ', "[]",
        ],
    )  # fmt: skip
    async def test_json_that_is_none_of_ours_is_refused_and_never_an_internal_error(
        self, node: NodeProcess, typed: str
    ) -> None:
        code, out = await self.grpcurl(node, "MeshService/Invoke", typed)
        assert code != 0
        assert "Internal" not in out and "Unknown" not in out and "Traceback" not in out

    @pytest.mark.parametrize("typed", ["0", "false", '""', "null", "[]", "{}", '{"ok": false, "n": 0}'])
    async def test_an_answer_of_nothing_is_shown_as_what_it_is(self, node: NodeProcess, typed: str) -> None:
        agent = make(name("plain"), node.grpc, own_link=True)

        @agent.handler
        async def same(data: Any) -> Any:
            return data

        async with agent, connect(node.grpc) as mesh:
            await usable(mesh, agent_id=agent.agent_id)
            asked = f'{{"target":{{"agentId":"{agent.agent_id}"}},"timeoutMs":5000,"payload":{{"json":{typed}}}}}'
            code, out = await self.grpcurl(node, "MeshService/Invoke", asked)
            assert code == 0, out
            assert json.loads(out)["payload"]["json"] == json.loads(typed)

    async def test_a_persistent_stream_can_be_typed_too(self, node: NodeProcess) -> None:
        agent_id = name("typed")
        hello = {"signals": [{"hello": {"agents": [{"record": {"agentId": agent_id}}]}}]}
        asked = {
            "seq": 1, "envelopes": [{"messageId": "typed-1", "timeoutMs": 2000, "target": {"agentType": "nobody"}}],
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *(str(GRPCURL), "-plaintext", "-d", "@", node.grpc, "agentreach.v1.MeshService/Connect"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{json.dumps(hello)}\n{json.dumps(asked)}\n".encode())
        out = ""
        async with asyncio.timeout(20):
            while '"code": "NO_ROUTE"' not in out:
                line = await process.stdout.readline()
                assert line, out
                out += line.decode()
            process.stdin.close()
            assert await process.wait() == 0
        assert '"welcome"' in out and agent_id in out and '"correlationId": "typed-1"' in out


async def test_after_all_this_nothing_is_left_over(node: NodeProcess) -> None:
    async def empty() -> bool:
        return await node.metric("reach_requests_in_flight") <= 1  # the neighbour's

    await eventually(empty, "no request is in flight")
    assert "Traceback" not in node.log
    assert node.process.poll() is None
