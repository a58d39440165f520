"""Answers the node's probes by the loop, or by a spare thread beside the pool, that runs the handlers.

So an answer says that handlers can run, and no more: whether the agent is ready is known to its host, what a missing
answer means is the node's to judge. A pool that is just busy answers, by its spare thread. One whose every thread is
held by a handler that outlived its cancel runs nothing any more, and does not: the spare thread would lie for it.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from agent_sdk.standing import POOL_THREADS
from agentreach.v1 import frame_pb2 as frames

if TYPE_CHECKING:
    from agent_sdk.host import Host


log = logging.getLogger("agent_sdk")


class Probes:
    """The answers of one agent."""

    __slots__ = ("_pool", "_stuck")

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._stuck = False

    def answer(self, host: Host, nonce: int) -> None:
        """Send the sign of life, once whatever runs the handlers has come to it."""
        if host.pool is not None and self._is_stuck(host):
            return
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

    def _is_stuck(self, host: Host) -> bool:
        threads = host.record.max_concurrency or POOL_THREADS
        held = sum(work.cancelled and work.admitted and work.handler.sync for work in host.works())
        was, self._stuck = self._stuck, held >= threads
        if self._stuck and not was:
            told = "%s: all of its %d threads are held by handlers whose time is over; no work until one has ended"
            log.warning(told, host.agent_id, threads)
        return self._stuck

    def close(self) -> None:
        """Give the thread back."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _send(host: Host, reply: frames.Signal) -> None:
    host.owner.signal(reply)
    host.owner.probed(host)
