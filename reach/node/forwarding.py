"""The way of wishes to the leading node over node links, and of its answers back.

A `Forwarder` for registrations (`admission`) and for what operators set (`policies`). Signals of one link may be sent
again after a cut, so whoever answers must not mind being asked twice; whoever asks gives up at a cut and asks anew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import structlog

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Forward, Forwarded, Signal
from agentreach.wire.errors import failure
from reach.core.nodes import NodePeer
from reach.core.state import State
from reach.core.store import StoreUnavailable

log = structlog.get_logger("reach.nodes")

ANSWER_WAIT_S = 10.0  # contract.md: a registration waits so long for a leader
ASKED_MAX = 1_000  # of other nodes, unanswered here; beyond, they are told to ask later

Answer = Callable[[Forward, str], Awaitable[Forwarded]]
Step = Callable[[], AbstractContextManager[State]]


class Forwarding:
    """Both ends of the way. `answer` is what this node says, as the leader, to the node of the given id."""

    def __init__(self, step: Step, leader_id: Callable[[], str], answer: Answer) -> None:
        self._step = step
        self._leader_id = leader_id
        self._answer = answer
        self._next_nonce = random.getrandbits(48)  # a leader may still answer a former life of this node
        self._asked: dict[int, tuple[NodePeer, asyncio.Future[Forwarded]]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def forward(self, forward: Forward) -> Forwarded:
        """See `reach.node.admission.Forwarder`."""
        leader_id = self._leader_id()
        with self._step() as state:
            node = state.nodes.get(leader_id)
            if node is None or not node.connected:
                raise StoreUnavailable(
                    f"node {leader_id} leads, and there is no link to it" if leader_id else "no node leads now"
                )
            nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
            forward.nonce = nonce
            answered: asyncio.Future[Forwarded] = asyncio.get_running_loop().create_future()
            self._asked[nonce] = (node, answered)
            node.link.signal(Signal(forward=forward))
            state.woken.add(node)
        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                return await answered
        except TimeoutError:
            raise StoreUnavailable(f"node {leader_id}, which leads, did not answer in {ANSWER_WAIT_S:g} s") from None
        finally:
            self._asked.pop(nonce, None)

    def asked(self, node: NodePeer, forward: Forward) -> None:
        """Another node takes this one for the leader."""
        if len(self._answering) >= ASKED_MAX:
            busy = failure(codes.REGISTRY_UNAVAILABLE, "the leading node is asked too much", retry_after_ms=1_000)
            self._reply(node, Forwarded(nonce=forward.nonce, error=busy))
            return
        task = asyncio.get_running_loop().create_task(self._find(node, forward), name=f"forward of {node.node_id}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _find(self, node: NodePeer, forward: Forward) -> None:
        try:
            answer = await self._answer(forward, node.node_id)
        except Exception:
            log.exception("a wish of another node failed", node=node.node_id)
            answer = Forwarded(error=failure(codes.INTERNAL, "the leading node failed; see its log"))
        answer.nonce = forward.nonce
        self._reply(node, answer)

    def _reply(self, node: NodePeer, answer: Forwarded) -> None:
        with self._step() as state:
            if node.connected:
                node.link.signal(Signal(forwarded=answer))
                state.woken.add(node)

    def answered(self, node: NodePeer, forwarded: Forwarded) -> None:
        """The leader's answer has come; one that nobody waits for any more is dropped."""
        asked = self._asked.get(forwarded.nonce)
        if asked is not None and asked[0] is node and not asked[1].done():
            asked[1].set_result(forwarded)

    def cut(self, node: NodePeer) -> None:
        """The link to a node was cut: its answers may never come."""
        for asked, future in self._asked.values():
            if asked is node and not future.done():
                future.set_exception(StoreUnavailable(f"the link to node {node.node_id}, which leads, was cut"))

    async def close(self) -> None:
        """Answer nobody any more."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
