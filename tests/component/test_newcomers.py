"""First registrations over several nodes on the embedded store: through the leader, past what is known, never twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.frame_pb2 import Attach, Forward, Forwarded
from agentreach.v1.registry_pb2 import AgentRecord
from reach.adapters.memory_store import MemoryStore
from reach.core.agents import Agent
from reach.core.arrivals import Arrival, Attaching
from reach.core.effects import DeregisterAgent
from reach.core.store import Delete, Item, Put, StoreUnavailable
from reach.node import newcomers
from reach.node.admission import AGENTS_PER_FORWARD_MAX, Admission
from reach.node.election import Election
from reach.node.records import stored_record
from reach.node.registrar import Registrar
from reach.node.view import View
from tests.support.core import CoreMesh

LIMIT_S = 10.0
WAIT_S = 1.5
PROMPT_S = 0.4  # of what must not wait for anything; without load it takes milliseconds


class Unseen:
    """A core that is not interested in other nodes."""

    def agent_seen(self, *_: object) -> None: ...

    def left_behind(self, *_: object) -> None: ...

    def agent_gone(self, *_: object) -> None: ...

    def node_seen(self, *_: object) -> None: ...

    def node_gone(self, *_: object) -> None: ...


@dataclass(eq=False)
class Node:
    """What a node has for the registry."""

    node_id: str
    store: MemoryStore
    election: Election
    admission: Admission
    registrar: Registrar
    view: View
    replaced: list[str] = field(default_factory=list)
    process: bytes = b""
    """The incarnation of the process whose agents are made."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def agent(self, name: str) -> Agent:
        """Of a process at this node."""
        process = self.process or f"process at {self.node_id}".encode()
        record = AgentRecord(agent_id=name, agent_type=name.partition("/")[0], tenant="default", env="production")
        record.node_id, record.incarnation = self.node_id, process
        return Agent.from_record(record)

    async def register(self, *names: str, link_id: str = "", told: list[str] | None = None) -> list[Attaching]:
        """Register agents of these ids in one arrival, and wait for the answer."""
        arrival = Arrival([Attaching(name, self.agent(name)) for name in names])
        done = asyncio.Event()

        def answered() -> None:
            done.set()
            if told is not None:
                told.extend(names)

        self.registrar.register(arrival, answered, link_id)
        async with asyncio.timeout(LIMIT_S):
            await done.wait()
        return arrival.agents


class Way:
    """A `Forwarder` that calls the leader's admission directly, and does what a test wants with the answer."""

    def __init__(self, mesh: Mesh, node_id: str) -> None:
        self._mesh = mesh
        self._node_id = node_id
        self.asked = 0
        self.lose_answers = False
        self.late = asyncio.Event()
        self.late.set()
        self.to: Callable[[], str] | None = None
        """Whom to ask instead of the leader."""

    async def forward(self, forward: Forward) -> Forwarded:
        """See `Forwarder.forward`."""
        self.asked += 1
        node = self._mesh.nodes[self._node_id]
        leader_id = node.election.leader_id if self.to is None else self.to()
        if leader_id not in self._mesh.nodes or leader_id == self._node_id:
            raise StoreUnavailable("no node leads now")
        asking = asyncio.create_task(self._ask(leader_id, forward))
        self._mesh.asking.append(asking)
        return await asyncio.shield(asking)

    async def _ask(self, leader_id: str, forward: Forward) -> Forwarded:
        await self.late.wait()
        copy = Forward.FromString(forward.SerializeToString())
        answer = await self._mesh.nodes[leader_id].admission.admit(copy, self._node_id)
        if self.lose_answers:
            await asyncio.Event().wait()
        return answer


class Mesh:
    """Nodes n0, n1, …, of which those in `stands` are candidates; `store` never fails."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.nodes: dict[str, Node] = {}
        self.ways: dict[str, Way] = {}
        self.asking: list[asyncio.Task[Forwarded]] = []

    async def add(self, *, stands: bool, agents_max: int) -> Node:
        """One node more."""
        store = self.store.share()
        record = NodeRecord(node_id=f"n{len(self.nodes)}", address="127.0.0.1:1")
        election = Election(store, record.node_id)
        way = self.ways[record.node_id] = Way(self, record.node_id)
        admission = Admission(store, election, record.node_id, agents_max=agents_max, forwarder=way)
        replaced: list[str] = []
        registrar = Registrar(
            store, record, lease_ttl_s=30, register_wait_s=WAIT_S, admission=admission,
            replaced=lambda agent, _: replaced.append(agent.agent_id),
        )  # fmt: skip
        view = View(store, record, registrar, step=CoreMesh().step, remote=Unseen())
        node = self.nodes[record.node_id] = Node(record.node_id, store, election, admission, registrar, view, replaced)
        await registrar.start()
        await view.start()
        node.tasks = [asyncio.create_task(each.run()) for each in (registrar, view)]
        if stands:
            await self.stand(node)
        return node

    async def stand(self, node: Node) -> None:
        """Let a node be a candidate."""
        await node.election.start()
        node.tasks.append(asyncio.create_task(node.election.run()))

    async def knows_leader(self, node: Node, leader_id: str) -> None:
        """Wait until a node knows who leads."""
        told = asyncio.Event()
        node.election.listeners.append(told.set)
        async with asyncio.timeout(LIMIT_S):
            while node.election.leader_id != leader_id:
                told.clear()
                await told.wait()

    async def keys(self) -> dict[str, Item]:
        """The agents' keys, by agent_id."""
        items = (await self.store.list("agents/")).items
        return {item.key.removeprefix("agents/default/production/"): item for item in items}

    async def until_keys(self, names: set[str]) -> None:
        """Wait until exactly these agents are in the store."""
        changes = self.store.watch("agents/", (await self.store.revision()) + 1)
        async with asyncio.timeout(LIMIT_S), contextlib.aclosing(changes):
            async for _ in changes:
                if set(await self.keys()) == names:
                    return


@contextlib.asynccontextmanager
async def mesh(*stand: bool, agents_max: int = 1_000) -> AsyncIterator[tuple[Mesh, list[Node]]]:
    """Nodes, each a candidate or not."""
    made = Mesh()
    for stands in stand:
        await made.add(stands=stands, agents_max=agents_max)
    nodes = list(made.nodes.values())
    for node in nodes:
        if node.election.leader is None and stand[nodes.index(node)]:
            await made.knows_leader(node, nodes[stand.index(True)].node_id)
    yield made, nodes
    tasks = [*made.asking, *(task for node in nodes for task in node.tasks)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for node in nodes:
        await node.registrar.stop()
        await node.election.stop()
        await node.store.close()


def generation(each: Attaching) -> int:
    """Of an agent that was registered."""
    assert each.error is None and each.agent is not None, each.error
    return each.agent.generation


async def test_a_newcomer_at_any_node_is_written_by_the_leader_under_its_own_homes_lease() -> None:
    async with mesh(True, True, True) as (made, nodes):
        for node in nodes:
            answers = await node.register(*(f"a{node.node_id}/{number}" for number in range(70)))
            keys = await made.keys()
            for each in answers:
                assert keys[each.agent_id].mod_revision == generation(each)
            (item,) = (await made.store.list(f"nodes/{node.node_id}")).items
            assert {keys[each.agent_id].lease for each in answers} == {item.lease}
        assert [way.asked for way in made.ways.values()] == [0, 2, 2]


async def test_without_a_leader_the_known_come_back_and_newcomers_wait_for_one() -> None:
    async with mesh(True, False, False) as (made, (first, second, third)):
        await first.register("known/1")
        first.election.resign()
        newcomer = asyncio.create_task(second.register("new/1"))
        began = boot_time()
        (back,) = await second.register("known/1")
        assert generation(back) and boot_time() - began < PROMPT_S
        assert first.replaced == ["known/1"] and not newcomer.done()
        await made.stand(third)
        await made.stand(second)
        await made.knows_leader(second, "n2")
        led = boot_time()
        (new,) = await newcomer
        assert generation(new) and boot_time() - led < PROMPT_S
        assert set(await made.keys()) == {"known/1", "new/1"}


async def test_a_newcomer_that_waits_in_vain_is_told_so_and_when_to_ask_again() -> None:
    async with mesh(False) as (made, (node,)):
        began = boot_time()
        (answer,) = await node.register("new/1")
        assert answer.error is not None and answer.error.code == codes.REGISTRY_UNAVAILABLE
        assert answer.error.retry_after_ms and answer.error.retryable and "no node leads" in answer.error.message
        assert WAIT_S - 0.05 < boot_time() - began < WAIT_S + 1
        assert await made.keys() == {}


async def test_newcomers_do_not_hold_up_the_known_of_the_same_process() -> None:
    async with mesh(True, False) as (made, (first, second)):
        await first.register("known/1")
        first.election.resign()
        began = boot_time()
        new, known = await second.register("new/1", "known/1")
        assert boot_time() - began < newcomers.BESIDE_KNOWN_S + PROMPT_S
        assert generation(known) == (await made.keys())["known/1"].mod_revision
        assert new.error is not None and new.error.retryable
        assert new.error.code == codes.REGISTRY_UNAVAILABLE


async def test_a_link_is_told_in_the_order_in_which_it_asked_and_not_late() -> None:
    async with mesh(True, False) as (_, (first, second)):
        await first.register("known/1")
        told: list[str] = []
        asked = [["new/1"], ["known/1"], [], ["new/2"]]
        await asyncio.gather(*(second.register(*names, link_id="a link", told=told) for names in asked))
        assert told == ["new/1", "known/1", "new/2"]
        first.election.resign()
        told.clear()
        began = boot_time()
        others = asyncio.create_task(second.register("other/1", link_id="another link"))
        (new,), (known,) = await asyncio.gather(
            *(second.register(name, link_id="a link", told=told) for name in ("new/3", "known/1"))
        )
        assert told == ["new/3", "known/1"] and boot_time() - began < newcomers.BESIDE_KNOWN_S + PROMPT_S
        assert generation(known) and new.error is not None and new.error.retryable
        assert not others.done(), "it has nobody to hold up"
        await others


async def test_of_two_that_come_under_one_name_at_once_the_second_takes_over_and_the_first_is_told() -> None:
    async with mesh(True, True, True) as (made, (_, second, third)):
        (one,), (other,) = await asyncio.gather(second.register("a/1"), third.register("a/1"))
        key = (await made.keys())["a/1"]
        elder, younger = sorted([(generation(one), second), (generation(other), third)], key=lambda each: each[0])
        assert elder[0] < younger[0] == key.mod_revision
        assert AgentRecord.FromString(key.value).node_id == younger[1].node_id
        async with asyncio.timeout(LIMIT_S):
            while not elder[1].replaced:
                await elder[1].register("b/1")  # a way through the writer
        assert (elder[1].replaced, younger[1].replaced) == (["a/1"], [])


async def test_equal_names_of_one_node_are_registered_one_after_the_other() -> None:
    async with mesh(True, True) as (made, (_, second)):
        answers = [*await second.register("a/1", "a/1", "b/1"), *await second.register("a/1")]
        generations = [generation(each) for each in answers if each.agent_id == "a/1"]
        assert (await made.keys())["a/1"].mod_revision == max(generations) == generations[-1]


async def test_of_two_that_wait_under_one_name_the_later_one_has_it_also_if_somebody_else_was_faster() -> None:
    async with mesh(True, False, False) as (made, (first, second, third)):
        first.election.resign()
        waiting = []
        for link in ("one", "two"):
            second.process = link.encode()
            waiting.append(asyncio.create_task(second.register("a/1", link_id=link)))
            await asyncio.sleep(0)
        record = stored_record(third.agent("a/1")).SerializeToString()
        await made.store.txn([], [Put("agents/default/production/a/1", record)])
        await made.stand(third)
        await made.stand(second)
        await made.knows_leader(second, "n2")
        (former,), (later,) = [await each for each in waiting]
        assert second.registrar._agents["agents/default/production/a/1"] is later.agent
        assert former.error is not None and former.error.code == codes.FENCED


async def test_the_bound_counts_all_agents_of_the_mesh_and_frees_with_them() -> None:
    async with mesh(True, True, agents_max=3) as (made, (first, second)):
        a, _ = await first.register("a/1", "a/2")
        answers = await second.register("b/1", "b/2", "b/3")
        assert [each.error.code if each.error else 0 for each in answers] == [0, codes.OVERLOADED, codes.OVERLOADED]
        assert answers[1].error is not None and "3 agents" in answers[1].error.message
        assert answers[1].error.retry_after_ms
        assert a.agent is not None
        first.registrar.deregister(DeregisterAgent(a.agent, a.agent.generation))
        await made.until_keys({"a/2", "b/1"})
        (again,) = await second.register("b/2")
        assert generation(again)
        (back,) = await second.register("b/2")  # whoever is known is not counted again
        assert generation(back)


async def test_who_is_taken_for_the_leader_and_is_not_registers_nobody() -> None:
    async with mesh(True, True, True) as (made, (old, new, third)):
        leading = old.election.leading
        assert leading is not None
        for task in old.tasks:
            task.cancel()  # it stands still, and still believes that it leads
        await asyncio.gather(*old.tasks, return_exceptions=True)
        await made.store.txn([], [Delete(leading.key)])
        await made.knows_leader(new, "n1")
        answer = await old.admission.admit(Forward(agents=[Attach(record=new.agent("a/1").to_record())], lease=0), "n1")
        assert answer.error.code == codes.REGISTRY_UNAVAILABLE and await made.keys() == {}
        askings = iter(["n0", "n0", "n1"])
        made.ways["n2"].to = lambda: next(askings)
        (late,) = await third.register("a/1")
        assert generation(late) == (await made.keys())["a/1"].mod_revision


async def test_an_answer_of_a_former_leader_is_not_believed() -> None:
    async with mesh(True, True) as (made, (first, second)):
        leading = first.election.leading
        assert leading is not None
        former = leading.revision - 1

        class Former:
            """Answers as one that led before."""

            async def forward(self, forward: Forward) -> Forwarded:
                """See `Forwarder.forward`."""
                answer = await first.admission.admit(forward, "n1")
                answer.election = former
                return answer

        second.admission.connect(Former())
        with pytest.raises(StoreUnavailable, match="former"):
            await second.admission.ask(Forward(agents=[Attach(record=second.agent("a/1").to_record())]))
        await made.store.txn([], [Delete("agents/", prefix=True)])


async def test_a_registration_whose_answer_is_lost_on_the_way_is_found_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "ASK_S", 0.2)
    async with mesh(True, True) as (made, (_, second)):
        made.ways["n1"].lose_answers = True
        asked = asyncio.create_task(second.register("a/1"))
        await made.until_keys({"a/1"})
        made.ways["n1"].lose_answers = False
        (answer,) = await asked
        assert generation(answer) == (await made.keys())["a/1"].mod_revision


async def test_what_the_leader_writes_after_the_newcomer_was_refused_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "TOO_LATE_S", 1.0)
    async with mesh(True, True) as (made, (_, second)):
        made.ways["n1"].late.clear()
        (answer,) = await second.register("a/1")
        assert answer.error is not None and answer.error.code == codes.REGISTRY_UNAVAILABLE
        made.ways["n1"].late.set()
        await made.until_keys({"a/1"})
        await made.until_keys(set())


async def test_a_lease_that_was_revoked_meanwhile_is_replaced_and_the_newcomer_registered() -> None:
    async with mesh(True, True) as (made, (_, second)):
        (node_key,) = (await made.store.list("nodes/n1")).items
        await made.store.revoke(node_key.lease)
        (answer,) = await second.register("a/1")
        assert generation(answer) == (await made.keys())["a/1"].mod_revision


async def test_the_leader_takes_from_a_node_only_its_own_agents_and_only_so_many_at_once() -> None:
    async with mesh(True, True) as (made, (first, second)):
        (lease,) = {item.lease for item in (await made.store.list("nodes/n1")).items}
        theirs = [Attach(record=first.agent("a/1").to_record()), Attach(record=second.agent("b/1").to_record())]
        nameless = Attach(record=second.agent("b/ 2").to_record())
        answer = await first.admission.admit(Forward(agents=[*theirs, nameless], lease=lease), "n1")
        assert [each.error.code for each in answer.agents] == [codes.PERMISSION_DENIED, 0, codes.INVALID_ENVELOPE]
        many = [Attach(record=second.agent(f"c/{number}").to_record()) for number in range(100)]
        answer = await first.admission.admit(Forward(agents=many, lease=lease), "n1")
        assert len(answer.agents) == AGENTS_PER_FORWARD_MAX
