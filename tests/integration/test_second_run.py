"""Who gets a second run in `make test` (decision 23), seen from a session of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.second_run import MOST

ROOT = Path(__file__).parents[2]

ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    mark = pathlib.Path(__file__).with_suffix(f".{{number}}")
    before = mark.exists()
    mark.touch()
    assert before, f"the first run says {{number}}"
"""
UNTRUE = """
from tests.support.chaos import judge
def test_ran_twice():
    judge(["7 (OK: ) ran 2 times"], "it ran twice")
"""
ALWAYS = "def test_fails_always():\n    assert False, 'it never holds'\n"


def session(folder: Path, tests: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of pytest on these tests, with this project's conftest."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-ra'\n")
    for name, text in tests.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "tests"],
        cwd=folder, env={k: v for k, v in environment.items() if not k.startswith("PYTEST_XDIST")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("folder", ["e2e", "integration"])
def test_a_test_of_processes_that_fails_once_beside_others_passes_and_is_shown(tmp_path: Path, folder: str) -> None:
    code, told = session(tmp_path, {f"{folder}/test_x.py": ONCE.format(count=1)}, "-n", "2")
    assert code == 0, told
    assert "1 passed, 1 rerun" in told
    assert "defects to look into" in told and "the first run says 0" in told


@pytest.mark.parametrize("folder", ["unit", "scenarios"])
def test_other_tests_get_none(tmp_path: Path, folder: str) -> None:
    code, told = session(tmp_path, {f"{folder}/test_x.py": ONCE.format(count=1)}, "-n", "2")
    assert code == 1 and "1 failed" in told and "1 rerun" not in told


def test_a_test_that_runs_alone_gets_none(tmp_path: Path) -> None:
    code, told = session(tmp_path, {"e2e/test_x.py": ONCE.format(count=1)})
    assert code == 1 and "1 failed" in told and "1 rerun" not in told


def test_what_no_load_explains_gets_none(tmp_path: Path) -> None:
    code, told = session(tmp_path, {"e2e/test_x.py": UNTRUE}, "-n", "2")
    assert code == 1 and "1 failed" in told and "1 rerun" not in told


def test_what_fails_twice_has_failed(tmp_path: Path) -> None:
    code, told = session(tmp_path, {"e2e/test_x.py": ALWAYS}, "-n", "2")
    assert code == 1 and "1 failed, 1 rerun" in told


def test_many_second_runs_fail_the_session(tmp_path: Path) -> None:
    code, told = session(tmp_path, {"e2e/test_x.py": ONCE.format(count=MOST + 1)}, "-n", "4")
    assert code == 1 and f"{MOST + 1} passed, {MOST + 1} rerun" in told
    assert f"more than {MOST} fail the session" in told
