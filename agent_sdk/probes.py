"""Answers the node's probes by the loop, or by a spare thread beside the pool, that runs the handlers.

So an answer says that handlers can run, and no more: whether the agent is ready is known to its host, what a missing
answer means is the node's to judge.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as frames

if TYPE_CHECKING:
    from agent_sdk.host import Host


class Probes:
    """The answers of one agent."""

    __slots__ = ("_pool",)

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def answer(self, host: Host, nonce: int) -> None:
        """Send the sign of life, once whatever runs the handlers has come to it."""
        reply = frames.Signal(
            probe_reply=frames.ProbeReply(agent_id=host.agent_id, nonce=nonce, ready=not host.draining)
        )
        loop = host.owner.loop
        if host.pool is None:
            loop.call_soon(_send, host, reply)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "agent_sdk probe")
        self._pool.submit(loop.call_soon_threadsafe, _send, host, reply)

    def close(self) -> None:
        """Give the thread back."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _send(host: Host, reply: frames.Signal) -> None:
    host.owner.signal(reply)
    host.owner.probed(host)
