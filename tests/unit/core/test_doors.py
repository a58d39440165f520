"""Which door needs what, what a caller shows, and how a node proves that it is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1 import admin_pb2, mesh_pb2, peer_pb2, registry_pb2
from reach.core import doors
from reach.core.doors import Needs, Unshown

SECRET, ADDRESS = b"s" * 32, "127.0.0.1:7070"


def test_every_method_of_the_contract_needs_somebody_who_is_known() -> None:
    open_to_all = {Needs.HEALTH, Needs.REFLECTION}
    for file in (admin_pb2, mesh_pb2, peer_pb2, registry_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                needed = doors.needs(f"/{service.full_name}/{method.name}")
                assert needed not in open_to_all
                if service.name == "AdminService":
                    assert needed in (Needs.ADMIN, Needs.OWNER)
                if service.name == "PeerService":
                    assert needed is Needs.NODE


@pytest.mark.parametrize(
    "method",
    [
        "/agentreach.v1.AdminService/New",
        "/no.such.Service/Method",
        "/agentreach.v1.meshservice/Invoke",
        "//agentreach.v1.MeshService/Invoke",
        "/agentreach.v1.MeshService",
        "/grpc.health.v1.HealthX/Check",
        "/grpc.health.v1.health/Check",
        "/",
        "",
    ],
)
def test_what_no_table_names_needs_an_admin_or_no_less_than_its_service(method: str) -> None:
    needed = doors.needs(method)
    assert needed is (Needs.PRINCIPAL if method == "/agentreach.v1.MeshService" else Needs.ADMIN)


def test_what_concerns_all_tenants_is_for_those_who_run_the_mesh() -> None:
    owners = {
        f"{service.name}/{method.name}"
        for file in (admin_pb2, mesh_pb2, peer_pb2, registry_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if doors.needs(f"/{service.full_name}/{method.name}") is Needs.OWNER
    }
    of_admin = ("GetNode", "ListNodes", "DrainNode", "SetConfig")
    assert owners == {*(f"AdminService/{name}" for name in of_admin), "RegistryService/SetVersionPolicy"}


def test_registering_over_calls_is_for_admins_until_it_has_rights_of_its_own() -> None:
    for name in ("Register", "Heartbeat", "Deregister"):
        assert doors.needs(f"/agentreach.v1.RegistryService/{name}") is Needs.ADMIN


@pytest.mark.parametrize("value", ["Bearer k", "bearer k", "BEARER k", "  Bearer   k  "])
def test_a_key_is_shown_as_a_bearer_whatever_the_case_of_that_word(value: str) -> None:
    assert doors.shown([("other", "x"), ("Authorization", value)]) == ("bearer", "k")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "   ")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer   ")],
        [("authorization", "secret-key")],
        [("authorization", "Basic secret-key")],
        [("authorization", b"Bearer secret-key")],
        [("authorization", "Bearer ключ")],
        [("authorization", "Bearer secret-key\r\n")],
        [("authorization", "Bearer secret-key\0")],
        [("authorization", "Bearer\tsecret-key")],
        [("authorization", "Bearer " + "secret-key" * 100)],
        [("authorization", "Bearer secret-key"), ("authorization", "Bearer secret-key")],
        [("authorization-bin", b"Bearer secret-key")],
        [("x-api-key", "secret-key")],
    ],
)
def test_anything_else_is_not_shown_and_the_reason_does_not_repeat_it(headers: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unshown) as refused:
        doors.shown(headers)
    assert "secret-key" not in str(refused.value)


def proof_for(address: str, secret: bytes = SECRET, node: str = "n1") -> str:
    return doors.node_proof(secret, node, address).removeprefix("Node ")


def test_a_node_proves_itself_to_the_one_that_it_dials_and_to_no_other() -> None:
    assert doors.proves(proof_for(ADDRESS), SECRET, ADDRESS) == "n1"
    assert doors.shown([("authorization", doors.node_proof(SECRET, "n1", ADDRESS))])[0] == doors.NODE
    assert not doors.proves(proof_for("127.0.0.1:7071"), SECRET, ADDRESS)
    assert not doors.proves(proof_for(ADDRESS, b"o" * 32), SECRET, ADDRESS)
    assert not doors.proves(proof_for(ADDRESS).replace("n1", "n2", 1), SECRET, ADDRESS)


@given(st.text(alphabet=st.characters(max_codepoint=126), max_size=80))
def test_nothing_else_proves_anything(text: str) -> None:
    assert not doors.proves(text, SECRET, ADDRESS)
    assert not doors.proves(f"n1 {text}", SECRET, ADDRESS)
