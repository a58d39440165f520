"""Where people have keys made, listed, ended and exchanged, and ask who may what: at the store itself, or at a node.

At the store whoever has it in hands may do anything. At a node an admin has a say about its own tenant.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.peer_pb2 import StoredKey
from agentreach.wire.errors import failure
from reach.core import access, access_explained, actors, key_orders, keyring
from reach.core.access import Rights
from reach.core.key_orders import Issued, Minted
from reach.core.keyring import Kept, KeyRefused, Keyring, KeysUnusable
from reach.core.ports import OWNERS_TENANT, Identity, MeshFailure
from reach.core.state import State
from reach.node.keys import ApiKeys, KeyStore

log = structlog.get_logger("reach.keys")

T = TypeVar("T")


class StoreDesk:
    """The keys of one store. `by` None may do anything. Raises `KeyRefused` for what cannot be, and `KeysUnusable`."""

    def __init__(self, store: KeyStore, unix: Callable[[], float] = time.time) -> None:
        self._store = store
        self._unix = unix

    async def create(self, request: admin.CreateKeyRequest, by: Identity | None = None) -> admin.CreateKeyReply:
        """A new key, as the request's `key` says."""
        new = await _minted()
        issued = await self._issue(lambda kept: key_orders.create(kept, request.key, new, self._unix(), by))
        return admin.CreateKeyReply(key=issued.info, secret=issued.key, signing_secret=issued.signing_text)

    async def list(self, by: Identity | None = None) -> admin.ListKeysReply:
        """All keys that `by` may see."""
        kept, used = await self._store.read(), await self._store.used()
        records = key_orders.visible(kept.records, by)
        infos = (keyring.shown(each, used.get(each.info.key_id, 0.0)) for each in records)
        return admin.ListKeysReply(keys=[key_orders.shown(info, by) for info in infos])

    async def revoke(self, key_id: str, by: Identity | None = None) -> None:
        """End a key."""
        await self._store.change(lambda kept: key_orders.revoke(kept, key_id, self._unix(), by))

    async def rotate(self, request: admin.RotateKeyRequest, by: Identity | None = None) -> admin.RotateKeyReply:
        """A new key in place of another."""
        new = await _minted()
        issued = await self._issue(
            lambda kept: key_orders.rotate(kept, request.key_id, request.overlap_s, new, self._unix(), by)
        )
        return admin.RotateKeyReply(key=issued.info, secret=issued.key, signing_secret=issued.signing_text)

    async def explain(self, request: admin.ExplainAccessRequest) -> admin.ExplainAccessReply:
        """What a principal may, as the keys say."""
        ring, kept = Keyring(b""), await self._store.read()
        ring.take(kept, self._unix())
        tenant = request.tenant or OWNERS_TENANT
        principals = ring.principals()
        return _explained(request, tenant, lambda name: principals.get((tenant, name)), ring.holding(self._unix()))

    async def _issue(self, decide: Callable[[Kept], tuple[Kept, Issued]]) -> Issued:
        issued: list[Issued] = []

        def change(kept: Kept) -> Kept:
            kept, told = decide(kept)
            issued[:] = [told]
            return kept

        await self._store.change(change)
        return issued[0]


class NodeDesk:
    """Implements `reach.core.ports.KeyDesk`."""

    def __init__(self, state: State, keys: ApiKeys | None = None) -> None:
        """`keys` None: this node has none."""
        self._state = state
        self._keys = keys

    async def create_key(self, request: admin.CreateKeyRequest, who: Identity) -> admin.CreateKeyReply:
        """See `KeyDesk`."""
        return await self._told(self._store.create(request, who))

    async def list_keys(self, request: admin.ListKeysRequest, who: Identity) -> admin.ListKeysReply:
        """See `KeyDesk`."""
        return await self._told(self._store.list(who))

    async def revoke_key(self, request: admin.RevokeKeyRequest, who: Identity) -> admin.RevokeKeyReply:
        """See `KeyDesk`."""
        await self._told(self._store.revoke(request.key_id, who))
        return admin.RevokeKeyReply()

    async def rotate_key(self, request: admin.RotateKeyRequest, who: Identity) -> admin.RotateKeyReply:
        """See `KeyDesk`."""
        return await self._told(self._store.rotate(request, who))

    def explain_access(self, request: admin.ExplainAccessRequest, who: Identity) -> admin.ExplainAccessReply:
        """See `KeyDesk`."""
        if who.rights is None:
            decision = access.may_administer(None)
            return admin.ExplainAccessReply(allowed=decision.allowed, why=decision.why, rule=decision.rule)
        tenant = request.tenant or who.tenant
        if who.tenant not in (tenant, OWNERS_TENANT):
            text = f"an admin of tenant {who.tenant} asks about that tenant only"
            raise MeshFailure(failure(codes.PERMISSION_DENIED, text))
        records = self._keys.holding() if self._keys is not None else {}
        try:
            return _explained(request, tenant, lambda name: actors.rights_of(self._state, tenant, name), records, who)
        except KeyRefused as refused:
            raise MeshFailure(failure(refused.code, str(refused))) from refused

    @property
    def _store(self) -> StoreDesk:
        if self._keys is None:
            raise MeshFailure(failure(codes.INVALID_ENVELOPE, "this node has no API keys: its auth is not keys"))
        return StoreDesk(self._keys.store)

    async def _told(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives; what it raises as the caller shall read it. What it changed is in force here then."""
        assert self._keys is not None
        try:
            done = await work
            await self._keys.refresh()
        except KeyRefused as refused:
            raise MeshFailure(failure(refused.code, str(refused))) from refused
        except KeysUnusable as error:
            log.error("an order about API keys failed", why=str(error))
            text = "the keys cannot be read or written now; the node's log says why"
            raise MeshFailure(failure(codes.REGISTRY_UNAVAILABLE, text, retry_after_ms=1_000)) from error
        return done


async def _minted() -> Minted:
    secrets = [os.urandom(n) for n in (keyring.ID_BYTES, keyring.SECRET_BYTES, keyring.SALT_BYTES, 32)]
    return await asyncio.to_thread(key_orders.minted, *secrets)


def _explained(
    request: admin.ExplainAccessRequest,
    tenant: str,
    rights_of: Callable[[str], Rights | None],
    records: Mapping[str, StoredKey],
    by: Identity | None = None,
) -> admin.ExplainAccessReply:
    """Raises `KeyRefused`. `rights_of` a principal of the tenant; `records` of keys that hold, of all tenants.

    `by` asks; None: who has the store itself in hands.
    """
    fault = access_explained.fault(request)
    if fault:
        raise KeyRefused(fault)
    if by is not None and (fault := access_explained.env_fault(request, by.rights, f"principal {by.principal}")):
        raise KeyRefused(fault, codes.PERMISSION_DENIED)
    within = access.within(by.rights) if by is not None else None
    request.tenant = tenant
    principal, rights = request.principal, rights_of(request.principal)
    if request.key_id:
        record = records.get(request.key_id)
        seen = record is not None and record.info.tenant == tenant and key_orders.may_see(by, record.info)
        if record is None or not seen or principal not in ("", record.info.principal):
            whose = f" of principal {principal}" if principal else ""
            raise KeyRefused(f"there is no key {request.key_id[:20]}{whose} that holds", codes.NO_ROUTE)
        principal, rights = record.info.principal, keyring.rights_of(record.info)
    return access_explained.explained(request, principal, rights, rights_of, within)
