"""The keys that sign lineages, shared by all nodes of a mesh: made by the first, kept in the store, replaced each day.

A lineage signed by one node is verified by others: an agent's nested calls enter at the agent's home, whichever node
its caller used. So a new key is shown to all nodes before anybody signs with it, and the old one is believed for a day
after that. Every node looks every `LOOK_S` seconds; the leader alone takes the next step when it is due.
"""

from __future__ import annotations

import asyncio
import os
import time
from hashlib import blake2b

import structlog
from google.protobuf.message import DecodeError

from agentreach.v1.peer_pb2 import LineageSecrets
from reach.core.lineage import LineageKeys
from reach.core.store import Get, Item, LeaseGone, Put, Store, StoreUnavailable, absent, unchanged
from reach.node.election import Election, NotLeading
from reach.node.policies import Step

log = structlog.get_logger("reach.lineage")

KEY = "keys/lineage"
PEERS_KEY = "keys/peers"  # by it nodes recognise each other
KEY_BYTES = 32
LOOK_S = 20.0
SHOWN_S = 120.0  # six looks: a node that missed them all takes what is signed next for a new root, and logs it
ROTATE_S = 86_400.0  # far beyond the longest call and its 15 minutes: what the old key signed has ended


async def shared_key(store: Store, key: str = PEERS_KEY) -> bytes:
    """A secret of the mesh, written now if there is none. Raises `StoreUnavailable`."""
    value = await _first(store, key, os.urandom(KEY_BYTES))
    if len(value) != KEY_BYTES:
        raise StoreUnavailable(f"the key {key} in the registry holds {len(value)} bytes, and not {KEY_BYTES}")
    return value


async def lineage_secrets(store: Store) -> LineageSecrets:
    """The mesh's keys for lineages, written now if there are none. Raises `StoreUnavailable`."""
    return secrets_in(await _first(store, KEY, new_secrets(time.time()).SerializeToString()))


async def _first(store: Store, key: str, value: bytes) -> bytes:
    result = await store.txn([absent(key)], [Put(key, value), Get(key)], [Get(key)])
    return result.reads[-1][0].value


def new_secrets(unix: float) -> LineageSecrets:
    """Those of a new mesh, or of a node without one."""
    return LineageSecrets(signing=os.urandom(KEY_BYTES), since_unix_s=unix)


def secrets_in(value: bytes) -> LineageSecrets:
    """What stands in the store; a bare key is of a version that had only one. Raises `StoreUnavailable`."""
    if len(value) == KEY_BYTES:
        return LineageSecrets(signing=value)
    try:
        secrets = LineageSecrets.FromString(value)
    except DecodeError:
        secrets = LineageSecrets()
    if len(secrets.signing) != KEY_BYTES or len(secrets.other) not in (0, KEY_BYTES):
        raise StoreUnavailable(f"the key {KEY} in the registry cannot be read")
    return secrets


def keys_of(secrets: LineageSecrets) -> LineageKeys:
    """Keys under names that tell them from others: what a lost key signed is unknown, not forged.

    One time in 256 another key has the same name, and calls under way when the key was lost are refused.
    """
    other = (_name(secrets.other), secrets.other) if secrets.other else None
    return LineageKeys((_name(secrets.signing), secrets.signing), other)


def _name(secret: bytes) -> int:
    return blake2b(secret, digest_size=1).digest()[0]


def next_step(secrets: LineageSecrets, unix: float, candidate: bytes) -> LineageSecrets | None:
    """What the leader writes now, or None. `candidate` is a new random key, taken if another one is due.

    Two steps a day: show the next key, and, when all have seen it, sign with it and believe the old one.
    """
    since_s = unix - secrets.since_unix_s
    if secrets.coming:
        if since_s < SHOWN_S:
            return None
        return LineageSecrets(signing=secrets.other, other=secrets.signing, since_unix_s=unix)
    if since_s < ROTATE_S or _name(candidate) == _name(secrets.signing):
        return None
    return LineageSecrets(signing=secrets.signing, other=candidate, coming=True, since_unix_s=unix)


class LineageKeeper:
    """Keeps this node's keys those of the mesh. `run` it in a task."""

    def __init__(self, store: Store, election: Election, step: Step) -> None:
        self._store = store
        self._election = election
        self._step = step
        self._revision = 0

    async def run(self) -> None:
        """Look again and again, until cancelled; while the store does not answer the keys stay as they are."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look(time.time())
            except (StoreUnavailable, LeaseGone) as error:
                log.debug("the lineage keys could not be looked at", why=str(error))

    async def look(self, unix: float) -> None:
        """Take what stands in the store, and take the next step if this node leads. Raises `StoreUnavailable`."""
        item = await self._store.get(KEY)
        if item is None:
            return  # somebody deleted it: nodes go on with what they have
        if item.mod_revision != self._revision:
            keys = keys_of(secrets_in(item.value))
            with self._step() as state:
                state.lineage = keys
            self._revision = item.mod_revision
        if self._election.leading is not None:
            await self._lead(item, unix)

    async def _lead(self, item: Item, unix: float) -> None:
        following = next_step(secrets_in(item.value), unix, os.urandom(KEY_BYTES))
        if following is None:
            return
        put = Put(KEY, following.SerializeToString())
        written = await self._election.write_as_leader([unchanged(item)], [put])
        if not isinstance(written, NotLeading) and written.succeeded:
            log.info("a lineage key was " + ("made" if following.coming else "put into use"))
