"""The composition root: one node from its configuration, from the first line to the last."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.aio.clock import boot_time
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.registry_pb2 import AgentStatus
from reach.adapters.binding import PortTaken
from reach.adapters.etcd import EtcdStore, EtcdTls, parse_endpoints
from reach.adapters.grpc_server.server import GrpcServer
from reach.adapters.http_server import HttpServer
from reach.adapters.memory_store import MemoryStore
from reach.adapters.metrics import Gauges, make_registry, render
from reach.core.lineage import LineageKeys
from reach.core.requests import Attachment
from reach.core.rules import Rules
from reach.core.state import State
from reach.core.stats import Stats
from reach.core.store import Store, StoreUnavailable
from reach.node.config import Config
from reach.node.engine import Engine
from reach.node.registrar import Registrar

log = structlog.get_logger("reach")

VERSION = importlib.metadata.version("agent-reach-mesh")
STOP_GRACE_S = 1.0
STATUS_NAMES = {int(number): name for name, number in AgentStatus.items()}


@dataclass(slots=True)
class Node:
    """A running node: its engine and where it listens."""

    engine: Engine
    grpc_address: str
    http_address: str


def rules_of(config: Config) -> Rules:
    """The core's numbers, from the settings of the same names."""
    shared = {each.name for each in fields(Rules)} & {each.name for each in fields(Config)}
    return Rules(**{name: getattr(config, name) for name in shared})


def make_engine(config: Config, unix: float) -> Engine:
    """The engine of a node; call it inside the event loop that will run it."""
    rng = random.SystemRandom()
    fast = random.Random(rng.getrandbits(128))
    state = State(
        rules_of(config),
        rng=fast,
        nonce=rng.getrandbits(64).to_bytes(8, "big"),
        lineage=LineageKeys((1, os.urandom(32))),
        now=boot_time(),
        unix=unix,
    )
    return Engine(state, hello_timeout_s=config.hello_timeout_s)


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Node]:
    """A node that serves while the context is open; leaving it drains and stops it.

    Raises `PortTaken`, or `StoreUnavailable` if the registry cannot be reached at start.
    """
    engine = make_engine(config, time.time())
    store = await make_store(config)
    record = NodeRecord(
        node_id=config.node_id,
        address=config.listen,
        http_address=config.http,
        version=VERSION,
        started_at=_stamp(time.time()),
        incarnation=os.urandom(16),
    )
    server = GrpcServer(engine, listen=config.listen)
    metrics = make_registry(_Source(engine), VERSION)
    http = HttpServer(listen=config.http, metrics=lambda: render(metrics), unready_reason=lambda: engine.unready_reason)
    registrar = Registrar(
        store,
        record,
        lease_ttl_s=config.node_lease_ttl_s,
        session_ttl_s=config.session_ttl_s,
        replaced=engine.replaced,
    )
    engine.use(registrar)
    engine.node, engine.registry_age, engine.registry_grace_s = record, lambda: registrar.age_s, config.registry_grace_s
    engine.registry_name = config.registry.partition(":")[0]
    duties: asyncio.Task[None] | None = None
    try:
        await registrar.start()
        duties = asyncio.create_task(registrar.run(), name="registrar")
        duties.add_done_callback(_duty_ended)
        await server.start()
        record.address = server.address
        if config.http:
            await http.start()
            record.http_address = http.address
        yield Node(engine, server.address, http.address if config.http else "")
        server.set_serving(False)
        await engine.drain(config.drain_timeout_s)
        await registrar.settle(STOP_GRACE_S)
    finally:
        await http.stop()
        await server.stop(STOP_GRACE_S)
        if duties is not None:
            duties.cancel()
            await asyncio.gather(duties, return_exceptions=True)
        await registrar.stop()
        await store.close()
        await engine.close()


async def make_store(config: Config) -> Store:
    """The registry store that the configuration names."""
    if config.registry == "memory":
        return MemoryStore()
    address = parse_endpoints(config.registry)
    tls = None
    if config.registry_tls_ca or address.tls:
        tls = EtcdTls(
            ca=_path(config.registry_tls_ca), cert=_path(config.registry_tls_cert), key=_path(config.registry_tls_key)
        )
    return await EtcdStore.connect(
        address.endpoints,
        prefix=config.registry_prefix,
        tls=tls,
        user=config.registry_user or None,
        password=config.registry_password or None,
    )


async def run_node(config: Config) -> int:
    """Serve until SIGTERM or SIGINT, drain, and give the exit code. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop)
    try:
        async with running(config) as node:
            log.info("ready", node=config.node_id, grpc=node.grpc_address, http=node.http_address, version=VERSION)
            await stop.wait()
            log.info("stopping: no new requests, running ones may end", limit_s=config.drain_timeout_s)
    except PortTaken as error:
        print(f"reach: {error}", file=sys.stderr)  # noqa: T201 - one line for people, before or without a log
        return 2
    except StoreUnavailable as error:
        print(f"reach: the registry {config.registry} cannot be used: {error}", file=sys.stderr)  # noqa: T201
        return 2
    log.info("stopped", node=config.node_id)
    return 0


def _path(name: str) -> Path | None:
    return Path(name) if name else None


class _Source:
    """What metrics ask the node."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def stats(self) -> Stats:
        return self._engine.state.stats

    def gauges(self) -> Gauges:
        state = self._engine.state
        agents: Counter[tuple[str, str]] = Counter()
        outboxes: dict[str, int] = {}
        for agent in state.directory:
            agents[agent.agent_type, STATUS_NAMES.get(agent.status, "UNKNOWN")] += 1
            if isinstance(agent.link, Attachment):
                outboxes[agent.agent_id] = agent.link.peer.link.waiting
        queued = [lane.waiting[0].received for lane in state.lanes.values() if lane.waiting]
        return Gauges(
            agents=agents,
            queue_depth=sum(len(lane.waiting) for lane in state.lanes.values()),
            queue_oldest_s=boot_time() - min(queued) if queued else 0.0,
            outbox_envelopes=outboxes,
            registry_age_s=self._engine.registry_age(),
            leader=True,
        )


def _duty_ended(task: asyncio.Task[None]) -> None:
    """The registry's duties run as long as the node. If one fails, the node must not go on pretending."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a duty of the node failed; it stops", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)


def _stamp(unix: float) -> Timestamp:
    return Timestamp(seconds=int(unix), nanos=int(unix % 1 * 1e9))
