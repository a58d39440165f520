"""TLS of whoever dials: certificates that are read again at each dial, and what a failed handshake means.

gRPC takes certificates once, when a channel is made, and has no way to tell a client's channel of new ones. So whoever
dials asks for `Credentials.current` each time, which reads the files again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

LOOK_TIMEOUT_S = 1.0
SYSTEM = "system"  # in place of a file of CAs: those that the machine knows


class TlsFileError(Exception):
    """A file of certificates or of a key cannot be used; the text is one line that names it."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes of a TLS channel. An empty `ca` means the system's roots; `cert` and `key` go together."""

    ca: bytes = b""
    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where those bytes are; an empty name: none. `ca` may be `system`."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def read(self) -> Tls:
        """Read them now. Raises `TlsFileError`."""
        if bool(self.cert) != bool(self.key):
            given, missing = ("certificate", "key") if self.cert else ("key", "certificate")
            raise TlsFileError(f"a TLS {given} is given ({self.cert or self.key}) and no {missing}: give both or none")
        return Tls(b"" if self.ca == SYSTEM else _bytes(self.ca), _bytes(self.cert), _bytes(self.key))


def _bytes(name: str) -> bytes:
    if not name:
        return b""
    try:
        found = Path(name).read_bytes()
    except OSError as error:
        raise TlsFileError(f"cannot read the TLS file {name}: {error.strerror or error}") from error
    if b"-----BEGIN " not in found:
        raise TlsFileError(f"the TLS file {name} holds nothing in PEM form")
    return found


class Credentials:
    """Of one dialler. `source` is asked at each dial; the credentials are made anew when it says something else."""

    def __init__(self, source: Callable[[], Tls]) -> None:
        self._source = source
        self._read: Tls | None = None
        self._made: grpc.ChannelCredentials | None = None

    def current(self) -> tuple[grpc.ChannelCredentials, Tls]:
        """Credentials for a channel that is made now, and of what they are made. Raises what `source` does."""
        import grpc  # whoever only reads files does without

        now = self._source()
        if self._made is None or now != self._read:
            self._made = grpc.ssl_channel_credentials(now.ca or system_roots(), now.key or None, now.cert or None)
            self._read = now
        return self._made, now


def system_roots() -> bytes | None:
    """The machine's certificate authorities; None where it has none: gRPC then takes those it brings along."""
    found = ssl.get_default_verify_paths().cafile
    try:
        return Path(found).read_bytes() if found else None
    except OSError:
        return None


_NOT_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY")
_NOT_OURS = (
    "CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_UNSUPPORTED_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN",
)  # fmt: skip


async def explained(address: str, details: str, tls: Tls | None, who: str = "the node") -> str:
    """What a failed dial comes from, in words, where gRPC's `details` tell it; else these details. Takes ≤ 1 s.

    `who` is at the other end.
    """
    if tls is None:
        if any(sign in details for sign in _CLOSED) and await speaks_tls(address):
            return f"{who} speaks TLS and this connection does not: give the CA by which its certificate is checked"
        return details
    if "create security handshaker" in details:
        return "the key does not belong to the certificate, or one of the TLS files cannot be used"
    closed = any(sign in details for sign in _CLOSED)
    if any(sign in details for sign in _NOT_TLS) or (closed and not await speaks_tls(address)):
        return f"{who} does not speak TLS and this connection does: leave the TLS files out, or start it with TLS"
    if "certificate has expired" in details:
        return f"{who}'s certificate has expired"
    if "certificate is not yet valid" in details:
        return f"{who}'s certificate is not valid yet; compare the clocks"
    if "Hostname Verification Check failed" in details:
        return f"{who}'s certificate is not made for {address.rpartition(':')[0]}: dial it by a name that it holds"
    if closed or any(sign in details for sign in _NOT_OURS):
        if not tls.cert:
            return f"{who} ended the TLS handshake: it may ask for a client's certificate, and none was given"
        return (
            f"{who} ended the TLS handshake: it does not take this client's certificate (another CA, expired, "
            "or not made for clients; its log says which)"
        )
    if "CERTIFICATE_VERIFY_FAILED" in details:
        by = "the CA that was given" if tls.ca else "a CA that this machine knows; give the right one"
        return f"{who}'s certificate is not signed by {by}"
    return details


async def speaks_tls(address: str) -> bool:
    """Whether whoever is at this address answers a TLS handshake, be it that it asks for a certificate."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except (OSError, ValueError, TimeoutError):
        return False
    writer.transport.abort()
    return True
