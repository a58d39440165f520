"""TLS of the HTTP side, with certificates that can be exchanged while it serves.

Python's servers keep the context that they were started with, and its certificates can be added to but not taken out.
So each handshake is given the newest context, by the hook that is there for server names.
"""

from __future__ import annotations

import ssl

from agentreach.aio.tls import TlsFiles


class HttpTls:
    """`context` is for the server; `renew` takes what the files hold now. Both raise `OSError` for unusable files."""

    def __init__(self, files: TlsFiles, *, ask_clients: bool) -> None:
        """`ask_clients`: look at a client's certificate, if it shows one, by the authorities in `files.ca`."""
        self._files = files
        self._ask_clients = ask_clients
        self._newest = self._made()
        self.context = self._made()
        self.context.sni_callback = self._choose

    def renew(self) -> None:
        """Use what the files hold now, from the next handshake on."""
        self._newest = self._made()

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.cert, self._files.key)
        if self._ask_clients:
            context.verify_mode = ssl.CERT_OPTIONAL
            context.load_verify_locations(self._files.ca)
        return context
