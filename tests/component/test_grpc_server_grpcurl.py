"""The real grpcurl against the server: reflection, health, and calls as a person types them."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reach.adapters.grpc_server import GrpcServer
from tests.support.switchboard import RuleSwitchboard

_BESIDE_PYTHON = Path(sys.executable).with_name("grpcurl")
GRPCURL = str(_BESIDE_PYTHON) if _BESIDE_PYTHON.exists() else shutil.which("grpcurl")
LIMIT_S = 20.0

pytestmark = pytest.mark.skipif(GRPCURL is None, reason="no grpcurl for this platform")


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    running = GrpcServer(RuleSwitchboard(), listen="127.0.0.1:0")
    await running.start()
    yield running
    await running.stop(0)


async def grpcurl(server: GrpcServer, *arguments: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, output and errors of `grpcurl -plaintext <before> ADDRESS <arguments>`."""
    process = await asyncio.create_subprocess_exec(
        str(GRPCURL), "-plaintext", *before, server.address, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode or 0, out.decode(), err.decode()


async def test_list_names_every_service(server: GrpcServer) -> None:
    code, out, _ = await grpcurl(server, "list")
    assert code == 0
    assert set(out.split()) == {
        "agentreach.v1.AdminService",
        "agentreach.v1.MeshService",
        "agentreach.v1.RegistryService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_describe_shows_services_messages_and_everything_listed(server: GrpcServer) -> None:
    code, out, err = await grpcurl(server, "describe")
    assert code == 0, err
    assert "rpc InvokeStream" in out and "rpc GetTrace" in out and "grpc.reflection.v1.ServerReflection" in out
    code, out, _ = await grpcurl(server, "describe", "agentreach.v1.Envelope")
    assert code == 0 and "timeout_ms" in out
    code, out, _ = await grpcurl(server, "describe", "google.rpc.ErrorInfo")
    assert code == 0 and "reason" in out


async def test_a_call_is_typed_and_answered_in_camel_case_json(server: GrpcServer) -> None:
    body = '{"messageId":"m1","target":{"capabilities":["echo"]},"timeoutMs":2000,"payload":{"json":{"hello":"world"}}}'
    code, out, err = await grpcurl(server, "agentreach.v1.MeshService/Invoke", before=("-d", body))
    assert code == 0, err
    reply = json.loads(out)
    assert reply == {"type": "RESPONSE", "payload": {"json": {"hello": "world"}}, "correlationId": "m1"}


async def test_an_error_shows_its_code_first_and_its_details_decoded(server: GrpcServer) -> None:
    body = '{"traceId":"abc","payload":{"text":"refuse"}}'
    code, _, err = await grpcurl(server, "agentreach.v1.MeshService/Invoke", before=("-d", body))
    assert code != 0
    assert "Code: NotFound" in err and "Message: NO_ROUTE" in err
    assert "ErrorInfo" in err and '"reason":"NO_ROUTE"' in err.replace(" ", "")


async def test_streams_print_item_by_item(server: GrpcServer) -> None:
    body = '{"payload":{"text":"3"}}'
    code, out, err = await grpcurl(server, "agentreach.v1.MeshService/InvokeStream", before=("-d", body))
    assert code == 0, err
    assert out.count('"RESPONSE"') == 3


async def test_health_check_and_unknown_service(server: GrpcServer) -> None:
    code, out, _ = await grpcurl(server, "grpc.health.v1.Health/Check")
    assert code == 0 and json.loads(out) == {"status": "SERVING"}
    code, _, err = await grpcurl(server, "grpc.health.v1.Health/Check", before=("-d", '{"service":"nope"}'))
    assert code != 0 and "NotFound" in err


async def test_a_health_watch_prints_not_serving_and_ends_when_the_node_stops(server: GrpcServer) -> None:
    process = await asyncio.create_subprocess_exec(
        str(GRPCURL), "-plaintext", server.address, "grpc.health.v1.Health/Watch",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = await asyncio.wait_for(process.stdout.readuntil(b"}"), LIMIT_S)
    assert b'"SERVING"' in first
    await asyncio.wait_for(server.stop(30), 3)
    rest, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert b'"NOT_SERVING"' in rest
    assert process.returncode == 0


async def test_dead_letters_are_listed_and_redriven(server: GrpcServer) -> None:
    code, out, err = await grpcurl(server, "agentreach.v1.AdminService/ListDeadLetters")
    assert code == 0, err
    assert json.loads(out) == {"deadLetters": [{"messageId": "m1", "reason": "HOP_LIMIT"}], "kept": 1}
    body = '{"messageId":"m1"}'
    code, out, err = await grpcurl(server, "agentreach.v1.AdminService/RedriveDeadLetter", before=("-d", body))
    assert code == 0, err
    assert json.loads(out) == {"messageId": "m2"}
