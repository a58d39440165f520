"""A slice of the simulator's seeds, and that a seed is the same every time. `make sim` runs 300."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tidy.sources import ROOT
from tools.simulation.seeds import run_seed

SLICE = "1001-1010"
SLICE_OF_NODES = "1011-1014"


def sim(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "sim.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)


def test_all_invariants_hold_in_a_slice_of_seeds() -> None:
    found = sim("--seeds", SLICE, "--jobs", "2")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "all invariants held" in found.stdout


def test_all_invariants_hold_in_a_few_seeds_of_three_nodes() -> None:
    found = sim("--seeds", SLICE_OF_NODES, "--nodes", "3", "--jobs", "2")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("nodes", [0, 3])
def test_a_seed_is_the_same_every_time(nodes: int) -> None:
    first, second = run_seed(7, nodes=nodes), run_seed(7, nodes=nodes)
    assert first.digest == second.digest
    assert (first.steps, first.outcomes) == (second.steps, second.outcomes)


@pytest.mark.parametrize("nodes", ["0", "3"])
def test_a_seed_is_the_same_in_another_process_and_with_its_trace_written(nodes: str) -> None:
    short, traced = sim("--seed", "11", "--nodes", nodes), sim("--seed", "11", "--nodes", nodes, "--trace")
    assert short.returncode == traced.returncode == 0, short.stdout + short.stderr
    assert short.stdout.splitlines()[-1] == traced.stdout.splitlines()[-1]
    assert "envelope" in traced.stdout


def test_seeds_differ() -> None:
    assert run_seed(7).digest != run_seed(8).digest


def test_a_wrong_range_is_told_and_ends_with_2() -> None:
    found = sim("--seeds", "9-1")
    assert found.returncode == 2
    assert "holds no seed" in found.stderr


def test_every_invariant_is_listed_with_its_statement() -> None:
    found = sim("--invariants")
    assert found.returncode == 0
    assert "message that is not idempotent runs once" in found.stdout
