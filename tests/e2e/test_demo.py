"""`reach demo` as a newcomer meets it, and the commands against it: real processes, real sockets, real grpcurl."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_BESIDE_PYTHON = Path(sys.executable).with_name("grpcurl")
GRPCURL = str(_BESIDE_PYTHON) if _BESIDE_PYTHON.exists() else shutil.which("grpcurl")
START_LIMIT_S = 40.0
LIMIT_S = 30.0


@dataclass(frozen=True)
class Demo:
    process: subprocess.Popen[str]
    listen: str
    http: str
    output: str

    @property
    def children(self) -> list[int]:
        return children_of(self.process.pid)


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def free_addresses() -> tuple[str, str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}", f"127.0.0.1:{two.getsockname()[1]}"


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("REACH_")} | more


def start() -> Demo:
    listen, http = free_addresses()
    process = subprocess.Popen(
        [sys.executable, "-m", "reach.cli", "demo", "--listen", listen, "--http", http],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        line = process.stdout.readline()
        lines.append(line)
        if not line or line.startswith("Ctrl-C"):
            break
    return Demo(process, listen, http, "".join(lines))


def finish(demo: Demo) -> None:
    if demo.process.poll() is None:
        demo.process.send_signal(signal.SIGINT)
    try:
        demo.process.wait(LIMIT_S)
    finally:
        demo.process.kill()
        assert demo.process.stdout is not None
        demo.process.stdout.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    running = start()
    yield running
    finish(running)


def reach(demo: Demo, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env=clean_environment(REACH_URL=demo.listen),
        input=given or "", check=False,
    )  # fmt: skip


def gone(pids: list[int], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in pids):
            return True
        time.sleep(0.05)  # there is no event for the end of somebody else's child
    return False


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_it_shows_calls_and_how_to_make_them(demo: Demo) -> None:
    assert "Ctrl-C" in demo.output, demo.output
    assert demo.output.count("✓") == 7 and demo.output.count("NO_ROUTE") == 1
    assert "who am I?" in demo.output and '"turn": 2' in demo.output
    assert "agentreach.v1.MeshService/Invoke" in demo.output
    assert "\x1b" not in demo.output and "WARNING" not in demo.output and "Traceback" not in demo.output


@pytest.mark.skipif(GRPCURL is None, reason="no grpcurl for this platform")
def test_the_contracts_grpcurl_call_answers_in_camel_case(demo: Demo) -> None:
    body = '{"target":{"capabilities":["echo"]},"timeoutMs":2000,"payload":{"json":{"hello":"world"}}}'
    result = subprocess.run(
        [str(GRPCURL), "-plaintext", "-d", body, demo.listen, "agentreach.v1.MeshService/Invoke"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    reply = json.loads(result.stdout)
    assert reply["payload"]["json"] == {"hello": "world"}
    assert reply["source"].startswith("echo/") and "correlationId" in reply


def test_metrics_moved_and_health_pages_answer(demo: Demo) -> None:
    for page in ("healthz", "readyz"):
        with urllib.request.urlopen(f"http://{demo.http}/{page}", timeout=LIMIT_S) as answer:
            assert answer.status == 200
    with urllib.request.urlopen(f"http://{demo.http}/metrics", timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    assert any(line.startswith("reach_requests_total") and 'agent_type="echo"' in line for line in text.splitlines())


def test_call_prints_the_answer_and_on_standard_error_who_gave_it(demo: Demo) -> None:
    result = reach(demo, "call", "-c", "echo", '{"a": [1, "ü"]}')
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"a": [1, "ü"]}
    assert "from echo/" in result.stderr and "trace" in result.stderr


def test_call_reads_standard_input_and_prints_json_for_programs(demo: Demo) -> None:
    result = reach(demo, "call", "--type", "echo", "--json", given="just text\n")
    shown = json.loads(result.stdout)
    assert shown["data"] == "just text" and shown["source"].startswith("echo/") and shown["trace_id"]


def test_call_streams_items_as_they_come(demo: Demo) -> None:
    result = reach(demo, "call", "-c", "think", "--stream", "--json", "why?")
    assert result.returncode == 0, result.stderr
    words = [json.loads(line) for line in result.stdout.splitlines()]
    assert words[:3] == ["Let", "me", "see"]


def test_data_that_looks_like_broken_json_is_sent_as_text_and_said_to_be(demo: Demo) -> None:
    broken = reach(demo, "call", "-c", "echo", '{"hello": "world"')
    assert broken.stdout.strip() == '{"hello": "world"'
    assert "looks like JSON, but is none (Expecting ',' delimiter" in broken.stderr
    text = reach(demo, "call", "-c", "echo", "hello {world}")
    assert text.stdout.strip() == "hello {world}" and "looks like JSON" not in text.stderr


def test_a_conversation_stays_with_one_instance(demo: Demo) -> None:
    answers = [
        json.loads(reach(demo, "call", "--type", "memory", "--session", "test", "--json", text).stdout)
        for text in ("one", "two")
    ]
    assert answers[0]["source"] == answers[1]["source"]
    assert answers[0]["session_event"] == "STARTED"
    assert answers[1]["data"]["heard_so_far"] == ["one", "two"]


def test_an_error_of_the_mesh_is_exit_code_1_with_the_trace(demo: Demo) -> None:
    result = reach(demo, "call", "-c", "fly", "now")
    assert result.returncode == 1
    assert result.stderr.startswith("reach: NO_ROUTE") and "reach trace " in result.stderr
    error = json.loads(reach(demo, "call", "-c", "fly", "now", "--json").stdout)["error"]
    assert error["code"] == "NO_ROUTE" and error["retryable"] is False


def test_agents_explain_and_trace_tell_what_happened(demo: Demo) -> None:
    assert sum(line.split()[1] == "HEALTHY" for line in reach(demo, "agents").stdout.splitlines()) == 5
    explained = reach(demo, "explain", "--capability", "report").stdout
    assert "chosen: reporter/" in explained and "selector" in explained
    trace_id = json.loads(reach(demo, "call", "-c", "report", "--json", "x").stdout)["trace_id"]
    traced = reach(demo, "trace", trace_id).stdout
    assert "→ reporter/" in traced and "└ reporter/" in traced and "in the handler" in traced


def agent_process(demo: Demo, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "reach.cli", "test-agent", *arguments],
        stderr=subprocess.PIPE, text=True, env=clean_environment(REACH_URL=demo.listen),
    )  # fmt: skip


def wait_until_listed(demo: Demo, agent_type: str) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if f"{agent_type}/" in reach(demo, "agents", "--status", "HEALTHY").stdout:
            return
    raise AssertionError(f"{agent_type} was not registered in time")


def test_a_test_agent_fails_as_told_and_ends_politely(demo: Demo) -> None:
    with agent_process(demo, "--type", "flaky", "--capabilities", "flake,other", "--fail", "1") as agent:
        wait_until_listed(demo, "flaky")
        result = reach(demo, "call", "-c", "flake", "x")
        assert result.returncode == 1
        assert "AGENT_ERROR" in result.stderr and "on purpose" in result.stderr
        agent.terminate()
        assert agent.wait(LIMIT_S) == 0
    assert "flaky/" not in reach(demo, "agents").stdout


def test_the_elder_of_two_processes_with_one_name_ends_with_code_4_and_says_why(demo: Demo) -> None:
    with agent_process(demo, "--type", "twin/one") as elder:
        wait_until_listed(demo, "twin")
        with agent_process(demo, "--type", "twin/one") as younger:
            assert elder.wait(LIMIT_S) == 4
            assert elder.stderr is not None and "twin/one" in elder.stderr.read()
            younger.terminate()
            assert younger.wait(LIMIT_S) == 0


def test_ctrl_c_ends_it_and_all_its_processes_within_seconds() -> None:
    running = start()
    children = running.children
    assert len(children) == 5, running.output
    began = time.monotonic()
    finish(running)
    assert running.process.returncode == 0
    assert time.monotonic() - began < 8
    assert gone(children, 1)


def test_processes_of_a_demo_that_was_killed_end_by_themselves() -> None:
    running = start()
    children = running.children
    assert len(children) == 5, running.output
    running.process.kill()
    running.process.wait(LIMIT_S)
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert gone(children, 15)
