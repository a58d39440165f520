"""Server reflection v1 and v1alpha, so that grpcurl works without our .proto files.

The library serves v1alpha only, from descriptors without `json_name`; older grpcurls then print snake_case. So it is
given a pool of its own in which every field has its JSON name, `google/rpc/error_details.proto` is there to decode
status details by, and v1 exists as a copy of v1alpha: the two differ in nothing but the package's name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from agentreach.v1 import admin_pb2, mesh_pb2, registry_pb2
from reach.adapters.grpc_server.calls import Handler
from reach.adapters.grpc_server.outcome import Context

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_FILES: tuple[Any, ...] = (  # FileDescriptors; the stubs disagree on which
    mesh_pb2.DESCRIPTOR,
    registry_pb2.DESCRIPTOR,
    admin_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
    error_details_pb2.DESCRIPTOR,
    status_pb2.DESCRIPTOR,
)


def handlers(services: Iterable[str]) -> dict[str, Handler]:
    """ServerReflectionInfo for the named services, the same for both versions."""
    servicer: Any = aio.ReflectionServicer(service_names=(*services, *SERVICES), pool=_pool())

    async def parsed(
        request_iterator: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        async for data in request_iterator:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(data)
            except DecodeError:
                request = None
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no ServerReflectionRequest")
            yield request

    async def serve(request_iterator: AsyncIterator[bytes], context: Context) -> None:
        async for reply in servicer.ServerReflectionInfo(parsed(request_iterator, context), context):
            await context.write(reply.SerializeToString())

    return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(serve)}


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    known: set[str] = set()

    def add(file: Any) -> None:
        if file.name in known:
            return
        known.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        copy = FileDescriptorProto()
        file.CopyToProto(copy)
        for message in copy.message_type:
            _name_for_json(message)
        pool.Add(copy)

    for file in _FILES:
        add(file)
    pool.Add(_reflection_v1())
    return pool


def _name_for_json(message: DescriptorProto) -> None:
    for field in message.field:
        if not field.json_name:
            first, *rest = field.name.split("_")
            field.json_name = first + "".join(word[:1].upper() + word[1:] for word in rest)
    for nested in message.nested_type:
        _name_for_json(nested)


def _reflection_v1() -> FileDescriptorProto:
    copy = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(copy)
    copy.name = "grpc/reflection/v1/reflection.proto"
    copy.package = "grpc.reflection.v1"
    old, new = ".grpc.reflection.v1alpha.", ".grpc.reflection.v1."
    for message in copy.message_type:
        _name_for_json(message)
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in copy.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
    return copy
