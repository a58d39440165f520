"""Who comes with a certificate: from what gRPC tells of the connection to a principal, and to the end of its streams.

The handshake has checked that an authority vouches for the certificate and that it holds today. Both may change while
a connection lasts, so both are looked at again: at each call, and once a second for what is open. So may the entries
that say whom certificates stand for: `exchange`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from reach.adapters.certificates import parsed, trusted
from reach.core.access import Rights
from reach.core.certificates import KEY_ID, Certificate, Known, Named, Names
from reach.core.ports import Change, End, Identity

log = structlog.get_logger("reach.gate")


@dataclass(frozen=True, slots=True)
class _Holder:
    """A certificate that somebody came with."""

    who: Identity
    chain: bytes
    expires_at: float


class CertifiedPrincipals:
    """Implements `reach.node.gate.Certificates`."""

    def __init__(self, entries: Iterable[Named], ca: Callable[[], bytes], unix: Callable[[], float]) -> None:
        """`ca` gives the authorities trusted now, in PEM; `unix` the time."""
        self._entries = tuple(entries)
        self._names = Names(self._entries)
        self._ca = ca
        self._unix = unix
        self._trusted = ca()
        self._changes = 0
        """Of authorities and of entries: who comes again after one comes as somebody else."""
        self._holders: dict[bytes, _Holder] = {}
        self._told: Callable[[Change], None] = lambda change: None

    def on_change(self, told: Callable[[Change], None]) -> None:
        """Have `told` called with those whose certificates count no more."""
        self._told = told

    def identify(self, certificate: Mapping[str, Iterable[bytes]]) -> Identity | str:
        """Whose certificate it is, by gRPC's auth_context; a text: why it is nobody's."""
        pem = _first(certificate, "x509_pem_cert")
        return self.identify_pem(pem, _first(certificate, "x509_pem_cert_chain")) if pem else "no certificate was shown"

    def identify_pem(self, pem: bytes, chain: bytes = b"") -> Identity | str:
        """The same by the certificate itself, and those between it and its authority's."""
        now = self._unix()
        holder = self._holders.get(pem) or self._met(pem, chain, now)
        if isinstance(holder, str):
            return holder
        if holder.expires_at <= now:
            return f"its certificate has expired; its names: {parsed(pem).told}"
        self._holders[pem] = holder
        return holder.who

    def principals(self) -> dict[tuple[str, str], Rights]:
        """By (tenant, principal): what their entries allow together; of those that entries give a name of their own."""
        found: dict[tuple[str, str], Rights] = {}
        for entry in self._entries:
            if entry.node or not entry.principal:
                continue
            key = entry.tenant, entry.principal
            found[key] = found[key].with_also(entry.rights) if key in found else entry.rights
        return found

    def named(self, tenant: str, principal: str) -> Rights | None:
        """The same of one that is called as its certificate is, whether it has come here or to another node."""
        entry = self._names.by_own_name(tenant, principal)
        return entry.rights if entry is not None and tenant else None

    def look(self) -> None:
        """End what has expired, and what no authority vouches for any more."""
        now, ca = self._unix(), self._ca()
        ended = {pem: "it has expired" for pem, holder in self._holders.items() if holder.expires_at <= now}
        if ca != self._trusted:
            self._trusted = ca
            self._changes += 1
            for pem, holder in self._holders.items():
                if not trusted(pem, holder.chain, ca, now):
                    ended.setdefault(pem, "no authority that is trusted now vouches for it")
        if not ended:
            return
        for pem, why in ended.items():
            log.warning("a certificate has ended; its streams end", names=parsed(pem).told, why=why)
        self._told(Change(tuple((self._holders.pop(pem).who, End.CERTIFICATE) for pem in ended)))

    def exchange(self, entries: Iterable[Named]) -> bool:
        """These entries count from now on. True if a certificate of a node stands for one no more."""
        self._entries = tuple(entries)
        self._names = Names(self._entries)
        self._changes += 1
        ended = []
        for pem, holder in list(self._holders.items()):
            now = self._who(parsed(pem), pem)
            if isinstance(now, str) or (now, now.rights) != (holder.who, holder.who.rights):
                why = now if isinstance(now, str) else f"principal {now.principal} now, or other rights"
                log.warning("what a certificate allows has changed; its streams end", names=parsed(pem).told, why=why)
                ended.append((self._holders.pop(pem).who, End.CHANGED))
        self._told(Change(tuple(ended)))
        return any(not who.tenant for who, _ in ended)

    def _met(self, pem: bytes, chain: bytes, now: float) -> _Holder | str:
        """Who comes with a certificate for the first time."""
        certificate = parsed(pem)
        if self._changes and not trusted(pem, chain, self._ca(), now):
            return f"no authority that is trusted now vouches for its certificate; its names: {certificate.told}"
        who = self._who(certificate, pem)
        return who if isinstance(who, str) else _Holder(who, chain, certificate.expires_at)

    def _who(self, certificate: Certificate, pem: bytes) -> Identity | str:
        """Whom it stands for by the entries; a text: why for nobody."""
        known = self._names.who(certificate)
        if not isinstance(known, Known):
            return known.why
        key_id = f"{KEY_ID}{hashlib.sha256(pem).hexdigest()[:16]}-{self._changes}"
        if known.entry.node:
            return Identity("", f"node/{known.name}", key_id=key_id)
        return Identity(known.entry.tenant, known.principal, known.entry.rights, key_id)


def _first(certificate: Mapping[str, Iterable[bytes]], name: str) -> bytes:
    return next(iter(certificate.get(name, ())), b"")
