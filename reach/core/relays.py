"""Messages that this node gave to the node that owns them (`once`): from there they are answered as by an agent.

What stands for such a node is an attachment, so that giving, cancelling and settling are the code that agents have. An
owner that is lost, or that is leaving, is followed by another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentreach.v1.envelope_pb2 import Envelope
from reach.core import again, once, order, outcomes, route, settle, writing
from reach.core.agents import Agent
from reach.core.requests import Attachment, Request, Stage

if TYPE_CHECKING:
    from reach.core.nodes import NodePeer
    from reach.core.state import State


def relay(state: State, request: Request, envelope: Envelope, node: NodePeer) -> None:
    """Give a request to the node that owns its message; its replies come back as from an agent."""
    attachment = _broker(state, node)
    request.agent, request.attachment, request.attempt = attachment.agent, attachment, 1
    request.relayed, request.retriable = True, False
    outcomes.forget(state, request)
    state.relayed[request.key] = request
    request.agent_type = envelope.target.agent_type.lower()
    request.note("relayed", state.now, f"to node {node.node_id}, which owns the message")
    attachment.attempts[request.number] = request
    if order.applies(envelope, request.parent):
        order.relayed(state, request, envelope.session_id, node)
    request.data = writing.relayed(state, request, envelope)
    route.put_on_link(state, request, attachment)


def answered(state: State, request: Request) -> None:
    """A relayed request has its outcome."""
    if state.relayed.get(request.key) is request:
        del state.relayed[request.key]


def _broker(state: State, node: NodePeer) -> Attachment:
    """What stands for a node that is given requests to own."""
    if node.broker is None:
        agent = Agent(f"node/{node.node_id}")
        node.broker = Attachment(agent, node, state.now, remote=True)
        node.broker.look_at = float("inf")
        agent.link = node.broker
    return node.broker


def owner_lost(state: State, node: NodePeer) -> None:
    """The link to an owner was cut: its messages are another's, who will ask whether they ran."""
    if node.broker is None:
        return
    for request in list(node.broker.attempts.values()):
        if request.stage is Stage.SETTLED:
            settle.release(state, request)
            continue
        if request.items:
            continue  # it cannot begin anew; its deadline ends it, or the link comes back
        request.ran = True
        _to_another(state, request, node)


def declined(state: State, request: Request, node: NodePeer) -> None:
    """The owner takes nothing more, for it is leaving, and had not said so yet: the message is another's."""
    node.draining = True
    _to_another(state, request, node)


def _to_another(state: State, request: Request, node: NodePeer) -> None:
    if request.item is not None:
        node.link.withdraw(request.item)
    settle.give_back(state, request)
    answered(state, request)
    del state.requests[request.number]
    again.renumber(state, request)  # the former owner may be given it once more, for an agent of its
    twin = state.by_key.get(request.key)
    if twin is not None and twin.is_settled:  # at its agent's home: what became of it is known here
        outcomes.keep_unconfirmed(state, twin)
    state.by_key.setdefault(request.key, request)
    request.attempt, request.relayed, request.retriable = 0, False, True
    request.inquired = False
    request.stage = Stage.ADMITTED
    envelope = Envelope.FromString(request.data)
    envelope.fresh = False
    once.place(state, request, envelope, request.parent)
