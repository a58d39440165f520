"""How much one principal, and one tenant, may have and do at this node, so that nobody takes it all.

Things that stand (links, sessions, topics, streams, agents) are counted; what flows (requests, bytes) is measured by a
token bucket each. What is over a limit is refused as OVERLOADED, naming the limit and whose it is; nothing else of that
principal is touched, and nobody else's. While no limit is set there are no accounts, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.v1.error_pb2 import Error
from agentreach.wire.errors import failure
from agentreach.wire.names import normalise_env
from reach.core.bucket import Bucket
from reach.core.peers import Peer

if TYPE_CHECKING:
    from reach.core.calls import Call
    from reach.core.lanes import LaneKey
    from reach.core.ports import Identity
    from reach.core.requests import Request
    from reach.core.rules import Rules
    from reach.core.state import State

LINKS, AGENTS, SESSIONS, TOPICS, STREAMS = "links_max", "agents_max", "sessions_max", "topics_max", "streams_max"
SILENT = "silent_streams_max"
REQUESTS, BYTES = "requests_per_s", "bytes_per_s"

LIMITS = (LINKS, AGENTS, SESSIONS, TOPICS, STREAMS, REQUESTS, BYTES)
"""What may be limited: the names of the settings, after `principal_` and `tenant_`."""

Owner = tuple[str, str]
"""(tenant, principal)."""

ACCOUNTS_MAX = 10_000  # principals with an account; beyond, those that have nothing and do nothing are forgotten
RETRY_AFTER_MS = 1_000  # of what is counted: nobody knows when one of it ends

_WHAT = {
    LINKS: "links to this node",
    AGENTS: "agents registered",
    SESSIONS: "conversations on this node",
    TOPICS: "subscriptions on this node",
    STREAMS: "streamed replies under way on this node",
}


class Account:
    """What one principal, or one tenant, has and does here; a principal's leads to its tenant's."""

    __slots__ = ("_bytes", "_limits", "_prefix", "_requests", "counts", "short_s", "tenant", "whose")

    def __init__(self, whose: str, prefix: str, limits: Mapping[str, int], burst_s: float, tenant: Account | None):
        self.whose = whose
        """`principal NAME` or `tenant NAME`, for people."""
        self.tenant = tenant
        self.counts = dict.fromkeys((LINKS, AGENTS, SESSIONS, TOPICS, STREAMS), 0)
        """What stands. Of agents only those whose registration is on its way: the others stand in the directory."""
        self.short_s = 0.0
        """How long its bytes had to wait when the last ones came."""
        self._prefix = prefix
        self._limits = limits
        requests, octets = limits.get(REQUESTS, 0), limits.get(BYTES, 0)
        self._requests = Bucket(requests, burst_s) if requests else None
        self._bytes = Bucket(octets, burst_s) if octets else None

    def limit(self, kind: str) -> int:
        """How much of it there may be; 0: any number."""
        return self._limits.get(kind, 0)

    def setting(self, kind: str) -> str:
        """The setting that says so."""
        return self._prefix + kind

    def is_idle(self, now: float) -> bool:
        """It has nothing, and did nothing for a while."""
        flows = (self._requests, self._bytes)
        return not any(self.counts.values()) and all(each is None or each.is_full(now) for each in flows)

    def take(self, kind: str, count: int = 1) -> None:
        """It has one more of what is counted; so has its tenant."""
        self.counts[kind] += count
        if self.tenant is not None:
            self.tenant.take(kind, count)

    def give_back(self, kind: str) -> None:
        """It has one less."""
        self.take(kind, -1)

    def received(self, now: float, size: int) -> None:
        """Bytes have come from it. While some are owed still, further ones do not make it more."""
        octets, tenant = self._bytes, self.tenant
        if octets is not None:
            self.short_s = octets.wait_s(now)
            if not self.short_s:
                octets.take(now, size)
        if tenant is not None:
            tenant.received(now, size)

    def admits(self, now: float) -> bool:
        """Count a request, if its own limits and its tenant's allow one more."""
        if self.short_s:
            return False
        requests, tenant = self._requests, self.tenant
        if requests is not None and not requests.takes_one(now):
            return False
        if tenant is None or tenant.admits(now):
            return True
        if requests is not None:
            requests.give_one_back()
        return False

    def over(self, kind: str) -> Account | None:
        """Whose limit of what is counted leaves no room: its own, its tenant's, or nobody's."""
        limit = self._limits.get(kind, 0)
        if limit and self.counts[kind] >= limit:
            return self
        return self.tenant.over(kind) if self.tenant is not None else None

    def wait_s(self, now: float, overdraft: float) -> float:
        """How long its next request has to wait for its own limit on them."""
        return self._requests.wait_s(now, overdraft) if self._requests is not None else 0.0

    def count_request(self, now: float) -> None:
        """A request of it was let in, whatever the limits."""
        if self._requests is not None:
            self._requests.take(now, 1)
        if self.tenant is not None:
            self.tenant.count_request(now)


class Quotas:
    """The accounts of a node on which some limit is set."""

    def __init__(
        self,
        principal: Mapping[str, int],
        tenant: Mapping[str, int],
        burst_s: float,
        tenants: Mapping[str, Mapping[str, int]],
    ) -> None:
        """`tenants` holds what is otherwise for some tenants: limits of the tenant, by their setting's whole name."""
        self._limits = {"principal_": principal, "tenant_": tenant}
        self._burst_s = burst_s
        self._tenants_own = tenants
        self._tenants: dict[str, Account] = {}
        self._principals: dict[tuple[str, str], Account] = {}
        self._sweep_at = ACCOUNTS_MAX
        self._sessions: dict[LaneKey, Account] = {}

    @property
    def known(self) -> int:
        """Principals with an account."""
        return len(self._principals)

    def of(self, owner: Owner, now: float) -> Account:
        """A principal's account; made if it has none."""
        return self._principals.get(owner) or self._open(owner, now)

    def session(self, key: LaneKey, owner: Owner, now: float) -> None:
        """A message of this principal is in a session: it is the one's who used it first, as far as is known here."""
        if key not in self._sessions:
            account = self._sessions[key] = self.of(owner, now)
            account.take(SESSIONS)

    def session_over(self, key: LaneKey) -> None:
        """It is forgotten."""
        account = self._sessions.pop(key, None)
        if account is not None:
            account.give_back(SESSIONS)

    def _open(self, owner: Owner, now: float) -> Account:
        if len(self._principals) >= self._sweep_at:
            self._sweep(now)
        tenant, principal = owner
        above = self._tenants.get(tenant)
        if above is None:
            above = self._tenants[tenant] = self._make("tenant_", f"tenant {tenant}", tenant, None)
        account = self._principals[owner] = self._make("principal_", f"principal {principal}", tenant, above)
        return account

    def _make(self, prefix: str, whose: str, tenant: str, above: Account | None) -> Account:
        limits = dict(self._limits[prefix])
        for name, limit in self._tenants_own.get(tenant, {}).items():
            if name.startswith(prefix):
                limits[name.removeprefix(prefix)] = limit
        return Account(whose, prefix, limits, self._burst_s, above)

    def _sweep(self, now: float) -> None:
        self._principals = {key: each for key, each in self._principals.items() if not each.is_idle(now)}
        used = {key[0] for key in self._principals}
        self._tenants = {key: each for key, each in self._tenants.items() if key in used or not each.is_idle(now)}
        self._sweep_at = max(ACCOUNTS_MAX, 2 * len(self._principals))


def of_rules(rules: Rules) -> Quotas | None:
    """The accounts that these rules need; None: no limit is set."""
    principal: dict[str, int] = {name: getattr(rules, f"principal_{name}") for name in LIMITS}
    tenant: dict[str, int] = {name: getattr(rules, f"tenant_{name}") for name in LIMITS}
    if not any(principal.values()) and not any(tenant.values()) and not rules.quotas:
        return None
    return Quotas(principal, tenant, rules.quota_burst_s, rules.quotas)


# ---- what flows ----


def request_fault(state: State, who: Identity, envelope: Envelope) -> Error | None:
    """Count a request or an event; an error if it is one too many for now.

    A repeat of a message that may be under way is let in beyond the limit, until as many as make a burst are owed:
    after a cut a process sends all that it waits for again, and what runs must not end with an error.
    """
    quotas = state.quotas
    assert quotas is not None
    account = quotas.of((who.tenant, who.principal), state.now)
    if account.admits(state.now):
        return None
    again = is_repeat(state, who, envelope)
    too_fast = _too_fast(state, account, again)
    if too_fast is None:
        account.count_request(state.now)
    return too_fast


def is_repeat(state: State, who: Identity, envelope: Envelope) -> bool:
    """The message was sent before, as far as its sender or this node knows."""
    message_id = envelope.message_id
    key = (who.tenant, who.principal, normalise_env(envelope.env), message_id)
    return bool(message_id) and (not envelope.fresh or key in state.by_key)


def query_fault(state: State, who: Identity) -> Error | None:
    """Count a call that carries no message; an error if it is one too many for now."""
    if state.quotas is None:
        return None
    account = state.quotas.of((who.tenant, who.principal), state.now)
    return None if account.admits(state.now) else _too_fast(state, account, again=False)


def _too_fast(state: State, account: Account | None, again: bool) -> Error | None:
    """Which limit per second an account, or its tenant's, is over; None: none, for a message that comes again."""
    while account is not None:
        if account.wait_s(state.now, 2.0 if again else 1.0):
            return _refused(state, account, REQUESTS, account.wait_s(state.now, 1.0), again)
        if account.short_s and not again:
            return _refused(state, account, BYTES, account.short_s, again)
        account = account.tenant
    return None


def _refused(state: State, account: Account, kind: str, wait_s: float, may_have_executed: bool) -> Error:
    state.stats.quota_refusals[kind] += 1
    what = "requests and events" if kind == REQUESTS else "bytes"
    return failure(
        codes.OVERLOADED,
        f"{account.whose} sends more than {account.limit(kind)} {what} a second, its limit ({account.setting(kind)})",
        retry_after_ms=int(wait_s * 1000) + 1,
        may_have_executed=may_have_executed,
    )


# ---- what stands ----


def fault(state: State, account: Account | None, kind: str) -> Error | None:
    """Why an account may not have one more of what is counted; None: it may. A refusal is counted."""
    over = account.over(kind) if account is not None else None
    return _too_many(state, over, kind, over.counts[kind]) if over is not None else None


def why_full(account: Account, kind: str) -> str:
    """The same in words, for where no error can be sent; empty: there is room."""
    over = account.over(kind)
    return _full_text(over, kind, over.counts[kind]) if over is not None else ""


def _too_many(state: State, account: Account, kind: str, count: int) -> Error:
    state.stats.quota_refusals[kind] += 1
    return failure(codes.OVERLOADED, _full_text(account, kind, count), retry_after_ms=RETRY_AFTER_MS)


def _full_text(account: Account, kind: str, count: int) -> str:
    return f"{account.whose} has {count} {_WHAT[kind]}, its limit ({account.setting(kind)}): end some, then try again"


def agents_fault(state: State, account: Account, who: Identity) -> Error | None:
    """Why a principal may not register one more agent, by all that the registry shows of the mesh; None: it may."""
    directory = state.directory
    registered = directory.of_principal.get((who.tenant, who.principal), 0)
    for each, there in ((account, registered), (account.tenant, directory.of_tenant.get(who.tenant, 0))):
        if each is not None and (limit := each.limit(AGENTS)) and there + each.counts[AGENTS] >= limit:
            return _too_many(state, each, AGENTS, there + each.counts[AGENTS])
    return None


def call_fault(state: State, call: Call, who: Identity, envelope: Envelope) -> Error | None:
    """Take note of a call that brings a message; an error if it is a stream too many."""
    if state.quotas is None:
        return None
    account = state.quotas.of((who.tenant, who.principal), state.now)
    account.received(state.now, envelope.ByteSize())
    if not call.streaming:
        return None
    too_many = fault(state, account, STREAMS)
    if too_many is None:
        call.account = account
        account.take(STREAMS)
    return too_many


def stream_fault(state: State, request: Request) -> Error | None:
    """The first item of a streamed reply is there: take note of it; an error if it is a stream too many.

    Whether a reply is streamed is known no sooner. What came by a call of its own was counted when that came.
    """
    if state.quotas is None:
        return None
    peer = next((each.port for each in request.waiters if isinstance(each.port, Peer)), None)
    account = peer.account if peer is not None else None
    too_many = fault(state, account, STREAMS)
    if too_many is not None:
        too_many.may_have_executed = True
    elif account is not None:
        request.streams_of = account
        account.take(STREAMS)
    return too_many


def session_fault(state: State, owner: Owner, key: LaneKey) -> Error | None:
    """Why a principal may not begin this conversation; None: it may, or it is not new."""
    if state.quotas is None or key in state.lanes:
        return None
    return fault(state, state.quotas.of(owner, state.now), SESSIONS)


# ---- streams that have not said hello ----


def silent_fault(state: State, who: Identity) -> Error | None:
    """Take note of a new stream, which has not said hello; an error if there are too many of these."""
    key = (who.tenant, who.principal)
    there, all_there = state.silent.get(key, 0), state.silent_count
    rules = state.rules
    if there >= rules.principal_silent_streams_max:
        text = f"principal {who.principal} has {there} streams that have not said hello"
        setting = "principal_silent_streams_max"
    elif all_there >= rules.silent_streams_max:
        text = f"node {rules.node_id} has {all_there} streams that have not said hello"
        setting = "silent_streams_max"
    else:
        state.silent[key] = there + 1
        state.silent_count += 1
        return None
    state.stats.quota_refusals[SILENT] += 1
    return failure(codes.OVERLOADED, f"{text}, the limit ({setting})", retry_after_ms=RETRY_AFTER_MS)


def silent_over(state: State, who: Identity) -> None:
    """Such a stream has said hello, or has ended."""
    key = (who.tenant, who.principal)
    left = state.silent[key] - 1
    state.silent_count -= 1
    if left:
        state.silent[key] = left
    else:
        del state.silent[key]
