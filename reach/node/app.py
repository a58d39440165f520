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
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from agentreach.aio.clock import boot_time
from agentreach.aio.grpc_transport import LINK_PATH, GrpcTransport
from agentreach.v1.admin_pb2 import NodeRecord
from agentreach.v1.peer_pb2 import LineageSecrets
from agentreach.wire.redaction import STANDARD
from reach.adapters.audit_file import AuditFile, AuditFileUnavailable
from reach.adapters.binding import PortTaken
from reach.adapters.certificates import CertificateUnusable
from reach.adapters.grpc_server.encrypting import server_credentials
from reach.adapters.grpc_server.gating import caller_address
from reach.adapters.grpc_server.server import GrpcServer
from reach.adapters.http_server import HttpServer
from reach.adapters.metrics import make_registry, render
from reach.adapters.peer_queries import PeerQueries
from reach.core import returning
from reach.core.keyring import KeysUnusable
from reach.core.rules import Rules
from reach.core.snapshots import SnapshotsUnavailable
from reach.core.state import State
from reach.core.store import Store, StoreUnavailable
from reach.node.auditing import Auditor
from reach.node.config import Config
from reach.node.encryption import Encryption
from reach.node.engine import Engine
from reach.node.everywhere import Everywhere
from reach.node.gate import Gatekeeper, introduction
from reach.node.gauges import NodeGauges
from reach.node.key_desk import NodeDesk
from reach.node.key_stores import opened
from reach.node.keys import ApiKeys
from reach.node.lineage_key import keys_of, lineage_secrets, new_secrets, shared_key
from reach.node.own_key import NameTaken
from reach.node.parts import Parts
from reach.node.registry_access import make_store

log = structlog.get_logger("reach")

VERSION = importlib.metadata.version("agent-reach-mesh")
STOP_GRACE_S = 1.0


@dataclass(slots=True)
class Node:
    """A running node: its engine and where it listens."""

    engine: Engine
    grpc_address: str
    http_address: str
    broken: asyncio.Event
    """Set when a duty of the node has failed: it must not go on pretending to be one."""
    encryption: Encryption | None = None
    """Its TLS; None: it speaks in the clear."""


def rules_of(config: Config) -> Rules:
    """The core's numbers, from the settings of the same names."""
    shared = {each.name for each in fields(Rules)} & {each.name for each in fields(Config)}
    numbers = {name: getattr(config, name) for name in shared}
    numbers["policies"] = {agent_type.lower(): policy for agent_type, policy in config.policies.items()}
    return Rules(**numbers)


def make_engine(config: Config, unix: float, incarnation: bytes = b"", lineage: LineageSecrets | None = None) -> Engine:
    """The engine of a node; call it inside the event loop that will run it.

    What names this start of the node, and what signs lineages, is made up where it is not given.
    """
    incarnation = incarnation or os.urandom(16)
    rng = random.SystemRandom()
    fast = random.Random(rng.getrandbits(128))
    state = State(
        rules_of(config),
        rng=fast,
        secrets=rng,
        nonce=incarnation[:8],
        lineage=keys_of(lineage or new_secrets(unix)),
        now=boot_time(),
        unix=unix,
    )
    state.incarnation = incarnation
    return Engine(state, hello_timeout_s=config.hello_timeout_s)


@contextlib.asynccontextmanager
async def running(config: Config, file: Path | None = None) -> AsyncIterator[Node]:
    """A node that serves while the context is open; leaving it drains and stops it.

    `file` is where `config` was read from: what may change there while the node runs is read again.
    Raises `AuditFileUnavailable`, `PortTaken`, `NameTaken`, `CertificateUnusable`, `KeysUnusable`, or
    `StoreUnavailable` if the registry cannot be used at start, within about 5 s.
    """
    lines = AuditFile(config.audit_log, boot_time) if config.audit_log else None
    encryption = Encryption(config, file=file) if config.tls_cert else None
    store = await make_store(config)
    record = _node_record(config)
    lineage = await lineage_secrets(store)
    engine = make_engine(config, time.time(), record.incarnation, lineage)
    audit = _audit(config, engine, lines)
    dial = encryption.dial if encryption is not None else None
    parts = Parts(engine, config, store, record, GrpcTransport(dial, path=LINK_PATH))
    secret = await _secret(config, store, engine)
    queries = PeerQueries(engine.introduce, dial)
    engine.others = others = Everywhere(engine.state, queries)
    keys = await _keys(config, store)
    server, http = _doors(config, engine, record, secret, encryption, keys)
    if encryption is not None:
        encryption.on_trust(lambda: parts.let_nodes_in_anew("others are trusted than before"))
    node = Node(engine, "", "", asyncio.Event(), encryption)
    duties: asyncio.Task[None] | None = None
    try:
        # Both addresses before the registry: whoever reads this node's key there can reach it.
        engine.starting = True
        await server.start()
        node.grpc_address = server.address
        record.address = config.advertise or server.address
        if config.http:
            await http.start()
            record.http_address = node.http_address = http.address
        await parts.start(queries)
        engine.starting = False
        audit.begin(VERSION)
        with engine.step() as state:
            returning.opened(state)
        duties = asyncio.create_task(_run(parts, encryption, keys), name="duties")
        duties.add_done_callback(lambda task: _duty_ended(task, node.broken))
        yield node
        server.set_serving(False)
        parts.resign()
        await engine.drain(_leave_within_s(engine, config))
        await parts.parted()
    finally:
        if duties is not None:
            duties.cancel()
            await asyncio.gather(duties, return_exceptions=True)
        # Before the servers: nobody shall find a node that is about to be gone.
        await parts.leave()
        await http.stop()
        await server.stop(STOP_GRACE_S)
        await others.close()
        await store.close()
        await parts.close()
        await engine.close()
        audit.close()


async def _secret(config: Config, store: Store, engine: Engine) -> bytes:
    """What all nodes of the mesh know, and this one shows the others that it does; nothing where no gate stands."""
    if config.auth == "none":
        return b""
    secret = await shared_key(store)
    engine.introduce = introduction(secret, config.node_id)
    return secret


def _audit(config: Config, engine: Engine, lines: AuditFile | None) -> Auditor:
    """Have the engine write its audit log there."""
    state = engine.state
    audit = Auditor(config.node_id, lines, state.stats, state.redaction, unix=time.time, caller=caller_address)
    engine.audit, engine.reopen_audit = audit, audit.reopen
    return audit


async def _keys(config: Config, store: Store) -> ApiKeys | None:
    if config.auth != "keys":
        return None
    try:
        return await opened(config, store)
    except KeysUnusable:
        await store.close()
        raise


def _doors(
    config: Config,
    engine: Engine,
    record: NodeRecord,
    secret: bytes,
    encryption: Encryption | None,
    keys: ApiKeys | None,
) -> tuple[GrpcServer, HttpServer]:
    """Both servers, not started, with what guards them. `secret` is that of all nodes of the mesh."""
    credentials = server_credentials(encryption.dial, ask_clients=encryption.asks_clients) if encryption else None
    server = GrpcServer(engine, listen=config.listen, credentials=credentials)
    metrics = make_registry(NodeGauges(engine, insecure=insecure(config), encryption=encryption, keys=keys), VERSION)
    http = HttpServer(
        listen=config.http,
        metrics=lambda: render(metrics),
        unready_reason=lambda: engine.unready_reason,
        tls=encryption.http.context if encryption is not None and encryption.http is not None else None,
    )
    if config.auth != "none":
        certificates = encryption.principals if encryption is not None else None
        gate = Gatekeeper(
            config, engine.step, keys, certificates,
            secret=secret, address=lambda: record.address, holders=engine.holders,
        )  # fmt: skip
        server.doorkeeper, http.may_scrape = gate, gate.may_scrape
        engine.keys = NodeDesk(engine.state, keys)
    return server, http


async def _run(parts: Parts, encryption: Encryption | None, keys: ApiKeys | None) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.run(), name="parts")
        if keys is not None:
            group.create_task(keys.run(), name="keys")
        if encryption is not None:
            group.create_task(encryption.run(), name="tls")


def insecure(config: Config) -> bool:
    """Whether whoever reaches this node may do anything, because it was started so."""
    return config.insecure and (config.auth == "none" or not config.tls_cert)


def _node_record(config: Config) -> NodeRecord:
    return NodeRecord(
        node_id=config.node_id,
        address=config.listen,
        http_address=config.http,
        version=VERSION,
        started_at=_stamp(time.time()),
        incarnation=os.urandom(16),
        auth=config.auth,
    )


async def run_node(config: Config, file: Path | None = None) -> int:
    """Serve until SIGTERM, SIGINT or `DrainNode`, drain, and give the exit code. A second signal ends it at once.

    `file` as in `running`.
    A signal before the node is ready ends the start. 2: it cannot start as configured (one line says why); 1: a duty
    of the node failed while it ran.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop)
    try:
        return await _serve(config, file, stop)
    except (AuditFileUnavailable, PortTaken, NameTaken, CertificateUnusable, KeysUnusable) as error:
        why = str(error)
    except SnapshotsUnavailable as error:
        why = f"conversations' states cannot be kept: {error}"
    except StoreUnavailable as error:
        why = f"the registry {config.registry} cannot be used: {error}"
    print(f"reach: {STANDARD.text(why)}", file=sys.stderr)  # noqa: T201 - one line for people, before or without a log
    return 2


async def _serve(config: Config, file: Path | None, stop: asyncio.Event) -> int:
    async with contextlib.AsyncExitStack() as stack:
        start = asyncio.create_task(stack.enter_async_context(running(config, file)), name="start")
        if not await _first(start, stop):
            start.cancel()
            await asyncio.wait([start])
            return 0
        node = start.result()
        if config.audit_log:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, node.engine.reopen_audit)
        if insecure(config):
            log.warning(
                "insecure: whoever reaches this node may do anything",
                grpc=node.grpc_address,
                tls=bool(config.tls_cert),
                auth=config.auth,
            )
        log.info("ready", node=config.node_id, grpc=node.grpc_address, http=node.http_address, version=VERSION)
        ends = [
            asyncio.create_task(wait(), name=name)
            for name, wait in (("broken", node.broken.wait), ("leaving", node.engine.leaving.wait), ("stop", stop.wait))
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        limit_s = _leave_within_s(node.engine, config)
        log.info("stopping: no new requests, running ones may end", limit_s=limit_s)
    log.info("stopped", node=config.node_id)
    return 1 if node.broken.is_set() else 0


def _leave_within_s(engine: Engine, config: Config) -> float:
    """How long what runs may take when the node leaves: as ordered, else as configured."""
    return config.drain_timeout_s if engine.leave_within_s is None else engine.leave_within_s


async def _first(task: asyncio.Task[Any], stop: asyncio.Event) -> bool:
    """Wait for the task or for `stop`; True if the task is done."""
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return task.done()


def _duty_ended(task: asyncio.Task[None], broken: asyncio.Event) -> None:
    """The registry's duties run as long as the node."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a duty of the node failed; it stops", exc_info=error)
        broken.set()


def _stamp(unix: float) -> Timestamp:
    return Timestamp(seconds=int(unix), nanos=int(unix % 1 * 1e9))
