"""Keeps a link on a stream: dials, redials, goes to another node, until it is stopped. `redial` says where and when."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_sdk.ending import Ended
from agent_sdk.errors import PermissionDenied, ReachError, Unauthenticated
from agent_sdk.greeting import Greeting
from agent_sdk.linkstream import LinkStream
from agent_sdk.redial import Redial
from agentreach.aio.clock import boot_time
from agentreach.aio.transport import Refused, Stream, StreamBroken, Transport

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink

log = logging.getLogger("agent_sdk")

_LOG_EVERY_S = 60.0  # unreachable nodes are told once a minute


class Dialler:
    """The dialling of one link."""

    def __init__(
        self,
        owner: MeshLink,
        addresses: tuple[str, ...],
        transport: Transport,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self.redial = Redial(addresses, random.random)
        self.stream: LinkStream | None = None
        """The stream there is, welcomed or not."""
        self.trouble = ""
        """Why the last dial failed; empty once a node has welcomed us."""
        self._owner = owner
        self._transport = transport
        self._metadata = metadata
        self._stop = asyncio.Event()
        self._next: Greeting | None = None
        """By which the node at `redial.address` has welcomed us while the present stream carries the link."""
        self._entering: asyncio.Task[bool] | None = None
        """The dial of that node, until it has answered; it outlives the present stream."""
        self._logged = -_LOG_EVERY_S

    def stop(self) -> None:
        """Dial no more. A stream that there is goes on until it ends."""
        self._stop.set()

    def welcomed(self) -> None:
        """A node has taken us in."""
        self.trouble, self._logged = "", -_LOG_EVERY_S

    async def run(self) -> None:
        """Dial until stopped; without an end, however long no node answers."""
        try:
            while not self._stop.is_set():
                if self._next is None:
                    await self._pause(self.redial.wait_s)
                if self._stop.is_set():
                    return
                await self._one_stream(self.redial.address)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a fault of ours: nobody may wait for ever
            log.exception("the link ended by a fault")
            self._owner.fail(ReachError(f"the link ended by a fault: {type(error).__name__}"))
        finally:
            await self._enter_no_more()
            if self._next is not None:
                await self._next.decline()
                await self._next.stream.close()

    async def _pause(self, wait_s: float) -> None:
        if wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()
            except TimeoutError:
                return

    async def enter_another(self, left: str, peers: Sequence[str], leaves_s: float) -> None:
        """Be welcomed by another node, while the one `left`, which is gone in `leaves_s`, still carries the link.

        Returns when one has welcomed us, or when the link is over; goes on as long as nobody does.
        """
        redial = self.redial
        redial.left(boot_time(), left, peers, leaves_s, in_time=True)
        while self._next is None and not self._stop.is_set():
            await self._pause(redial.wait_s)
            if redial.address == left or not await self._enter_by_task(redial.address):
                redial.failed(boot_time())

    async def _enter_by_task(self, address: str) -> bool:
        self._entering = self._owner.loop.create_task(self._enter(address), name="agent_sdk enters another node")
        taken = await asyncio.shield(self._entering)
        self._entering = None
        return taken

    async def _enter_on(self) -> None:
        """The stream ended while another node was asked: wait for its answer, unless stopped.

        The node that is left sees our agents registered there, and says goodbye, before the welcome has reached us.
        """
        if self._entering is not None and not self._owner.closing:
            stop = self._owner.loop.create_task(self._stop.wait())
            try:
                await asyncio.wait((self._entering, stop), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.cancel()
        await self._enter_no_more()

    async def _enter_no_more(self) -> None:
        entering, self._entering = self._entering, None
        if entering is not None:
            entering.cancel()
            await asyncio.wait((entering,))
            if not entering.cancelled() and (fault := entering.exception()) is not None:
                raise fault

    async def _enter(self, address: str) -> bool:
        stream = await self._open(address)
        if stream is None:
            return True  # counted already
        greeting, taken = Greeting(self._owner, stream, address), False
        try:
            taken = await greeting.greet() and greeting.lets_agents_in
        except StreamBroken:
            return False
        finally:
            if taken:
                self._next = greeting
            else:
                await stream.close()
        return taken

    @property
    def entered(self) -> bool:
        """True while another node has welcomed us and the present one still carries the link."""
        return self._next is not None

    async def _open(self, address: str) -> Stream | None:
        try:
            async with asyncio.timeout(self.redial.limit_s):
                return await self._transport.open(address, self._metadata)
        except TimeoutError:
            self._not_reached(address, "no answer")
        except Refused as refused:
            if refused.fatal:
                kind = PermissionDenied if refused.code == "PERMISSION_DENIED" else Unauthenticated
                log.info("%s refuses: %s; not trying again", address, refused)
                self._owner.fail(kind(f"{address} refuses: {refused.details or refused.code}"))
            else:
                self._not_reached(address, str(refused))
        return None

    async def _one_stream(self, address: str) -> None:
        owner, redial = self._owner, self.redial
        greeting, self._next = self._next, None
        if greeting is None:
            stream = await self._open(address)
            if stream is None:
                return
            greeting = Greeting(owner, stream, address)
        life = self.stream = LinkStream(owner, greeting)
        try:
            ended = await life.run()
        finally:
            self.stream = None
            owner.down()
            await greeting.stream.close()
        await self._enter_on()
        if self._next is not None:
            ended = Ended.MOVED if ended is Ended.CUT else ended
        elif ended is Ended.MOVED:
            redial.left(boot_time(), address, life.peers, life.leaves_s)
        else:
            redial.failed(boot_time())
        if owner.closing:
            return
        if ended is Ended.REFUSED:
            owner.fail(Unauthenticated(f"{address}: {life.reason or 'credentials refused'}"))
        elif ended in (Ended.SCRATCH, Ended.MOVED):
            owner.resume_token = b""
        log.info("link to %s ended: %s", address, life.reason or "cut")

    def _not_reached(self, address: str, why: str) -> None:
        now = boot_time()
        self.trouble = f"{address}: {why}"
        self.redial.failed(now)
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            log.warning("no node reached at %s: %s; trying on", address, why)
