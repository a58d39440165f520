"""The trees that are compared: another commit's, unpacked, and the compiled copy of each."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path


class NoSuchTree(Exception):
    """The commit cannot be had; the text says why."""


def unpack(commit: str, repository: Path, into: Path) -> tuple[Path, str]:
    """Unpack a commit's files; returns where they are and the commit's short name. Raises `NoSuchTree`."""
    name = _git(repository, "rev-parse", "--short", "--verify", f"{commit}^{{commit}}").decode().strip()
    archive = _git(repository, "archive", "--format=tar", name)
    target = into / name
    target.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    return target, name


def compiled(root: Path) -> Path | None:
    """The compiled copy of a tree, made now if need be; None where it cannot be made (standard error says why)."""
    program = root / "tools" / "compiled.py"
    if not program.exists():
        return None
    done = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def _git(repository: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise NoSuchTree(done.stderr.decode(errors="replace").strip() or f"git {arguments[0]} failed")
    return done.stdout
