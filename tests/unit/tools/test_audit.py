"""What `make audit` makes of what pip-audit says: a hole, nothing, or no answer at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HOLE = {"id": "PYSEC-1", "aliases": ["CVE-2"], "fix_versions": ["2.11"], "description": "…"}
CLEAN = {"name": "rich", "version": "15.0.0", "vulns": []}
BAD = {"name": "jinja2", "version": "2.10", "vulns": [HOLE]}
SKIPPED = {"name": "click", "skip_reason": "Dependency not found"}


def audit(folder: Path, said: str, *arguments: str, code: int = 0) -> tuple[int, str]:
    """Run the tool with a pip-audit that says this: (exit code, what it printed)."""
    (folder / "pip_audit.py").write_text(f"import sys\n{said}\nsys.exit({code})\n")
    done = subprocess.run(
        [sys.executable, "-m", "tools.audit", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def reporting(*dependencies: dict[str, Any]) -> str:
    return f"print({json.dumps({'dependencies': dependencies, 'fixes': []})!r})"


def test_a_hole_is_named_with_the_version_that_mends_it_and_fails(tmp_path: Path) -> None:
    code, text = audit(tmp_path, reporting(CLEAN, BAD), code=1)
    assert code == 1
    assert "jinja2 2.10: PYSEC-1 CVE-2; fixed in 2.11" in text
    assert "2 packages looked up, 1 known holes" in text


def test_nothing_known_passes(tmp_path: Path) -> None:
    assert audit(tmp_path, reporting(CLEAN), "--strict") == (0, "audit: 1 packages looked up, 0 known holes\n")


@pytest.mark.parametrize(("arguments", "expected"), [((), 0), (("--strict",), 3)])
def test_what_the_index_does_not_know_is_not_called_clean(
    tmp_path: Path, arguments: tuple[str, ...], expected: int
) -> None:
    code, text = audit(tmp_path, reporting(SKIPPED), *arguments)
    assert code == expected
    assert text == "audit: NOT AUDITED: 1 of 1 (click)\n"


@pytest.mark.parametrize(("arguments", "expected"), [((), 0), (("--strict",), 3)])
def test_no_network_is_said_and_is_no_hole(tmp_path: Path, arguments: tuple[str, ...], expected: int) -> None:
    code, text = audit(tmp_path, "print('ProxyError: refused', file=sys.stderr)", *arguments, code=1)
    assert code == expected
    assert text == "audit: NOT AUDITED: the database of known holes cannot be used: ProxyError: refused\n"


def test_a_hole_fails_even_if_others_could_not_be_looked_up(tmp_path: Path) -> None:
    code, text = audit(tmp_path, reporting(SKIPPED, BAD), code=1)
    assert code == 1
    assert "NOT AUDITED: 1 of 2 (click)" in text


def test_all_that_is_locked_is_looked_up_and_nothing_without_its_hash(tmp_path: Path) -> None:
    code, text = audit(tmp_path, "print(sys.argv[1:], file=sys.stderr)")
    assert code == 0
    assert "--require-hashes" in text
    for file in (ROOT / "requirements").glob("*.txt"):
        assert str(file) in text
