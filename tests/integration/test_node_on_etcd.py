"""One node and real etcd: keys under leases, outages, crashes of either side, sessions over a restart.

Times are shrunk: the node's lease lives 2 s, links resume within 1 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import pytest

from agent_sdk import Agent, Mesh, NoAgentAvailable, NoRoute, RegistryUnavailable, Timeout, connect
from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.peer_pb2 import Pin
from agentreach.v1.registry_pb2 import AgentRecord
from reach.adapters.etcd import EtcdStore
from reach.core.store import Delete, Item, Put, StoreUnavailable
from tests.support.etcd import EtcdCluster, free_port, start_etcd
from tests.support.node import config, running, start_node
from tests.support.rawlink import raw_link
from tests.support.stores import connected, put

LEASE_S = 2.0  # QUICK's node_lease_ttl_s
RESUME_S = 1.0  # QUICK's resume_window_s
MENDED_S = 5.0  # "within 5 s of etcd being reachable"
MARGIN_S = 2.0  # etcd looks for expired leases twice a second; the rest is for a busy machine

BUSY_S = 10.0  # what a machine whose cores are all taken adds to the start of a process, or to a thousand agents

_prefixes = count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One member for all tests; each has a prefix of its own. Who stops it starts it again."""
    with start_etcd() as etcd:
        yield etcd


@pytest.fixture
async def store(etcd: EtcdCluster) -> AsyncIterator[EtcdStore]:
    """What the test sees of etcd: a prefix that nobody else uses."""
    async with connected(etcd, prefix=f"/test-{next(_prefixes)}/") as store:
        yield store


def on(etcd: EtcdCluster, store: EtcdStore, **more: Any) -> dict[str, Any]:
    """Settings of a node on this etcd, with the test's prefix."""
    return {"registry": f"etcd://{etcd.endpoints[0]}", "registry_prefix": store._codec.key("").decode(), **more}


async def eventually(holds: Callable[[], Awaitable[bool]], limit_s: float, what: str) -> float:
    """Wait until it holds; how long that took. There is no event for what another process will do."""
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.03)
    return time.monotonic() - began


async def agents(store: EtcdStore) -> dict[str, Item]:
    """The agents' keys, by agent_id."""
    items = (await store.list("agents/")).items
    return {"/".join(item.key.split("/")[-2:]): item for item in items}


async def gone(store: EtcdStore, prefix: str, limit_s: float) -> float:
    """Wait until no key is left below a prefix."""

    async def none_left() -> bool:
        return not (await store.list(prefix)).items

    return await eventually(none_left, limit_s, f"no key below {prefix}")


async def back(store: EtcdStore, wanted: dict[str, Item], limit_s: float = MENDED_S) -> float:
    """Wait until these agents' keys stand under other leases than before."""
    former = {item.lease for item in wanted.values()}

    async def all_there() -> bool:
        found = await agents(store)
        return found.keys() >= wanted.keys() and all(found[name].lease not in former for name in wanted)

    return await eventually(all_there, limit_s, f"keys of {sorted(wanted)} are back")


def echo(url: str, name: str = "echo", **more: Any) -> Agent:
    """An agent in this process that returns what it gets."""
    agent = Agent(name, url=url, **more)

    @agent.handler
    async def answer(data: Any) -> Any:
        return data

    return agent


async def not_registered(url: str, agent_id: str) -> codes.Error:
    """What the node answers to an agent that it does not register."""
    async with raw_link(url, agents=[agent_id]) as link:
        return link.welcome.agents[0].error


@contextlib.contextmanager
def agent_process(url: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`reach test-agent` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "reach.cli", "test-agent", "--url", url, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def registered(store: EtcdStore, agent_type: str) -> Item:
    """Wait until an agent of this type has its key."""
    found: list[Item] = []

    async def there() -> bool:
        found[:] = [item for name, item in (await agents(store)).items() if name.startswith(f"{agent_type}/")]
        return bool(found)

    await eventually(there, 10, f"{agent_type} is registered")
    return found[0]


async def usable(mesh: Mesh, agent_type: str) -> None:
    """Wait until an agent of this type has shown that it works."""

    async def answers() -> bool:
        try:
            await mesh.request("x", agent_type=agent_type, timeout=2)
        except (NoAgentAvailable, NoRoute, Timeout):
            return False
        return True

    await eventually(answers, 20, f"{agent_type} is usable")


@contextlib.asynccontextmanager
async def traffic(mesh: Mesh, agent_type: str) -> AsyncIterator[list[float]]:
    """Requests one after another while the block runs, each answered; gives the times of the answers."""
    answers: list[float] = []
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            await mesh.request("x", agent_type=agent_type, timeout=2)
            answers.append(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await over.wait()

    task = asyncio.create_task(ask(), name="traffic")
    try:
        yield answers
        over.set()
        await task
    finally:
        task.cancel()


class TestALostLease:
    async def test_keys_come_back_after_etcd_was_away_longer_than_the_lease_and_meanwhile_traffic_flows(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        quick = {"registry_grace_s": 1.0, "register_wait_s": 1.0}
        async with running(config(**on(etcd, store, **quick))) as node, connect(node.grpc_address) as mesh:
            engine = node.engine
            async with echo(node.grpc_address), traffic(mesh, "echo") as answers:
                pinned = await mesh.request("x", agent_type="echo", session="known", timeout=2)
                before = await agents(store)
                assert engine.ready and engine.registry_age() == 0.0
                etcd.members[0].stop()
                await self._without_etcd(node.grpc_address, mesh, pinned.source)
                newcomer = echo(node.grpc_address, "newcomer", own_link=True)
                arriving = asyncio.create_task(newcomer.__aenter__())

                async def unready() -> bool:
                    return not engine.ready

                await eventually(unready, 10, "the node says that it is not ready")
                assert re.search(r"registry has not answered for \d+ s", engine.unready_reason)
                assert engine.registry_age() > 1.0
                await asyncio.sleep(max(0.0, LEASE_S + 0.5 - engine.registry_age()))  # the outage itself
                await etcd.members[0].restart()
                await back(store, before)
                assert {item.key for item in (await store.list("nodes/")).items}

                async def ready() -> bool:
                    return engine.ready

                await eventually(ready, MENDED_S, "the node is ready again")
                assert len(answers) > 30
                await asyncio.wait_for(arriving, 10)  # it has asked again until it was registered
                assert (await mesh.request("x", agent_type="newcomer", timeout=2)).data == "x"
                await newcomer.__aexit__(None, None, None)
            async with echo(node.grpc_address, "later"):
                assert (await mesh.request("x", agent_type="later", session="new", timeout=2)).session_event

    async def _without_etcd(self, address: str, mesh: Mesh, owner: str) -> None:
        """What goes on while etcd is away, and what is refused, saying why and when to try again."""
        refused_at = time.monotonic()
        refused = await not_registered(address, "stranger/1")
        assert 0.5 < time.monotonic() - refused_at < 3
        assert refused.code == codes.REGISTRY_UNAVAILABLE
        assert refused.retryable and refused.retry_after_ms and not refused.may_have_executed
        with pytest.raises(RegistryUnavailable, match=r"session new .*registry cannot record"):
            await mesh.request("x", agent_type="echo", session="new", timeout=8)
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable):  # at once by now: it is known to be away
            await mesh.request("x", agent_type="echo", session="newer", timeout=8)
        assert time.monotonic() - began < 0.5
        known = await mesh.request("x", agent_type="echo", session="known", timeout=2)
        assert known.source == owner and known.session_event is None

    async def test_keys_come_back_after_the_node_was_stopped_longer_than_the_lease(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store)) as node, echo(node.grpc):
            before = await agents(store)
            node.process.send_signal(signal.SIGSTOP)
            await gone(store, "agents/", LEASE_S + MARGIN_S)
            await gone(store, "nodes/", LEASE_S + MARGIN_S)
            node.process.send_signal(signal.SIGCONT)
            await back(store, before)
            async with connect(node.grpc) as mesh:
                assert (await mesh.request("x", agent_type="echo", timeout=5)).data == "x"

    async def test_keys_come_back_after_the_lease_was_revoked_or_a_key_deleted_by_hand(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        # The lease is long: it is not the next keepalive that finds out.
        async with (
            running(config(**on(etcd, store, node_lease_ttl_s=60))) as node,
            connect(node.grpc_address) as mesh,
            echo(node.grpc_address),
            traffic(mesh, "echo") as answers,
        ):
            before = await agents(store)
            (lease,) = {item.lease for item in before.values()}
            await etcd.ctl("lease", "revoke", f"{lease:x}")
            await back(store, before)
            root = on(etcd, store)["registry_prefix"]
            for key in [item.key for prefix in ("nodes/", "agents/") for item in (await store.list(prefix)).items]:
                await etcd.ctl("del", root + key)

                async def there(key: str = key) -> bool:
                    return await store.get(key) is not None

                await eventually(there, MENDED_S, f"{key} is written again")
            assert len(await agents(store)) == 1 and len((await store.list("nodes/")).items) == 1
            asked = len(answers)

            async def asked_more() -> bool:
                return len(answers) > asked

            await eventually(asked_more, 2, "traffic flows")

    async def test_a_session_starts_after_the_lease_of_its_pins_was_revoked(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with (
            running(config(**on(etcd, store))) as node,
            connect(node.grpc_address) as mesh,
            echo(node.grpc_address),
        ):
            await mesh.request("x", agent_type="echo", session="one", timeout=2)
            (pin,) = (await store.list("pins/")).items
            await store.revoke(pin.lease)
            reply = await mesh.request("x", agent_type="echo", session="two", timeout=2)
            assert reply.session_event == "STARTED"


class TestLeaving:
    async def test_a_killed_nodes_keys_end_with_its_lease_and_a_stopped_nodes_at_once(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store)) as node, connect(node.grpc) as mesh, echo(node.grpc):
            await mesh.request("x", agent_type="echo", session="s", timeout=2)
            items = [item for item in (await store.list("")).items if not item.key.startswith("keys/")]
            assert {item.key.partition("/")[0] for item in items} == {"nodes", "agents", "pins", "election"}
            assert all(item.lease for item in items), "a key without a lease"
            node.process.kill()
            await gone(store, "agents/", LEASE_S + MARGIN_S)
            await gone(store, "nodes/", LEASE_S + MARGIN_S)
            node.process.wait(5)
            await node.restart()
            await registered(store, "echo")
            node.process.terminate()
            assert await gone(store, "agents/", 2) < 1
            assert await gone(store, "nodes/", 2) < 1
            assert await asyncio.to_thread(node.process.wait, 5) == 0

    async def test_a_killed_agents_key_ends_with_the_resume_window_and_with_goodbye_at_once(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with running(config(**on(etcd, store))) as node:
            async with echo(node.grpc_address, "polite"):
                await registered(store, "polite")
            assert await gone(store, "agents/default/production/polite/", 2) < 0.5
            with agent_process(node.grpc_address, "--type", "crashing") as agent:
                await registered(store, "crashing")
                agent.kill()
                took_s = await gone(store, "agents/", RESUME_S + MARGIN_S)
                assert took_s > RESUME_S * 0.8, "it could not have resumed"

    async def test_an_agent_that_leaves_while_etcd_is_away_leaves_no_ghost(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        # The lease outlives the outage: the keys under it do not end by themselves.
        async with running(config(**on(etcd, store, node_lease_ttl_s=60))) as node, echo(node.grpc_address, "stays"):
            async with echo(node.grpc_address, "leaves"):
                assert len(await agents(store)) == 2
                etcd.members[0].stop()
            await etcd.members[0].restart()

            async def ghostless() -> bool:
                return [name.partition("/")[0] for name in await agents(store)] == ["stays"]

            await eventually(ghostless, MENDED_S, "only the agent that stays has a key")

    async def test_the_younger_of_two_processes_has_the_key_and_the_elders_end_leaves_it(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with running(config(**on(etcd, store))) as node:
            with agent_process(node.grpc_address, "--type", "twin/one") as elder:
                first = await registered(store, "twin")
                with agent_process(node.grpc_address, "--type", "twin/one"):
                    assert await asyncio.to_thread(elder.wait, 10) == 4
                    second = await registered(store, "twin")
                    assert second.mod_revision > first.mod_revision
                    incarnations = [AgentRecord.FromString(item.value).incarnation for item in (first, second)]
                    assert incarnations[0] != incarnations[1]
                    async with connect(node.grpc_address) as mesh:  # the elder's goodbye is long through
                        assert (await mesh.request("x", agent_type="twin", timeout=2)).source == "twin/one"
                    assert await store.get(second.key) == second

    async def test_an_agent_whose_key_another_node_took_is_told_and_its_key_is_left_alone(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with running(config(**on(etcd, store))) as node:
            with agent_process(node.grpc_address, "--type", "twin/one") as agent:
                record = AgentRecord.FromString((await registered(store, "twin")).value)
                record.node_id, record.incarnation = "elsewhere", b"another process."
                key = "agents/default/production/twin/one"
                taken = await put(store, key, record.SerializeToString())
                assert await asyncio.to_thread(agent.wait, 10) == 4
                item = await store.get(key)
                assert item is not None and item.mod_revision == taken


class TestStarting:
    async def test_a_registry_that_cannot_be_used_is_said_in_one_line_within_ten_seconds(self) -> None:
        async with start_etcd() as locked:
            for command in (("user", "add", "root:right"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
                await locked.ctl(*command)
            nobody = f"127.0.0.1:{free_port()}"
            refused, absent = await asyncio.gather(
                self._start(f"etcd://{locked.endpoints[0]}", REACH_REGISTRY_USER="root", REACH_REGISTRY_PASSWORD="no"),
                self._start(f"etcd://{nobody}"),
            )
        assert re.fullmatch(r"reach: the registry etcd://\S+ cannot be used: .*user 'root'.*\n", refused)
        assert re.fullmatch(rf"reach: the registry etcd://{nobody} cannot be used: .*refused.*\n", absent, re.I)

    async def _start(self, registry: str, **more: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")} | more
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "reach.cli", "serve", "--registry", registry,
            "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        try:
            async with asyncio.timeout(10 + BUSY_S):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 2, out.decode()
        return out.decode()


class TestOneNodeId:
    async def test_a_second_node_does_not_start_while_the_first_lives_and_the_first_keeps_its_key(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store, node_id="node-1")) as first:
            mine = await store.get("nodes/node-1")
            assert await self._refused(etcd, store) == (
                f"reach: node node-1 runs at {first.grpc}; give this node another --node-id"
            )
            assert await store.get("nodes/node-1") == mine

    async def test_one_that_does_not_answer_is_left_its_key_until_its_lease_has_ended(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store, node_id="node-1", node_lease_ttl_s=20.0)) as first:
            first.process.send_signal(signal.SIGSTOP)
            said = await self._refused(etcd, store)
            assert f"node node-1 is registered at {first.grpc} and does not answer" in said
            assert "registration ends within 2 s" in said and "another --node-id" in said

    async def test_one_that_was_killed_is_replaced_at_once_at_the_same_address_and_at_another(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        settings = on(etcd, store, node_id="node-1", node_lease_ttl_s=60.0)
        async with start_node(**settings) as first:
            killed = await self._incarnation(store)
            first.process.kill()
            first.process.wait(10)
            await first.restart()
            restarted = await self._incarnation(store)
            assert restarted != killed
            first.process.kill()
            first.process.wait(10)
            async with start_node(**settings) as second:
                record = NodeRecord.FromString((await self._item(store)).value)
                assert record.address == second.grpc != first.grpc and record.incarnation != restarted

    async def test_a_node_that_finds_anothers_record_in_its_place_says_so_once_and_comes_back_when_it_is_gone(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store, node_id="node-1")) as node:
            other = NodeRecord(node_id="node-1", address="127.0.0.1:1", incarnation=b"another process.")
            revision = await put(store, "nodes/node-1", other.SerializeToString())

            async def complained() -> bool:
                return b"another process.".hex() in node.log

            await eventually(complained, 10, "it names the other")
            assert (await self._item(store)).mod_revision == revision
            await store.txn([], [Delete("nodes/node-1")])

            async def back_again() -> bool:
                item = await store.get("nodes/node-1")
                return item is not None and NodeRecord.FromString(item.value).address == node.grpc

            await eventually(back_again, MENDED_S + MARGIN_S, "its own record is back")
            assert node.log.count("another node runs with this node's node_id") == 1

    async def _item(self, store: EtcdStore) -> Item:
        item = await store.get("nodes/node-1")
        assert item is not None
        return item

    async def _incarnation(self, store: EtcdStore) -> bytes:
        return NodeRecord.FromString((await self._item(store)).value).incarnation

    async def _refused(self, etcd: EtcdCluster, store: EtcdStore) -> str:
        """What a further node-1 says before it ends."""
        second = start_node(**on(etcd, store, node_id="node-1"))
        try:
            second.start()
            assert await asyncio.to_thread(second.process.wait, 10 + BUSY_S) == 2
            return next(line for line in second.log.splitlines() if line.startswith("reach: "))
        finally:
            second.close()


@pytest.mark.soak
async def test_etcd_does_not_end_a_connection_that_carries_nothing(etcd: EtcdCluster, store: EtcdStore) -> None:
    endpoint, over = store._endpoints.current, boot_time() + 40
    await store.revision()

    async def lived() -> bool:
        assert endpoint.connected, "etcd has sent us away"
        return boot_time() > over

    await eventually(lived, 45, "the connection was idle for many pings")


class TestLoad:
    async def test_idle_agents_write_nothing_and_share_a_lease(self, etcd: EtcdCluster, store: EtcdStore) -> None:
        leases = len((await etcd.ctl("lease", "list")).splitlines())
        async with running(config(**on(etcd, store, heartbeat_interval_s=0.1))) as node:
            idle = [echo(node.grpc_address, f"idle/{number}") for number in range(50)]
            await asyncio.gather(*(agent.start() for agent in idle))
            assert len(await agents(store)) == 50
            assert len((await etcd.ctl("lease", "list")).splitlines()) <= leases + 2  # the candidate's is apart
            written = (await store.list("")).items  # of this mesh: leases of other tests end when they like
            heard = node.engine.state.now
            # Many heartbeats and more than one life of the lease.
            lives_on = boot_time() + LEASE_S * 1.5

            async def lived() -> bool:
                return boot_time() > lives_on

            await eventually(lived, LEASE_S * 2, "the lease was kept alive")
            assert node.engine.state.now > heard
            assert (await store.list("")).items == written and len(await agents(store)) == 50
            await asyncio.gather(*(agent.drain() for agent in idle))

    async def test_a_thousand_agents_register_in_batches_and_again_after_a_crash_of_the_node(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store)) as node:
            many = [echo(node.grpc, f"many/{number}") for number in range(1000)]
            revision = await store.revision()
            began = time.monotonic()
            await asyncio.gather(*(agent.start() for agent in many))
            assert time.monotonic() - began < 5 + BUSY_S
            assert len(await agents(store)) == 1000
            assert await store.revision() - revision < 100, "each agent was a transaction of its own"
            before = await agents(store)
            await node.end(signal.SIGKILL)
            await node.restart()
            # Their former keys may still be there, or not any more: both are written over.
            print("again after", await back(store, before))
            async with connect(node.grpc) as mesh:
                assert (await mesh.request("x", agent_type="many", timeout=2)).data == "x"
            await asyncio.gather(*(agent.drain() for agent in many))

    async def test_a_full_etcd_is_named_as_the_cause_and_known_agents_are_routed_on(self) -> None:
        flags = ["--quota-backend-bytes=1000000"]
        async with start_etcd(flags=flags) as full, connected(full) as store:
            settings = {"registry": f"etcd://{full.endpoints[0]}", "register_wait_s": 1.0}
            async with running(config(**settings)) as node, connect(node.grpc_address) as mesh, echo(node.grpc_address):
                with pytest.raises(StoreUnavailable, match="quota"):
                    for number in range(200):
                        await store.txn([], [Put(f"big{number}", bytes(500_000))])
                refused = await not_registered(node.grpc_address, "stranger/1")
                assert refused.code == codes.REGISTRY_UNAVAILABLE
                assert re.search(r"quota is exceeded.*alarm disarm", refused.message)
                with pytest.raises(RegistryUnavailable, match=r"quota is exceeded"):
                    await mesh.request("x", agent_type="echo", session="new", timeout=5)
                assert (await mesh.request("x", agent_type="echo", timeout=2)).data == "x"
                assert node.engine.ready and len(await agents(store)) == 1


class TestSessions:
    async def test_a_session_keeps_its_owner_and_epoch_over_a_crash_of_the_node(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with (
            start_node(**on(etcd, store)) as node,
            connect(node.grpc) as mesh,
            echo(node.grpc, "chat/1"),
            echo(node.grpc, "chat/2"),
        ):
            started = {}
            for name in ("a", "b", "c", "d"):
                reply = await mesh.request("x", agent_type="chat", session=name, timeout=2)
                assert reply.session_event == "STARTED"
                started[name] = reply.source
            pins = (await store.list("pins/")).items
            assert len(pins) == 4 and all(pin.lease for pin in pins)
            await node.end(signal.SIGKILL)
            await node.restart()
            for name, owner in started.items():
                reply = await mesh.request("x", agent_type="chat", session=name, timeout=5)
                assert (reply.source, reply.session_event) == (owner, None)
            assert {epoch_of(pin) for pin in (await store.list("pins/")).items} == {epoch_of(pin) for pin in pins}

    async def test_a_sessions_message_waits_for_an_owner_that_comes_back_later_than_others_after_a_crash(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with (
            start_node(**on(etcd, store, resume_window_s=8)) as node,
            connect(node.grpc) as mesh,
            echo(node.grpc, "chat/prompt"),
        ):
            with agent_process(node.grpc, "--type", "chat/late") as late:

                async def owned_by_late() -> bool:
                    reply = await mesh.request("x", agent_type="chat", session=names[-1], timeout=2)
                    names.append(f"s{len(names)}")
                    return reply.source == "chat/late"

                names = ["s0"]
                await eventually(owned_by_late, 10, "the late agent owns a session")
                late.send_signal(signal.SIGSTOP)
                await node.end(signal.SIGKILL)
                await node.restart()
                await usable(mesh, "chat")
                message = asyncio.create_task(
                    mesh.request("x", agent_type="chat", session=names[-2], timeout=8), name="message"
                )

                async def waits() -> bool:
                    return message.done() or await node.metric("reach_queue_depth") == 1

                await eventually(waits, 5, "the message waits in its lane")
                late.send_signal(signal.SIGCONT)
                reply = await message
                assert (reply.source, reply.session_event) == ("chat/late", None)

    async def test_a_session_whose_owner_is_dead_gets_another_under_a_greater_epoch_and_is_told(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with start_node(**on(etcd, store, node_id="node-1")) as node, connect(node.grpc) as mesh:
            with agent_process(node.grpc, "--type", "chat") as first:
                await registered(store, "chat")
                await usable(mesh, "chat")
                told = await mesh.request("x", agent_type="chat", session="s", timeout=5)
                (pin,) = (await store.list("pins/")).items
                first.kill()
                async with echo(node.grpc, "chat/2") as second:
                    await gone(store, f"agents/default/production/{told.source}", RESUME_S + MARGIN_S)
                    reply = await mesh.request("x", agent_type="chat", session="s", timeout=5)
                    assert (reply.source, reply.session_event) == (second.agent_id, "LOST")
                    (later,) = (await store.list("pins/")).items
                    assert later.key == pin.key and epoch_of(later) > epoch_of(pin)
                    await node.end(signal.SIGKILL)  # and it dies while nobody keeps the book
            await node.restart()
            async with echo(node.grpc, "chat/3") as third:
                reply = await mesh.request("x", agent_type="chat", session="s", timeout=8)
                assert (reply.source, reply.session_event) == (third.agent_id, "LOST")
                (last,) = (await store.list("pins/")).items
                assert epoch_of(last) > epoch_of(later)

    async def test_a_pin_ends_with_its_session_and_is_written_again_while_it_is_used(
        self, etcd: EtcdCluster, store: EtcdStore
    ) -> None:
        async with (
            running(config(**on(etcd, store, session_ttl_s=1.0))) as node,
            connect(node.grpc_address) as mesh,
            echo(node.grpc_address),
        ):
            await mesh.request("x", agent_type="echo", session="s", timeout=2)
            (pin,) = (await store.list("pins/")).items

            async def moved() -> bool:
                reply = await mesh.request("x", agent_type="echo", session="s", timeout=2)
                assert reply.session_event is None
                (now,) = (await store.list("pins/")).items
                return now.lease != pin.lease and epoch_of(now) == epoch_of(pin)

            await eventually(moved, 5, "the pin stands under a newer lease")
            await store.revoke((await store.list("pins/")).items[0].lease)

            async def there_again() -> bool:
                await mesh.request("x", agent_type="echo", session="s", timeout=2)
                return [epoch_of(item) for item in (await store.list("pins/")).items] == [epoch_of(pin)]

            await eventually(there_again, 5, "the pin is written again under its epoch")
            await gone(store, "pins/", 2.0 + MARGIN_S)  # etcd's shortest lease


def epoch_of(pin: Item) -> int:
    """The epoch that a pin stands for."""
    return Pin.FromString(pin.value).epoch or pin.mod_revision
