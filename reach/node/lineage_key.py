"""The key that signs lineages, shared by all nodes of a mesh: made by the first, kept in the store.

A lineage signed by one node is verified by others: an agent's nested calls enter at the agent's home, whichever node
its caller used.
"""

from __future__ import annotations

import os
from hashlib import blake2b

from reach.core.lineage import LineageKeys
from reach.core.store import Get, Put, Store, StoreUnavailable, absent

KEY = "keys/lineage"
PEERS_KEY = "keys/peers"  # by it nodes recognise each other
KEY_BYTES = 32


async def shared_key(store: Store, key: str = KEY) -> bytes:
    """The mesh's key, written now if there is none. Raises `StoreUnavailable`."""
    result = await store.txn([absent(key)], [Put(key, os.urandom(KEY_BYTES)), Get(key)], [Get(key)])
    item = result.reads[-1][0]
    if len(item.value) != KEY_BYTES:
        raise StoreUnavailable(f"the key {key} in the registry holds {len(item.value)} bytes, and not {KEY_BYTES}")
    return item.value


def named_by_itself(secret: bytes) -> LineageKeys:
    """The key under a name that tells it from others: what was signed before the key was lost is unknown, not forged.

    One time in 256 another key has the same name, and calls under way when the key was lost are refused.
    """
    return LineageKeys((blake2b(secret, digest_size=1).digest()[0], secret))
