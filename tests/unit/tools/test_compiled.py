"""Which compiled copy belongs to which sources, and what happens on a machine that cannot compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import compiled

PROGRAM = Path(compiled.__file__)


def checkout(root: Path) -> Path:
    """A tree with one module of each package."""
    for place in compiled.PACKAGES.values():
        (root / place).mkdir(parents=True)
        (root / place / "__init__.py").write_text("")
    (root / "reach" / "core").mkdir()
    (root / "reach" / "core" / "mesh.py").write_text("x = 1\n")
    return root


def test_a_copy_is_found_by_the_sources_that_it_was_made_from_and_by_no_others(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    assert compiled.built(root) is None
    compiled.place(root).mkdir(parents=True)
    made = compiled.built(root)
    assert made is not None
    source = root / "reach" / "core" / "mesh.py"
    source.write_text("x = 2\n")
    assert compiled.built(root) is None
    source.write_text("x = 1\n")
    assert compiled.built(root) == made
    (root / "reach" / "core" / "more.py").write_text("")
    assert compiled.built(root) is None


def test_modules_are_chosen_by_pattern_without_packages_and_what_is_left_out(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "reach" / "core" / "__init__.py").write_text("")
    (root / "reach" / "core" / "ring.py").write_text("")
    assert compiled.chosen(root) == ["reach/core/mesh.py"]


def test_of_former_copies_the_newest_few_are_kept(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / f"old{number}"
        folder.mkdir()
        os.utime(folder, (number, number))
    current = tmp_path / "current"
    current.mkdir()
    compiled._forget(current)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "old4", "old5"]


def test_a_machine_without_a_compiler_is_told_so_and_nothing_is_printed_for_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    assert "a C compiler" in (compiled.missing() or "")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--into", str(tmp_path / "made")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "all goes on in plain Python" in done.stderr
    assert not (tmp_path / "made").exists()


def test_what_crashes_on_import_is_not_kept(tmp_path: Path) -> None:
    """The trial runs in a process of its own, so that even a crash is only a failure of the build."""
    (tmp_path / "crashes.py").write_text("import ctypes\nctypes.string_at(0)\n")
    with pytest.raises(compiled.CannotCompile, match="does not work"):
        compiled._try(tmp_path, ["crashes.py"])
