"""The gRPC server: what agents, callers, operators and ordinary gRPC tools talk to. It carries bytes and statuses only.

Every method takes and gives raw bytes, so that what cannot be parsed is answered by us and not by gRPC's own UNKNOWN
with class names in it (house.md, trap 12).
"""

from reach.adapters.binding import PortTaken
from reach.adapters.grpc_server.server import GrpcServer

__all__ = ["GrpcServer", "PortTaken"]
