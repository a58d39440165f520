"""The settings of an agent that operators can change while it runs: what they are now, and who is told of a change.

The node sends them when the agent attaches and whenever they change (`config_update`), and again with a heartbeat as
long as the agent reports another version. A version counts as taken over when the handler has returned: one that
raises is called again with the next heartbeat.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentreach.v1 import frame_pb2 as frames

if TYPE_CHECKING:
    from agent_sdk.host import Host

log = logging.getLogger("agent_sdk")


class Configuration:
    """One agent's. It outlives the agent's links."""

    def __init__(self, agent_id: str) -> None:
        self.settings: Mapping[str, str] = MappingProxyType({})
        self.handler: Callable[[dict[str, str]], Any] | None = None
        self._agent_id = agent_id
        self._applied = 0
        self._newest: frames.ConfigUpdate | None = None
        self._task: asyncio.Task[None] | None = None

    def serve(self, host: Host) -> None:
        """Take what is sent to the agent on this link, and report there which version it has."""
        host.record.config_version = self._applied
        host.configured = lambda update: self._take(host, update)

    def close(self) -> None:
        """The agent leaves: a handler that still runs is cancelled."""
        if self._task is not None:
            self._task.cancel()

    def _take(self, host: Host, update: frames.ConfigUpdate) -> None:
        known = self._applied if self._newest is None else self._newest.config_version
        if update.config_version == known:
            return  # said again because the node has not heard yet that it is taken over
        self._newest = update
        self.settings = MappingProxyType(dict(update.settings))
        if self._task is None:
            self._task = host.owner.loop.create_task(self._apply(host), name=f"{self._agent_id} config")

    async def _apply(self, host: Host) -> None:
        """Let the handler take over the newest settings; those that come meanwhile are next."""
        try:
            while (update := self._newest) is not None:
                told = await self._tell(update)
                if self._newest is update:
                    self._newest = None
                if told:
                    self._applied = host.record.config_version = update.config_version
        finally:
            self._task = self._newest = None

    async def _tell(self, update: frames.ConfigUpdate) -> bool:
        if self.handler is None:
            return True
        try:
            done = self.handler(dict(update.settings))
            if inspect.isawaitable(done):
                await done
        except Exception:
            log.exception(
                "%s: the on_config handler failed; it is called again with version %d",
                self._agent_id,
                update.config_version,
            )
            return False
        return True


def take(hosts: Mapping[str, Host], update: frames.ConfigUpdate) -> None:
    """The node says what an agent's settings are."""
    host = hosts.get(update.agent_id)
    if host is not None and host.configured is not None:
        host.configured(update)
