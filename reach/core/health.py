"""Three verdicts on an agent, kept apart: its link is dead, its handlers are stuck, or it is just busy (healthy).

A probe goes the way of the work: it is answered by the loop or pool that runs handlers. One that stays unanswered
makes the agent DEGRADED, two in a row UNREACHABLE; the next answer makes it what it says it is again. Being idle or
working long is no fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import AgentStatus
from reach.core import again, breakers, leaving, owners, remote, returning
from reach.core.agents import DEGRADED, DRAINING, HEALTHY, STARTING, UNREACHABLE
from reach.core.requests import Attachment, Request

if TYPE_CHECKING:
    from agentreach.wire.outbox import Item
    from reach.core.state import State

LOOK_S: Final = 1.0  # an agent with work is looked after at least so often
BREAKER_LOOK_S: Final = 0.05  # and never more often than so, however soon its breaker changes

_SAYABLE: Final = frozenset({HEALTHY, DEGRADED, DRAINING})


def begin(state: State, attachment: Attachment) -> None:
    """Watch over a newly attached agent."""
    attachment.probed_at = state.now
    _look_at(state, attachment, state.now + state.rules.probe_interval_busy_s)


def _look_at(state: State, attachment: Attachment, when: float) -> None:
    attachment.look_at = when
    attachment.timer = state.checks.schedule(attachment, when)


def look_soon(state: State, attachment: Attachment) -> None:
    """An idle agent, looked after seldom, was given work: see in time whether it acknowledges that."""
    end(state, attachment)
    _look_at(state, attachment, state.now + _look_every_s(state))


def look_by(state: State, attachment: Attachment, when: float) -> None:
    """Something about the agent changes at this time: look after it no later."""
    if when < attachment.look_at and attachment.timer is not None:
        end(state, attachment)
        _look_at(state, attachment, max(when, state.now))


def _look_every_s(state: State) -> float:
    return min(state.rules.probe_interval_busy_s, state.rules.accept_timeout_s / 4, LOOK_S)


def end(state: State, attachment: Attachment) -> None:
    """Stop watching."""
    if attachment.timer is not None:
        state.checks.cancel(attachment.timer, attachment)
        attachment.timer = None


def set_status(state: State, attachment: Attachment, status: int) -> None:
    """Make a status known to every decision at once."""
    agent = attachment.agent
    if agent.status == status:
        return
    attachment.unreachable_since = state.now if status == UNREACHABLE else 0.0
    state.log("info", "agent status", agent=agent.agent_id, status=_name(status), was=_name(agent.status))
    agent.status = status
    state.directory.changed(agent)
    owners.changed(state, attachment)
    if status == DRAINING:
        leaving.begin(state, attachment)
    if status == HEALTHY:
        returning.stir(state)


def _name(status: int) -> str:
    return AgentStatus.Name(AgentStatus.ValueType(status))


def said(state: State, attachment: Attachment, status: int) -> None:
    """The process reports a status (at once on a change, and with each heartbeat)."""
    if status not in _SAYABLE:
        return
    attachment.said_status = DRAINING if attachment.drain is not None else status
    _judge(state, attachment)


def _judge(state: State, attachment: Attachment) -> None:
    """What the agent is, from what it says and what is seen of it."""
    if attachment.said_status == DRAINING:
        status = DRAINING
    elif not attachment.proven:
        status = STARTING
    elif not attachment.peer.connected or attachment.missed_probes >= 2:
        status = UNREACHABLE
    elif attachment.missed_probes:
        status = DEGRADED
    else:
        status = attachment.said_status or HEALTHY
    set_status(state, attachment, status)


def out_of_sight(state: State, attachment: Attachment) -> None:
    """Its link was cut: no new work."""
    _judge(state, attachment)


def in_sight(state: State, attachment: Attachment) -> None:
    """Its link is back."""
    attachment.probe_sent_at = 0.0
    if not attachment.proven or attachment.missed_probes:  # its answer may have been lost with the old stream
        probe(state, attachment)
    _judge(state, attachment)


def probe(state: State, attachment: Attachment) -> None:
    """Ask the agent's handlers for a sign of life."""
    attachment.probe_nonce = state.rng.getrandbits(63)
    attachment.probe_sent_at = attachment.probed_at = state.now
    peer = attachment.peer
    peer.link.signal(Signal(probe=pb.Probe(agent_id=attachment.agent.agent_id, nonce=attachment.probe_nonce)))
    state.woken.add(peer)


def doubt(state: State, attachment: Attachment) -> None:
    """A handler did not end when it was told to: see at once whether any can run, though nothing else is under way."""
    if attachment.timer is not None and attachment.peer.connected and not attachment.probe_sent_at:
        probe(state, attachment)
        look_by(state, attachment, state.now + state.rules.probe_timeout_s)


def answered(state: State, attachment: Attachment, reply: pb.ProbeReply) -> None:
    """The sign of life came. An old probe's late answer is one too, but does not make a starting agent ready."""
    if reply.nonce == attachment.probe_nonce:
        attachment.probe_sent_at = 0.0
        if reply.ready and not attachment.proven:
            attachment.proven = True
            attachment.agent.warm_since = state.now
    attachment.missed_probes = 0
    _judge(state, attachment)


def on_timer(state: State, attachment: Attachment) -> None:
    """Time to look after the agent: overdue probes, overdue acknowledgements, the next probe."""
    if attachment.remote:
        remote.on_timer(state, attachment)
        return
    if attachment.peer.attachments.get((attachment.agent.env, attachment.agent.agent_id)) is not attachment:
        return  # it left in this very tick
    rules, now = state.rules, state.now
    look_for_overdue(state, attachment)
    sent_at = attachment.probe_sent_at
    connected = attachment.peer.connected
    if sent_at and connected and now - sent_at >= rules.probe_timeout_s:
        attachment.missed_probes += 1
        attachment.probe_sent_at = 0.0
        _judge(state, attachment)
        probe(state, attachment)
    elif not sent_at and connected:
        unsure = attachment.overdue is not None or attachment.agent.status in (STARTING, DEGRADED)
        busy = unsure or bool(attachment.attempts or attachment.held or attachment.agent.leftovers)
        interval_s = rules.probe_interval_busy_s if busy else rules.probe_interval_idle_s
        if now - attachment.probed_at >= interval_s:
            probe(state, attachment)
    if attachment.unreachable_since and attachment.pinned and now - attachment.unreachable_since >= rules.owner_lost_s:
        owners.gone(state, attachment)
    wait_s = min(rules.probe_interval_busy_s, rules.probe_timeout_s)
    agent = attachment.agent
    if agent.suspect or agent.recent_failures:
        breakers.look(state, agent)
        if agent.breaker is not None:
            wait_s = max(BREAKER_LOOK_S, min(wait_s, agent.breaker.next_at(now) - now))
    if attachment.overdue is not None or attachment.attempts:
        wait_s = min(wait_s, _look_every_s(state))
    _look_at(state, attachment, now + wait_s)


def look_for_overdue(state: State, attachment: Attachment) -> None:
    """An agent that does not acknowledge what it was sent gets nothing new until it does."""
    overdue = attachment.overdue
    known = overdue is not None and not overdue.accepted and not overdue.doubtful
    late = [
        request
        for request in attachment.attempts.values()
        if request.item is not None and _is_overdue(state, attachment, request, request.item)
    ]
    if late and not known and late[0].item is not None:
        unacknowledged(state, attachment, late[0].item)
    for request in late:
        again.unacknowledged(state, request)
    if overdue is not None and not late and not known:
        attachment.overdue = None
        unsaturate(state, attachment)
        owners.changed(state, attachment)


def unacknowledged(state: State, attachment: Attachment, item: Item) -> None:
    """This delivery was not acknowledged in time."""
    if attachment.overdue is None:
        state.log("warning", "agent does not acknowledge deliveries: no new work", agent=attachment.agent.agent_id)
    attachment.overdue = item
    attachment.agent.saturated = True
    state.directory.changed(attachment.agent)


def unsaturate(state: State, attachment: Attachment) -> None:
    """Let requests see the agent again once its outbox has room and nothing is overdue."""
    agent = attachment.agent
    if agent.saturated and attachment.peer.connected and not attachment.peer.link.full and not attachment.overdue:
        agent.saturated = False
        state.directory.changed(agent)


def _is_overdue(state: State, attachment: Attachment, request: Request, item: Item) -> bool:
    if item.seq == 0 or item.accepted or not attachment.peer.connected:
        return False
    if item.doubtful and item.data is None:
        return False  # withdrawn from a link that has begun anew: nothing of it is sent again
    since = max(item.sent_at, attachment.peer.back_at)
    limit_s = min(state.rules.accept_timeout_s, (request.deadline - request.delivered_at) / 4)
    return state.now - since > limit_s
