"""The command line: what it prints, where, and with which exit code. Against a server with a fake node behind it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent_sdk import NoRoute, Overloaded
from agentreach.v1.error_pb2 import NO_ROUTE
from agentreach.wire import errors
from reach.adapters.admin_client import NodeUnreached
from reach.adapters.grpc_server import GrpcServer
from reach.cli import ending
from reach.cli.call import _end_with
from reach.cli.ending import Ended, Exit
from reach.cli.root import reach
from reach.cli.targets import Access
from reach.core.ports import MeshFailure
from tests.support.switchboard import RuleSwitchboard

LIMIT_S = 20.0


@pytest.fixture
def node() -> Iterator[str]:
    """Address of a server in a thread with a loop of its own: commands run loops themselves."""
    started: list[str] = []
    up = threading.Event()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        server = GrpcServer(RuleSwitchboard(), listen="127.0.0.1:0")
        await server.start()
        over = asyncio.Event()
        stop.append((asyncio.get_running_loop(), over))
        started.append(server.address)
        up.set()
        await over.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fake-node")
    thread.start()
    assert up.wait(LIMIT_S)
    yield started[0]
    loop, over = stop[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(LIMIT_S)


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address where nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, without REACH_ variables but those given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env=environment | more, input="", check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "demo",
        "test-agent",
        "agents",
        "call",
        "explain",
        "trace",
        "breakers",
        "dead",
        "drain",
        "versions",
        "rollout",
        "config",
        "check-config",
        "version",
    ],
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = CliRunner().invoke(reach, [command, "--help"])
    assert result.exit_code == 0
    assert command == "version" or f"reach {command}" in result.output.split("Options:")[0].split("Usage:")[1]


def test_an_unknown_command_names_the_nearest() -> None:
    result = run("agnts")
    assert result.returncode == 2
    assert "Did you mean 'agents'?" in result.stderr


def test_the_version_is_an_option_too() -> None:
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout == run("version").stdout
    assert result.stdout.startswith("Agent-Reach 0")


def test_version_is_printed_and_as_json() -> None:
    assert CliRunner().invoke(reach, ["version"]).output.startswith("Agent-Reach ")
    assert json.loads(CliRunner().invoke(reach, ["version", "--json"]).output)["agent-reach-mesh"]


def test_agents_are_listed_as_a_plain_table_into_a_pipe_and_as_json(node: str) -> None:
    result = run("agents", "--url", node)
    assert result.returncode == 0, result.stderr
    assert "echo/1" in result.stdout and "HEALTHY" in result.stdout and "\x1b" not in result.stdout
    listed = json.loads(run("agents", "--json", REACH_URL=node).stdout)
    assert listed[0]["agentId"] == "echo/1"
    assert listed[0]["inFlight"] == 0  # defaults are written out


def test_nodes_and_sessions_are_listed_as_tables_and_as_json(node: str) -> None:
    result = run("nodes", "--url", node)
    assert result.returncode == 0, result.stderr
    assert "NODE" in result.stdout and "n1" in result.stdout and "\x1b" not in result.stdout
    assert json.loads(run("nodes", "--json", REACH_URL=node).stdout)["nodes"][0]["nodeId"] == "n1"
    result = run("sessions", "--url", node)
    assert (result.returncode, result.stdout) == (0, "") and "no agent holds such a session" in result.stderr
    assert json.loads(run("sessions", "--json", REACH_URL=node).stdout)["sessions"] == []


def test_explain_shows_the_choice(node: str) -> None:
    result = run("explain", "--url", node, "--capability", "echo")
    assert result.returncode == 0, result.stderr
    assert "→" in result.stdout and "chosen: echo/1" in result.stdout
    assert json.loads(run("explain", "--url", node, "-c", "echo", "--json").stdout)["chosen"] == "echo/1"


def test_explain_and_call_need_one_target_and_say_how() -> None:
    for command in (["explain"], ["call", "hi"]):
        result = CliRunner().invoke(reach, command)
        assert result.exit_code == 2
        assert "--capability" in result.output
        result = CliRunner().invoke(reach, [*command, "--id", "a/1", "--type", "a"])
        assert result.exit_code == 2


def test_breakers_are_listed_and_reset(node: str) -> None:
    result = CliRunner().invoke(reach, ["breakers", "--url", node])
    assert result.exit_code == 0
    assert result.output.split()[:7] == ["AGENT", "BREAKER", "TRIPS", "NEXT", "PROBE", "ENV", "echo/1"]
    as_json = CliRunner().invoke(reach, ["breakers", "--url", node, "--json"])
    assert json.loads(as_json.output)["breakers"][0]["state"] == "OPEN"
    for arguments in (["breakers", "reset", "echo/1", "--url", node], ["breakers", "--url", node, "reset", "echo/1"]):
        result = CliRunner().invoke(reach, arguments)
        assert result.output == "the breaker of echo/1 is closed\n"


def test_a_drain_is_begun_and_what_runs_is_told(node: str) -> None:
    result = CliRunner().invoke(reach, ["drain", "echo/1", "--no-wait", "--json", "--url", node])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["in_flight"] == 1
    assert "echo/1 drains: 1 requests in flight" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["drain"], "AGENT_ID, or --node"),
        (["drain", "echo/1", "--node"], "AGENT_ID, or --node"),
        (["drain", "--node", ""], "names no node"),
        (["drain", "echo/1", "--timeout", "0"], "above 0 and at most 3600"),
        (["sessions", "release", "ada"], "Missing option '--type'"),
        (["dead", "list", "--limit", "99999999999999999999"], "not in the range"),
        (["breakers", "--limit", "99999999999999999999"], "not in the range"),
        (["call", "-c", "echo", "--timeout", "0", "x"], "'0' is not a number of seconds above 0"),
        (["call", "-c", "echo", "--timeout", "-1", "x"], "'-1' is not a number of seconds above 0"),
        (["call", "-c", "echo", "--timeout", "nan", "x"], "'nan' is not a number of seconds above 0"),
        (["call", "-c", "echo", "--timeout", "inf", "x"], "'inf' is not a number of seconds above 0"),
        (["call", "-c", "echo", "--session", "", "x"], "an empty ID names no conversation"),
        (["explain", "-c", "echo", "--session", ""], "an empty ID names no conversation"),
        (["config", "set", "agents", "a=1", "a=2"], "'a' is there twice"),
        (["config", "set", "agents", "a=1", "--unset", "a"], "a cannot be both"),
        (["call", "-c", "echo", '{"x": NaN}'], "NaN in DATA"),
        (["call", "-c", "echo", "[1e999]"], "1e999 in DATA"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(reach, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_a_failed_call_says_from_whom_after_how_many_attempts_and_when_to_come_again() -> None:
    error = Overloaded(
        "busy now",
        agent_id="w/1",
        attempts=3,
        retry_after=2.0,
        may_have_executed=True,
        details={"not_retried": "the back-off would pass the deadline"},
        trace_id="abc",
    )
    with pytest.raises(Ended) as ended:
        _end_with(error, json_wanted=False)
    assert ended.value.message.splitlines() == [
        "OVERLOADED: busy now; it may have run",
        "from w/1; after 3 attempts; not tried again: the back-off would pass the deadline; come again in 2.00 s",
        "see: reach trace abc",
    ]
    with pytest.raises(Ended) as ended:
        _end_with(NoRoute("no agent matches type w", trace_id="abc"), json_wanted=False, identified=True)
    assert ended.value.message.splitlines()[-1] == "an admin sees more: reach trace abc"
    assert [Access(api_key="k").identified, Access(cert="f").identified, Access(ca="f").identified] == [
        True,
        True,
        False,
    ]
    with pytest.raises(Ended) as ended:
        _end_with(NoRoute("no agent matches type w"), json_wanted=False)
    assert ended.value.message == "NO_ROUTE: no agent matches type w"


def test_trace_prints_or_ends_with_what_the_mesh_said(node: str) -> None:
    assert "m1" in run("trace", "--url", node, "abc").stdout
    result = run("trace", "--url", node, "unknown")
    assert result.returncode == Exit.MESH_ERROR
    assert result.stderr.startswith("reach: NO_ROUTE") and result.stdout == ""


@pytest.mark.parametrize("command", [["agents"], ["trace", "abc"], ["explain", "-c", "echo"]])
def test_no_node_is_one_line_and_exit_code_3(closed_port: str, command: list[str]) -> None:
    result = run(*command, "--url", closed_port)
    assert result.returncode == Exit.NO_NODE
    assert result.stderr.count("\n") == 1
    assert closed_port in result.stderr and "reach serve" in result.stderr


def test_the_second_address_is_tried_when_the_first_is_dead(node: str, closed_port: str) -> None:
    assert run("agents", "--url", f"{closed_port},{node}").returncode == 0


def test_an_address_that_is_none_is_a_usage_error() -> None:
    result = CliRunner().invoke(reach, ["agents", "--url", "nonsense"])
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output


def test_a_reader_that_has_enough_is_no_failure(node: str) -> None:
    environment = os.environ | {"REACH_URL": node}
    with subprocess.Popen(
        [sys.executable, "-m", "reach.cli", "agents"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(LIMIT_S) == 0
        assert process.stderr.read() == b""


def test_check_config_shows_what_was_changed_and_hides_secrets(tmp_path: Path) -> None:
    file = tmp_path / "reach.toml"
    file.write_text('lane_max = 5\nregistry_user = "reach"\nregistry_password = "hunter2"\n[aliases]\na = "b"\n')
    result = run("check-config", "--config", str(file))
    assert result.returncode == 0, result.stderr
    assert "default 100" in result.stdout and "hunter2" not in result.stdout
    shown = json.loads(run("check-config", "--json", "--config", str(file), REACH_MAX_HOPS="3").stdout)
    assert (shown["lane_max"], shown["max_hops"], shown["aliases"]) == (5, 3, {"a": "b"})
    assert shown["registry_password"] == "(secret)"


@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_a_bad_configuration_is_one_line_and_exit_code_2(command: str) -> None:
    for result in (run(command, "--lane-max", "0"), run(command, REACH_LANE_MAKS="3"), run(command, "--config", "/no")):
        assert result.returncode == Exit.USAGE
        assert result.stderr.count("\n") == 1 and result.stderr.startswith("reach: ")


def test_an_unknown_option_names_the_nearest() -> None:
    result = run("serve", "--lisen", "x")
    assert result.returncode == Exit.USAGE
    assert "--listen" in result.stderr


@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize("which", ["--listen", "--http"])
def test_a_taken_port_is_one_line_and_exit_code_2(command: str, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = "--http" if which == "--listen" else "--listen"
        result = run(command, which, address, other, "127.0.0.1:0")
    assert result.returncode == Exit.USAGE
    lines = [line for line in result.stderr.splitlines() if line.startswith("reach: ")]
    assert len(lines) == 1 and address in lines[0] and which in lines[0]
    assert "Traceback" not in result.stderr


def test_call_reads_json_or_text_and_refuses_nothing_at_all() -> None:
    from reach.cli.call import _value

    assert _value('{"a": 1}') == {"a": 1}
    assert _value("hello there") == "hello there"
    assert _value("[" * 100_000) == "[" * 100_000


def test_test_agent_refuses_a_bad_name_and_bad_rates() -> None:
    for arguments in (["--type", "Not A Type"], ["--fail", "2"], ["--delay", "-1"]):
        assert CliRunner().invoke(reach, ["test-agent", *arguments]).exit_code == 2


async def _raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NodeUnreached("nobody"), Exit.NO_NODE),
        (MeshFailure(errors.failure(NO_ROUTE, "nothing matches")), Exit.MESH_ERROR),
    ],
)
def test_errors_become_exit_codes(error: Exception, code: Exit) -> None:
    with pytest.raises(Ended) as caught:
        ending.run(_raising(error))
    assert caught.value.code is code


def test_ctrl_c_before_the_work_began_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    work = _raising(RuntimeError())
    with pytest.raises(KeyboardInterrupt):
        ending.run(work)
    assert work.cr_frame is None  # closed: Python has nothing to say about it


def test_dead_letters_are_listed_and_redriven_with_the_exit_codes_of_every_command(node: str, closed_port: str) -> None:
    listed = run("dead", "list", "--url", node)
    assert listed.returncode == 0 and "m1" in listed.stdout and "HOP_LIMIT" in listed.stdout, listed.stderr
    assert json.loads(run("dead", "redrive", "m1", "--json", REACH_URL=node).stdout)["messageId"] == "m2"
    assert run("dead", "list", "--url", closed_port).returncode == Exit.NO_NODE
    assert CliRunner().invoke(reach, ["dead", "redrive"]).exit_code == Exit.USAGE
    assert CliRunner().invoke(reach, ["call", "-c", "x", "--stream", "--reply-topic", "t", "1"]).exit_code == Exit.USAGE


def test_versions_and_a_rollout_are_shown_and_set(node: str) -> None:
    listed = json.loads(run("versions", "--url", node, "--json").stdout)
    assert [(row["agentType"], row["instances"], row["share"], row["state"]) for row in listed] == [
        ("echo", {"HEALTHY": 1}, None, "active")
    ]
    result = run("rollout", "echo", "--weights", "2.1.0=5,2.0.3=95", "--url", node)
    assert result.returncode == 0, result.stderr
    assert "no agent of version 2.1.0 is there yet" in result.stderr
    assert [line.split()[:2] + line.split()[-2:] for line in result.stdout.splitlines()[1:]] == [
        ["echo", "2.0.3", "absent", "production"],
        ["echo", "2.1.0", "absent", "production"],
        ["echo", "–", "drained", "production"],
    ]
    shown = json.loads(run("rollout", "Echo", "--prefer", "3", "--url", node, "--json").stdout)
    assert shown["policy"]["preferred"] == "3" and shown["policy"]["weights"] == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout"],
        ["rollout", "a", "--prefer", "1", "--clear"],
        ["rollout", "a", "--weights", "1"],
        ["rollout", "a", "--weights", "=1"],
        ["rollout", "a", "--weights", "1=-1"],
        ["rollout", "a", "--weights", "1=1,1=2"],
        ["rollout", "a", "--clear", "--watch"],
        ["rollout", "a", "--watch", "--json"],
        ["rollout", ""],
        ["rollout", "a", "--prefer", ""],
        ["rollout", "a", "--drain", ""],
        ["config", "set", "agents"],
        ["config", "set", "agents", "novalue"],
        ["config", "get"],
    ],
)
def test_usage_errors_of_rollout_and_config_exit_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(reach, arguments).exit_code == 2


def test_settings_are_set_key_by_key_and_shown(node: str) -> None:
    assert "nothing is set under agents" in run("config", "get", "agents", "--url", node).stderr
    assert run("config", "set", "agents", "model=large", "depth=3=4", "--url", node).stdout == "agents is set\n"
    assert run("config", "get", "agents", "--url", node).stdout == "depth=3=4\nmodel=large\n"
    changed = run("config", "set", "agents", "model=small", "--unset", "depth", "--url", node, "--json")
    assert json.loads(changed.stdout) == {"name": "agents", "version": 2} and changed.stderr == ""
    shown = json.loads(run("config", "get", "agents", "--url", node, "--json").stdout)
    assert shown == {"settings": {"model": "small"}, "version": "2"}
    result = run("config", "set", "agents", "--unset", "depth", "--url", node)
    assert result.returncode == 0 and result.stderr == "depth was not set under agents\n"


def test_a_version_that_is_not_there_cannot_be_drained(node: str) -> None:
    result = run("rollout", "echo", "--drain", "9.9", "--url", node)
    assert result.returncode == Exit.MESH_ERROR and result.stdout == ""
    assert result.stderr == "reach: no agent of type echo and version 9.9 is there; its versions: (none)\n"


def test_rollout_without_a_node_exits_with_3(closed_port: str) -> None:
    for arguments in (["versions"], ["rollout", "a"], ["config", "get", "agents"]):
        assert run(*arguments, "--url", closed_port).returncode == 3
