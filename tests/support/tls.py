"""A node that asks for certificates, with the authority that vouches for them, and what its clients need."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_sdk import Tls
from agentreach.aio.tls import TlsFiles
from reach.adapters.dev_certificates import Authority, Issued, Subject
from tests.support.certificates import HOSTS, LASTS_S, Folder

PRINCIPALS: Mapping[str, Mapping[str, Any]] = {
    "spiffe://test/a": {"principal": "a", "may_register": ["a"], "may_call": ["*"], "may_subscribe": ["*"]},
    "spiffe://test/b": {"principal": "b", "may_register": ["b"], "may_call": ["*"], "may_publish": ["*"]},
    "spiffe://test/team/*": {"may_call": ["*"]},
    "spiffe://test/root": {"principal": "root", "admin": True, "may_register": ["*"], "may_call": ["*"]},
}


class Issuer(Folder):
    """An authority, a node's certificate in `node.pem`, and clients' certificates by name."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        super().__init__(folder, authority)
        self.node()

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of a node with this certificate, that asks its clients for one of this authority."""
        return {
            "auth": "mtls",
            "tls_cert": str(self.path / "node.pem"),
            "tls_key": str(self.path / "node-key.pem"),
            "tls_ca": self.ca,
            "principals": PRINCIPALS,
            **more,
        }

    def trust(self, *authorities: Authority) -> None:
        """Have `ca.pem` hold these and no others."""
        self.write("ca.pem", b"".join(each.pem.cert for each in authorities))

    def renew(self, name: str, authority: Authority, lasts_s: float = LASTS_S) -> None:
        """A new certificate in the place of `name`'s, signed by this authority."""
        node = name == "node"
        subject = Subject(HOSTS if node else (), (f"spiffe://test/{name}",), server=node)
        self.put(name, authority.issue(name, subject, time.time(), lasts_s))

    def files(self, name: str) -> Tls:
        """Where a client's are, made before."""
        return Tls(self.ca, str(self.path / f"{name}.pem"), str(self.path / f"{name}-key.pem"))


def files_of(tls: Tls | None) -> TlsFiles | None:
    """The same for what the command line uses."""
    return TlsFiles(tls.ca or "", tls.cert or "", tls.key or "") if tls is not None else None


def nobody(issuer: Folder) -> Issued:
    """A certificate of this authority without any name."""
    return issuer.authority.issue("nameless", Subject(server=False), time.time(), LASTS_S)
