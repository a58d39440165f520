"""Which process is at the other end of a loopback connection: what a relay needs that stands between several of them.

The kernel is asked for the one socket (sock_diag(7)), which takes some 30 µs: the table in /proc/net/tcp takes tens of
milliseconds once thousands of closed connections linger in it, and the relays' thread would stop the test's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

_SOCK_DIAG = 4  # netlink's protocol, and the type of its messages
_BY_FAMILY = 20
_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_ASKED = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_ENDS = struct.Struct("!HH16s16s")  # ports, addresses
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # interface, and no cookie
_ENTRY = struct.Struct("=4x48x16xI")  # of an answer: what is skipped, then the inode
_LOOPBACK = socket.inet_aton("127.0.0.1") + bytes(12)


class Process(Protocol):
    """An etcd member, a node; perhaps not started yet, or gone by now."""

    @property
    def pid(self) -> int: ...


P = TypeVar("P", bound=Process)


def who_dialled(accepted: asyncio.StreamWriter, processes: Iterable[P]) -> P | None:
    """Which of them is at the other end of this loopback connection: to other ports it may have one as well."""
    peer, door = accepted.get_extra_info("peername"), accepted.get_extra_info("sockname")
    if peer is None:  # it has gone already
        return None
    inode = _inode(peer[1], door[1])
    if inode is None:
        return None
    name = f"socket:[{inode}]"
    return next((each for each in processes if name in _open_files(each.pid)), None)


def _inode(local: int, remote: int) -> int | None:
    """Of the socket of a loopback connection between these ports; None if there is none (any more)."""
    body = _ASKED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    body += _ENDS.pack(local, remote, _LOOPBACK, _LOOPBACK) + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
        answer = kernel.recv(4096)
    kind = _HEADER.unpack_from(answer)[1]
    return int(_ENTRY.unpack_from(answer, _HEADER.size)[0]) or None if kind == _BY_FAMILY else None


def _can_tell() -> bool:
    """Linux, and a kernel that answers."""
    if not hasattr(socket, "AF_NETLINK"):
        return False
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as made:
            return _inode(made.getsockname()[1], server.getsockname()[1]) == os.fstat(made.fileno()).st_ino
    except OSError:
        return False


CAN_TELL = _can_tell()
"""Whether that can be told here."""


def _open_files(pid: int) -> set[str]:
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.add(os.readlink(entry))
            except OSError:
                continue
    except OSError:
        pass
    return found
