"""Questions that all nodes answer, and orders for the node that has what is meant.

Whoever asks need not know where an agent is attached, which node keeps a letter, or who waits where. A node that is
asked by another answers for itself alone (`ASKED_ALONE`), so a question crosses each link once. What a node does not
say within `ANSWER_S` is left out, and the reply names it; an order has `ORDER_S`, and its sender is told if the node
that it may be meant for did not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.core import nodes
from reach.core.ports import ANYBODY, Identity, MeshFailure, NoAnswer
from reach.core.state import State
from reach.node import merged

ANSWER_S = 1.0
ORDER_S = 5.0

M = TypeVar("M", bound=Message)
Own = Callable[[], Any]


class Peers(Protocol):
    """How other nodes are asked: `reach.adapters.peer_queries`."""

    async def ask(
        self, address: str, method: str, request: Message, reply_type: type[M], limit_s: float, who: Identity
    ) -> M:
        """One node's own answer, as it gives it to `who`.

        Raises `MeshFailure` for what it refused, `NoAnswer` if it said nothing in time.
        """
        ...

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Let go of all other nodes."""
        ...

    async def close(self) -> None:
        """Let go of all."""
        ...


_MERGES: dict[str, Callable[[Sequence[Any], int], Any]] = {
    "GetTrace": merged.traces,
    "ListSessions": merged.sessions,
    "ListBreakers": merged.breakers,
    "ListDeadLetters": merged.dead_letters,
}


class Everywhere:
    """This node and the others, as one that is asked."""

    def __init__(self, state: State, peers: Peers) -> None:
        self._state = state
        self._peers = peers

    async def ask(self, method: str, request: Any, own: Own, who: Identity = ANYBODY) -> Any:
        """The answer of all nodes, or of the one that it is about; `own` gives this node's, `who` asks.

        Raises `MeshFailure`: this node's, unless another one has what is meant.
        """
        others = {
            node.node_id: node.address
            for node in self._state.nodes.values()
            if node.address and not nodes.unlike(self._state, node)
        }
        await self._peers.keep_only(others.values())
        if method == "DrainNode":
            return await self._of_node(method, request, own, others, who)
        if not others:
            return own()
        if method == "ResetBreaker":
            return await self._on_all(method, request, own, others, who)
        if method in _MERGES:
            return await self._of_all(method, request, own, others, who)
        return await self._where_it_is(method, request, own, others, who)

    async def close(self) -> None:
        """Let go of the other nodes."""
        await self._peers.close()

    async def _of_all(self, method: str, request: Any, own: Own, others: dict[str, str], who: Identity) -> Any:
        first = own()
        answers = await self._gather(method, request, type(first), others, ANSWER_S, who)
        told = [answer for answer in answers.values() if isinstance(answer, Message)]
        reply = _MERGES[method]([first, *told], getattr(request, "limit", 0))
        reply.silent_nodes.extend(node_id for node_id, answer in answers.items() if not isinstance(answer, Message))
        return reply

    async def _on_all(self, method: str, request: Any, own: Own, others: dict[str, str], who: Identity) -> Any:
        """Carried out wherever the agent is known; refused if that is nowhere."""
        refusal: MeshFailure | None = None
        try:
            reply = own()
        except MeshFailure as refused:
            refusal, reply = refused, admin.ResetBreakerReply()
        answers = await self._gather(method, request, type(reply), others, ORDER_S, who)
        if refusal is not None and not any(isinstance(answer, Message) for answer in answers.values()):
            raise refusal
        reply.silent_nodes.extend(node_id for node_id, answer in answers.items() if isinstance(answer, NoAnswer))
        return reply

    async def _where_it_is(self, method: str, request: Any, own: Own, others: dict[str, str], who: Identity) -> Any:
        """One node after another, until one has it: nothing is done twice."""
        try:
            return own()
        except MeshFailure as refused:
            if refused.error.code != codes.NO_ROUTE:
                raise
            refusal = refused
        silent = []
        home = refusal.error.details.get("node_id", "")
        for node_id in sorted(others, key=lambda each: (each != home, each)):
            try:
                return await self._peers.ask(others[node_id], method, request, _reply_type(method), ORDER_S, who)
            except NoAnswer:
                silent.append(node_id)
            except MeshFailure as refused:
                if refused.error.code != codes.NO_ROUTE:
                    raise
            if node_id == home:
                break
        if silent:
            text = f"{refusal.error.message}; no answer from node {', '.join(silent)}, which may have done it"
            raise MeshFailure(
                failure(codes.NO_ROUTE, text, may_have_executed=True, details=dict(refusal.error.details))
            )
        raise refusal

    async def _of_node(
        self, method: str, request: admin.DrainNodeRequest, own: Own, others: dict[str, str], who: Identity
    ) -> Any:
        if request.node_id in ("", self._state.rules.node_id):
            return own()
        address = others.get(request.node_id)
        if address is None:
            known = ", ".join(sorted({*others, self._state.rules.node_id})[:100])
            text = f"there is no node {request.node_id[:100]}; those known here are {known}"
            raise MeshFailure(failure(codes.NO_ROUTE, text))
        try:
            return await self._peers.ask(address, method, request, _reply_type(method), ORDER_S, who)
        except NoAnswer as silence:
            text = f"node {request.node_id} did not answer within {ORDER_S:g} s ({silence}); it may have begun to drain"
            raise MeshFailure(failure(codes.CONNECT_FAILED, text, may_have_executed=True)) from silence

    async def _gather(
        self, method: str, request: Any, reply_type: type[Any], others: dict[str, str], limit_s: float, who: Identity
    ) -> dict[str, Message | Exception]:
        """Each other node's answer, or what it ended with."""

        async def ask(address: str) -> Message | Exception:
            try:
                answer: Message = await self._peers.ask(address, method, request, reply_type, limit_s, who)
                return answer
            except (MeshFailure, NoAnswer) as failed:
                return failed

        answers = await asyncio.gather(*(ask(address) for address in others.values()))
        return dict(zip(others, answers, strict=True))


def _reply_type(method: str) -> type[Message]:
    """The reply of an admin method, as this project names all of them."""
    found: type[Message] = getattr(admin, f"{method}Reply")
    return found
