"""API keys for tests, made as `reach keys create` makes them.

keys = KeysFile(tmp_path / "keys.json")
ops = keys.add("ops", admin=True)
keys.revoke(ops)
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from agentreach.v1.admin_pb2 import KeyInfo
from agentreach.v1.peer_pb2 import StoredKey
from reach.adapters.key_file import KeyFile
from reach.core import key_orders, keyring
from reach.core.key_orders import Minted
from reach.core.keyring import Kept

EVERYTHING: dict[str, Any] = {name: ["*"] for name in ("may_register", "may_call", "may_publish", "may_subscribe")}


def minted(key_id: str = "") -> Minted:
    """A key that nobody has yet."""
    return key_orders.minted(bytes.fromhex(key_id) or os.urandom(4), os.urandom(32), os.urandom(16), os.urandom(32))


def info(principal: str, *, expires_in_s: float | None = None, now: float | None = None, **rights: Any) -> KeyInfo:
    """What a key shall allow."""
    wanted = KeyInfo(principal=principal, **rights)
    if expires_in_s is not None:
        wanted.expires_at.CopyFrom(keyring.stamp((time.time() if now is None else now) + expires_in_s))
    return wanted


def key_id(key: str) -> str:
    """The part of a key that names it."""
    return key.split("_")[1]


class KeysFile:
    """A file of keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = KeyFile(path)
        self.signing: dict[str, str] = {}
        """By key: the signing secret of those made with signs=True."""

    def add(self, principal: str, *, expires_in_s: float | None = None, made_ago_s: float = 0.0, **rights: Any) -> str:
        """A new key. Without rights it may do nothing; `**EVERYTHING` allows all but administration."""
        issued: list[str] = []
        now = time.time() - made_ago_s

        def decide(kept: Kept) -> Kept:
            wanted = info(principal, expires_in_s=expires_in_s, now=now, **rights)
            kept, new = key_orders.create(kept, wanted, minted(), now)
            issued.append(new.key)
            self.signing[new.key] = new.signing_text
            return kept

        self.file.change(decide)
        return issued[-1]

    def change(self, key: str, **rights: Any) -> None:
        """Have it allow these from now on in place of what it allowed, as by an editor."""

        def decide(kept: Kept) -> Kept:
            records = [StoredKey.FromString(record.SerializeToString()) for record in kept.records]
            for record in records:
                if record.info.key_id == key_id(key):
                    for name, patterns in rights.items():
                        record.info.ClearField(name)  # type: ignore[arg-type]  # the caller's to spell
                        getattr(record.info, name).extend(patterns)
            return Kept(kept.lookup_key, tuple(records))

        self.file.change(decide)

    def revoke(self, key: str) -> None:
        """End it now."""
        self.file.change(lambda kept: key_orders.revoke(kept, key_id(key), time.time()))
