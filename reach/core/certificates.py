"""Who a client's certificate is: its names, and the principal that the configuration gives to a name.

A certificate speaks by its subject alternative names, never by its common name: the one SPIFFE id where it has one
(then nothing else counts), else its DNS names. That a CA signed it says only that the names are true; who may do what
is said by the entries here, and a name without an entry is nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from reach.core.access import Rights

SPIFFE: Final = "spiffe://"
SPIFFE_CHARS_MAX = 2048  # by the standard
DNS_CHARS_MAX = 253
KEY_ID = "cert-"  # begins the key_id of an identity that a certificate established
_SPIFFE_ID = re.compile(r"spiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)+")
_SPIFFE_PATTERN = re.compile(r"spiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)*/([A-Za-z0-9._-]*\*)?")
_DNS = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says: the URIs and DNS names of its subject, and until when it holds (Unix time)."""

    uris: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    expires_at: float = 0.0

    @property
    def told(self) -> str:
        """Its names for a log line."""
        return ", ".join((*self.uris, *self.dns)) or "none"


@dataclass(frozen=True, slots=True)
class Named:
    """An entry of the configuration: who comes with a certificate of this name, and what they may do."""

    name: str
    """As it stands in the configuration; `*` at the end of a SPIFFE id stands for any rest, `*.` for one DNS label."""
    principal: str = ""
    """Empty: the certificate's own name."""
    tenant: str = ""
    rights: Rights = field(default_factory=Rights)
    node: bool = False
    """It is a node of this mesh, and may open links between nodes."""


@dataclass(frozen=True, slots=True)
class Known:
    """Whose certificate it is."""

    entry: Named
    name: str
    """The name that the entry was found by."""

    @property
    def principal(self) -> str:
        """Who it is."""
        return self.entry.principal or self.name


@dataclass(frozen=True, slots=True)
class Unknown:
    """A certificate that is nobody's: `why` for the log, with all its names."""

    why: str


def spiffe_fault(text: str) -> str:
    """What is wrong with a SPIFFE id of a certificate; empty: nothing."""
    if len(text) > SPIFFE_CHARS_MAX:
        return f"longer than {SPIFFE_CHARS_MAX} characters"
    dots = any(part in (".", "..") for part in text.removeprefix(SPIFFE).split("/"))
    if not _SPIFFE_ID.fullmatch(text) or dots:
        return "not of the form spiffe://trust-domain/path"
    return ""


def name_fault(name: str) -> str:
    """What is wrong with the name of an entry, for the person who wrote it; empty: nothing."""
    if name.startswith(SPIFFE):
        if len(name) <= SPIFFE_CHARS_MAX and (not spiffe_fault(name) or _is_spiffe_pattern(name)):
            return ""
        return (
            f"{name!r} is no SPIFFE id; allowed: spiffe://trust-domain/path, with * at its end, after the trust "
            "domain, for any rest"
        )
    if len(name) <= DNS_CHARS_MAX and _DNS.fullmatch(name):
        return ""
    return f"{name!r} is no name of a certificate; allowed: spiffe://trust-domain/path, or a DNS name in lower case"


def _is_spiffe_pattern(name: str) -> bool:
    return name.endswith("*") and _SPIFFE_PATTERN.fullmatch(name) is not None


class Names:
    """The entries, ready to be asked."""

    __slots__ = ("_exact", "_labels", "_starts")

    def __init__(self, entries: Iterable[Named] = ()) -> None:
        self._exact: dict[str, Named] = {}
        self._labels: dict[str, Named] = {}
        starts: list[tuple[str, Named]] = []
        for entry in entries:
            if entry.name.startswith("*."):
                self._labels[entry.name[1:]] = entry
            elif entry.name.endswith("*"):
                starts.append((entry.name[:-1], entry))
            else:
                self._exact[entry.name] = entry
        self._starts = sorted(starts, key=lambda each: -len(each[0]))

    def who(self, certificate: Certificate) -> Known | Unknown:
        """Whose certificate this is. Of entries that fit one name the longest counts."""
        spiffe = [uri for uri in certificate.uris if uri.lower().startswith(SPIFFE)]
        if spiffe:
            if len(certificate.uris) > 1:
                return Unknown(f"a certificate with a SPIFFE id has no other URI; this one has: {certificate.told}")
            fault = spiffe_fault(spiffe[0])
            if fault:
                return Unknown(f"its SPIFFE id {spiffe[0]!r} is {fault}")
            return self._one(certificate, spiffe)
        return self._one(certificate, [name.lower() for name in certificate.dns if "*" not in name])

    def by_own_name(self, tenant: str, name: str) -> Named | None:
        """The entry of a principal that is called as its certificate is."""
        entry = self._entry(name)
        return entry if entry is not None and not entry.principal and entry.tenant == tenant else None

    def _one(self, certificate: Certificate, names: list[str]) -> Known | Unknown:
        found: dict[str, Known] = {}
        for name in names:
            entry = self._entry(name)
            if entry is not None:
                known = Known(entry, name)
                found.setdefault(f"{entry.tenant} {known.principal} {entry.name}", known)
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            several = ", ".join(known.name for known in found.values())
            return Unknown(f"its names stand for several principals: {several}")
        return Unknown(f"no entry of principals has one of its names: {certificate.told}")

    def _entry(self, name: str) -> Named | None:
        entry = self._exact.get(name)
        if entry is not None:
            return entry
        if name.startswith(SPIFFE):
            return next((each for start, each in self._starts if name.startswith(start) and name != start), None)
        _, dot, rest = name.partition(".")
        return self._labels.get(dot + rest) if dot else None
