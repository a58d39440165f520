"""Looks up whether a known hole is in what requirements/*.txt lock. `make audit`; needs the network.

It ends with 1 if there is one. What could not be looked up is said and is no failure (an index that mirrors another
often has no database of holes, and no network is no hole); with --strict that ends with 3, for a job that must not
believe in an audit that never was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0  # two hundred look-ups, one after another

CLEAN, FOUND, NOT_AUDITED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit came to."""

    holes: tuple[str, ...]
    """One line each."""
    unknown: tuple[str, ...]
    """What could not be looked up."""
    looked_up: int

    def code(self, *, strict: bool) -> int:
        """The exit code."""
        if self.holes:
            return FOUND
        return NOT_AUDITED if strict and (self.unknown or not self.looked_up) else CLEAN

    def text(self) -> str:
        """For people."""
        lines = list(self.holes)
        if self.unknown or not self.looked_up:
            shown = ", ".join(self.unknown[:5]) + (" …" if len(self.unknown) > 5 else "")
            lines.append(f"audit: NOT AUDITED: {len(self.unknown)} of {len(self.unknown) + self.looked_up} ({shown})")
        if self.looked_up:
            lines.append(f"audit: {self.looked_up} packages looked up, {len(self.holes)} known holes")
        return "\n".join(lines)


def judge(report: Any) -> Verdict:
    """Read pip-audit's JSON."""
    holes, unknown, looked_up = [], [], 0
    for each in report["dependencies"]:
        if "skip_reason" in each:
            unknown.append(each["name"])
            continue
        looked_up += 1
        for hole in each["vulns"]:
            names = " ".join([hole["id"], *hole.get("aliases", ())])
            fixed = ", ".join(hole["fix_versions"]) or "no version yet"
            holes.append(f"audit: {each['name']} {each['version']}: {names}; fixed in {fixed}")
    return Verdict(tuple(holes), tuple(unknown), looked_up)


def look_up(files: Sequence[Path]) -> Verdict | str:
    """Ask pip-audit about these files. A text says why there is no answer."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--format", "json"]
    command += ["--progress-spinner", "off", *(word for file in files for word in ("--requirement", str(file)))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S:g} s"
    try:
        return judge(json.loads(done.stdout))
    except ValueError:  # its code is 1 for a hole and for a failure alike; only the report tells them apart
        said = done.stderr.strip().splitlines()
        return said[-1] if said else f"pip-audit ended with {done.returncode} and without a word"


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--strict", action="store_true", help="end with 3 if something could not be looked up")
    parser.add_argument("files", nargs="*", type=Path, help="lock files (default: all of requirements/)")
    chosen = parser.parse_args(arguments)
    verdict = look_up(chosen.files or sorted((ROOT / "requirements").glob("*.txt")))
    if isinstance(verdict, str):
        print(f"audit: NOT AUDITED: the database of known holes cannot be used: {verdict}", file=sys.stderr)
        return NOT_AUDITED if chosen.strict else CLEAN
    print(verdict.text())
    return verdict.code(strict=chosen.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
