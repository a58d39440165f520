"""What the callers of a world do: the requests, copies, cancels, streams, sessions and events of one seed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from agent_sdk import connection
from agent_sdk.client import Mesh
from agent_sdk.errors import ReachError
from agent_sdk.settings import Access
from agentreach.wire import ids

from .asking import Asking
from .cast import TOPICS, inbox
from .ledger import Ask
from .network import SimTransport
from .process import UNIX

if TYPE_CHECKING:
    from .process import Process
    from .world import World

_KINDS = {"echo": 8, "slow": 5, "chat": 8, "story": 4, "relay": 3, "flaky": 5, "stubborn": 2, "nobody": 1}
_FAULTS = ("retryable", "fatal", "rejected", "overloaded", "crash")


class Caller:
    """One process of callers: a link, and what is sent by it."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.asking = Asking(world, process)
        self.lease: connection.Lease | None = None
        self.mesh: Mesh | None = None
        process.things["caller"] = self

    async def begin(self, topic: str) -> None:
        """Dial; what is asked before a node was reached waits in the link."""
        transport = SimTransport(self.world, self.process)
        lease = self.lease = connection.take(
            Access(self.world.known_addresses(self.process)), own_link=True, transport=transport
        )
        mesh = self.mesh = Mesh(lambda: lease.link)
        if topic:
            await inbox(self.world, self.process, mesh, topic, 0.01)

    def asks(self, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> asyncio.Task[Any]:
        """Make a request; called within this process's loop."""
        assert self.mesh is not None
        return self.process.loop.run_inside(self.asking.ask(self.mesh, ask, data, options), f"ask {ask.number}")

    async def publishes(self, topic: str, number: int, pause_s: float) -> None:
        """Send one event and note what is told of it."""
        assert self.mesh is not None
        ledger = self.world.ledger
        by = self.process.name
        ledger.event("publishes", self.process, f"{topic} {number}")
        try:
            counts = await self.mesh.publish(topic, {"by": by, "n": number, "s": pause_s})
        except ReachError as error:
            ledger.event("published", self.process, f"{topic} {number}: {error.code}")
            return
        told = {"matched": counts.matched, "accepted": counts.accepted, "at": self.world.now}
        ledger.published[(f"{topic} of {by}", number)] = told
        ledger.event("published", self.process, f"{topic} {number}: {told}")


class Load:
    """Everything that is asked in one world, drawn from its seed."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._sessions = [f"s{number}" for number in range(4)]

    def schedule(self, asks: int, until: float) -> None:
        """Let so many messages begin before a time, besides their copies."""
        rng, world = self._rng, self._world
        bursts = [rng.uniform(0.2, until) for _ in range(3)]
        for _ in range(asks):
            at = rng.choice(bursts) + rng.uniform(0, 0.05) if rng.random() < 0.3 else rng.uniform(0.2, until)
            world.scheduler.at(at, self._one)
        for _ in range(rng.randint(2, 5)):
            world.scheduler.at(rng.uniform(0.2, until), self._conversation, rng.choice(self._sessions))
        for _ in range(rng.randint(1, 3)):
            world.scheduler.at(rng.uniform(0.5, until), self._publishing, rng.choice(TOPICS), rng.randint(2, 12))

    # ---- requests ----

    def _caller(self) -> Caller | None:
        """One of the callers that run."""
        callers = [each.things["caller"] for each in self._world.processes if each.alive and "caller" in each.things]
        callers = [caller for caller in callers if caller.mesh is not None]
        return self._rng.choice(callers) if callers else None

    def _one(self) -> None:
        caller = self._caller()
        if caller is None:
            return
        rng = self._rng
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        ask, data, options = self._drawn(kind, caller)
        if rng.random() < 0.08 and kind in ("echo", "slow", "chat", "flaky"):
            self._invoke(ask, data, options)
            return
        if rng.random() < 0.2 and not ask.session:
            self._copies(ask, data, options)
        self._send(caller, ask, data, options)

    def _drawn(self, kind: str, caller: Caller, session: str = "") -> tuple[Ask, dict[str, Any], dict[str, Any]]:
        rng, number = self._rng, self._world.number()
        timeout_s = rng.choice((0.05, 0.3, 1.0, 2.0, 4.0, 6.0, 9.0))
        if kind == "relay":
            timeout_s = max(timeout_s, 2.0)
        ask = Ask(number, number, caller.process, kind, "request", timeout_s)
        ask.idempotent = rng.random() < 0.35
        ask.profile = rng.choice(("", "", "RPC", "CACHE", "TASK", "LLM"))
        if kind == "chat":
            ask.session = session or f"{caller.process.name}-{rng.choice(self._sessions)}"
        ask.kind = "stream" if kind == "story" and rng.random() < 0.7 else "request"
        return ask, self._data(kind, number), self._options(ask)

    def _data(self, kind: str, number: int) -> dict[str, Any]:
        rng = self._rng
        data: dict[str, Any] = {"ask": number, "root": number, "s": rng.choice((0.0, 0.0, 0.01, 0.3))}
        if kind in ("slow", "stubborn"):
            data["s"] = rng.uniform(0.1, 6.0) if rng.random() < 0.7 else 0.05
        elif kind == "chat":
            data["s"] = rng.choice((0.0, 0.05, 0.5, 2.0))
        elif kind == "story":
            data["items"] = rng.choice((0, 1, 5, 30, 200))
            data["gap"] = rng.choice((0.0, 0.001, 0.05))
            data["pace"] = rng.choice((0.0, 0.0, 0.02))
            if rng.random() < 0.2:
                data["leave"] = rng.randint(1, 10)
        elif kind == "relay":
            data["hops"] = rng.choice((1, 1, 2, 3, 20))
            data["next"] = rng.choice(("echo", "slow", "flaky", "nobody"))
            data["root"] = number if rng.random() < 0.5 else 0
            data["fault"], data["times"] = "fatal", 1
        if kind == "flaky":
            data["fault"], data["times"] = rng.choice(_FAULTS), rng.choice((0, 1, 1, 9))
        if rng.random() < 0.05:
            data["pad"] = "x" * rng.choice((5_000, 80_000))
        return data

    def _options(self, ask: Ask) -> dict[str, Any]:
        rng = self._rng
        options: dict[str, Any] = {"timeout": ask.timeout_s, "idempotent": ask.idempotent}
        if rng.random() < 0.7 or ask.session:
            options["agent_type"] = ask.target
        else:
            options["capabilities"] = [f"can-{ask.target}"]
        if ask.profile:
            options["profile"] = ask.profile
        if ask.session:
            options["session"] = ask.session
        else:
            options["priority"] = rng.choice((None, None, "HIGH", "LOW"))
            options["policy"] = rng.choice((None, None, None, "RANDOM", "ROUND_ROBIN", "LEAST_LOAD", "SCORE"))
        return options

    def _send(self, caller: Caller, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        """Make a request in its caller's loop; some are withdrawn by their sender."""
        cancel_s = self._rng.uniform(0.0, 1.5) if self._rng.random() < 0.08 else None
        caller.process.loop.call_soon(self._send_now, caller, ask, data, options, cancel_s)

    def _send_now(
        self, caller: Caller, ask: Ask, data: dict[str, Any], options: dict[str, Any], cancel_s: float | None
    ) -> None:
        task = caller.asks(ask, data, options)
        if cancel_s is not None:
            caller.process.loop.call_later(cancel_s, task.cancel)

    def _copies(self, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        """Give it an id of the application's, and let copies come: at once or later, from here or elsewhere.

        Ids without a time are remembered as long as the node's table holds them, so where that is made tiny all are
        UUIDs of version 7.
        """
        rng, world = self._rng, self._world
        ask.message_id = f"order-{ask.number}"
        if rng.random() < 0.4 or "replay_entries_max" in world.node_flags:
            ask.message_id = ids.uuid7(int((UNIX + world.now) * 1000), rng.getrandbits(74))
        options["message_id"] = ask.message_id
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            world.scheduler.after(rng.choice((0.0, 0.01, 0.5, 3.0, 6.0)) * rng.random(), self._copy, ask, data, options)

    def _copy(self, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        caller = self._caller()
        if caller is not None:
            copy = replace(
                ask, number=self._world.number(), by=caller.process, ended_at=None, outcome="", items=[], run=0,
                run_group=0, ends=0, told_items=None, may_have_executed=False, text="", attempts=0,
                left=False,
            )  # fmt: skip
            self._send(caller, copy, data, options)

    def _invoke(self, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        """By Invoke at a node; the call's client is part of the node's process here: it dies with it."""
        nodes = [node for node in self._world.nodes.values() if node.alive and node.accept is not None]
        if nodes:
            node = self._rng.choice(nodes)
            ask.by, ask.kind = node, "invoke"
            options = {"agent_type": ask.target}
            node.loop.call_soon(self._invoke_now, node, ask, data, options)

    def _invoke_now(self, node: Process, ask: Ask, data: dict[str, Any], options: dict[str, Any]) -> None:
        call = Asking(self._world, node).invoke(node.things["engine"], ask, data, options)
        task = node.loop.run_inside(call, f"invoke {ask.number}")
        if ask.number % 7 == 0:
            node.loop.call_later(0.4, task.cancel)

    # ---- sessions and events ----

    def _conversation(self, session: str) -> None:
        """A few messages of a session one right after another, without waiting for replies."""
        caller = self._caller()
        if caller is None:
            return
        name = f"{caller.process.name}-{session}"
        for _ in range(self._rng.randint(2, 6)):
            ask, data, options = self._drawn("chat", caller, name)
            caller.process.loop.call_soon(self._send_now, caller, ask, data, options, None)

    def _publishing(self, topic: str, count: int) -> None:
        """A burst of events of one publisher."""
        caller = self._caller()
        if caller is None:
            return
        for _ in range(count):
            self._world.event_count += 1
            event = caller.publishes(topic, self._world.event_count, self._rng.choice((0.0, 0.0, 0.05)))
            caller.process.loop.call_soon(caller.process.loop.run_inside, event, "publish")
