"""A certificate authority for trying TLS on one machine, and what it signs. Not for production: its key lies in a file.

Keys are ECDSA P-256. Certificates hold what RFC 5280 and SPIFFE ask for: the issuer's and subject's key ids, what the
key is for, and names in the subject alternative name alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SKEW_S = 300.0  # clocks of the machines that try it may differ by so much


class AuthorityUnusable(Exception):
    """The files are no authority that can sign; the text says why."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Subject:
    """For whom a certificate is made: hosts are names or IP addresses."""

    hosts: Sequence[str] = ()
    uris: Sequence[str] = ()
    server: bool = True
    client: bool = True


class Authority:
    """Signs certificates."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def made(cls, name: str, now: float, lasts_s: float) -> Authority:
        """A new one, valid from `now` (Unix time)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        usage = _usage(signs_certificates=True)
        builder = (
            _builder(subject, subject, key.public_key(), now, lasts_s)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, cert: bytes, key: bytes) -> Authority:
        """The one of these files. Raises `AuthorityUnusable`."""
        try:
            certificate = x509.load_pem_x509_certificate(cert)
            private = load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:
            raise AuthorityUnusable("its certificate or key cannot be read") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != certificate.public_key():
            raise AuthorityUnusable("its key does not belong to its certificate")
        return cls(certificate, private)

    @property
    def pem(self) -> Issued:
        """Its own certificate and key."""
        return Issued(self._certificate.public_bytes(Encoding.PEM), _key_pem(self._key))

    def issue(self, name: str, subject: Subject, now: float, lasts_s: float) -> Issued:
        """A certificate signed by it. `name` is for people; who it is for is said by `subject`."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [_general(host) for host in subject.hosts]
        names += [x509.UniformResourceIdentifier(uri) for uri in subject.uris]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH] * subject.server + [
            ExtendedKeyUsageOID.CLIENT_AUTH
        ] * subject.client
        builder = (
            _builder(_name(name), self._certificate.subject, key.public_key(), now, lasts_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return Issued(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM), _key_pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, lasts_s: float
) -> x509.CertificateBuilder:
    begins = datetime.fromtimestamp(now - _SKEW_S, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(datetime.fromtimestamp(now, UTC) + timedelta(seconds=lasts_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
