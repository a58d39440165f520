"""The node's certificate: read, checked, looked at again; and what a peer's says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agent_sdk import Tls
from agentreach.aio.tls import TlsFiles
from reach.adapters.certificates import CertificateUnusable, NodeCertificate, parsed, trusted
from reach.adapters.dev_certificates import Authority, Subject
from reach.core.certificates import Certificate
from tests.support.certificates import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "certs")


def files(tls: Tls) -> TlsFiles:
    return TlsFiles(tls.ca or "", tls.cert or "", tls.key or "")


def refusal(tls: TlsFiles) -> str:
    with pytest.raises(CertificateUnusable) as refused:
        NodeCertificate(tls)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_cannot_be_used_is_told_in_one_line(folder: Folder, tmp_path: Path) -> None:
    good = files(folder.node())
    other = files(folder.node("other"))
    missing, rubbish = str(tmp_path / "missing.pem"), folder.write("rubbish.pem", b"-----BEGIN rubbish-----\n")
    assert "cannot read the TLS file" in refusal(TlsFiles(good.ca, missing, good.key))
    assert "cannot read the TLS file" in refusal(TlsFiles(good.ca, good.cert, missing))
    assert "nothing in PEM form" in refusal(TlsFiles(good.ca, folder.write("empty.pem", b""), good.key))
    assert "no certificate that can be read" in refusal(TlsFiles(good.ca, rubbish, good.key))
    assert "no certificate that can be read" in refusal(TlsFiles(rubbish, good.cert, good.key))
    assert "no private key that can be read" in refusal(TlsFiles(good.ca, good.cert, rubbish))
    assert "does not belong to the certificate" in refusal(TlsFiles(good.ca, good.cert, other.key))
    assert "has expired" in refusal(files(folder.node("old", lasts_s=-1)))
    late = folder.authority.issue("late", Subject(("localhost",)), time.time() + 3600, 60)
    assert "is valid from" in refusal(files(folder.put("late", late)))


def test_an_encrypted_key_and_an_expired_authority_are_told(folder: Folder) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    good = files(folder.node())
    key = pem.load_pem_private_key(Path(good.key).read_bytes(), None)
    locked = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret"))
    assert "is encrypted" in refusal(TlsFiles(good.ca, good.cert, folder.write("locked.pem", locked)))
    old = Authority.made("old", time.time() - 7200, 3600)
    assert "every CA" in refusal(TlsFiles(folder.write("old-ca.pem", old.pem.cert), good.cert, good.key))


def test_a_renewed_certificate_is_taken_and_an_unusable_one_told_once(folder: Folder) -> None:
    tls = files(folder.node(lasts_s=100))
    certificate = NodeCertificate(tls)
    used, ends = certificate.tls, certificate.expires_at
    assert not certificate.look()
    folder.write("node.pem", b"-----BEGIN rubbish-----\n")
    assert not certificate.look(), "its other half may just be being written"
    with pytest.raises(CertificateUnusable, match=r"node\.pem"):
        certificate.look()
    assert not certificate.look() and certificate.tls is used, "told once, and the old one stays"
    folder.node(lasts_s=5000)
    assert certificate.look()
    assert certificate.tls != used and certificate.expires_at > ends + 4000


def test_what_a_peer_says_is_read_from_its_names_alone(folder: Folder) -> None:
    tls = folder.client("a", "spiffe://test/a", dns=("a.example",))
    assert tls.cert
    found = parsed(Path(tls.cert).read_bytes())
    assert (found.uris, found.dns) == (("spiffe://test/a",), ("a.example",))
    assert found.expires_at == pytest.approx(time.time() + 3600, abs=60)
    nameless = folder.authority.issue("common.name", Subject(server=False), time.time(), 60)
    assert (parsed(nameless.cert).uris, parsed(nameless.cert).dns) == ((), ()), "a common name is no name"
    assert parsed(b"rubbish") == Certificate()


def test_trust_ends_with_the_authority(folder: Folder, tmp_path: Path) -> None:
    tls, now = folder.client("a"), time.time()
    assert tls.cert
    pem, ca = Path(tls.cert).read_bytes(), folder.authority.pem.cert
    other = Authority.made("test CA", now, 3600).pem.cert  # of the same name
    assert trusted(pem, b"", ca, now) and trusted(pem, b"", other + ca, now)
    assert not trusted(pem, b"", other, now)
    assert not trusted(pem, b"", ca, now + 2 * 86_400), "an authority that has expired vouches for nobody"
    assert not trusted(pem, b"rubbish", b"rubbish", now)
