"""Writes requirements/*.txt again: every version that is installed here, with the hashes of its files.

    make lock                    what pyproject.toml asks for now, at the versions locked so far where they still fit
    make lock ARGS=--upgrade     the newest versions that fit

One lock for Linux and macOS, x86-64 and arm64, Python 3.11 and newer. Only `make lock` needs uv, which it installs
beside, in build/tools, as locked too; who installs needs pip alone. No address of a package index is written.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHON = "3.11"  # the oldest that pyproject.toml allows; the lock's markers tell the newer ones apart


@dataclass(frozen=True, slots=True)
class Lock:
    """What one file locks."""

    project: bool
    """The dependencies of the project itself."""
    group: str = ""
    """A dependency group of pyproject.toml."""
    like: str = ""
    """Another file, whose versions are taken where both name a package: both go into one environment."""


LOCKS: Mapping[str, Lock] = {
    "dev": Lock(project=True, group="dev"),
    "build": Lock(project=False, group="build", like="dev"),
    "run": Lock(project=True, like="dev"),
    "bench": Lock(project=False, group="bench", like="dev"),
    "fuzz": Lock(project=False, group="fuzz", like="dev"),
    "tools": Lock(project=False, group="tools"),
}


_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; ([^\\\n]+?))? \\$", re.MULTILINE)
_BY = re.compile(r"^    #(?: via|  ) +([a-z0-9-]+)(?: \(pyproject\.toml(?::[a-z]+)?\))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Locked:
    """One entry of a file."""

    name: str
    version: str
    marker: str
    """Where it is installed (PEP 508); empty: everywhere."""
    hashes: tuple[str, ...]
    """SHA-256 of each file that may be installed: wheels of all platforms, and the source."""
    wanted_by: tuple[str, ...]
    """Names of other entries; those that pyproject.toml asks for have our own name here, too."""


def entries(text: str) -> list[Locked]:
    """What a file locks, in its order."""
    pins = list(_PIN.finditer(text))
    ends = [*(pin.start() for pin in pins[1:]), len(text)]
    found = []
    for pin, end in zip(pins, ends, strict=False):  # an empty file has an end, and no pin
        rest = text[pin.end() : end]
        by = _BY.findall(rest)
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", rest)
        found.append(Locked(pin[1], pin[2], pin[3] or "", tuple(hashes), tuple(by)))
    return found


def command(name: str, lock: Lock, more: Sequence[str]) -> list[str]:
    """What writes one file."""
    return [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON,
        "--generate-hashes", "--no-emit-index-url", "--custom-compile-command", "make lock",
        *(["pyproject.toml"] if lock.project else []),
        *(["--group", lock.group] if lock.group else []),
        *(["--constraints", f"requirements/{lock.like}.txt"] if lock.like else []),
        "--output-file", f"requirements/{name}.txt", *more,
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Write all files, the one that others follow first."""
    FOLDER.mkdir(exist_ok=True)
    for name, lock in LOCKS.items():
        done = subprocess.run(command(name, lock, arguments), cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            return done.returncode
        print(f"requirements/{name}.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
