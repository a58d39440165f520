"""The suite of the pure code and of the SDK once more, against the compiled build.

Compiling takes minutes: it is done here in the soak run only. In an ordinary run the tests use what `make fast` made
of today's sources, and are skipped where there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import compiled

ROOT = Path(__file__).resolve().parents[2]
SUITE = ("tests/unit/core", "tests/unit/wire", "tests/unit/policy", "tests/unit/sdk", "tests/scenarios",
         "tests/component")  # fmt: skip
NOT = (
    "--ignore", "tests/component/test_duties.py", "--ignore", "tests/unit/core/test_actors.py",
    "--deselect", "tests/component/test_api_keys.py::"
    "test_a_thousand_wrong_keys_cost_no_slow_hash_and_a_right_one_costs_one",
    "--deselect", "tests/unit/core/test_version_policy.py::TestWhatItCosts",
)  # fmt: skip
"""They put others in the place of functions, which compiled code calls directly, or objects whose class it checks."""
LIMIT_S = 900.0


FROM_THE_COPY = "import sys, pytest, reach, agent_sdk, agentreach; sys.exit(pytest.main(sys.argv[1:]))"
"""The packages are imported before pytest puts the checkout first on the path; their modules then follow them."""


def run_suite(copy: Path) -> subprocess.CompletedProcess[str]:
    """Run the suite in a process in which the packages come from the copy."""
    return subprocess.run(
        [sys.executable, "-P", "-c", FROM_THE_COPY, "-q", "-p", "no:cacheprovider", *NOT, *SUITE],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def check(copy: Path) -> None:
    done = run_suite(copy)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(LIMIT_S)
def test_the_suite_holds_for_the_compiled_copy_that_was_made() -> None:
    copy = compiled.built()
    if copy is None:
        pytest.skip("today's sources were not compiled (make fast)")
    check(copy)


@pytest.mark.soak
@pytest.mark.timeout(3 * LIMIT_S)
def test_today_s_sources_can_be_compiled_and_the_suite_holds_for_them() -> None:
    lacking = compiled.missing()
    if lacking is not None:
        pytest.skip(f"this machine has no {lacking}")
    check(compiled.build())
