"""Plays: agents are told the settings that operators give them, at once, and again as long as they have older ones."""

from __future__ import annotations

import pytest

from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.frame_pb2 import Signal
from agentreach.v1.registry_pb2 import AgentLoad
from reach.core import configs
from reach.core.configs import SETTINGS_BYTES_MAX, SETTINGS_MAX, Settings
from tests.support.core import CoreMesh, Process, record
from tests.support.cores import Cores


def put(core: CoreMesh, name: str, version: int, **values: str) -> None:
    """The store has this now."""
    with core.step() as state:
        assert state.configs.put(name, Settings(values, version))
        for attachment in configs.attached_here(state):
            configs.tell(state, attachment)
    core.pump()


def told(process: Process) -> list[tuple[str, int, dict[str, str]]]:
    """The updates that it got, in order."""
    updates = [signal.config_update for signal in process.got_signals("config_update")]
    return [(one.agent_id, one.config_version, dict(one.settings)) for one in updates]


def beat(process: Process, version: int) -> frames.HeartbeatAck:
    """A heartbeat of echo/1 that says which version it has; the answer to it."""
    load = AgentLoad(agent_id="echo/1", config_version=version)
    process.signal(Signal(heartbeat=frames.Heartbeat(agents=[load])))
    process.core.pump()
    return process.got_signals("heartbeat_ack")[-1].heartbeat_ack


def test_everybody_attached_is_told_at_once_when_settings_change() -> None:
    core = CoreMesh()
    echo, other = core.agent("echo/1"), core.agent("other/1")
    put(core, "agents", 7, model="large")
    assert told(echo) == [("echo/1", 7, {"model": "large"})]
    put(core, "agents/echo", 9, model="small", depth="3")
    assert told(echo)[1:] == [("echo/1", 9, {"model": "small", "depth": "3"})]
    assert {version for _, version, _ in told(other)} == {7}


def test_an_agent_that_attaches_later_gets_them_with_its_welcome() -> None:
    core = CoreMesh()
    put(core, "agents/echo", 5, model="large")
    late = core.agent("echo/1")
    assert late.welcome is not None and late.welcome.config_version == 5
    assert told(late) == [("echo/1", 5, {"model": "large"})]
    late.signal(Signal(attach=frames.Attach(record=record("echo/2"))))
    core.pump()
    assert told(late)[1:] == [("echo/2", 5, {"model": "large"})]


def test_one_that_comes_back_with_them_is_not_told_again() -> None:
    core = CoreMesh()
    put(core, "agents", 5, model="large")
    process = core.process("p", record("echo/1", config_version=5))
    assert told(process) == []


def test_a_heartbeat_that_shows_an_older_version_is_answered_with_the_settings() -> None:
    core = CoreMesh()
    process = core.agent("echo/1")
    put(core, "agents", 5, model="large")
    assert len(told(process)) == 1
    assert beat(process, 0).config_version == 5
    assert len(told(process)) == 2
    assert beat(process, 5).config_version == 5
    assert len(told(process)) == 2
    assert core.attachment("echo/1").agent.config_version == 5


def test_a_store_that_counts_from_before_again_reaches_agents_that_have_settings_of_later() -> None:
    core = CoreMesh()
    put(core, "agents", 5, model="large")
    process = core.process("p", record("echo/1", config_version=90))
    assert told(process) == [("echo/1", 5, {"model": "large"})]
    beat(process, 90)
    assert len(told(process)) == 2
    beat(process, 5)
    put(core, "agents", 6, model="small")
    assert told(process)[2:] == [("echo/1", 6, {"model": "small"})]
    beat(process, 6)
    assert len(told(process)) == 3


def test_an_older_revision_changes_nothing_and_a_deleted_key_leaves_agents_as_they_are() -> None:
    core = CoreMesh()
    process = core.agent("echo/1")
    put(core, "agents", 5, model="large")
    beat(process, 5)
    assert not core.state.configs.put("agents", Settings({"model": "old"}, 4))
    core.state.configs.drop("agents")
    beat(process, 5)
    assert len(told(process)) == 1
    assert core.state.configs.of("echo") == Settings({}, 0)


@pytest.mark.parametrize(
    "name", ["", "agent", "agents/", "agents/a b", "agents/caller", "agents/echo/1", "node", "x/y"]
)
def test_only_agents_have_settings(name: str) -> None:
    why = configs.fault(name, {})
    assert why is not None and "agents" in why


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({f"k{number}": "" for number in range(SETTINGS_MAX + 1)}, "65 keys; the limit is 64"),
        ({"model name": "x"}, "is not a name"),
        ({"depth": "1", "model": "large\nadmin=yes"}, "the value of model has a line break"),
        ({"model": "\x1b[2J"}, "the value of model"),
        ({"model": "a\u202eb"}, "the value of model"),
        ({"model": "x" * SETTINGS_BYTES_MAX}, "8197 bytes of keys and values; the limit is 8192"),
    ],
)
def test_what_cannot_be_set_is_named(values: dict[str, str], says: str) -> None:
    assert says in (configs.fault("agents", values) or "")
    assert configs.fault("agents/echo", {"model": "x" * (SETTINGS_BYTES_MAX - 5)}) is None
    assert configs.fault("agents/echo", {"greeting": "größer 你好 👩\u200d💻", "none": ""}) is None


def test_every_node_knows_which_version_an_agent_has() -> None:
    cores = Cores(2)
    home, other = cores.nodes
    beat(home.agent("echo/1"), 7)
    cores.advance(1.0)
    remote = other.state.directory.get("default", "production", "echo/1")
    assert remote is not None and remote.config_version == 7
