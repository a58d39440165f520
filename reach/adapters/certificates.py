"""Certificates in files and of peers: read, checked, and looked at again. The one place that knows `cryptography`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from agentreach.aio.tls import Tls, TlsFileError, TlsFiles
from reach.core.certificates import Certificate

PARSED_MAX = 4096  # certificates of peers whose parsed form is kept
LOOKS_UNTIL_TOLD = 2
WAY_MAX = 8  # certificates from a peer's to its root


class CertificateUnusable(Exception):
    """This node's own certificate cannot be used; the text is one line that says why."""


class NodeCertificate:
    """This node's certificate, its key, and the CAs by which it checks others; looked at again while it runs."""

    def __init__(self, files: TlsFiles, unix: Callable[[], float] = time.time) -> None:
        """Read and check the files. Raises `CertificateUnusable`."""
        self._files = files
        self._unix = unix
        self.tls = _read(files, unix())
        """What is in use: PEM bytes."""
        self.expires_at = _expiry(self.tls)
        """When the certificate in use ends, in Unix time."""
        self._trouble, self._seen = "", 0

    def look(self) -> bool:
        """Read the files again; True if what is in use has changed.

        What cannot be used leaves everything as it was. At the second look in a row (files are renewed one after
        another, and belong together only when all are there) it raises `CertificateUnusable`, once for each reason.
        """
        try:
            found = _read(self._files, self._unix())
        except CertificateUnusable as error:
            self._seen = self._seen + 1 if str(error) == self._trouble else 1
            self._trouble = str(error)
            if self._seen == LOOKS_UNTIL_TOLD:
                raise
            return False
        self._trouble, self._seen = "", 0
        if found == self.tls:
            return False
        self.tls, self.expires_at = found, _expiry(found)
        return True


def _read(files: TlsFiles, now: float) -> Tls:
    try:
        tls = files.read()
    except TlsFileError as error:
        raise CertificateUnusable(str(error)) from error
    chain = _certificates(tls.cert, files.cert)
    _check_key(tls.key, files.key, chain[0], files.cert)
    end, begin = chain[0].not_valid_after_utc, chain[0].not_valid_before_utc
    if end.timestamp() <= now:
        raise CertificateUnusable(f"the certificate {files.cert} has expired at {end:%Y-%m-%d %H:%M:%S} UTC: renew it")
    if begin.timestamp() > now:
        raise CertificateUnusable(
            f"the certificate {files.cert} is valid from {begin:%Y-%m-%d %H:%M:%S} UTC only: wait, or mend the clock"
        )
    if tls.ca and all(each.not_valid_after_utc.timestamp() <= now for each in _certificates(tls.ca, files.ca)):
        raise CertificateUnusable(f"every CA in {files.ca} has expired")
    return tls


def _certificates(pem: bytes, name: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise CertificateUnusable(f"{name} holds no certificate that can be read") from error


def _check_key(pem: bytes, name: str, certificate: x509.Certificate, certificate_name: str) -> None:
    try:
        key = load_pem_private_key(pem, None)
    except TypeError as error:
        raise CertificateUnusable(f"the key {name} is encrypted: give it without a password, readable for this user "
                                  "alone") from error  # fmt: skip
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateUnusable(f"{name} holds no private key that can be read") from error
    if _public(key.public_key()) != _public(certificate.public_key()):
        raise CertificateUnusable(f"the key {name} does not belong to the certificate {certificate_name}")


def _public(key: object) -> bytes:
    written: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]  # every kind of public key has it
    return written


def _expiry(tls: Tls) -> float:
    return x509.load_pem_x509_certificates(tls.cert)[0].not_valid_after_utc.timestamp()


@lru_cache(PARSED_MAX)
def parsed(pem: bytes) -> Certificate:
    """What a peer's certificate, which the handshake has verified, says. Unreadable names are no names."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        ends = certificate.not_valid_after_utc.timestamp()
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return Certificate(expires_at=ends)
    except ValueError:
        return Certificate()
    return Certificate(
        tuple(names.get_values_for_type(x509.UniformResourceIdentifier)),
        tuple(names.get_values_for_type(x509.DNSName)),
        ends,
    )


def trusted(pem: bytes, chain: bytes, ca: bytes, now: float) -> bool:
    """Whether a certificate still leads to a CA of `ca`, which may have changed since the handshake that verified it.

    Names and dates and signatures of the way are checked; what else belongs to it the handshake has seen.
    """
    try:
        at = x509.load_pem_x509_certificate(pem)
        between = x509.load_pem_x509_certificates(chain) if chain else []
        roots = x509.load_pem_x509_certificates(ca)
    except ValueError:
        return False
    for _ in range(WAY_MAX):
        if any(_issued(at, root, now) or at == root for root in roots):
            return True
        step = next((each for each in between if each != at and _issued(at, each, now)), None)
        if step is None:
            return False
        at = step
    return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate, now: float) -> bool:
    if issuer.not_valid_after_utc.timestamp() <= now:
        return False
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
