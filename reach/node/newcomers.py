"""Agents whose keys do not exist yet: they wait here for the leader, while all others are registered past them.

What was asked of the leader and not answered may be written all the same. So a key stays `ours` until the answer is
known, and after a newcomer was refused without one the registrar is told to look for what came too late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentreach.aio.clock import boot_time
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.frame_pb2 import Attach, Forward, Forwarded
from agentreach.wire.errors import failure
from reach.core.agents import Agent
from reach.core.arrivals import Arrival, Attaching
from reach.core.store import Item, StoreUnavailable
from reach.node.admission import AGENTS_PER_FORWARD_MAX, EXISTS, LEASE_GONE, Admission
from reach.node.records import agent_key, incarnation_in, stored_record, written_by
from reach.node.shards import Shard, Shards

FORWARD_BYTES_MAX = 192 << 10
"""Records of one `forward`: with its frame it stays below the 256 KiB after which others wait for it on the link."""

ASK_S = 3.0  # a leader answers in milliseconds; one that is frozen is given up by its link within 8 s
ASK_AGAIN_S = 0.25  # after a failure, unless another leader is known before
BESIDE_KNOWN_S = 0.5
"""Newcomers hold up what their process is told of its known agents only so long; the SDK brings them again."""
TOO_LATE_S = 20.0
"""After this nothing that was forwarded is written any more: a link's window (10 s), and a store's call (5 s)."""


@dataclass(slots=True, eq=False)
class Registering:
    """The agents of one arrival that are to be written, and whom to tell when each has its generation or its error.

    A link is told in the order in which it asked (contract.md), but for a welcome, which is the first on its stream.
    """

    left: deque[Attaching]
    """Those that do not wait for the leader."""
    done: Callable[[], None]
    deadline: float
    line: deque[Registering]
    """What the same link has asked and was not told yet, this included."""
    welcomes: bool = False
    known_since: float = float("inf")
    """Since when agents that are known wait for those of this arrival that are not."""
    open: int = 0
    is_there: Callable[[], bool] = lambda: True
    """Whether its process is."""

    @classmethod
    def of(
        cls,
        arrival: Arrival,
        done: Callable[[], None],
        deadline: float,
        line: deque[Registering],
        is_there: Callable[[], bool],
    ) -> Registering:
        """Of all new agents of the arrival; the last in the line."""
        left = deque(each for each in arrival.agents if each.agent is not None and each.attachment is None)
        some_known = any(each.attachment is not None for each in arrival.agents)
        known_since = boot_time() if some_known else float("inf")
        made = cls(left, done, deadline, line, arrival.with_welcome, known_since, len(left), is_there)
        line.append(made)
        return made

    def take(self, each: Attaching) -> None:
        """It is not left any more."""
        if self.left[0] is each:
            self.left.popleft()
        else:
            self.left = deque(other for other in self.left if other is not each)

    def overtaken(self, each: Attaching) -> None:
        """Another process has come under the same agent_id since, and has it."""
        each.error = failure(codes.FENCED, f"another process registered as {each.agent_id} after this one")

    def of_another(self, each: Attaching) -> None:
        """The agent_id belongs to another principal, of this node or another."""
        each.error = failure(codes.PERMISSION_DENIED, f"{each.agent_id} is registered by somebody else")
        self.settled()

    def settled(self) -> None:
        """One more of its agents has its generation or its error."""
        self.open -= 1
        self.tell()

    def tell(self) -> None:
        """Tell the link whatever it can be told now."""
        if self.welcomes and not self.open:
            self.line.remove(self)
            self.done()
        while self.line and not self.line[0].open:
            self.line.popleft().done()
        if not self.open and self in self.line:
            for earlier in self.line:
                earlier.known_since = min(earlier.known_since, boot_time())

    def refuse(self, each: Attaching, why: str) -> None:
        """There is no more time to register this one."""
        message = f"{each.agent_id} cannot be registered now: {why}"
        each.error = failure(codes.REGISTRY_UNAVAILABLE, message, retry_after_ms=1_000)
        self.settled()


Asked = tuple[Registering, Attaching, Agent]


def take_over(batch: list[Asked], present: Mapping[str, Item]) -> bool:
    """Whether one of these agent_ids has another process, of this node or another."""
    return any(incarnation_in(present[agent_key(agent)]) != agent.incarnation for *_, agent in batch)


def of_the_living(batch: list[Asked], present: Mapping[str, Item]) -> list[Asked]:
    """Those whose process is still there, or takes nothing from another.

    One that dialled a node that stood still, and ended, may have a successor: its hello is read all the same.
    """
    living: list[Asked] = []
    for register, each, agent in batch:
        if register.is_there() or incarnation_in(present[agent_key(agent)]) == agent.incarnation:
            living.append((register, each, agent))
        else:
            register.take(each)
            register.overtaken(each)
            register.settled()
    return living


def of_their_own(batch: list[Asked], present: Mapping[str, Item]) -> list[Asked]:
    """Those whose key no other principal has; the others are refused, wherever the holder is attached."""
    own: list[Asked] = []
    for register, each, agent in batch:
        if written_by(present[agent_key(agent)]) in ("", agent.principal):
            own.append((register, each, agent))
        else:
            register.take(each)
            register.of_another(each)
    return own


@dataclass(slots=True, eq=False)
class _Waiting:
    each: Attaching
    agent: Agent
    key: str
    of: Registering
    asked: bool = False
    """The leader was asked and has not answered: it may have been written."""
    value: bytes = field(default=b"", repr=False)

    @property
    def deadline(self) -> float:
        return min(self.of.deadline, self.of.known_since + BESIDE_KNOWN_S)


class Newcomers:
    """Those of this node that wait for the leader. `add`, and `run` in a task."""

    def __init__(
        self,
        admission: Admission,
        shards: Shards,
        *,
        admitted: Callable[[str, Agent, Shard], None],
        known: Callable[[Registering, Attaching], None],
        in_doubt: Callable[[], None],
    ) -> None:
        """`known` takes back those whose key somebody else has written meanwhile."""
        self._admission = admission
        self._shards = shards
        self._admitted = admitted
        self._known = known
        self._in_doubt = in_doubt
        self._waiting: deque[_Waiting] = deque()
        self._keys: dict[str, int] = {}
        self._arrived = asyncio.Event()
        self._another_leads = asyncio.Event()
        self._look_again: asyncio.TimerHandle | None = None
        admission.on_change(self._another_leads.set)

    def __contains__(self, key: str) -> bool:
        """True while the leader may be writing this key for us."""
        return key in self._keys

    def add(self, of: Registering, each: Attaching) -> None:
        """An agent that has no key yet, or whose key another newcomer is about to get."""
        assert each.agent is not None
        record = stored_record(each.agent)
        waiting = _Waiting(each, each.agent, agent_key(record), of, value=record.SerializeToString())
        self._waiting.append(waiting)
        self._keys[waiting.key] = self._keys.get(waiting.key, 0) + 1
        self._arrived.set()

    async def run(self) -> None:
        """Have them admitted, in their order, until cancelled."""
        try:
            while True:
                self._arrived.clear()
                batch = self._next()
                if not batch:
                    await self._arrived.wait()
                    continue
                self._another_leads.clear()
                why = await self._try(batch)
                self._refuse_overdue(why or "the leader takes too long")
                if why:
                    await self._pause()
                    self._refuse_overdue(why)
        finally:
            if self._look_again is not None:
                self._look_again.cancel()

    # ---- asking ----

    def _next(self) -> list[_Waiting]:
        """The first of each key, as many as one `forward` takes."""
        batch: dict[str, _Waiting] = {}
        size = 0
        for each in self._waiting:
            if each.key in batch:
                continue
            size += len(each.value)
            if batch and (len(batch) >= AGENTS_PER_FORWARD_MAX or size > FORWARD_BYTES_MAX):
                break
            batch[each.key] = each
        return list(batch.values())

    async def _try(self, batch: list[_Waiting]) -> str:
        """Ask the leader. Why it has not answered; empty if it has."""
        try:
            async with asyncio.timeout(min(ASK_S, max(0.0, self._first_deadline() - boot_time()))):
                await self._ask(batch)
        except StoreUnavailable as error:
            return str(error)
        except TimeoutError:
            return "the leader does not answer"
        return ""

    async def _ask(self, batch: list[_Waiting]) -> None:
        shard = await self._shards.room_for(len(batch))
        forward = Forward(lease=shard.lease.id)
        for waiting in batch:
            forward.agents.append(Attach(record=stored_record(waiting.agent)))
            waiting.asked = True
        answer = await self._admission.ask(forward)
        if answer.HasField("error"):
            if answer.error.code == LEASE_GONE:
                self._shards.drop(shard)
                self._in_doubt()
            raise StoreUnavailable(answer.error.message)
        if len(answer.agents) != len(batch):
            raise StoreUnavailable("the leader has not answered for each agent")
        self._take(batch, answer, shard)

    def _take(self, batch: list[_Waiting], answer: Forwarded, shard: Shard) -> None:
        for waiting, attached in zip(batch, answer.agents, strict=True):
            waiting.asked = False
            if not attached.HasField("error"):
                self._forget(waiting)
                waiting.agent.generation = attached.generation
                self._admitted(waiting.key, waiting.agent, shard)
                waiting.of.settled()
            elif attached.error.code == EXISTS:
                for each in [each for each in self._waiting if each.key == waiting.key]:
                    self._forget(each)
                    self._known(each.of, each.each)
            else:
                self._forget(waiting)
                waiting.each.error = attached.error
                waiting.of.settled()

    def _forget(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        self._keys[waiting.key] -= 1
        if not self._keys[waiting.key]:
            del self._keys[waiting.key]

    # ---- time ----

    def _first_deadline(self) -> float:
        return min((each.deadline for each in self._waiting), default=float("inf"))

    async def _pause(self) -> None:
        """Until another leader is known, or a moment."""
        pause_s = min(ASK_AGAIN_S, max(0.0, self._first_deadline() - boot_time()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._another_leads.wait()

    def _refuse_overdue(self, why: str) -> None:
        now = boot_time()
        for waiting in [each for each in self._waiting if each.deadline <= now]:
            self._forget(waiting)
            if waiting.asked:
                self._look_for_what_comes_late()
            waiting.of.refuse(waiting.each, why)

    def _look_for_what_comes_late(self) -> None:
        self._in_doubt()
        if self._look_again is not None:
            self._look_again.cancel()
        self._look_again = asyncio.get_running_loop().call_later(TOO_LATE_S, self._in_doubt)
