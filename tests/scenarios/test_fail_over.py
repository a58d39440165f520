"""Plays: a node is lost, and its callers and agents come to the others, in any order."""

from __future__ import annotations

import pytest

from agentreach.v1 import error_pb2 as codes
from tests.support.cores import Cores


@pytest.mark.parametrize("place", [0, 1])
def test_what_a_caller_sends_again_waits_for_the_agent_that_is_on_its_way_to_any_node(place: int) -> None:
    cores = Cores(3)
    *others, lost = cores.nodes
    lost.agent("echo/1")
    cores.advance(60)
    cores.kill(lost)
    caller = others[0].caller()
    message = caller.request("hello", fresh=True, resent=True, timeout_ms=20_000)
    assert not caller.replies_to(message)
    cores.advance(3)
    agent = others[place].agent("echo/1")
    cores.advance(0.2)
    agent.answer(message, "here")
    assert caller.text_of(message) == "here"
    cores.assert_settled()


def test_a_new_request_does_not_wait_nor_does_one_that_comes_long_after() -> None:
    cores = Cores(2)
    entry, lost = cores.nodes
    cores.advance(60)
    cores.kill(lost)
    caller = entry.caller()
    assert caller.error_of(caller.request()).code == codes.NO_ROUTE
    cores.advance(60)
    assert caller.error_of(caller.request(fresh=True, resent=True)).code == codes.NO_ROUTE
    cores.assert_settled()
