"""An authority of its own for each test, and files of nodes and clients that it knows."""

from __future__ import annotations

import time
from pathlib import Path

from agent_sdk import Tls
from reach.adapters.dev_certificates import Authority, Issued, Subject

LASTS_S = 3600.0
HOSTS = ("localhost", "127.0.0.1", "::1")


class Folder:
    """Certificates as files of a folder, under the names that `files` gives back."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder
        self.authority = authority or Authority.made("test CA", time.time(), 86_400)
        self.ca = self.write("ca.pem", self.authority.pem.cert)

    def write(self, name: str, data: bytes) -> str:
        """Put it there in one step, as whoever renews certificates should."""
        new = self.path / f".{name}.new"
        new.write_bytes(data)
        new.replace(self.path / name)
        return str(self.path / name)

    def put(self, name: str, issued: Issued) -> Tls:
        """Certificate and key as files; with the CA's they are what a client needs."""
        key = self.write(f"{name}-key.pem", issued.key)
        return Tls(self.ca, self.write(f"{name}.pem", issued.cert), key)

    def node(self, name: str = "node", *, uri: str = "", lasts_s: float = LASTS_S, server_only: bool = False) -> Tls:
        """A node's certificate for loopback."""
        subject = Subject(HOSTS, (uri,) if uri else (), client=not server_only)
        return self.put(name, self.authority.issue(name, subject, time.time(), lasts_s))

    def client(self, name: str, *uris: str, dns: tuple[str, ...] = (), lasts_s: float = LASTS_S) -> Tls:
        """A client's certificate with these names; none: that of the name in a trust domain of the tests."""
        names = uris or (() if dns else (f"spiffe://test/{name}",))
        issued = self.authority.issue(name, Subject(dns, names, server=False), time.time(), lasts_s)
        return self.put(name, issued)
