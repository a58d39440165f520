"""An agent's conversations: how many turns each has had, what is in its state already, and how it changes hands.

The node asks for a session (`session_release`) when the agent leaves or an operator wants it elsewhere, and gives one
(`session_restore`) that comes from elsewhere; the agent's hooks do the rest. A handler can also have its state kept
after its turn (`checkpoint`): it goes out before the turn's answer, and names that answer, so that no copy of the
message runs again wherever the state is restored.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from agent_sdk import shapes
from agent_sdk.errors import PayloadTooLarge, Rejected
from agent_sdk.handlers import annotation_of
from agent_sdk.work import key_of
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2
from agentreach.v1 import frame_pb2 as frames
from agentreach.wire import errors as wire_errors
from agentreach.wire import limits
from agentreach.wire import payload as payloads

if TYPE_CHECKING:
    from agent_sdk.host import Host
    from agent_sdk.work import Key, Work

log = logging.getLogger("agent_sdk")

TRACKED_MAX = 100_000  # conversations of one agent; beyond, those used longest ago begin to count anew
KEYS_MAX = 200_000  # messages noted in all of them together
ANSWERS_MAX = 16  # kept for a node that asks once more: the first answer may be lost with a link
HOOK_S = 600.0  # for a hook whose node named no time; the node's own limit is shorter
_LOOK_S = 0.005


class Session:
    """A conversation, as hooks see it."""

    __slots__ = ("epoch", "session_id", "turn")

    def __init__(self, session_id: str, epoch: int, turn: int) -> None:
        self.session_id = session_id
        self.epoch = epoch
        """Grows with each owner of the session."""
        self.turn = turn
        """How many messages its state has seen, at former owners too."""

    def __bool__(self) -> bool:
        """False for what `Context.session` gives when the request belongs to none."""
        return bool(self.session_id)

    def __repr__(self) -> str:
        return f"Session({self.session_id!r}, epoch={self.epoch}, turn={self.turn})"


class Hooks:
    """What the agent's author declared. Either may be missing."""

    __slots__ = ("release", "restore", "restore_decode")

    def __init__(self) -> None:
        self.release: Callable[[Session], Any] | None = None
        self.restore: Callable[[Session, Any], Any] | None = None
        self.restore_decode: shapes.Decoder | None = None

    def on_release(self, fn: Any) -> None:
        """Take the release hook. Raises `TypeError` if it cannot be called with (session)."""
        _check("on_session_release", fn, "session")
        self.release = fn

    def on_restore(self, fn: Any) -> None:
        """Take the restore hook. Raises `TypeError` if it cannot be called with (session, state)."""
        parameters = _check("on_session_restore", fn, "session", "state")
        self.restore = fn
        self.restore_decode = shapes.decoder_of(annotation_of(inspect.unwrap(fn), parameters[1]))

    @property
    def sync(self) -> bool:
        """True if one of them is a `def` function: it runs in the agent's pool."""
        return any(fn is not None and not inspect.iscoroutinefunction(fn) for fn in (self.release, self.restore))


def _check(what: str, fn: Any, *names: str) -> list[inspect.Parameter]:
    if not callable(fn):
        raise TypeError(f"{what} decorates the function itself: write @agent.{what}, without brackets")
    signature = inspect.signature(fn)
    try:
        signature.bind(*names)
    except TypeError:
        raise TypeError(f"{what}: {fn!r} must take ({', '.join(names)})") from None
    return list(signature.parameters.values())


class _Track:
    __slots__ = ("epoch", "handled", "lived", "turn")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.turn = 0
        self.lived = False
        """It had a turn here."""
        self.handled: deque[Key] = deque(maxlen=limits.SESSION_HANDLED_MAX)


class Sessions:
    """The conversations of one agent on one link."""

    def __init__(self, host: Host, hooks: Hooks) -> None:
        self._host = host
        self._hooks = hooks
        self._tracks: OrderedDict[str, _Track] = OrderedDict()
        self._keys = 0
        self._answers: OrderedDict[tuple[str, str, int], frames.Signal] = OrderedDict()
        self._under_way: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    @property
    def to_hand_over(self) -> bool:
        """True if there is something to hand over when the agent leaves, and a hook that does it."""
        return self._hooks.release is not None and bool(self._tracks)

    def close(self) -> None:
        """The agent has left: hooks that still run are cancelled."""
        for task in list(self._under_way.values()):
            task.cancel()

    # ---- turns ----

    def turn_of(self, work: Work) -> int:
        """The number of the turn that this message is, from 1."""
        track = self._tracks.get(work.envelope.session_id)
        return 1 if track is None or track.epoch != work.envelope.epoch else track.turn + 1

    def keep(self, work: Work, state: Any) -> None:
        """Have the state kept when this turn has ended. Raises what is wrong with it, or with asking for it."""
        if not work.envelope.session_id:
            raise Rejected(
                "the message belongs to no session, and its handler keeps a session's state: send it with session=…",
                may_have_executed=True,
            )
        if self._hooks.restore is None:
            raise RuntimeError("declare @agent.on_session_restore first: nobody could take the state up")
        if work.ended:
            raise RuntimeError("the turn is over and answered: what it leaves behind is kept with its answer only")
        work.checkpoint = _encoded(state)

    def ended(self, work: Work, kept: bool) -> None:
        """A message of a conversation was handled, and its answer is remembered (`kept`) but not sent yet."""
        envelope = work.envelope
        session_id = envelope.session_id
        track = self._tracks.get(session_id)
        if track is None or track.epoch != envelope.epoch:
            if track is not None and track.epoch > envelope.epoch:
                return  # of a former owner's time: the session is another one since
            track = self._begin(session_id, envelope.epoch)
        else:
            self._tracks.move_to_end(session_id)
        track.turn += 1
        track.lived = True
        if kept and (self._hooks.release is not None or self._hooks.restore is not None):
            self._note(track, work.key)
        if work.checkpoint is not None:
            snapshot = self._snapshot(session_id, track)
            snapshot.state.CopyFrom(work.checkpoint)
            self._host.owner.signal(frames.Signal(session_snapshot=snapshot))

    def _begin(self, session_id: str, epoch: int) -> _Track:
        self._drop(session_id)
        self._answers.pop(("release", session_id, epoch), None)  # it came back: what was handed over is old
        track = self._tracks[session_id] = _Track(epoch)
        if len(self._tracks) > TRACKED_MAX:
            self._drop(next(iter(self._tracks)))
        return track

    def _drop(self, session_id: str) -> None:
        track = self._tracks.pop(session_id, None)
        if track is not None:
            self._keys -= len(track.handled)

    def _note(self, track: _Track, key: Key) -> None:
        if len(track.handled) < limits.SESSION_HANDLED_MAX:
            if self._keys >= KEYS_MAX:
                return
            self._keys += 1
        track.handled.append(key)

    def _snapshot(self, session_id: str, track: _Track) -> frames.SessionSnapshot:
        """Everything of a session but its state."""
        host, now, size = self._host, boot_time(), 0
        snapshot = frames.SessionSnapshot(
            agent_id=host.agent_id, session_id=session_id, epoch=track.epoch, turn=track.turn
        )
        for key in reversed(track.handled):
            reply = host.replies.as_envelope(key, now, limits.SESSION_HANDLED_BYTES_MAX)
            if reply is None:
                continue
            tenant, principal, env, message_id = key
            named = frames.MessageKey(tenant=tenant, principal=principal, env=env, message_id=message_id)
            handled = frames.HandledMessage(key=named, reply=reply)
            size += handled.ByteSize()
            if size > limits.SESSION_HANDLED_BYTES_MAX:
                break
            snapshot.handled.append(handled)
        return snapshot

    # ---- changing hands ----

    def told(self, signal: frames.Signal) -> None:
        """The node asks for a session, or gives one."""
        if signal.HasField("session_release"):
            order = signal.session_release
            self._begin_hook(("release", order.session_id, order.epoch), self._release(order))
        else:
            given = signal.session_restore
            self._begin_hook(("restore", given.session_id, given.epoch), self._restore(given))

    def _begin_hook(self, what: tuple[str, str, int], work: Coroutine[Any, Any, frames.Signal]) -> None:
        answer = self._answers.get(what)
        if answer is not None or what in self._under_way:  # asked once more: the first answer may be lost
            work.close()
            if answer is not None:
                self._host.owner.signal(answer)
            return
        name = f"{self._host.agent_id} {what[0]}s a session"
        self._under_way[what] = self._host.owner.loop.create_task(self._answer(what, work), name=name)

    async def _answer(self, what: tuple[str, str, int], work: Coroutine[Any, Any, frames.Signal]) -> None:
        try:
            answer = await work
        finally:
            self._under_way.pop(what, None)
        if what[0] == "release" and not answer.session_snapshot.HasField("error"):
            self._answers[what] = answer
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        self._host.owner.signal(answer)

    async def _release(self, order: frames.SessionRelease) -> frames.Signal:
        session_id, host = order.session_id, self._host
        snapshot = frames.SessionSnapshot(agent_id=host.agent_id, session_id=session_id, epoch=order.epoch)
        hook = self._hooks.release
        if hook is None:
            snapshot.error.CopyFrom(_no_hook(host.agent_id, "on_session_release"))
        else:
            try:
                async with asyncio.timeout(order.deadline_ms / 1000 or HOOK_S):
                    snapshot = await self._released(hook, session_id, order.epoch)
            except Exception as error:  # a rim: the author's own code
                snapshot.error.CopyFrom(_told(host.agent_id, "on_session_release", session_id, error))
        snapshot.released = True
        return frames.Signal(session_snapshot=snapshot)

    async def _released(self, hook: Callable[[Session], Any], session_id: str, epoch: int) -> frames.SessionSnapshot:
        while any(work.envelope.session_id == session_id for work in self._host.works()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)  # a turn that outlived its cancel, as a rule none; an event would cost each
        track = self._tracks.get(session_id)
        if track is None or track.epoch != epoch:  # it never had a turn here under this epoch: there is nothing
            return frames.SessionSnapshot(agent_id=self._host.agent_id, session_id=session_id, epoch=epoch)
        state = await self._call(hook, Session(session_id, epoch, track.turn))
        snapshot = self._snapshot(session_id, track)
        if state is not None:
            snapshot.state.CopyFrom(_encoded(state))
        self._drop(session_id)
        return snapshot

    async def _restore(self, given: frames.SessionRestore) -> frames.Signal:
        session_id, host = given.session_id, self._host
        ready = frames.SessionReady(agent_id=host.agent_id, session_id=session_id, epoch=given.epoch)
        hook = self._hooks.restore
        if hook is None:
            ready.error.CopyFrom(_no_hook(host.agent_id, "on_session_restore"))
        else:
            track = self._tracks.get(session_id)
            if track is not None and track.epoch == given.epoch:
                ready.held = track.lived  # its node was started anew, or the agent is at another one
                return frames.Signal(session_ready=ready)
            try:
                async with asyncio.timeout(HOOK_S):
                    await self._restored(hook, given)
            except Exception as error:  # a rim: the author's own code
                ready.error.CopyFrom(_told(host.agent_id, "on_session_restore", session_id, error))
        return frames.Signal(session_ready=ready)

    async def _restored(self, hook: Callable[[Session, Any], Any], given: frames.SessionRestore) -> None:
        if given.HasField("state"):
            state = _decoded(given.state)
            decode = self._hooks.restore_decode
            if decode is not None and not isinstance(state, payloads.Blob):
                state = decode(state)
            await self._call(hook, Session(given.session_id, given.epoch, given.turn), state)
        known = self._tracks.get(given.session_id)
        if known is not None and known.epoch > given.epoch:
            return
        track, now = self._begin(given.session_id, given.epoch), boot_time()
        track.turn = given.turn
        for handled in reversed(given.handled):
            key = key_of(handled.key)
            self._host.replies.learn(key, handled.reply if handled.HasField("reply") else None, now)
            self._note(track, key)

    async def _call(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(hook):
            return await hook(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._host.pool, hook, *arguments)


def _encoded(state: Any) -> frames.SessionState:
    """A state for the wire. Raises `PayloadTooLarge`, or `PayloadError` for what no payload can carry."""
    payload = shapes.encode(state)
    if payload.WhichOneof("content") == "blob":
        return frames.SessionState(blob=payload.blob, content_type=payload.content_type)
    size, bound = len(payload.body), limits.SESSION_STATE_BYTES_MAX
    if size > bound:
        raise PayloadTooLarge(
            f"the session's state has {size} bytes and the limit is {bound}: keep it where both agents reach it and "
            "hand over a Blob that says where (BlobRef)"
        )
    return frames.SessionState(inline=payload.body, content_type=payload.content_type)


def _decoded(state: frames.SessionState) -> Any:
    payload = pb.Payload(content_type=state.content_type)
    if state.HasField("blob"):
        payload.blob.CopyFrom(state.blob)
    else:
        payload.body = state.inline
    return payloads.decode(payload)


def _no_hook(agent_id: str, name: str) -> error_pb2.Error:
    return wire_errors.failure(error_pb2.REJECTED, f"{agent_id} declares no {name}", agent_id=agent_id)


def _told(agent_id: str, name: str, session_id: str, error: Exception) -> error_pb2.Error:
    """What the node is told of a hook that failed."""
    log.error("%s of %s failed for session %r: %s", name, agent_id, session_id[:100], error, exc_info=error)
    if isinstance(error, PayloadTooLarge):
        return wire_errors.failure(error_pb2.PAYLOAD_TOO_LARGE, str(error), agent_id=agent_id)
    if isinstance(error, TimeoutError):
        return wire_errors.failure(error_pb2.TIMEOUT, f"{name} did not end in time", agent_id=agent_id)
    return wire_errors.failure(error_pb2.AGENT_ERROR, f"{name} raised {type(error).__name__}", agent_id=agent_id)


def take(hosts: dict[str, Host], signal: frames.Signal) -> None:
    """Give a session's signal to its agent."""
    released = signal.HasField("session_release")
    host = hosts.get(signal.session_release.agent_id if released else signal.session_restore.agent_id)
    if host is not None:
        host.sessions.told(signal)
