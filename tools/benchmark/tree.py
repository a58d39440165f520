"""The trees that are compared: another commit's, unpacked, and the compiled copy of each."""

from __future__ import annotations

import asyncio
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


async def compiled(root: Path, make: bool) -> Path | None:
    """The compiled copy of a tree, with `make` made now if need be; None where there is none."""
    program = root / "tools" / "compiled.py"
    if not program.exists():
        return None
    command = [sys.executable, str(program), *([] if make else ["--path"])]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        path = (await process.communicate())[0].decode().strip()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    return Path(path) if path else None


def _git(repository: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise NoSuchTree(done.stderr.decode(errors="replace").strip() or f"git {arguments[0]} failed")
    return done.stdout
