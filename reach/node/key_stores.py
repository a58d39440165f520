"""Where API keys are kept: in a file of this machine's, or in the registry for all nodes.

The registry's are in `reach.node.registry_keys`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import structlog

from reach.adapters.key_file import KeyFile, Mark
from reach.core.keyring import Kept, KeysUnusable
from reach.core.store import Store
from reach.node.config import Config
from reach.node.keys import LOOK_S, ApiKeys
from reach.node.registry_keys import RegistryOfKeys

log = structlog.get_logger("reach.keys")


class FileOfKeys:
    """Implements `reach.node.keys.KeyStore` by a file."""

    def __init__(self, path: str) -> None:
        self._file = KeyFile(path)
        self._one_at_a_time = asyncio.Lock()
        self._seen: Mark | None = None
        self._again = True
        """What stands there could not be read."""

    async def read(self) -> Kept:
        """See `KeyStore.read`."""
        return await asyncio.to_thread(self._file.read)

    async def follow(self) -> AsyncGenerator[Kept | KeysUnusable, None]:
        """See `KeyStore.follow`: looked at each `LOOK_S`."""
        while True:
            try:
                kept = await self._look(again=True)
            except KeysUnusable as error:
                yield error
            else:
                if kept is not None:
                    yield kept
            await asyncio.sleep(LOOK_S)

    async def refreshed(self) -> Kept | None:
        """See `KeyStore.refreshed`."""
        return await self._look(again=False)

    async def _look(self, *, again: bool) -> Kept | None:
        async with self._one_at_a_time:
            mark = self._file.mark()
            if mark == self._seen and not (again and self._again):
                return None
            self._seen, self._again = mark, True  # seen before it is read: what is written meanwhile is read again
            kept = await self.read()
            self._again = False
            return kept

    async def change(self, decide: Callable[[Kept], Kept]) -> Kept:
        """See `KeyStore.change`."""
        return await asyncio.to_thread(self._file.change, decide)

    async def used(self) -> dict[str, float]:
        """See `KeyStore.used`."""
        return await asyncio.to_thread(self._file.used)

    async def put_used(self, used: Mapping[str, float]) -> None:
        """See `KeyStore.put_used`."""
        try:
            await asyncio.to_thread(self._file.put_used, used)
        except OSError as error:
            log.warning("when keys were used cannot be kept", why=error.strerror or str(error))


async def opened(config: Config, store: Store) -> ApiKeys:
    """The keys that the configuration names, as they are now. Raises `KeysUnusable`."""
    keys = ApiKeys(
        FileOfKeys(config.keys_file) if config.keys_file else RegistryOfKeys(store), os.urandom(32), time.time
    )
    await keys.start()
    return keys
