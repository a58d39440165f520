"""Plays: how often processes report, and how long an agent counts without a word of it."""

from __future__ import annotations

from agentreach.v1.frame_pb2 import Signal
from tests.support.core import CoreMesh, Process


def _told(process: Process) -> tuple[int, int]:
    process.signals.clear()
    process.beat()
    (ack,) = [signal.heartbeat_ack for signal in process.got_signals("heartbeat_ack")]
    return ack.heartbeat_interval_ms, ack.lease_ttl_ms


def test_above_so_many_agents_all_processes_are_told_to_report_less_often_and_back() -> None:
    core = CoreMesh(many_agents=2)
    first = core.agent("echo/1")
    core.agent("echo/2")
    assert first.welcome is not None
    assert (first.welcome.heartbeat_interval_ms, first.welcome.lease_ttl_ms) == (10_000, 30_000)
    assert _told(first) == (10_000, 30_000)
    third = core.agent("echo/3")
    assert third.welcome is not None
    assert (third.welcome.heartbeat_interval_ms, third.welcome.lease_ttl_ms) == (15_000, 45_000)
    assert _told(first) == (15_000, 45_000)
    third.leave()
    assert _told(first) == (10_000, 30_000)


def test_any_frame_of_a_process_counts_as_a_sign_of_life() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.beating = False
    for _ in range(8):
        core.advance(9)
        agent.signal(Signal())  # nothing that the node knows
        core.pump()
    agent.answer(caller.request())
    assert not core.logged("nothing heard")
