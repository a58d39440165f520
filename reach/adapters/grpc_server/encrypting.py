"""TLS of the gRPC server, with certificates that can be exchanged while it serves. TLS 1.2 is the least it speaks."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from agentreach.aio.tls import Tls


class _Newest:
    """Asked by gRPC at each handshake, from threads of its own: it only looks at a reference, and never raises."""

    def __init__(self, source: Callable[[], Tls], ask_clients: bool) -> None:
        self._source = source
        self._ask_clients = ask_clients
        self._given = source()

    @property
    def first(self) -> grpc.ServerCertificateConfiguration:
        """What the server starts with."""
        return self._configuration(self._given)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """What is new since the last time; None: nothing."""
        newest = self._source()
        if newest is self._given:
            return None
        self._given = newest
        return self._configuration(newest)

    def _configuration(self, tls: Tls) -> grpc.ServerCertificateConfiguration:
        root = tls.ca if self._ask_clients else None
        return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], root)


def server_credentials(source: Callable[[], Tls], *, ask_clients: bool) -> grpc.ServerCredentials:
    """Credentials of a server; `source` gives what is in use now, the same object as long as it is the same.

    `ask_clients`: only who shows a certificate that an authority of `Tls.ca` vouches for gets to the server at all.
    """
    newest = _Newest(source, ask_clients)
    return grpc.dynamic_ssl_server_credentials(
        newest.first,
        newest,  # type: ignore[arg-type]  # None is allowed and means that nothing is new; the stubs do not know it
        require_client_authentication=ask_clients,
    )
