"""The names other programs are written against. They are final: a name may be added, none may go or change."""

from __future__ import annotations

import re

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor, ServiceDescriptor

from agent_sdk.errors import ErrorCode as SdkErrorCode
from agentreach.v1 import admin_pb2, envelope_pb2, error_pb2, frame_pb2, mesh_pb2, peer_pb2, registry_pb2
from agentreach.wire import errors
from tests.tidy.sources import ROOT

FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (envelope_pb2, frame_pb2, registry_pb2, mesh_pb2, admin_pb2, peer_pb2, error_pb2)
)
MESSAGES: dict[str, Descriptor] = {name: d for file in FILES for name, d in file.message_types_by_name.items()}
SERVICES: dict[str, ServiceDescriptor] = {name: d for file in FILES for name, d in file.services_by_name.items()}

METHODS = {
    "MeshService": "Connect Invoke InvokeStream Publish",
    "RegistryService": "Register Heartbeat Deregister Resolve GetAgent ListAgents ListCapabilities WatchAgents "
    "SetVersionPolicy GetVersionPolicy",
    "AdminService": "GetNode ListNodes Explain GetTrace ListSessions ReleaseSession ListBreakers ResetBreaker "
    "DrainAgent DrainNode GetConfig SetConfig ListDeadLetters RedriveDeadLetter CreateKey ListKeys RevokeKey "
    "RotateKey ExplainAccess",
    "PeerService": "Link",
}
STREAMS = {
    "MeshService.Connect": (True, True),
    "MeshService.InvokeStream": (False, True),
    "RegistryService.WatchAgents": (False, True),
    "PeerService.Link": (True, True),
}
"""(client streams, server streams); every other method is unary."""

FIELDS = {
    "Envelope": "protocol_version message_id fresh type source recipient tenant principal actors target payload "
    "correlation_id entry trace_id span_id parent_span_id session_id strict_session epoch session_event timeout_ms "
    "profile idempotent priority parent_message_id lineage hop_count path dedup_key attempt sequence more reply_topic "
    "error timing env headers created_at signature",
    "Payload": "schema_version content_type body json text blob",
    "BlobRef": "uri size_bytes sha256 expires_at",
    "Target": "agent_id topic agent_type capabilities labels version policy hash_key broadcast",
    "Hop": "agent_id message_id session_id dedup_key",
    "Timing": "queue_us handler_us",
    "Frame": "seq ack age_ms envelopes signals",
    "Hello": "agents incarnation protocol_version sdk resume_token last_seq",
    "Welcome": "link_id resume_token resumed last_seq node_id agents caller_id heartbeat_interval_ms lease_ttl_ms "
    "limits config_version peers",
    "Attach": "record holding sessions",
    "Attached": "agent_id generation error",
    "Detached": "agent_id code reason incarnation",
    "Goodbye": "code reason incarnation",
    "AgentRecord": "agent_id agent_type tenant env version capabilities labels endpoints status weight priority "
    "max_concurrency session_concurrency reentrant description node_id incarnation generation lease_ttl_s "
    "registered_at heartbeat_at load in_flight config_version",
    "Error": "code message retryable retry_after_ms may_have_executed agent_id attempts details",
    "PublishReply": "matched accepted dropped unknown",
    "ListAgentsRequest": "target env status page_size page_token",
    "ListAgentsReply": "agents next_page_token revision age_ms",
    "ResolveRequest": "target env",
    "ResolveReply": "agents revision age_ms",
    "GetAgentRequest": "agent_id env",
    "ListCapabilitiesRequest": "env",
    "ListCapabilitiesReply": "capabilities",
    "ExplainReply": "candidates chosen policy revision age_ms",
    "GetTraceRequest": "trace_id",
    "GetTraceReply": "messages silent_nodes",
    "ListSessionsRequest": "agent_type agent_id limit",
    "ListSessionsReply": "sessions silent_nodes",
    "ListNodesReply": "nodes leader_id leader_since",
    "ListBreakersRequest": "limit",
    "ListBreakersReply": "breakers silent_nodes",
    "Lineage": "message_id hop_count path trace_id tenant principal actors",
}
NESTED = {
    "ListCapabilitiesReply.capabilities": "name aliases agents",
    "ExplainReply.candidates": "agent_id removed_by why",
    "GetTraceReply.messages": "message_id parent_message_id source agent_id outcome stages",
    "ListSessionsReply.sessions": "session_id agent_id epoch idle_s",
    "ListBreakersReply.breakers": "agent_id state trips next_probe_ms",
}
STAGE_FIELDS = "name node_id at offset_us attempt detail"

SIGNALS = (
    "hello welcome attach attached detach detached heartbeat heartbeat_ack status_change probe probe_reply progress "
    "subscribe unsubscribe gap stream_credit session_release session_snapshot session_restore session_ready "
    "config_update lookup found drain goodbye node_hello loads pins_honoured attempt_state want grant handover "
    "interest forward forwarded"
)
ENUMS = {
    "MessageType": "REQUEST RESPONSE EVENT CALLBACK CANCEL",
    "SessionEvent": "STARTED MOVED LOST",
    "CallProfile": "CACHE RPC LLM EXTERNAL TASK",
    "Priority": "HIGH NORMAL LOW",
    "RoutingPolicy": "RANDOM WEIGHTED_RANDOM ROUND_ROBIN LEAST_ACTIVE LEAST_LOAD SCORE CONSISTENT_HASH",
    "AgentStatus": "STARTING HEALTHY DEGRADED DRAINING UNREACHABLE",
    "ErrorCode": "INVALID_ENVELOPE PAYLOAD_TOO_LARGE NO_ROUTE NO_AGENT_AVAILABLE BREAKER_OPEN CONNECT_FAILED "
    "AGENT_LOST TIMEOUT OVERLOADED REJECTED AGENT_ERROR HOP_LIMIT LOOP_DETECTED WOULD_DEADLOCK IDEMPOTENCY_CONFLICT "
    "SESSION_LOST FENCED CANCELLED UNAUTHENTICATED PERMISSION_DENIED REGISTRY_UNAVAILABLE SHUTTING_DOWN INTERNAL",
}
GOODBYES = "NORMAL DRAINED REPLACED UNAUTHENTICATED PROTOCOL_ERROR SLOW_CONSUMER SHUTDOWN"

ZEROS = {"Found.State": "NO"}
"""Zero values that mean something: the contract names NO beside RUNNING and DONE, and an answer left empty is a no."""

GRPC_CODES = {
    "INVALID_ENVELOPE": 3, "PAYLOAD_TOO_LARGE": 3, "NO_ROUTE": 5, "NO_AGENT_AVAILABLE": 14, "BREAKER_OPEN": 14,
    "CONNECT_FAILED": 14, "AGENT_LOST": 14, "TIMEOUT": 4, "OVERLOADED": 8, "REJECTED": 9, "AGENT_ERROR": 2,
    "HOP_LIMIT": 9, "LOOP_DETECTED": 9, "WOULD_DEADLOCK": 9, "IDEMPOTENCY_CONFLICT": 6, "SESSION_LOST": 10,
    "FENCED": 10, "CANCELLED": 1, "UNAUTHENTICATED": 16, "PERMISSION_DENIED": 7, "REGISTRY_UNAVAILABLE": 14,
    "SHUTTING_DOWN": 14, "INTERNAL": 13,
}  # fmt: skip


def all_enums() -> dict[str, EnumDescriptor]:
    top = {name: enum for file in FILES for name, enum in file.enum_types_by_name.items()}
    nested = {
        f"{message.name}.{name}": enum
        for message in MESSAGES.values()
        for name, enum in message.enum_types_by_name.items()
    }
    return top | nested


def missing(wanted: str, there: object) -> set[str]:
    return set(wanted.split()) - set(there)  # type: ignore[call-overload]  # any container of names


def test_every_file_is_of_the_package_at_the_path_of_its_package() -> None:
    assert {file.package for file in FILES} == {"agentreach.v1"}
    assert all(file.name.startswith("agentreach/v1/") for file in FILES)


def test_proto_files_import_nothing_foreign() -> None:
    for path in sorted((ROOT / "proto/agentreach/v1").glob("*.proto")):
        text = path.read_text()
        imports = re.findall(r'^import "([^"]+)"', text, re.MULTILINE)
        assert all(name.startswith(("google/protobuf/", "agentreach/v1/")) for name in imports), path.name
        assert 'syntax = "proto3";' in text


def test_every_service_has_its_methods() -> None:
    assert set(SERVICES) == set(METHODS)
    for service, methods in METHODS.items():
        assert missing(methods, SERVICES[service].methods_by_name) == set(), service


def test_methods_stream_as_the_contract_says() -> None:
    for service in SERVICES.values():
        for method in service.methods:
            expected = STREAMS.get(f"{service.name}.{method.name}", (False, False))
            assert (method.client_streaming, method.server_streaming) == expected, method.full_name


def test_methods_carry_messages_of_their_name_unless_named_otherwise() -> None:
    otherwise = {
        "Connect": ("Frame", "Frame"), "Invoke": ("Envelope", "Envelope"), "InvokeStream": ("Envelope", "Envelope"),
        "Publish": ("Envelope", "PublishReply"), "Link": ("Frame", "Frame"), "Explain": ("Envelope", "ExplainReply"),
        "GetAgent": ("GetAgentRequest", "AgentRecord"),
    }  # fmt: skip
    for service in SERVICES.values():
        for method in service.methods:
            name = method.name
            if name in otherwise:
                assert (method.input_type.name, method.output_type.name) == otherwise[name]
            else:
                assert method.input_type.name == f"{name}Request", method.full_name


def test_every_message_has_its_fields() -> None:
    for message, fields in FIELDS.items():
        assert message in MESSAGES, message
        assert missing(fields, MESSAGES[message].fields_by_name) == set(), message


def test_the_parts_of_answers_have_their_fields() -> None:
    for where, fields in NESTED.items():
        message, field = where.split(".")
        part = MESSAGES[message].fields_by_name[field].message_type
        assert missing(fields, part.fields_by_name) == set(), where
    trace = MESSAGES["GetTraceReply"].fields_by_name["messages"].message_type
    assert missing(STAGE_FIELDS, trace.fields_by_name["stages"].message_type.fields_by_name) == set()


def test_every_signal_is_one_of_a_kind() -> None:
    kinds = {field.name for field in MESSAGES["Signal"].oneofs_by_name["kind"].fields}
    assert missing(SIGNALS, kinds) == set()


def test_a_payload_holds_one_kind_of_content() -> None:
    content = MESSAGES["Payload"].oneofs_by_name["content"].fields
    assert {field.name for field in content} == {"body", "json", "text", "blob"}


def test_enums_have_their_values_without_a_prefix_and_the_zero_with_one() -> None:
    enums = all_enums()
    for name, values in ENUMS.items():
        assert missing(values, enums[name].values_by_name) == set(), name
    assert missing(GOODBYES, enums["Goodbye.Code"].values_by_name) == set()
    for name, enum in enums.items():
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).upper()
        for value in enum.values:
            if value.number == 0:
                assert value.name == ZEROS.get(name, f"{prefix}_UNSPECIFIED"), f"{name}.{value.name}"
            else:
                assert not value.name.startswith(prefix + "_"), f"{name}.{value.name}"


def test_values_of_one_package_never_meet() -> None:
    names = [value.name for file in FILES for enum in file.enum_types_by_name.values() for value in enum.values]
    assert len(names) == len(set(names))


def test_json_names_are_lower_camel_case() -> None:
    fields = [field for message in MESSAGES.values() for field in message.fields]
    for field in fields:
        first, *rest = field.name.split("_")
        assert field.camelcase_name == first + "".join(word.capitalize() for word in rest), field.full_name


def test_fields_every_message_carries_have_numbers_of_one_byte() -> None:
    envelope = MESSAGES["Envelope"].fields_by_name
    everywhere = "message_id type source target payload correlation_id entry trace_id timeout_ms lineage"
    assert [name for name in everywhere.split() if envelope[name].number > 15] == []


def test_numbers_once_given_up_are_reserved_not_reused() -> None:
    for message in MESSAGES.values():
        numbers = [field.number for field in message.fields]
        assert len(numbers) == len(set(numbers)), message.full_name


def test_each_error_code_has_its_grpc_code_and_its_class() -> None:
    for name, status in GRPC_CODES.items():
        code = error_pb2.ErrorCode.Value(name)
        assert errors.TABLE[code][0] == status, name
        assert SdkErrorCode[name].value == name
    assert len(errors.TABLE) == len(GRPC_CODES)


def test_a_name_that_is_gone_is_found() -> None:
    assert missing("one two", {"one": 1}) == {"two"}
