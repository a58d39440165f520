"""API keys: what a key looks like, what is kept of it, whose it is, and which have ended.

A key is `reach_ID_SECRET`: 8 hex digits that name it, and 256 random bits. Kept are two hashes. The fast one, under a
key of the store's own, finds the record, so that a wrong key costs nobody a slow hash; the slow one proves the key.
Nobody can guess 256 random bits, so the slow hash is as slow as a node can bear at which all clients arrive at once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import KeyInfo
from agentreach.v1.peer_pb2 import StoredKey
from reach.core.access import Patterns, Rights, pattern_fault
from reach.core.ports import Change, End, Identity

ID_BYTES, SECRET_BYTES, SALT_BYTES, LOOKUP_KEY_BYTES = 4, 32, 16, 32
LOOKUP_BYTES, HASH_BYTES = 8, 32
KEYS_MAX = 10_000
PATTERNS_MAX = 100  # of each kind, in one key
INFO_BYTES_MAX = 8_192  # all that is said about one key: what many of them take is bounded too
ENDED_KEPT_S = 30 * 86_400.0
"""How long a key that has ended is still listed; then its record goes when others change."""

_KEY = re.compile(r"reach_[0-9a-f]{8}_[A-Za-z0-9_-]{43}")
_ID = re.compile(r"[0-9a-f]{8}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_ENV = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NEVER = float("inf")
_LAST_S = 253_402_300_799  # the end of the year 9999, as far as protobuf's JSON goes
_SCRYPT_N = 1 << 12  # 10 ms and 4 MiB: a thousand clients that come back to a node at once are in within some seconds


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store of keys holds."""

    lookup_key: bytes = field(repr=False)
    records: tuple[StoredKey, ...] = field(repr=False)


class KeysUnusable(Exception):
    """What is kept cannot be used as keys, or none of them holds; the text is one line for whoever runs the node."""


class KeyRefused(Exception):
    """What is wanted of a key cannot be; the text is one line for whoever wants it."""

    def __init__(self, why: str, code: codes.ErrorCode.ValueType = codes.INVALID_ENVELOPE) -> None:
        super().__init__(why)
        self.code = code


# ---- a key ----


def key_text(key_id: str, secret: bytes) -> str:
    """The key as its holder has it. `secret` is `SECRET_BYTES` random bytes."""
    return f"reach_{key_id}_{urlsafe_b64encode(secret).rstrip(b'=').decode()}"


def looks_like_a_key(text: str) -> bool:
    """Whether it has the shape of one."""
    return _KEY.fullmatch(text) is not None


def is_key_id(text: str) -> bool:
    """Whether it has the shape of a key's id."""
    return _ID.fullmatch(text) is not None


def lookup(lookup_key: bytes, key: str) -> bytes:
    """By it the key's record is found."""
    return hmac.digest(lookup_key, key.encode(), "sha256")[:LOOKUP_BYTES]


def slow_hash(key: str, salt: bytes) -> bytes:
    """What proves it: some 10 ms, not for an event loop."""
    return hashlib.scrypt(key.encode(), salt=salt, n=_SCRYPT_N, r=8, p=1, dklen=HASH_BYTES)


def proves(key: str, record: StoredKey) -> bool:
    """Whether it is the key of this record: as slow as `slow_hash`."""
    return hmac.compare_digest(slow_hash(key, record.salt), record.hash)


def stored(info: KeyInfo, key: str, salt: bytes, lookup_key: bytes) -> StoredKey:
    """The record of a new key."""
    return StoredKey(info=info, lookup=lookup(lookup_key, key), salt=salt, hash=slow_hash(key, salt))


# ---- what a record says ----


def info_fault(info: KeyInfo, *, tenant_needed: bool = True) -> str:
    """What is wrong with what a key shall allow, for who asked for it; empty: nothing."""
    for what, name in (("principal", info.principal), ("tenant", info.tenant)):
        if not name and what == "tenant" and not tenant_needed:
            continue
        if not _NAME.fullmatch(name):
            return f"{what} is {name[:100]!r}; allowed: 1 to 100 letters, digits, '.', '_', '@', '-'"
    if info.ByteSize() > INFO_BYTES_MAX:
        return f"all that is said about the key takes {info.ByteSize()} bytes; at most {INFO_BYTES_MAX} are allowed"
    for env in info.envs:
        if not _ENV.fullmatch(env):
            return f"env {env[:100]!r} is no environment; allowed: a name, or * for all"
    for what, patterns, topic in (
        ("may_register", info.may_register, False),
        ("may_call", info.may_call, False),
        ("may_publish", info.may_publish, True),
        ("may_subscribe", info.may_subscribe, True),
    ):
        if len(patterns) > PATTERNS_MAX:
            return f"{what} has {len(patterns)} patterns; at most {PATTERNS_MAX} are allowed"
        for pattern in patterns:
            fault = pattern_fault(pattern, topic=topic)
            if fault:
                return f"{what}: {fault}"
    return ""


def record_fault(record: StoredKey) -> str:
    """Why a record from a store cannot be used; empty: it can."""
    if not is_key_id(record.info.key_id):
        return f"key_id is {record.info.key_id[:100]!r}, and not 8 hex digits"
    if (len(record.lookup), len(record.salt), len(record.hash)) != (LOOKUP_BYTES, SALT_BYTES, HASH_BYTES):
        return f"the hashes of key {record.info.key_id} are not of the right length"
    for time in (record.info.created_at, record.info.expires_at, record.revoked_at):
        if not (0 <= time.seconds <= _LAST_S and 0 <= time.nanos < 1_000_000_000):
            return f"a time of key {record.info.key_id} is none"
    fault = info_fault(record.info)
    return f"key {record.info.key_id}: {fault}" if fault else ""


def rights_of(info: KeyInfo) -> Rights:
    """What a key allows. One that names no env allows it in all."""
    return Rights(
        envs=frozenset(info.envs or ("*",)),
        register=Patterns(info.may_register),
        call=Patterns(info.may_call),
        publish=Patterns(info.may_publish, topics=True),
        subscribe=Patterns(info.may_subscribe, topics=True),
        admin=info.admin,
        scrape=info.scrape,
        signs=info.signs,
    )


def ended(record: StoredKey, unix: float) -> bool:
    """Whether it was revoked or has expired."""
    if record.HasField("revoked_at"):
        return True
    return record.info.HasField("expires_at") and unix_of(record.info.expires_at) <= unix


def ended_at(record: StoredKey) -> float:
    """Since when it has ended, or will; infinite: never. Unix seconds."""
    times = [unix_of(record.revoked_at)] if record.HasField("revoked_at") else []
    if record.info.HasField("expires_at"):
        times.append(unix_of(record.info.expires_at))
    return min(times, default=_NEVER)


def forgettable(records: Iterable[StoredKey], unix: float) -> list[str]:
    """The ids of those that have ended so long ago that nobody looks for them any more."""
    return [each.info.key_id for each in records if ended_at(each) < unix - ENDED_KEPT_S]


def shown(record: StoredKey, used_at: float = 0.0) -> KeyInfo:
    """What people may know of it."""
    info = KeyInfo()
    info.CopyFrom(record.info)
    info.revoked = record.HasField("revoked_at")
    if used_at:
        info.last_used_at.CopyFrom(stamp(used_at))
    return info


def stamp(unix: float) -> Timestamp:
    """Unix seconds as the contract writes them."""
    return Timestamp(seconds=int(unix), nanos=int(unix % 1 * 1e9))


def unix_of(time: Timestamp) -> float:
    """The other way."""
    return time.seconds + time.nanos / 1e9


# ---- all of them ----


class Keyring:
    """The keys that a node knows. It forgets what it has verified as soon as that holds no more.

    An `Identity` has its own key_id each time a key comes to hold: what was ended stays ended, even if the key is
    there again later; and a key whose rights have changed ends, for its streams to be opened anew with the new ones.
    """

    def __init__(self, secret: bytes) -> None:
        """`secret` is random, at most 64 bytes, and this process's own: keys are remembered by a MAC under it."""
        self._secret = secret
        self._lookup_key = b""
        self._records: dict[str, StoredKey] = {}
        self._by_lookup: dict[bytes, StoredKey] = {}
        self._holders: dict[str, Identity] = {}
        self._verified: dict[bytes, Identity] = {}
        self._ends_at: dict[str, float] = {}
        """By the key_id of an identity: when its key ends."""
        self._next_end = _NEVER
        """When the first of these ends."""
        self._times = 0

    def take(self, kept: Kept, unix: float) -> tuple[bool, Change]:
        """All that a store holds now. Whether anything is new, and whose keys have ended, or hold from now on."""
        records = {record.info.key_id: record for record in kept.records}
        if records == self._records and kept.lookup_key == self._lookup_key:
            return self.look(unix)
        before = self._records
        self._records, self._lookup_key = records, kept.lookup_key
        self._by_lookup = {record.lookup: record for record in records.values()}
        ends = self._end(
            [
                key_id
                for key_id in self._holders
                if not _same(before[key_id], records.get(key_id)) or ended(records[key_id], unix)
            ],
            unix,
        )
        begun = []
        for key_id, record in records.items():
            if key_id not in self._holders and not ended(record, unix):
                self._times += 1
                who = self._holders[key_id] = Identity(
                    record.info.tenant,
                    record.info.principal,
                    rights_of(record.info),
                    f"{key_id}#{self._times}",
                    record.signing_secret,
                )
                begun.append(who)
        self._ends_at = {who.key_id: ended_at(records[key_id]) for key_id, who in self._holders.items()}
        self._next_end = min(self._ends_at.values(), default=_NEVER)
        return True, Change(ends, tuple(begun))

    def look(self, unix: float) -> tuple[bool, Change]:
        """What has ended by now: the same pair."""
        if unix < self._next_end:
            return False, Change()
        ends = self._end([key_id for key_id in self._holders if ended(self._records[key_id], unix)], unix)
        self._next_end = min((self._ends_at[who.key_id] for who in self._holders.values()), default=_NEVER)
        return bool(ends), Change(ends)

    def known(self, key: str, unix: float) -> Identity | None:
        """Whose key it is, if it was verified before and still holds."""
        who = self._verified.get(self._digest(key))
        return who if who is not None and unix < self._ends_at[who.key_id] else None

    def candidate(self, key: str, unix: float) -> StoredKey | None:
        """The record that this key may be of; `proves` tells."""
        if not looks_like_a_key(key):
            return None
        record = self._by_lookup.get(lookup(self._lookup_key, key))
        return None if record is None or ended(record, unix) else record

    def verified(self, key: str, record: StoredKey, unix: float) -> Identity | None:
        """Whose key it is: it was proved to be of this record. None: that has ended meanwhile."""
        who = self._holders.get(record.info.key_id)
        if who is None or ended(record, unix) or self._records.get(record.info.key_id) != record:
            return None
        self._verified[self._digest(key)] = who
        return who

    def principals(self) -> dict[tuple[str, str], Rights]:
        """By (tenant, principal): what its keys allow together."""
        rights: dict[tuple[str, str], dict[Rights, None]] = {}
        for who in self._holders.values():
            assert who.rights is not None
            rights.setdefault((who.tenant, who.principal), {})[who.rights] = None
        return {key: reduce(Rights.with_also, each) for key, each in rights.items()}

    def holding(self, unix: float) -> dict[str, StoredKey]:
        """By key_id, the records of those that hold."""
        return {key_id: record for key_id, record in self._records.items() if not ended(record, unix)}

    @property
    def usable(self) -> int:
        """How many hold now."""
        return len(self._holders)

    def _end(self, key_ids: Iterable[str], unix: float) -> tuple[tuple[Identity, End], ...]:
        ends = []
        for key_id in key_ids:
            record = self._records.get(key_id)
            end = End.KEY if record is None or ended(record, unix) else End.CHANGED
            ends.append((self._holders.pop(key_id), end))
        if ends:
            gone = {who.key_id for who, _ in ends}
            self._verified = {digest: who for digest, who in self._verified.items() if who.key_id not in gone}
        return tuple(ends)

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), digest_size=16, key=self._secret).digest()


def key_id_of(who: Identity) -> str:
    """The id of the key by which somebody got in, as people know it; empty: by none."""
    return who.key_id.partition("#")[0]


def _same(before: StoredKey, now: StoredKey | None) -> bool:
    """Whether whoever holds the key may go on as before: when it ends is looked at elsewhere."""
    if before is now or before == now:
        return True
    if now is None or (before.hash, before.signing_secret) != (now.hash, now.signing_secret):
        return False
    return (before.info.tenant, before.info.principal, rights_of(before.info)) == (
        now.info.tenant,
        now.info.principal,
        rights_of(now.info),
    )
