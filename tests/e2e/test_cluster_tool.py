"""`make cluster` as a person meets it: what it shows, what becomes of a killed node, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.cluster import free_first_port
from tools.cluster import COUNT, START_AGAIN_S, Place

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
STOP_S = 30.0
POLL_S = 0.1


class Tool:
    """One run of the tool; what it prints goes to a file."""

    def __init__(self, folder: Path, first_port: int) -> None:
        self.places = [Place(number, first_port) for number in range(1, COUNT + 1)]
        self._printed = folder / "printed"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
        with self._printed.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tools" / "cluster.py"), "--first-port", str(first_port)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, env=environment | {"COLUMNS": "200"},
            )  # fmt: skip

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def until(self, holds: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        give_up = time.monotonic() + limit_s
        while not holds():
            assert self.process.poll() is None, f"it has ended before {what}:\n{self.printed}"
            assert time.monotonic() < give_up, f"not within {limit_s:g} s: {what}\n{self.printed}"
            time.sleep(POLL_S)

    def pid(self, name: str) -> int:
        """Of a node or a member, as its table shows it."""
        found = re.search(rf"^(\d+) +{name} ", self.printed, re.MULTILINE)
        assert found, self.printed
        return int(found[1])

    def children(self) -> list[int]:
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in found.stdout.split()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


def reach(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REACH_")}
    return subprocess.run(
        [sys.executable, "-m", "reach.cli", *arguments], capture_output=True, text=True, timeout=LIMIT_S,
        env={**environment, "REACH_URL": place.grpc}, check=False,
    )  # fmt: skip


def linked(place: Place) -> int:
    """How many nodes this one knows and is linked with, itself among them."""
    told = reach(place, "nodes", "--json")
    return sum(state["linked"] for state in json.loads(told.stdout)["states"]) if told.returncode == 0 else 0


def test_three_nodes_are_shown_at_work_survive_a_kill_and_end_with_all_they_started(tmp_path: Path) -> None:
    tool = Tool(tmp_path, free_first_port())
    try:
        tool.until(lambda: "Ctrl-C ends it all" in tool.printed, "it shows what to try")
        first, second, third = tool.places
        assert all(place.grpc in tool.printed and place.etcd in tool.printed for place in tool.places)
        tool.until(lambda: bool(re.search(r"✓ .*node-\d → node-\d → ", tool.printed)), "a call crosses nodes")
        assert linked(first) == linked(third) == COUNT
        killed = tool.pid("node-2")
        os.kill(killed, signal.SIGKILL)
        told = reach(first, "call", "--capability", "echo", "--timeout", "10", '"still there?"')
        assert told.returncode == 0, told.stderr
        tool.until(lambda: linked(second) == COUNT, "node-2 is back", LIMIT_S + START_AGAIN_S)
        started = tool.children()
        assert len(started) == 2 * COUNT + 5 and killed not in started
        tool.process.send_signal(signal.SIGINT)
        assert tool.process.wait(STOP_S) == 0, tool.printed
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in tool.printed
    finally:
        tool.close()


def test_a_taken_port_is_said_before_anything_is_started(tmp_path: Path) -> None:
    first_port = free_first_port()
    with socket.create_server(("127.0.0.1", first_port + 105)):
        tool = Tool(tmp_path, first_port)
        assert tool.process.wait(LIMIT_S) == 2, tool.printed
    assert f"127.0.0.1:{first_port + 105}" in tool.printed and "--first-port" in tool.printed
    assert "starting" not in tool.printed and "Traceback" not in tool.printed
