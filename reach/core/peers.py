"""A process attached by a link: its callers and agents, and how it stands with its stream."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agentreach.wire.limits import OUTBOX_BYTES_HARD_MAX, OUTBOX_BYTES_MAX
from agentreach.wire.link import Link
from agentreach.wire.names import normalise_env
from agentreach.wire.outbox import Item

if TYPE_CHECKING:
    from agentreach.policy.wheel import Token
    from reach.core.ports import Identity
    from reach.core.quotas import Account
    from reach.core.requests import Attachment, Request
    from reach.core.state import State

Subscription = tuple[str, str, str]
"""(env, topic, agent_id); the agent_id is empty for the process's caller."""


class Peer:
    """The node's end of one link. It outlives its streams by the resume window; it is a `Port` for replies."""

    __slots__ = (
        "account",
        "acked_seen",
        "acked_seen_at",
        "arriving",
        "attachments",
        "back_at",
        "caller_id",
        "came_from",
        "closing",
        "connected",
        "cut_at",
        "elsewhere",
        "env",
        "event_items",
        "filled",
        "gaps",
        "heard_at",
        "hellos",
        "incarnation",
        "link",
        "link_id",
        "numbers_items",
        "requests",
        "restarts",
        "state",
        "stream",
        "subscriptions",
        "timer",
        "token",
        "welcomed",
        "who",
    )

    def __init__(self, state: State, link_id: str, token: bytes, who: Identity) -> None:
        self.state = state
        self.link = Link(state.outboxes)
        self.link_id = link_id
        self.token = token
        self.who = who
        self.came_from = ""
        """Where its present stream comes from, for people."""
        self.account: Account | None = None
        """Of its principal, where limits are set."""
        self.env = "production"
        self.caller_id = ""
        self.incarnation = b""
        self.attachments: dict[tuple[str, str], Attachment] = {}
        """By (env, agent_id)."""
        self.requests: dict[int, Request] = {}
        """Requests that have a waiter here, by number."""
        self.subscriptions: set[Subscription] = set()
        self.event_items: deque[Item] = deque()
        """Events in the outbox, oldest first: what a slow subscriber loses."""
        self.gaps: dict[tuple[str, str], int] = {}
        """Events dropped by (agent_id, topic), not yet told; the agent_id is empty for the process's caller."""
        self.stream: object = None
        """The current stream, opaque to the core: the engine wakes its outlet."""
        self.connected = True
        self.welcomed = False
        self.numbers_items = False
        """The items of its streamed replies are numbered, as by an SDK or a node; who writes by hand may not do it."""
        self.arriving = 0
        """Registrations that the store has not answered yet."""
        self.closing = False
        """It is over: what an old stream of it still brings counts for nothing."""
        self.filled = False
        """Its outbox was full: some of its agents count as full until there is room."""
        self.hellos = 0
        """How often a stream began; the answer to an earlier hello is nobody's."""
        self.restarts = False
        """Its numbering begins anew with the next welcome; until then nothing numbered may go out."""
        self.back_at = state.now
        """When its present stream began."""
        self.cut_at = 0.0
        self.heard_at = state.now
        self.acked_seen = 0
        self.acked_seen_at = state.now
        self.timer: Token | None = None
        self.elsewhere: tuple[str, ...] = ()
        """The addresses of other nodes that its process has, of those that this node told it."""

    streaming = True

    def deliver(self, reply: bytes, priority: int, *, final: bool = True) -> Item | None:
        """Put a RESPONSE on the link."""
        state = self.state
        link = self.link
        item = link.put_bytes(reply, state.now, priority)
        state.woken.add(self)
        waiting_bytes = link.waiting_bytes
        if waiting_bytes >= OUTBOX_BYTES_MAX and (waiting_bytes >= OUTBOX_BYTES_HARD_MAX or state.outboxes.full):
            state.overrun.add(self)
        return item

    @property
    def names(self) -> tuple[str, ...]:
        """What its messages may say they come from."""
        return (self.caller_id, *(agent_id for _, agent_id in self.attachments))

    def attachment(self, agent_id: str, env: str = "") -> Attachment | None:
        """The agent of this link; without an env the one in the link's own, else the only one of that id."""
        attachment = self.attachments.get((normalise_env(env or self.env), agent_id))
        if attachment is None and not env:
            found = [each for (_, name), each in self.attachments.items() if name == agent_id]
            return found[0] if len(found) == 1 else None
        return attachment
