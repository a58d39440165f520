"""A real etcd of several members whose every connection passes a wire that can be cut.

    async with etcd_cluster() as etcd:                 # three members, up in about 3 s; plain `with` works too
        store = await EtcdStore.connect(etcd.endpoints)
        leader = await etcd.leader()
        etcd.isolate(leader)                           # from its peers and from clients
        await etcd.leader_other_than(leader)
        etcd.heal()

    node = start_node(registry=etcd.registry_for("node-1"))   # wires of its own
    etcd.cut_client("node-1")                                 # this node alone sees no etcd any more

`member.kill()`, `stop()`, `pause()`, `resume()`, `await member.restart()` are those of `tests.support.etcd`. What is
cut is held, as TCP knows a partition: nothing passes, nothing is refused, and after `heal` what was sent arrives late.
`member.endpoint` is the member itself, behind no wire: a client on its side of a partition.

The wires are relays of `tools.faultproxy` in a thread of their own: a test that blocks its loop does not hold up etcd.
Which member dialled is told by the kernel, so partitions between members need Linux (`dialled.CAN_TELL`).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tests.support.dialled import CAN_TELL, who_dialled
from tests.support.etcd import EtcdCluster, EtcdMember, ServerTls, free_port
from tools.faultproxy import FaultProxy

T = TypeVar("T")

QUICK = ("--heartbeat-interval=50", "--election-timeout=500")
"""A new leader within a second; leases of one second are possible."""

_LIMIT_S = 10.0
_POLL_S = 0.05


class WiredEtcd(EtcdCluster):
    """The members and the wires between them, and between them and clients."""

    def __init__(self, members: int, flags: Sequence[str], tls: ServerTls | None) -> None:
        super().__init__(members, [*QUICK, *flags], tls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd-wires", daemon=True)
        self._doors: list[asyncio.Server] = []
        self._between: dict[tuple[str, str], FaultProxy] = {}
        self._clients: dict[str, dict[str, FaultProxy]] = {}
        self._isolated: set[str] = set()

    # ---- where it is ----

    @property
    def endpoints(self) -> list[str]:
        """host:port of each member, in order, as clients reach it through wires that they share."""
        return self.endpoints_for("")

    def endpoints_for(self, client: str) -> list[str]:
        """The same through wires that only this client has."""
        if client not in self._clients:
            self._clients[client] = {member.name: self.do(_opened(member.endpoint)) for member in self.members}
            for name in self._isolated:
                self.soon(self._clients[client][name].hold)
        return [wire.address for wire in self._clients[client].values()]

    def registry_for(self, client: str) -> str:
        """The setting `registry` of a node that has wires of its own."""
        return f"etcd://{','.join(self.endpoints_for(client))}"

    # ---- cuts ----

    def cut(self, one: EtcdMember, other: EtcdMember) -> None:
        """These two hear nothing of each other any more."""
        for names in ((one.name, other.name), (other.name, one.name)):
            self.soon(self._between[names].hold)

    def isolate(self, *members: EtcdMember, clients: bool = True) -> None:
        """These members hear nothing of the others any more (among them they do), nor of clients."""
        outside = [member for member in self.members if member not in members]
        for one, other in itertools.product(members, outside):
            self.cut(one, other)
        self._isolated |= {member.name for member in members}
        if clients:
            for member in members:
                self.cut_clients(member)

    def cut_clients(self, member: EtcdMember) -> None:
        """No client reaches this member any more; its peers do."""
        for wires in self._clients.values():
            self.soon(wires[member.name].hold)

    def cut_client(self, client: str, *members: EtcdMember, reset: bool = False) -> None:
        """This client reaches these members (none named: none at all) no more; with `reset` it is told at once."""
        for member in members or self.members:
            wire = self._clients[client][member.name]
            self.soon(wire.hold)
            if reset:
                self.soon(wire.reset)

    def heal_client(self, client: str) -> None:
        """This client reaches all members again but those that are isolated."""
        for name, wire in self._clients[client].items():
            if name not in self._isolated:
                self.soon(wire.heal)

    def heal(self) -> None:
        """All wires pass again, and what they held arrives."""
        self._isolated.clear()
        for wire in self._wires():
            self.soon(wire.heal)

    # ---- by hand ----

    async def ctl(self, *arguments: str, endpoints: Sequence[str] | None = None, user: str | None = None) -> str:
        """See `EtcdCluster.ctl`. It asks members that answer: on no wire, and none that is down, paused or isolated."""
        return await super().ctl(*arguments, endpoints=endpoints or self._answering(), user=user)

    async def leader(self) -> EtcdMember:
        """The member that leads, of those that answer: of two who say so, the one of the later term."""
        found = [status for status in await self._statuses() if status[0] and not status[1]]
        if not found:
            raise RuntimeError("no leader")
        return max(found, key=lambda status: status[0])[2]

    async def leader_other_than(self, *members: EtcdMember, limit_s: float = _LIMIT_S) -> EtcdMember:
        """Wait until a member other than these leads."""
        async with asyncio.timeout(limit_s):
            while True:
                found = [status for status in await self._statuses() if not status[1] and status[2] not in members]
                if found:
                    return max(found, key=lambda status: status[0])[2]
                await asyncio.sleep(_POLL_S)

    async def followers(self) -> list[EtcdMember]:
        """The others."""
        leader = await self.leader()
        return [member for member in self.members if member is not leader]

    async def settled(self, limit_s: float = 2 * _LIMIT_S) -> None:
        """Heal and restart what was cut, paused or killed, and wait until all members agree on a leader."""
        self.heal()
        for member in self.members:
            if not member.running:
                member.start()
            member.resume()
        for member in self.members:
            await member.ready(limit_s)
        await self.leader_other_than(limit_s=limit_s)

    async def revision(self) -> int:
        """The revision of the last change."""
        answer = json.loads(await self.ctl("get", "\\0", "-w", "json"))
        return int(answer["header"]["revision"])

    async def compact(self, revision: int | None = None) -> int:
        """Compact to `revision`, the last one if it is not given; which it was."""
        revision = revision or await self.revision()
        await self.ctl("compaction", str(revision))
        return revision

    async def leases_of(self, prefix: str) -> dict[str, int]:
        """The keys that start so, each with its lease (0: none)."""
        answer = json.loads(await self.ctl("get", "--prefix", "--keys-only", "-w", "json", prefix))
        return {_text(item["key"]): int(item.get("lease", 0)) for item in answer.get("kvs", ())}

    async def revisions_of(self, prefix: str) -> dict[str, int]:
        """The keys that start so, each with the revision that wrote it last."""
        answer = json.loads(await self.ctl("get", "--prefix", "--keys-only", "-w", "json", prefix))
        return {_text(item["key"]): int(item["mod_revision"]) for item in answer.get("kvs", ())}

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, as an operator does by mistake."""
        await self.ctl("lease", "revoke", f"{lease:x}")

    async def delete(self, key: str) -> None:
        """Delete a key, as an operator does by mistake. `RuntimeError` if it is not there."""
        if (await self.ctl("del", key)).strip() != "1":
            raise RuntimeError(f"no key {key}")

    # ---- life ----

    def start(self) -> None:
        """Open the wires, start all members and return at once."""
        self._thread.start()
        if CAN_TELL:
            for one, other in itertools.product(self.members, repeat=2):  # a member may dial itself
                self._between[one.name, other.name] = FaultProxy(other.peer_address)
            for member in self.members:
                member.peers_dial = f"127.0.0.1:{free_port()}"
                self._doors.append(self.do(self._door_of(member)))
        self.endpoints_for("")
        super().start()

    def close(self) -> None:
        """Kill all members, remove their data and end the wires."""
        super().close()
        if self._thread.is_alive():
            for door in self._doors:
                self._loop.call_soon_threadsafe(door.close)
            self.do(_close(self._wires()))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_LIMIT_S)
        self._loop.close()

    # ---- the wires' own thread ----

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this in the loop of the wires, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LIMIT_S)

    def soon(self, change: Callable[[], None]) -> None:
        """Call this in the loop of the wires, and wait for it."""

        async def changed() -> None:
            change()

        self.do(changed())

    # ---- inside ----

    async def _door_of(self, member: EtcdMember) -> asyncio.Server:
        """Where the others dial a member: each connection goes to the wire of whoever dialled."""

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialled = who_dialled(writer, self.members)
            if dialled is None:  # it has ended meanwhile
                writer.transport.abort()
            else:
                self._between[dialled.name, member.name].relay(reader, writer)

        host, _, port = member.peers_dial.rpartition(":")
        return await asyncio.start_server(accepted, host, int(port))

    def _wires(self) -> list[FaultProxy]:
        return [*self._between.values(), *(wire for wires in self._clients.values() for wire in wires.values())]

    def _answering(self) -> list[str]:
        return [m.endpoint for m in self.members if m.running and not m.paused and m.name not in self._isolated]

    async def _statuses(self) -> list[tuple[int, bool, EtcdMember]]:
        """(term, whether it follows, member) of each member that answers."""
        asked = [member for member in self.members if member.endpoint in self._answering()]
        answers = await asyncio.gather(
            *(
                self.ctl("endpoint", "status", "-w", "json", "--command-timeout=2s", endpoints=[m.endpoint])
                for m in asked
            ),
            return_exceptions=True,
        )
        found = []
        for member, answer in zip(asked, answers, strict=True):
            if isinstance(answer, str):
                status = json.loads(answer)[0]["Status"]
                follows = status.get("leader") != status["header"]["member_id"]
                found.append((int(status.get("raftTerm", 0)), follows, member))
        return found


def etcd_cluster(members: int = 3, *, flags: Sequence[str] = (), tls: ServerTls | None = None) -> WiredEtcd:
    """A cluster to use in a `with` or `async with`; `flags` go to every member's command line."""
    return WiredEtcd(members, flags, tls)


async def _opened(to: str) -> FaultProxy:
    wire = FaultProxy(to)
    await wire.open()
    return wire


async def _close(wires: Iterable[FaultProxy]) -> None:
    for _ in range(2):  # what is just being accepted while the first round closes is a relay in the second
        for wire in wires:
            await wire.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1)
    # Whatever else has a socket: a later test would fail for it, when it is collected.
    for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
        transport.abort()
    for _ in range(2):  # a transport that was aborted is gone a turn later
        await asyncio.sleep(0)


def _text(base64_key: str) -> str:
    return base64.b64decode(base64_key).decode()
