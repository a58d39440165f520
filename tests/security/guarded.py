"""A node in a process of its own that lets in who shows a key, with keys of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.security.raw import Metadata, bearer
from tests.support.api_keys import EVERYTHING, KeysFile
from tests.support.node import NodeProcess, start_node


class Guarded:
    """A node that lets in who shows a key, and the keys."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.keys = KeysFile(folder / "keys.json")
        self.root = self.keys.add("root", admin=True)
        self.root_elsewhere = self.keys.add("root", admin=True, tenant="elsewhere")
        self.rich = self.keys.add("rich", **EVERYTHING)
        self.rich_elsewhere = self.keys.add("rich", tenant="elsewhere", **EVERYTHING)
        self.poor = self.keys.add("poor")
        self.scraper = self.keys.add("prometheus", scrape=True)
        self.expired = self.keys.add("gone", expires_in_s=0.2, admin=True, **EVERYTHING)
        self.revoked = self.keys.add("gone", admin=True, **EVERYTHING)
        self.keys.revoke(self.revoked)
        self.node: NodeProcess = start_node(auth="keys", keys_file=str(self.keys.path), **settings)

    @property
    def strangers(self) -> dict[str, Metadata]:
        """Everything that one may show in vain."""
        key = self.root
        return {
            "nothing": (),
            "an empty header": (("authorization", ""),),
            "a blank one": (("authorization", "   "),),
            "a scheme alone": (("authorization", "Bearer"),),
            "a scheme and blanks": (("authorization", "Bearer    "),),
            "a key alone": (("authorization", key),),
            "another scheme": (("authorization", f"Basic {key}"),),
            "a scheme run together": (("authorization", f"Bearer{key}"),),
            "another header": (("x-api-key", key), ("api-key", key), ("bearer", key)),
            "a binary header": (("authorization-bin", f"Bearer {key}".encode()),),
            "a cookie": (("cookie", f"authorization=Bearer {key}"),),
            "two headers": (*bearer(key), *bearer("wrong")),
            "the same twice": (*bearer(key), *bearer(key)),
            "two keys in one": (("authorization", f"Bearer {key} {key}"),),
            "two with a comma": (("authorization", f"Bearer {key}, Bearer {key}"),),
            "the word wrong": bearer("wrong"),
            "one letter more": bearer(key + "A"),
            "one letter less": bearer(key[:-1]),
            "one letter changed": bearer(key[:-1] + ("A" if key[-1] != "A" else "B")),
            "in other case": bearer(key.swapcase()),
            "the id of a key": bearer("_".join(key.split("_", 2)[:2])),
            "600 letters": bearer("k" * 600),
            "an expired key": bearer(self.expired),
            "a revoked key": bearer(self.revoked),
            "a node's words": (("authorization", f"Node n1 {'0' * 64}"),),
            "a node's words and whom it asks for": (
                ("authorization", f"Node n1 {'0' * 64}"), ("reach-nodes", "this"), ("reach-for", "default/*/root"),
            ),
            "whom it asks for alone": (("reach-nodes", "this"), ("reach-for", "default/*/root")),
        }  # fmt: skip
