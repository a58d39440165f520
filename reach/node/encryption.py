"""The node's TLS: its certificate at both doors and towards other nodes, and whom clients' certificates stand for.

Files are looked at once a second. What can be used is used from the next handshake on; what cannot leaves everything as
it was, and is told. When other authorities are trusted, whoever was let in by the former ones has to come in anew. So
has whoever's certificate stands for somebody else, once the configuration file says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from agentreach.aio.tls import Tls, TlsFiles
from reach.adapters.certificates import CertificateUnusable, NodeCertificate
from reach.adapters.http_tls import HttpTls
from reach.node.certified import CertifiedPrincipals
from reach.node.config import Config, ConfigError, loopback
from reach.node.principals import named
from reach.node.principals_file import PrincipalsFile

log = structlog.get_logger("reach.tls")

LOOK_EVERY_S = 1.0
SOON_S = 3 * 86_400.0  # less left: told in the log, once a day


class Encryption:
    """What `Config.tls_…` asks for. `run` it as long as the node lives."""

    def __init__(self, config: Config, unix: Callable[[], float] = time.time, file: Path | None = None) -> None:
        """`file` is where `config` was read from, in which `principals` may change. Raises `CertificateUnusable`."""
        files = TlsFiles(config.tls_ca, config.tls_cert, config.tls_key)
        self._certificate = NodeCertificate(files, unix)
        self._unix = unix
        self._warned_at = 0.0
        self.reloads_failed = 0
        """How often new files could not be used."""
        self.asks_clients = config.auth == "mtls"
        """Whoever has no certificate of `tls_ca` does not get through the handshake of the gRPC server."""
        self.principals = (
            CertifiedPrincipals(named(config.principals), lambda: self.tls.ca, unix) if self.asks_clients else None
        )
        self._entries = PrincipalsFile(file, config.principals) if file is not None and self.asks_clients else None
        self._http_is_old = False
        self.http: HttpTls | None = None
        """For the HTTP server, unless it listens on loopback: there `curl http://…/readyz` works as ever."""
        if config.http and not loopback(config.http):
            self.http = _http(files, self.asks_clients)
        self._trusted_anew: list[Callable[[], None]] = []

    @property
    def tls(self) -> Tls:
        """What is in use now; the same object as long as it is the same. Any thread may ask."""
        return self._certificate.tls

    def dial(self) -> Tls:
        """The same, for whoever asks by calling: what this node shows, and by what it checks others."""
        return self.tls

    @property
    def expires_at(self) -> float:
        """When the certificate in use ends, in Unix time."""
        return self._certificate.expires_at

    def on_trust(self, told: Callable[[], None]) -> None:
        """Have `told` called when other authorities are trusted than before."""
        self._trusted_anew.append(told)

    async def run(self) -> None:
        """Look at the files, and at what has expired, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Look once."""
        before = self.tls.ca
        try:
            if await asyncio.to_thread(self._certificate.look):
                self._http_is_old = self.http is not None
                log.info("certificate exchanged", expires_in_s=round(self._certificate.expires_at - self._unix()))
            if self._http_is_old and self.http is not None:
                await asyncio.to_thread(self.http.renew)
                self._http_is_old = False
        except (CertificateUnusable, OSError) as error:
            self.reloads_failed += 1
            log.error("the certificate is not exchanged, the former one goes on", why=str(error))
        node_is_out = await self._look_at_principals()
        if self.principals is not None:
            self.principals.look()
        if self.tls.ca != before:
            log.info("other authorities are trusted; whoever came in by the former ones comes in anew")
        if self.tls.ca != before or node_is_out:
            for told in self._trusted_anew:
                told()
        self._warn()

    async def _look_at_principals(self) -> bool:
        """Use those that stand in the file now. True if a node is none any more by them."""
        if self._entries is None or self.principals is None:
            return False
        try:
            entries = await asyncio.to_thread(self._entries.look)
        except (ConfigError, ValueError) as error:
            self.reloads_failed += 1
            log.error("principals are not exchanged, the former ones go on", why=str(error))
            return False
        if entries is None:
            return False
        log.info("principals exchanged", entries=len(entries))
        return self.principals.exchange(entries)

    def _warn(self) -> None:
        now = self._unix()
        left_s = self._certificate.expires_at - now
        if left_s < SOON_S and now - self._warned_at >= 86_400:
            self._warned_at = now
            log.warning("the node's certificate expires soon: put a new one in its place", expires_in_s=round(left_s))


def _http(files: TlsFiles, ask_clients: bool) -> HttpTls:
    try:
        return HttpTls(files, ask_clients=ask_clients)
    except OSError as error:
        raise CertificateUnusable(f"the certificate {files.cert} cannot be used: {error}") from error
