"""requirements/*.txt: all that pyproject.toml asks for, each with its hashes, and no word of where it came from."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tidy.sources import ROOT
from tools.lock import LOCKS, Locked, entries

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def text_of(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text()


def asked_for(name: str, project: dict[str, Any]) -> list[str]:
    """What a lock must hold."""
    lock = LOCKS[name]
    asked = list(project["project"]["dependencies"]) if lock.project else []
    return asked + (grouped(lock.group, project["dependency-groups"]) if lock.group else [])


def grouped(name: str, groups: dict[str, Any]) -> list[str]:
    """A group of pyproject.toml with those that it includes."""
    asked: list[str] = []
    for each in groups[name]:
        asked += [each] if isinstance(each, str) else grouped(each["include-group"], groups)
    return asked


def missing(asked: list[str], locked: list[Locked]) -> list[str]:
    """Requirements for which no version is locked that satisfies them."""
    versions = {each.name: each.version for each in locked}
    return [each for each in asked if not satisfied(Requirement(each), versions)]


def satisfied(wanted: Requirement, versions: dict[str, str]) -> bool:
    version = versions.get(canonicalize_name(wanted.name))
    return version is not None and wanted.specifier.contains(version)


def loose(text: str) -> list[str]:
    """Lines that would install something without a version and hashes of its own."""
    pins = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    held = {(each.name, each.version) for each in entries(text) if each.hashes}
    return [line for line in pins if tuple(re.split(r"==| ", line)[:2]) not in held]


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_holds_what_pyproject_asks_for(name: str) -> None:
    assert missing(asked_for(name, PROJECT), entries(text_of(name))) == [], "make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_has_a_version_and_hashes(name: str) -> None:
    assert loose(text_of(name)) == []
    assert len(entries(text_of(name))) >= len(asked_for(name, PROJECT))


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_says_nothing_of_the_machine_or_the_index_it_was_written_with(name: str) -> None:
    assert re.findall(r"^.*(?:://|--index|--find-links|--trusted|(?:^|[ =\"'])/).*$", text_of(name), re.MULTILINE) == []


def test_one_environment_gets_one_version_of_each() -> None:
    versions = {each.name: each.version for each in entries(text_of("dev"))}
    for name in (name for name, lock in LOCKS.items() if lock.like):
        for each in entries(text_of(name)):
            assert versions.get(each.name, each.version) == each.version, f"{name}: {each.name}"
    assert {each.name for each in entries(text_of("run"))} <= set(versions)


def test_every_file_of_the_folder_is_written_by_make_lock() -> None:
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == set(LOCKS)


def test_what_builds_us_is_locked_too() -> None:
    """Nobody else's hashes hold for what pip would fetch to build with."""
    assert missing(PROJECT["build-system"]["requires"], entries(text_of("build"))) == []
    assert "--no-build-isolation" in makefile_variable("PIP")


def test_make_installs_nothing_but_what_is_locked_and_ourselves() -> None:
    installs = re.findall(r"python \$\((LOCKED|PIP)\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(installs) > 4
    assert [line for variable, line in installs if variable == "PIP"] == ["--no-deps --editable ."]
    assert {line for variable, line in installs if variable == "LOCKED"} == {
        f"requirements/{name}.txt" for name in LOCKS if name != "run"
    }
    assert (ROOT / "Makefile").read_text().count("pip install") == 1
    assert makefile_variable("LOCKED") == "$(PIP) --require-hashes -r"


def makefile_variable(name: str) -> str:
    found = re.search(rf"^{name} +:= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_what_make_writes_for_others_stays_out_of_git() -> None:
    for path in ("build/sbom/run.cdx.json", makefile_variable("TOOLS")):
        subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT, check=True, timeout=20)


def test_a_dependency_that_nobody_locked_is_found() -> None:
    locked = [Locked("click", "8.1.0", "", ("ab",), ())]
    assert missing(["Click>=8"], locked) == []
    assert missing(["click>=8.2", "leftpad"], locked) == ["click>=8.2", "leftpad"]


def test_an_entry_without_hashes_is_found() -> None:
    digest = "0" * 64
    good = f"click==8.1.0 \\\n    --hash=sha256:{digest}\n    # via agent-reach-mesh (pyproject.toml)\n"
    assert loose(good) == []
    assert loose(good + "rich==15.0.0\n") == ["rich==15.0.0"]
    assert loose(good + "leftpad @ file.whl\n") == ["leftpad @ file.whl"]
    assert loose("click==8.1.0 \\\n    --hash=md5:12\n") == ["click==8.1.0 \\"]
