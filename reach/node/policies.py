"""Version policies and agents' settings in the registry: followed by every node, written by the one that leads.

Each key is a value of its own with the store's revision as its version; whoever sets it says which version it replaces,
so two operators cannot overwrite each other unseen. Another node than the leading one forwards what is to be set. What
was set is in force on the node that was asked as soon as it answers, on the others as soon as their watch tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import structlog
from google.protobuf.message import DecodeError

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import error_pb2 as codes
from agentreach.v1 import registry_pb2 as registry
from agentreach.v1.error_pb2 import Error
from agentreach.v1.frame_pb2 import Forward, Forwarded
from agentreach.wire.errors import failure
from reach.core import configs, version_policy
from reach.core.configs import Settings
from reach.core.ports import MeshFailure
from reach.core.state import State
from reach.core.store import (
    Change,
    Compacted,
    Compare,
    Delete,
    Field,
    Get,
    Item,
    LeaseGone,
    Op,
    Operation,
    Put,
    Store,
    StoreUnavailable,
    absent,
)
from reach.node.admission import Admission, Forwarder, Nobody
from reach.node.election import Election, NotLeading
from reach.node.forwarding import Answer
from reach.node.mirror import Mirror

log = structlog.get_logger("reach.policies")

VERSIONS, CONFIG = "versions/", "config/"
REVISION_LAST = (1 << 63) - 1  # no store has one, and etcd can be asked for none beyond
POLICIES_MAX = 1_000
LEADER_WAIT_S = 3.0  # a new leader is there within 5 s; operators' tools wait 5 s for an answer
FORWARD_S = 3.0
LIST_AGAIN_S = 0.5  # after the store did not answer
LIST_EVERY_S = 60.0  # whatever the watch says: that nothing came does not prove that nothing changed
TELL_AT_ONCE = 500  # agents told in one step; ≈ 30 µs each

Step = Callable[[], AbstractContextManager[State]]


class Policies:
    """This node's part in them. `start`, then `run` in a task; `answer` what other nodes forward to this one."""

    def __init__(
        self, store: Store, election: Election, state: State, *, step: Step, forwarder: Forwarder | None = None
    ) -> None:
        self._store = store
        self._election = election
        self._state = state
        self._step = step
        self._forwarder = forwarder or Nobody()
        self._mirrors = (Mirror(VERSIONS), Mirror(CONFIG))
        self._one_at_a_time = asyncio.Lock()
        self._led = asyncio.Event()
        """Set when another node leads."""
        self._unusable: dict[str, int] = {}
        """By key: the revisions of values that cannot be used."""
        election.listeners.append(self._led.set)

    def connect(self, forwarder: Forwarder) -> None:
        """Ask this way while another node leads."""
        self._forwarder = forwarder

    # ---- its life ----

    async def start(self) -> None:
        """Learn what is set before anything is routed. Raises `StoreUnavailable`."""
        for mirror in self._mirrors:
            await self._list(mirror)

    async def run(self) -> None:
        """Follow what is set until cancelled."""
        async with asyncio.TaskGroup() as group:
            for mirror in self._mirrors:
                group.create_task(self._follow(mirror), name=f"policies-{mirror.prefix.rstrip('/')}")

    async def _follow(self, mirror: Mirror) -> None:
        while True:
            try:
                async with asyncio.timeout(LIST_EVERY_S):
                    await self._watch(mirror)
                    return  # the store is closed
            except (Compacted, TimeoutError):
                pass
            except StoreUnavailable:
                await asyncio.sleep(LIST_AGAIN_S)
            with contextlib.suppress(StoreUnavailable):
                await self._list(mirror)

    async def _watch(self, mirror: Mirror) -> None:
        async with contextlib.aclosing(self._store.watch(mirror.prefix, mirror.revision + 1)) as batches:
            async for batch in batches:
                if batch:
                    await self._apply(mirror, mirror.fresh(batch))
                    mirror.reached(batch[-1].revision)

    async def _list(self, mirror: Mirror) -> None:
        listing = await self._store.list(mirror.prefix)
        await self._apply(mirror, mirror.difference(listing))
        mirror.listed(listing.revision, 0.0)

    async def _apply(self, mirror: Mirror, changes: Sequence[Change]) -> None:
        if not changes:
            return
        with self._step() as state:
            for change in changes:
                mirror.hold(change)
                take = _take_policy if mirror.prefix == VERSIONS else _take_settings
                self._unusable.pop(change.key, None)
                if not take(state, change.key, change.item):
                    self._unusable[change.key] = change.revision
        if mirror.prefix == CONFIG:
            await self._tell_agents()

    async def _tell_agents(self) -> None:
        attached = configs.attached_here(self._state)
        for at in range(0, len(attached), TELL_AT_ONCE):
            if at:
                await asyncio.sleep(0)
            with self._step() as state:
                for attachment in attached[at : at + TELL_AT_ONCE]:
                    if not attachment.peer.closing:
                        configs.tell(state, attachment)

    # ---- what operators set ----

    def version_of(self, key: str, known: int) -> int:
        """What to name as the version to be replaced: of what is in force, or of what cannot be used in its place."""
        return max(known, self._unusable.get(key, 0))

    async def set_version_policy(self, request: registry.SetVersionPolicyRequest) -> registry.SetVersionPolicyReply:
        """Set or, without versions, end the policy of an agent type. Raises `MeshFailure`.

        The reply's policy has its new version; 0 if there is none any more.
        """
        policy = registry.VersionPolicy()
        policy.CopyFrom(request.policy)
        policy.env, policy.agent_type = version_policy.key_of(policy)
        asked = registry.SetVersionPolicyRequest(policy=policy)
        policy.version = await self._set(Forward(set_version_policy=asked.SerializeToString()))
        ends = not policy.preferred and not policy.weights
        if ends:
            policy.version = 0
        with self._step() as state:
            _obey(state, version_policy.key_of(policy), None if ends else policy, policy.version)
        return registry.SetVersionPolicyReply(policy=policy)

    async def set_config(self, request: admin.SetConfigRequest) -> admin.SetConfigReply:
        """Set agents' settings; those there were under the name are gone. Raises `MeshFailure`."""
        version = await self._set(Forward(set_config=request.SerializeToString()))
        with self._step() as state:
            _give(state, request.name, dict(request.settings), version)
        await self._tell_agents()
        return admin.SetConfigReply(version=version)

    async def _set(self, forward: Forward) -> int:
        """Have it written by whoever leads; the new version."""
        try:
            answer = await self._ask(forward)
        except StoreUnavailable as error:
            raise MeshFailure(_unavailable(str(error), may_have_executed=True)) from error
        if answer.HasField("error"):
            raise MeshFailure(answer.error)
        return answer.version

    async def _ask(self, forward: Forward) -> Forwarded:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEADER_WAIT_S):
                while self._election.leader is None:
                    self._led.clear()
                    await self._led.wait()
        if self._election.leading is not None:
            return await self.answer(forward)
        try:
            async with asyncio.timeout(FORWARD_S):
                answer = await self._forwarder.forward(forward)
        except TimeoutError:
            raise StoreUnavailable("the leader does not answer") from None
        leader = self._election.leader
        if leader is not None and not answer.HasField("error") and answer.election < leader.revision:
            raise StoreUnavailable("the answer is a former leader's")
        return answer

    # ---- what the leader writes ----

    async def answer(self, forward: Forward) -> Forwarded:
        """Set what a node asks for, if this one leads. Never raises for what the node or the store did."""
        answer = Forwarded(nonce=forward.nonce)
        leading = self._election.leading
        if leading is not None:
            answer.election = leading.revision
        try:
            outcome = await self._carry_out(forward)
        except DecodeError as error:
            outcome = failure(codes.INVALID_ENVELOPE, f"what is to be set cannot be read: {error}")
        except (StoreUnavailable, LeaseGone) as error:
            outcome = _unavailable(str(error), may_have_executed=True)
        if isinstance(outcome, Error):
            answer.error.CopyFrom(outcome)
        else:
            answer.version = outcome
        return answer

    async def _carry_out(self, forward: Forward) -> int | Error:
        if forward.set_version_policy:
            policy = registry.SetVersionPolicyRequest.FromString(forward.set_version_policy).policy
            why = version_policy.fault(policy)
            if why is not None:
                return failure(codes.INVALID_ENVELOPE, why)
            version, policy.version = policy.version, 0
            policy.env, policy.agent_type = version_policy.key_of(policy)
            ends = not policy.preferred and not policy.weights
            key = f"{VERSIONS}{policy.env}/{policy.agent_type}"
            return await self._write(key, None if ends else policy.SerializeToString(), version)
        request = admin.SetConfigRequest.FromString(forward.set_config)
        why = configs.fault(request.name, request.settings)
        if why is not None:
            return failure(codes.INVALID_ENVELOPE, why)
        value = admin.GetConfigReply(settings=request.settings).SerializeToString()
        return await self._write(CONFIG + request.name, value, request.version)

    async def _write(self, key: str, value: bytes | None, version: int) -> int | Error:
        """Compare and set, or delete; the new version."""
        compare = Compare(key, Field.MOD, Op.EQUAL, min(version, REVISION_LAST)) if version else absent(key)
        then: Operation = Put(key, value) if value is not None else Delete(key)
        async with self._one_at_a_time:
            if not version and value is not None and await self._is_full(key):
                return failure(codes.OVERLOADED, f"{POLICIES_MAX} of these are set already, the limit; end one first")
            result = await self._election.write_as_leader([compare], [then], [Get(key)])
        if isinstance(result, NotLeading):
            return _unavailable(f"{result.leader_id or 'no node'} leads now")
        if result.succeeded:
            return result.revision
        present = next((item.mod_revision for read in result.reads for item in read), 0)
        wanted = f"version {version}" if version else "none"
        there = f"it has version {present}" if present else "there is none"
        text = f"{key} is not as you have seen it: {there}, not {wanted}; read it again, and set it with its version"
        return failure(codes.FENCED, text, details={"version": str(present)})

    async def _is_full(self, key: str) -> bool:
        """No more may be added beside this one, and it is not there."""
        prefix = next(mirror.prefix for mirror in self._mirrors if key.startswith(mirror.prefix))
        summary = await self._store.summary(prefix)
        return summary.count >= POLICIES_MAX and await self._store.get(key) is None


def wishes(admission: Admission, policies: Policies) -> Answer:
    """What this node does, as the leader, with what another one forwards."""

    async def answer(forward: Forward, node_id: str) -> Forwarded:
        if forward.set_version_policy or forward.set_config:
            return await policies.answer(forward)
        return await admission.admit(forward, node_id)

    return answer


def _take_policy(state: State, key: str, item: Item | None) -> bool:
    """Obey what stands there now. False if that cannot be used: no policy is in force."""
    env, _, agent_type = key.removeprefix(VERSIONS).partition("/")
    policy, why = None, None
    if item is not None:
        try:
            policy = registry.VersionPolicy.FromString(item.value)
        except DecodeError as error:
            why = str(error) or "it is no policy"
        else:
            why = version_policy.fault(policy)
            if why is None and version_policy.key_of(policy) != (env, agent_type):
                why = "it is of another type"
    if why is not None:
        _left_out(key, why)
        policy = None
    _obey(state, (env, agent_type), policy, item.mod_revision if item is not None else 0)
    return why is None


def _obey(state: State, key: tuple[str, str], policy: registry.VersionPolicy | None, version: int) -> None:
    """From now on this policy is in force, or none."""
    env, agent_type = key
    known = state.version_policies.get(key)
    if policy is None:
        if state.version_policies.pop(key, None) is not None:
            log.info("no version policy any more", agent_type=agent_type, env=env)
    elif known is None or known.version < version:
        taken = state.version_policies[key] = version_policy.from_proto(policy, version)
        log.info("version policy", agent_type=agent_type, env=env, shares=dict(taken.shares), version=version)


def _take_settings(state: State, key: str, item: Item | None) -> bool:
    """Give agents what stands there now. False if that cannot be used: they have what they had."""
    name = key.removeprefix(CONFIG)
    if item is None:
        state.configs.drop(name)
        return True
    try:
        values = dict(admin.GetConfigReply.FromString(item.value).settings)
    except DecodeError as error:
        why: str | None = str(error) or "these are no settings"
    else:
        why = configs.fault(name, values)
    if why is not None:
        _left_out(key, why)
        return False
    _give(state, name, values, item.mod_revision)
    return True


def _give(state: State, name: str, values: dict[str, str], version: int) -> None:
    """From now on agents have these settings."""
    if state.configs.put(name, Settings(values, version)):
        log.info("settings of agents", name=name, keys=sorted(values), version=version)


def _left_out(key: str, why: str) -> None:
    log.warning("a value in the registry cannot be used: left out", key=key, why=why)


def _unavailable(why: str, *, may_have_executed: bool = False) -> Error:
    return failure(
        codes.REGISTRY_UNAVAILABLE,
        f"it cannot be set now: {why}",
        retry_after_ms=1_000,
        may_have_executed=may_have_executed,
    )
