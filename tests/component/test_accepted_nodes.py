"""The stream that another node dials: who is let in, and that a former stream's end is not the present one's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentreach.v1.frame_pb2 import Frame, Goodbye, NodeHello, Signal
from reach.node.app import make_engine
from reach.node.config import load
from reach.node.engine import Engine
from reach.node.nodelinks import AcceptedNode


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = make_engine(load(environment={}, flags={"node_id": "node-2"}), 0.0)
    made.state.registry_away, made.state.view_complete_at = True, 0.0  # who is not in such a view may be there
    yield made
    await made.close()


def dialled(engine: Engine, node_id: str = "node-1", to: str = "node-2", **more: object) -> AcceptedNode:
    """A stream on which this hello has come."""
    stream = AcceptedNode(engine, "somewhere", 5.0)
    values: dict[str, object] = {"incarnation": b"one", "protocol_version": 1, **more}
    hello = NodeHello(node_id=node_id, to_node_id=to, **values)  # type: ignore[arg-type]
    stream.received(Frame(signals=[Signal(node_hello=hello)]).SerializeToString())
    return stream


async def said(stream: AcceptedNode) -> list[Signal]:
    data = await stream.next_frame()
    assert data is not None
    return list(Frame.FromString(data).signals)


async def test_a_former_streams_end_is_not_the_end_of_the_link(engine: Engine) -> None:
    first = dialled(engine)
    node = engine.state.nodes["node-1"]
    second = dialled(engine)
    assert node.stream is second
    first.ended()
    assert node.connected and node.stream is second
    second.ended()
    assert not node.connected


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"to": "node-9"}, "this is node node-2, not node-9"),
        ({"node_id": "node-3"}, "node node-2 dials node node-3"),
        ({"node_id": "node-2"}, "node node-2 dials node node-2"),
        ({"node_id": "no name!"}, "names no node"),
        ({"incarnation": b""}, "names no node"),
        ({"protocol_version": 99}, "protocol version 99 is newer"),
    ],
)
async def test_who_is_not_let_in_is_told_why(engine: Engine, hello: dict[str, object], why: str) -> None:
    stream = dialled(engine, **hello)  # type: ignore[arg-type]
    (signal,) = await said(stream)
    assert signal.goodbye.code == Goodbye.PROTOCOL_ERROR and why in signal.goodbye.reason
    assert not engine.state.nodes


async def test_who_says_something_else_first_is_not_let_in(engine: Engine) -> None:
    for first in (b"\xff\xff", Frame().SerializeToString()):
        stream = AcceptedNode(engine, "somewhere", 5.0)
        stream.received(first)
        (signal,) = await said(stream)
        assert signal.HasField("goodbye")
