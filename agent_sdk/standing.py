"""What the node is told of an agent: how it is registered, what it still holds, how busy it is. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from agent_sdk.identity import incarnation
from agent_sdk.work import Key, Work
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1 import registry_pb2
from agentreach.wire.outbox import Item

if TYPE_CHECKING:
    from agent_sdk.host import Host

POOL_THREADS = 32  # for `def` handlers of an agent without a max_concurrency; also what its load is measured against


def attach(
    record: registry_pb2.AgentRecord,
    draining: bool,
    running: Mapping[Key, Work],
    answered: Iterable[tuple[Work, Item]],
) -> frames.Attach:
    """An agent's registration, with the messages it runs, the answers not acknowledged yet, and its sessions."""
    attach = frames.Attach(record=record)
    if draining:
        attach.record.status = registry_pb2.DRAINING
    for work in running.values():
        if work.replies:
            _hold(attach, work, frames.Holding.RUNNING)
            envelope = work.envelope
            if envelope.session_id and envelope.epoch:
                attach.sessions.add(session_id=envelope.session_id, epoch=envelope.epoch)
    for work, item in answered:
        if not item.accepted:
            _hold(attach, work, frames.Holding.REPLIED)
    return attach


def _hold(attach: frames.Attach, work: Work, state: frames.Holding.State.ValueType) -> None:
    tenant, principal, env, message_id = work.key
    key = frames.MessageKey(tenant=tenant, principal=principal, env=env, message_id=message_id)
    attach.holding.add(key=key, session_id=work.envelope.session_id, state=state)


def load(
    record: registry_pb2.AgentRecord, draining: bool, running: Mapping[Key, Work], active: int, idle_s: float
) -> registry_pb2.AgentLoad:
    """An agent's part of a heartbeat; `active` counts the handlers that run, `idle_s` since one has ended."""
    return registry_pb2.AgentLoad(
        agent_id=record.agent_id,
        status=registry_pb2.DRAINING if draining else registry_pb2.HEALTHY,
        load=min(active / (record.max_concurrency or POOL_THREADS), 1.0),
        in_flight=len(running),
        leftovers=sum(1 for work in running.values() if work.cancelled and work.admitted),
        since_last_completed_ms=max(int(idle_s * 1000), 0),
        self_check=True,
        config_version=record.config_version,
    )


def found(lookup: frames.Lookup, hosts: Collection[Host]) -> frames.Found:
    """Which of these messages the process's agents run or have answered."""
    found = frames.Found(nonce=lookup.nonce)
    for key in lookup.keys:
        item = found.items.add(key=key)
        for host in hosts:
            state = host.state_of(key)
            if state:
                item.state, item.agent_id, item.incarnation = state, host.agent_id, incarnation()
                break
    return found
