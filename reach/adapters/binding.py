"""Taking an address for this process alone.

Port sharing is on by default in gRPC: a second server silently takes part of the connections (house.md, trap 7), and
its C core prints a line of its own when a bind fails. So both servers look first, and say in one line what is wrong.
"""

from __future__ import annotations

import errno
import socket


class PortTaken(Exception):
    """The address cannot be listened on; the text is one line that says what to do."""


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT as host and port; the configuration has checked it before."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_free(address: str, what: str, setting: str) -> None:
    """Raise `PortTaken` unless `address` can be listened on now. `what` names the server, `setting` its setting."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PortTaken(f"cannot listen on {address} for {what}: no such host ({error.strerror or error})") from error
    for family, kind, protocol, _, socket_address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for us
            try:
                probe.bind(socket_address)
                probe.listen(1)
            except OSError as error:
                raise taken(address, what, setting, error) from error


def taken(address: str, what: str, setting: str, error: OSError | None = None) -> PortTaken:
    """The one line for an address that cannot be had."""
    if error is None or error.errno == errno.EADDRINUSE:
        reason = f"another process listens there; stop it, or choose another with --{setting} HOST:PORT"
    elif error.errno == errno.EACCES:
        reason = f"not permitted; choose a port above 1023 with --{setting} HOST:PORT"
    else:
        reason = error.strerror or str(error)
    return PortTaken(f"cannot listen on {address} for {what}: {reason}")
