"""`make lock` and `make audit` with the tools locked for them: they need the package index, so CI leaves them out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LIMIT_S = 600.0
COPIED = ("Makefile", "pyproject.toml", "requirements", "tools/lock.py", "tools/audit.py")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two need of the checkout."""
    folder = tmp_path_factory.mktemp("copy")
    (folder / "tools").mkdir()
    for name in COPIED:
        found = ROOT / name
        (shutil.copytree if found.is_dir() else shutil.copy)(found, folder / name)
    return folder


def make(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *words],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
    )


@pytest.mark.soak
def test_make_lock_changes_nothing_while_everything_fits(copy: Path) -> None:
    done = make(copy, "lock")
    assert done.returncode == 0, done.stderr
    for file in (ROOT / "requirements").iterdir():
        assert (copy / "requirements" / file.name).read_text() == file.read_text(), file.name


@pytest.mark.soak
def test_make_audit_without_a_network_says_so_and_fails_only_where_it_must_not_be_skipped(copy: Path) -> None:
    assert make(copy, "build/tools/.installed").returncode == 0
    away = {"HTTPS_PROXY": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1", "ALL_PROXY": ""}
    skipped, strict = make(copy, "audit", **away), make(copy, "audit", "ARGS=--strict", **away)
    for done in (skipped, strict):
        assert "audit: NOT AUDITED: the database of known holes cannot be used" in done.stderr
    assert (skipped.returncode, strict.returncode) == (0, 2)  # make's own code for a command that failed
