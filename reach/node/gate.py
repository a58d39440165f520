"""The node's doorkeeper: from what a call shows to a principal, and from a revoked key to the ends of its streams.

It asks the keys (or the certificate) who it is and the table of doors what that opens. A key is hashed slowly once;
from then on its holder is known at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.core import access, auditing, doors, quotas, revoking
from reach.core.access import Rights
from reach.core.doors import Needs, Unshown
from reach.core.ports import ANYBODY, ASKED_ALONE, ASKED_FOR, OWNERS_TENANT, Change, Identity, MeshFailure, TurnedAway
from reach.core.state import State
from reach.node.config import Config, loopback
from reach.node.holders import Holders

log = structlog.get_logger("reach.gate")

REFUSALS_LOGGED_PER_S = 10

_METRICS = "/metrics"
_NOBODYS = "its certificate stands for no principal here"
_NEITHER = "no API key: send it as `authorization: Bearer KEY`"
_NOT_VALID = "what it shows is not valid here, has expired, or was revoked"


class Keys(Protocol):
    """The API keys of the mesh, wherever they are kept."""

    def known(self, key: str) -> Identity | None:
        """Whose key it is, if it was verified before and still holds. Never waits."""
        ...

    async def verified(self, key: str) -> Identity | None:
        """The same for a key that was never seen; None: nobody's, or it has ended."""
        ...

    def principals(self) -> dict[tuple[str, str], Rights]:
        """By (tenant, principal): what all its valid keys allow together."""
        ...

    def on_change(self, told: Callable[[Change], None]) -> None:
        """Have `told` called after each change, with what is new."""
        ...


class Certificates(Protocol):
    """The principals that certificates stand for."""

    def identify(self, certificate: Mapping[str, Iterable[bytes]]) -> Identity | str:
        """Whose certificate it is, or why it is nobody's here, with its names: for the log."""
        ...

    def principals(self) -> dict[tuple[str, str], Rights]:
        """By (tenant, principal): what its certificates allow together; of those that are not called as these are."""
        ...

    def named(self, tenant: str, principal: str) -> Rights | None:
        """The same of one that is."""
        ...

    def on_change(self, told: Callable[[Change], None]) -> None:
        """Have `told` called after each change, with what is new."""
        ...


class Gatekeeper:
    """Implements `reach.core.ports.Doorkeeper`; one of a node."""

    def __init__(
        self,
        config: Config,
        step: Callable[[], AbstractContextManager[State]],
        keys: Keys | None,
        certificates: Certificates | None,
        *,
        secret: bytes,
        address: Callable[[], str],
        holders: Holders,
    ) -> None:
        """`secret` is shared by all nodes of the mesh, `address` is where the others reach this one."""
        self._config = config
        self._step = step
        self._keys = keys
        self._certificates = certificates
        self._secret = secret
        self._address = address
        self._holders = holders
        self._second = self._complaints = self._unlogged = 0
        self._open = {
            Needs.HEALTH: config.health_access == "open",
            Needs.REFLECTION: config.reflection_access == "open"
            or (config.reflection_access == "auto" and loopback(config.listen)),
        }
        with step() as state:
            self._limited = state.quotas is not None
            if certificates is not None:
                state.named = certificates.named
        self._changed(Change())
        for known in (keys, certificates):
            if known is not None:
                known.on_change(self._changed)

    async def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Identity | None:
        """See `Doorkeeper.admit`."""
        needed = doors.needs(method)
        if self._open.get(needed):
            return ANYBODY
        try:
            scheme, text = doors.shown(metadata)
        except Unshown as wrong:
            if self._certificates is not None:
                return None
            raise self._refused(method, str(wrong)) from None
        if scheme == doors.NODE:
            who = self._node(text, metadata)
        elif self._keys is None:
            if self._certificates is not None:
                return None
            who = ANYBODY  # a key where none is needed
        else:
            who = self._keys.known(text) or await self._keys.verified(text)
            if who is not None and not who.tenant:  # only a node has none, and no key makes one
                who = None
        if who is None:
            raise self._refused(method, _NOT_VALID)
        return self._through(method, needed, who)

    def certified(self, method: str, certificate: Mapping[str, Iterable[bytes]]) -> Identity:
        """See `Doorkeeper.certified`."""
        return self._through(method, doors.needs(method), self._certified(method, certificate))

    def _certified(self, method: str, certificate: Mapping[str, Iterable[bytes]]) -> Identity:
        who: Identity | str = "no certificate counts here"
        if self._certificates is not None:
            who = self._certificates.identify(certificate)
        if isinstance(who, str):
            raise self._refused(method, _NOBODYS if self._keys is None else _NEITHER, logged=who)
        return who

    def turned_away(self, method: str, refused: MeshFailure, address: str) -> None:
        """See `Doorkeeper.turned_away`."""
        who = refused.who if isinstance(refused, TurnedAway) else None
        code = codes.ErrorCode.Name(refused.error.code)
        about = {"method": method}
        with self._step() as state:
            state.effects.append(
                auditing.line("gate.refused", who, address, about, outcome=code, why=refused.error.message)
            )

    def check(self, who: Identity) -> None:
        """See `Doorkeeper.check`."""
        self._holders.check(who)

    async def may_scrape(self, authorization: Sequence[str], certificate: bytes) -> None:
        """Whether whoever shows these headers, or this certificate (PEM), may read /metrics.

        Raises as `Doorkeeper.admit` if not.
        """
        access_to = self._config.metrics_access
        if access_to == "open" or (access_to == "auto" and self._config.auth == "none"):
            return
        who = self._by_certificate(certificate) if self._keys is None else await self._by_key(authorization)
        decision = access.may_scrape(who.rights, owners=who.tenant == OWNERS_TENANT, who=f"principal {who.principal}")
        if not decision.allowed:
            raise self._denied(_METRICS, who, decision.why)

    def _by_certificate(self, pem: bytes) -> Identity:
        if not pem:
            raise self._refused(
                _METRICS,
                "no certificate: https carries one, http (on loopback) does not; metrics_access = open needs none",
            )
        return self._certified(_METRICS, {"x509_pem_cert": [pem]})

    async def _by_key(self, authorization: Sequence[str]) -> Identity:
        try:
            scheme, text = doors.shown([(doors.AUTHORIZATION, value) for value in authorization])
        except Unshown as wrong:
            raise self._refused(_METRICS, str(wrong)) from None
        who = None
        if self._keys is not None and scheme == doors.BEARER:
            who = self._keys.known(text) or await self._keys.verified(text)
        if who is None:
            raise self._refused(_METRICS, _NOT_VALID)
        return who

    def _node(self, text: str, metadata: Sequence[tuple[str, str | bytes]]) -> Identity | None:
        """Another node: as itself, or for the admin who asked it."""
        node_id = doors.proves(text, self._secret, self._address())
        if not node_id:
            return None
        asked_for = next((value for name, value in metadata if name == ASKED_FOR and isinstance(value, str)), None)
        if asked_for is None or ASKED_ALONE not in metadata:
            return Identity("", f"node/{node_id}")
        tenant, _, rest = asked_for.partition("/")
        envs, _, principal = rest.partition("/")
        return Identity(tenant, principal, Rights(envs=frozenset(envs.split(",")), admin=True))

    def _through(self, method: str, needed: Needs, who: Identity) -> Identity:
        """Who was recognised, if this door is open to it."""
        why = self._closed_to(needed, who)
        if why:
            raise self._denied(method, who, why)
        if self._limited and who.tenant and not doors.brings_messages(method):
            with self._step() as state:
                error = quotas.query_fault(state, who)
            if error is not None:
                raise MeshFailure(error)
        return who

    @staticmethod
    def _closed_to(needed: Needs, who: Identity) -> str:
        is_node = not who.tenant
        if is_node or needed is Needs.NODE:
            return "" if is_node and needed is Needs.NODE else "this is for other nodes of the mesh only"
        if needed in (Needs.PRINCIPAL, Needs.HEALTH):
            return ""
        decision = access.may_administer(who.rights, who=f"principal {who.principal}")
        if not decision.allowed:
            return f"{decision.why}, and this needs one"
        if needed is Needs.OWNER and who.tenant != OWNERS_TENANT:
            return f"this concerns all tenants: it needs an admin of tenant {OWNERS_TENANT}"
        if needed is Needs.OWNER and access.within(who.rights) is not None:
            return "this concerns all envs: it needs an admin with rights in all of them"
        return ""

    def _complain(self, method: str, why: str, **who: str) -> None:
        """A stranger can knock as often as it likes; the log is told of some, and how many were left out."""
        second = int(boot_time())
        if second != self._second:
            self._second, self._complaints = second, 0
        self._complaints += 1
        if self._complaints > REFUSALS_LOGGED_PER_S:
            self._unlogged += 1
            return
        unlogged, self._unlogged = self._unlogged, 0
        log.warning("not let in", method=method, why=why, **who, **({"unlogged": unlogged} if unlogged else {}))

    def _denied(self, method: str, who: Identity, why: str) -> MeshFailure:
        with self._step() as state:
            state.stats.denied += 1
        self._complain(method, why, tenant=who.tenant, principal=who.principal)
        text = f"{why}; `reach authz explain` shows who may what"
        return self._told(method, TurnedAway(failure(codes.PERMISSION_DENIED, text), who))

    def _refused(self, method: str, why: str, *, logged: str = "") -> MeshFailure:
        with self._step() as state:
            state.stats.strangers += 1
        self._complain(method, logged or why)
        return self._told(method, TurnedAway(failure(codes.UNAUTHENTICATED, why)))

    def _told(self, method: str, refused: TurnedAway) -> TurnedAway:
        """Whoever refuses a call says where it came from; of a scrape nobody does."""
        if method == _METRICS:
            self.turned_away(method, refused, "")
        return refused

    def _changed(self, change: Change) -> None:
        ends = {who.key_id: end for who, end in change.ended}
        principals: dict[tuple[str, str], Rights] = {}
        for known in (self._keys, self._certificates):
            if known is not None:
                principals |= known.principals()
        with self._step() as state:
            state.principals = principals
            for who, end in change.ended:
                auditing.key(state, "key.ended", who, end.value)
            for who in change.begun:
                auditing.key(state, "key.begun", who)
            if ends:
                revoking.revoked(state, ends)
        self._holders.wake(ends)


def introduction(secret: bytes, node_id: str) -> Callable[[str, Identity | None], tuple[tuple[str, str], ...]]:
    """What this node shows the one at an address; with an identity, on behalf of that admin."""

    def headers(address: str, asked_for: Identity | None = None) -> tuple[tuple[str, str], ...]:
        shown = (doors.AUTHORIZATION, doors.node_proof(secret, node_id, address))
        if asked_for is None:
            return (shown,)
        within = access.within(asked_for.rights)
        envs = "*" if within is None else ",".join(sorted(within))
        return shown, (ASKED_FOR, f"{asked_for.tenant}/{envs}/{asked_for.principal}")

    return headers
