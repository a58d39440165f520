"""Watches of a node's health: places for all, room for each tenant, and none beyond the key that opened it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from reach.adapters.grpc_server import health
from reach.adapters.grpc_server.health import Health
from reach.core.access import Rights
from reach.core.ports import ANYBODY, Identity
from tests.support.api_keys import KeysFile
from tests.support.node import config, running

LIMIT_S = 5.0
WATCH = "/grpc.health.v1.Health/Watch"


def of(tenant: str, principal: str = "a") -> Identity:
    return Identity(tenant, principal, Rights())


def taken(places: Health, who: Identity, stack: contextlib.ExitStack) -> int:
    """How many places somebody gets who wants all."""
    count = 0
    while not places.full_for(who):
        stack.enter_context(places.place(who))
        count += 1
    return count


def test_a_tenant_that_wants_every_place_leaves_some_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCHES_MAX", 80)
    places = Health(())
    with contextlib.ExitStack() as stack:
        assert taken(places, of("loud"), stack) == 40
        assert places.full_for(of("loud", "another"))
        assert taken(places, of("other"), stack) == 20
        assert taken(places, of("third"), stack) == 10
        assert taken(places, ANYBODY, stack) == 10, "of whom nobody knows who it is, all are one"
        assert places.full_for(of("fourth"))
    assert not places.full_for(of("loud")) and taken(places, of("loud"), stack) == 40, "places come back"


async def test_where_health_is_closed_a_watch_ends_with_its_key(tmp_path: Path) -> None:
    """Found by reading: it was the one stream that went on with a key that had been revoked."""
    keys = KeysFile(tmp_path / "keys.json")
    mine, others = keys.add("alice"), keys.add("bob")
    settings = config(auth="keys", keys_file=str(keys.path), health_access="closed")
    async with running(settings) as node, grpc.aio.insecure_channel(node.grpc_address) as channel:
        calls = {}
        for key in (mine, others):
            metadata = (("authorization", f"Bearer {key}"),)
            calls[key] = channel.unary_stream(WATCH)(
                health_pb2.HealthCheckRequest().SerializeToString(), metadata=metadata
            )
            assert await asyncio.wait_for(calls[key].read(), LIMIT_S)
        keys.revoke(mine)
        assert await asyncio.wait_for(calls[mine].code(), LIMIT_S) is grpc.StatusCode.UNAUTHENTICATED
        assert not calls[others].done()
        calls[others].cancel()
