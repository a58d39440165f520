"""The benchmark as `make bench` runs it, at its smallest: real processes, one row, no NATS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench.py"
LIMIT_S = 60.0


def command(*more: str) -> list[str]:
    return [sys.executable, str(BENCH), "--quick", "--systems", "reach,direct", "--rounds", "1", *more]


def descendants(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents if parent in level} - found
        found |= level
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_row_is_measured_compared_and_written_as_json(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    arguments = command("--seconds", "0.2", "--rows", "c64", "--json", str(target))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 in flight" in done.stdout
    assert "Agent-Reach / direct gRPC" in done.stdout
    result = json.loads(target.read_text())
    systems = result["rows"]["c64"]["systems"]
    assert set(systems) == {"reach", "direct"}
    for found in systems.values():
        assert found["errors"] == 0
        assert found["value"]["median"] > 0
    assert systems["direct"]["ratio_to_direct"]["median"] == 1.0
    assert [bound["what"] for bound in result["bounds"]] == ["64 in flight, 256 B"]
    assert result["circumstances"]["rounds"] == 1


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    done = subprocess.run(command("--rows", "c65"), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "'c65' is none of alone, c64" in done.stderr


def test_a_row_of_several_nodes_is_measured_on_etcd(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    arguments = command("--seconds", "0.2", "--rows", "nodes", "--json", str(target))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(target.read_text())
    for where in ("same", "other"):
        assert [one["errors"] for one in result["nodes"]["reach"][where]["c64"]] == [0]
    assert [bound["limit"] for bound in result["bounds"]] == ["≤ 2", "≥ 0.45"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_benchmark_that_is_told_to_stop_ends_all_its_processes() -> None:
    bench = subprocess.Popen(
        command("--seconds", "30", "--rows", "c64"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    started: set[int] = set()
    try:
        end = time.monotonic() + LIMIT_S
        while len(started) < 5 and time.monotonic() < end:  # node, two responders, two requesters
            started |= descendants(bench.pid) - {bench.pid}
            assert bench.poll() is None, bench.stderr.read() if bench.stderr else ""
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(LIMIT_S) == 130
    finally:
        if bench.poll() is None:
            bench.kill()
            bench.wait()
        if bench.stderr is not None:
            bench.stderr.close()
    assert [pid for pid in started if alive(pid)] == []
