"""An agent: a function made reachable.

from agent_sdk import Agent, Context

agent = Agent("extractor", capabilities=["ner"], version="2.1.0")

@agent.handler
async def extract(request: dict, ctx: Context) -> dict:
    return {"entities": [word for word in request["text"].split() if word.istitle()]}

agent.run()
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from agent_sdk import arguments, connection
from agent_sdk.client import Mesh
from agent_sdk.configuring import Configuration
from agent_sdk.draining import drain
from agent_sdk.handlers import Handler
from agent_sdk.host import Host
from agent_sdk.identity import incarnation, instance, place_among
from agent_sdk.link import MeshLink
from agent_sdk.messages import failed_callback
from agent_sdk.sessions import Hooks
from agent_sdk.settings import Access, Tls, access
from agent_sdk.standing import POOL_THREADS
from agentreach.aio.transport import Transport
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1.registry_pb2 import AgentRecord
from agentreach.wire import names
from agentreach.wire.checks import CONCURRENCY_MAX, WEIGHT_MAX

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("agent_sdk")

DRAIN_TIMEOUT_S = 55.0
ROUTABLE_WITHIN_S = 10.0  # a probe's time and its second chance; ordinarily two round trips


class Agent:
    """One instance of an agent type.

    `name_or_type`: `"extractor"` (an instance is made for this process) or `"extractor/fixed"`; a fixed instance is
    taken over by whoever registers it next, so prefer the former. `capabilities`, `version`, `labels` are what it is
    found by. `max_concurrency` requests run at once (0: any number); `session_concurrency` of one session.
    `reentrant` lets a call that comes back to this agent within its own call tree use the slot it already holds.
    `weight` (default 100) is its share of the traffic. `url`, `api_key`, `tls`, `signing_secret` default to
    the environment (`REACH_URL` …). `own_link` gives it a connection of its own.
    """

    def __init__(
        self,
        name_or_type: str,
        *,
        capabilities: Sequence[str] = (),
        version: str = "",
        labels: Mapping[str, str] | None = None,
        weight: int = 100,
        priority: int = 0,
        max_concurrency: int = 0,
        session_concurrency: int = 1,
        reentrant: bool = False,
        env: str = "",
        description: str = "",
        url: str | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        drain_timeout: float = DRAIN_TIMEOUT_S,
        own_link: bool = False,
        transport: Transport | None = None,
        signing_secret: str | None = None,
    ) -> None:
        agent_type, own = _name_parts(name_or_type)
        capabilities = arguments.names("capabilities", capabilities)
        arguments.check_labels(labels)
        _check_numbers(weight, priority, max_concurrency, session_concurrency)
        for what, text in (("version", version), ("env", env), ("description", description)):
            arguments.check_text(what, text)
        arguments.check_seconds("drain_timeout", drain_timeout)
        self._instance = own
        self._place = 0 if own else place_among(agent_type)
        self._record = AgentRecord(
            agent_type=agent_type,
            env=env,
            version=version,
            labels=labels or {},
            weight=weight,
            priority=priority,
            max_concurrency=max_concurrency,
            session_concurrency=session_concurrency,
            reentrant=reentrant,
            description=description,
        )
        self._capabilities = [_name("capability", capability) for capability in capabilities]
        self._url, self._api_key, self._tls, self._signing_secret = url, api_key, tls, signing_secret
        self._drain_timeout_s = drain_timeout
        self._own_link = own_link
        self._transport = transport
        self._default: Handler | None = None
        self._by_capability: dict[str, Handler] = {}
        self._by_topic: dict[str, Handler] = {}
        self._host: Host | None = None
        self._lease: connection.Lease | None = None
        self._shares_lease = False
        self.stuck = False
        """True after a drain that a `def` handler has outlived: its thread would keep the process from exiting."""
        self._mesh = Mesh(self._link, env, self.agent_id)
        self._configuration = Configuration(self.agent_id)
        self._session_hooks = Hooks()

    def __repr__(self) -> str:
        return f"<Agent {self.agent_id}>"

    # ---- handlers ----

    def handler(self, fn: F) -> F:
        """Decorator: the function that answers requests which no `.on` takes."""
        self._default = Handler(fn)
        return fn

    def on(self, capability: str) -> Callable[[F], F]:
        """Decorator: the function that answers requests for a capability, which it also declares."""
        name = _name("capability", capability)

        def declare(fn: F) -> F:
            self._by_capability[names.normalise_capability(name)] = Handler(fn)
            if name not in self._capabilities:
                self._capabilities.append(name)
            return fn

        return declare

    def on_event(self, topic: str) -> Callable[[F], F]:
        """Decorator: the function that gets the events of a topic, one publisher's one after another."""
        if fault := names.topic_fault(topic):
            raise ValueError(fault)

        def declare(fn: F) -> F:
            self._by_topic[topic] = Handler(fn)
            return fn

        return declare

    def on_config(self, fn: F) -> F:
        """Decorator: the function that is told the agent's settings, as `dict[str, str]`, whenever they change.

        Operators set them (`reach config set`). It is called in the event loop: make it `async def`, or quick. If it
        raises, that is logged, and it is called again after a heartbeat. See `config` for the settings themselves.
        """
        if not callable(fn):
            raise TypeError("on_config decorates the function itself: write @agent.on_config, without brackets")
        self._configuration.handler = fn
        return fn

    def on_session_release(self, fn: F) -> F:
        """Decorator: the function that hands a conversation over, called with (session) when none of its turns runs.

        It returns the state, which the next owner's `on_session_restore` gets: what a payload can be (dict, list, str,
        bytes, a dataclass …, at most 256 KiB), a `Blob` that says where a larger one is, or None: there is none. Keep
        nothing of what was handed over; it comes back by `on_session_restore` if nobody else could take it. If the
        function raises, or takes longer than the node's `session_hook_s`, it was not handed over.
        """
        self._session_hooks.on_release(fn)
        return fn

    def on_session_restore(self, fn: F) -> F:
        """Decorator: the function that takes a conversation up, called with (session, state) before its next turn.

        `state` is what `on_session_release` returned or a handler kept with `ctx.session.checkpoint`, as the type it
        is annotated with. If it raises, another agent is asked.
        """
        self._session_hooks.on_restore(fn)
        return fn

    def _pick(self, envelope: pb.Envelope) -> Handler | None:
        if self._by_capability:
            for capability in envelope.target.capabilities:
                found = self._by_capability.get(names.normalise_capability(capability))
                if found is not None:
                    return found
        return self._default

    # ---- facts ----

    @property
    def config(self) -> Mapping[str, str]:
        """What operators have set for this agent, as last heard from the node; empty before the first time."""
        return self._configuration.settings

    @property
    def agent_id(self) -> str:
        """`agent_type/instance`, the same over every reconnect of this process."""
        return f"{self._record.agent_type}/{self._instance or instance(self._place)}"

    @property
    def mesh(self) -> Mesh:
        """Sends as this agent; usable while the agent is attached."""
        return self._mesh

    def _link(self) -> MeshLink:
        if self._lease is None:
            raise RuntimeError(f"{self.agent_id} is not attached: use it inside `async with agent` or while it serves")
        return self._lease.link

    def _access(self) -> Access:
        return access(self._url, self._api_key, self._tls, self._signing_secret)

    # ---- life ----

    async def __aenter__(self) -> Agent:
        await self.start(wait_s=5.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.drain()

    async def start(self, wait_s: float | None = None, lease: connection.Lease | None = None) -> None:
        """Attach to the mesh and return when the node routes to the agent.

        `wait_s` bounds the wait for a node (None: for ever).

        Raises `ConnectFailed`, or what the node refused the agent with. `lease` is a link to share.
        """
        if self._host is not None:
            raise RuntimeError(f"{self.agent_id} is attached already")
        self._shares_lease = lease is not None
        self._lease = lease or connection.take(
            self._access(), env=self._record.env, own_link=self._own_link, transport=self._transport
        )
        link = self._lease.link
        host = self._host = self._make_host(link)
        try:
            link.attach(host)
            for topic, handler in self._by_topic.items():
                key = (host.agent_id, names.normalise_env(host.env), topic)
                link.topics.add(key, _taker(host, handler))
            await link.connected(wait_s)
            await host.registered.wait()
            await _routable(host)
            if host.failure is not None:
                raise host.failure
        except BaseException:
            await self._leave()
            raise

    def _make_host(self, link: MeshLink) -> Host:
        record = AgentRecord()
        record.CopyFrom(self._record)
        record.agent_id = self.agent_id
        record.incarnation = incarnation()
        record.capabilities.extend(self._capabilities)
        host = Host(link, record, self._pick, self._session_hooks)
        host.mesh = self._mesh
        self._configuration.serve(host)
        handlers = [self._default, *self._by_capability.values(), *self._by_topic.values()]
        if any(handler is not None and handler.sync for handler in handlers) or self._session_hooks.sync:
            host.pool = ThreadPoolExecutor(record.max_concurrency or POOL_THREADS, "agent_sdk handler")
        return host

    async def drain(self) -> None:
        """Take no new work, finish what is under way, leave the mesh. Bounded by `drain_timeout` and a few seconds."""
        host = self._host
        if host is not None:
            if not host.gone.is_set():
                await drain(host, self._drain_timeout_s)
            await self._leave()

    async def _leave(self) -> None:
        host, lease = self._host, self._lease
        self._host = self._lease = None
        self._configuration.close()
        if host is not None:
            if host.ordered is not None:
                host.ordered.cancel()
            self.stuck = host.pool is not None and host.busy
            host.close()
            if lease is not None:
                lease.link.detach(host, "left")
                lease.link.topics.remove_agent(host.agent_id)
        if lease is not None and not self._shares_lease:
            await connection.release(lease)

    async def ended(self) -> None:
        """Wait until the agent is no longer attached; raises what ended it, if it was not our wish."""
        host = self._host
        if host is not None:
            await host.gone.wait()
            if host.failure is not None:
                raise host.failure

    async def serve(self) -> None:
        """Attach, and serve until drained or cancelled. Waits for a node for ever; raises what ends it for good."""
        from agent_sdk.serving import serve

        await serve(self)

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C, which finish what is under way; a second one exits at once.

        Exits with code 4 if another process registers as this agent, with 2 if the node refuses it.
        """
        from agent_sdk.serving import run

        run(self)


def _name_parts(name_or_type: str) -> tuple[str, str]:
    """The type, and the instance if there is one. Raises `TypeError` or `ValueError`."""
    arguments.check_text("name_or_type", name_or_type)
    agent_type, slash, own = name_or_type.partition("/")
    fault = names.agent_type_fault(agent_type) or (names.agent_id_fault(name_or_type) if slash else None)
    if fault is not None:
        raise ValueError(f"agent {name_or_type!r}: {fault}")
    return agent_type, own


def _check_numbers(weight: int, priority: int, max_concurrency: int, session_concurrency: int) -> None:
    arguments.check_whole("weight", weight, 1, WEIGHT_MAX)
    arguments.check_whole("priority", priority, -(2**31), 2**31 - 1)
    arguments.check_whole("max_concurrency", max_concurrency, 0, CONCURRENCY_MAX)
    arguments.check_whole("session_concurrency", session_concurrency, 1, CONCURRENCY_MAX)


def _name(what: str, text: str) -> str:
    if not names.is_name(text):
        raise ValueError(f"{what} {names.shown(text)} is not a name: {names.NAME_RULE}")
    return text


async def _routable(host: Host) -> None:
    """Wait until the node would route to a registered agent. Bounded: a call may then be told NO_AGENT_AVAILABLE."""
    try:
        async with asyncio.timeout(ROUTABLE_WITHIN_S):
            await host.ready.wait()
    except TimeoutError:
        log.warning("%s is registered, but the node did not confirm that it is ready", host.agent_id)


def _taker(host: Host, handler: Handler) -> Callable[[pb.Envelope], None]:
    def take(envelope: pb.Envelope) -> None:
        error = None if handler.wants_context else failed_callback(envelope)
        if error is None:
            host.take_event(envelope, handler)
        else:
            told = "%s: request %s failed, and handler %s takes no ctx by which it could see that: %s"
            log.warning(told, host.agent_id, envelope.correlation_id, handler.name, error)

    return take
