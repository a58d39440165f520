"""What people have done to API keys: one made, one ended, one exchanged for another.

An admin of a tenant has a say about the keys of that tenant, and about rights within its own envs; what concerns all
tenants (metrics, other tenants' keys) is for the admins of those who run the mesh. It sees the keys that hold in one of
its envs.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import KeyInfo
from agentreach.v1.peer_pb2 import StoredKey
from reach.core import access, keyring
from reach.core.keyring import Kept, KeyRefused
from reach.core.ports import OWNERS_TENANT, Identity

LASTS_S_MAX = 100 * 366 * 86_400.0
OVERLAP_S_MAX = 90 * 86_400.0
TENANT_KEYS_MAX = 1_000
"""Of one tenant whose admin makes more: no tenant takes the room of the others."""


@dataclass(frozen=True, slots=True)
class Minted:
    """A key that nobody has yet, and its slow hash."""

    key_id: str
    key: str = field(repr=False)
    salt: bytes
    hash: bytes
    signing_secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Issued:
    """What its holder gets, once."""

    info: KeyInfo
    key: str = field(repr=False)
    signing_text: str = field(repr=False)
    """Empty unless what the key sends must be signed."""


def minted(key_id: bytes, secret: bytes, salt: bytes, signing_secret: bytes) -> Minted:
    """A key of random bytes: `keyring.ID_BYTES`, two times `SECRET_BYTES`, and `SALT_BYTES`. Slow, as its hash is."""
    key = keyring.key_text(key_id.hex(), secret)
    return Minted(key_id.hex(), key, salt, keyring.slow_hash(key, salt), signing_secret)


def create(kept: Kept, wanted: KeyInfo, new: Minted, unix: float, by: Identity | None = None) -> tuple[Kept, Issued]:
    """One more key. `by` None: by whoever has the store itself in hands. Raises `KeyRefused`."""
    info = KeyInfo()
    info.CopyFrom(wanted)
    info.DiscardUnknownFields()
    info.tenant = info.tenant or (by.tenant if by is not None else OWNERS_TENANT)
    fault = keyring.info_fault(info)
    if fault:
        raise KeyRefused(fault)
    _check_hands_out(by, info)
    if info.HasField("expires_at"):
        at = keyring.unix_of(info.expires_at)
        if not unix < at <= unix + LASTS_S_MAX:
            raise KeyRefused("it would have expired already, or in more than 100 years")
        info.expires_at.CopyFrom(keyring.stamp(at))  # its parts may have been beyond their bounds
    return _with(kept, info, new, unix, by)


def revoke(kept: Kept, key_id: str, unix: float, by: Identity | None = None) -> Kept:
    """End a key now; one that was revoked before stays so. Raises `KeyRefused`."""
    record = StoredKey()
    record.CopyFrom(_found(kept, key_id, by))
    _check_envs(by, record.info)
    if not record.HasField("revoked_at"):
        record.revoked_at.CopyFrom(keyring.stamp(unix))
    return _replaced(kept, record, unix)


def rotate(
    kept: Kept, key_id: str, overlap_s: float, new: Minted, unix: float, by: Identity | None = None
) -> tuple[Kept, Issued]:
    """A key in place of another, which goes on for `overlap_s`. It lasts as long as that one was made to last.

    Raises `KeyRefused`.
    """
    if not 0 <= overlap_s <= OVERLAP_S_MAX:
        raise KeyRefused(f"the overlap is {overlap_s:g} s; allowed: 0 to {OVERLAP_S_MAX:g}")
    old = StoredKey()
    old.CopyFrom(_found(kept, key_id, by))
    if keyring.ended(old, unix):
        raise KeyRefused(f"key {key_id} has ended: make a new one by `reach keys create`")
    info = KeyInfo()
    info.CopyFrom(old.info)
    _check_hands_out(by, info)
    if info.HasField("expires_at"):
        lasts_s = keyring.unix_of(info.expires_at) - keyring.unix_of(info.created_at)
        info.expires_at.CopyFrom(keyring.stamp(unix + lasts_s))
    if not overlap_s:
        old.revoked_at.CopyFrom(keyring.stamp(unix))
    elif not old.info.HasField("expires_at") or keyring.unix_of(old.info.expires_at) > unix + overlap_s:
        old.info.expires_at.CopyFrom(keyring.stamp(unix + overlap_s))
    return _with(_replaced(kept, old, unix), info, new, unix, by)


def visible(records: Iterable[StoredKey], by: Identity | None) -> list[StoredKey]:
    """Those that somebody may see, the eldest first."""
    return sorted(
        (record for record in records if may_see(by, record.info)),
        key=lambda record: (keyring.unix_of(record.info.created_at), record.info.key_id),
    )


def may_see(by: Identity | None, info: KeyInfo) -> bool:
    """Whether somebody is told that there is this key."""
    within = access.within(by.rights) if by is not None else None
    envs = set(info.envs or ("*",))
    return _is_of(by, info.tenant) and (within is None or "*" in envs or not envs.isdisjoint(within))


def shown(info: KeyInfo, by: Identity | None) -> KeyInfo:
    """What somebody who may see a key is told of it: of its envs those that are also its own."""
    within = access.within(by.rights) if by is not None else None
    if within is not None:
        envs = [env for env in info.envs if env == "*" or env in within]
        info.ClearField("envs")
        info.envs.extend(envs)
    return info


def signing_text(secret: bytes) -> str:
    """How the holder of a key has the secret that it signs with."""
    return f"reach_sign_{urlsafe_b64encode(secret).rstrip(b'=').decode()}"


def _with(kept: Kept, info: KeyInfo, new: Minted, unix: float, by: Identity | None) -> tuple[Kept, Issued]:
    if any(record.info.key_id == new.key_id for record in kept.records):
        raise KeyRefused("two keys would have the same id, by chance: try again")
    remaining = _remaining(kept, unix)
    of_tenant = sum(record.info.tenant == info.tenant for record in remaining)
    if by is not None and by.tenant != OWNERS_TENANT and of_tenant >= TENANT_KEYS_MAX:
        raise KeyRefused(f"tenant {info.tenant} has {TENANT_KEYS_MAX} keys already, the limit", codes.OVERLOADED)
    info.key_id = new.key_id
    info.created_at.CopyFrom(keyring.stamp(unix))
    info.ClearField("last_used_at")
    info.revoked = False
    record = StoredKey(info=info, lookup=keyring.lookup(kept.lookup_key, new.key), salt=new.salt, hash=new.hash)
    if info.signs:
        record.signing_secret = new.signing_secret
    issued = Issued(info, new.key, signing_text(new.signing_secret) if info.signs else "")
    return Kept(kept.lookup_key, (*remaining, record)), issued


def _replaced(kept: Kept, record: StoredKey, unix: float) -> Kept:
    key_id = record.info.key_id
    records = tuple(record if each.info.key_id == key_id else each for each in _remaining(kept, unix, key_id))
    return Kept(kept.lookup_key, records)


def _remaining(kept: Kept, unix: float, but: str = "") -> tuple[StoredKey, ...]:
    gone = frozenset(keyring.forgettable(kept.records, unix)) - {but}
    return tuple(record for record in kept.records if record.info.key_id not in gone)


def _found(kept: Kept, key_id: str, by: Identity | None) -> StoredKey:
    """A key that somebody may see; others are as unknown as those that never were."""
    for record in kept.records:
        if record.info.key_id == key_id and may_see(by, record.info):
            return record
    what = key_id if keyring.is_key_id(key_id) else "(this is no key id: those have 8 hex digits)"
    raise KeyRefused(f"there is no key {what}; `reach keys list` shows which there are", codes.NO_ROUTE)


def _is_of(by: Identity | None, tenant: str) -> bool:
    return by is None or by.tenant in (tenant, OWNERS_TENANT)


def _check_hands_out(by: Identity | None, info: KeyInfo) -> None:
    """Raises `KeyRefused` if somebody may not hand out this key."""
    if by is None:
        return
    why = ""
    if not _is_of(by, info.tenant):
        why = f"an admin of tenant {by.tenant} makes keys for that tenant only"
    elif info.scrape and by.tenant != OWNERS_TENANT:
        why = f"metrics concern all tenants: only admins of tenant {OWNERS_TENANT} may let others read them"
    if why:
        raise KeyRefused(why, codes.PERMISSION_DENIED)
    _check_envs(by, info)


def _check_envs(by: Identity | None, info: KeyInfo) -> None:
    """Raises `KeyRefused` for a key that holds in an env in which somebody has no rights."""
    envs = by.rights.envs if by is not None and by.rights is not None else frozenset({"*"})
    if by is None or "*" in envs or set(info.envs or ("*",)) <= envs:
        return
    why = f"principal {by.principal} has rights in {', '.join(sorted(envs))} only, and gives and takes none in others"
    raise KeyRefused(why, codes.PERMISSION_DENIED)
