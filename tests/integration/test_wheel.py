"""The wheel: what is in it, and that it works away from the checkout, on the oldest and newest libraries we allow."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.etcd import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
INSTALL_LIMIT_S = 600.0

IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
names = []
for top in ("agentreach", "agent_sdk", "reach"):
    package = importlib.import_module(top)
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    names += [found.name for found in pkgutil.walk_packages(package.__path__, top + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""

SAME_NAMED = """
from google.protobuf import descriptor_pb2, descriptor_pool
mine = descriptor_pb2.FileDescriptorProto(name="v1/envelope.proto", package="v1", syntax="proto3")
mine.message_type.add(name="Envelope")
descriptor_pool.Default().Add(mine)
from agentreach.v1.envelope_pb2 import Envelope
print(Envelope.DESCRIPTOR.full_name, Envelope.DESCRIPTOR.file.name)
"""


@dataclass(frozen=True)
class Home:
    """A virtual environment with our wheel in it, and an empty folder to run from."""

    folder: Path
    empty: Path

    @property
    def bin(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    def run(self, *command: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run one of its programs in the empty folder, with nothing of ours in the environment."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("REACH_", "PYTHON"))}
        program, *arguments = command
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.empty, env=clean, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip


def new_home(folder: Path, *, pip: bool = False) -> Home:
    """An empty virtual environment."""
    home = Home(folder / "venv", folder / "empty")
    home.empty.mkdir(parents=True)
    without = [] if pip else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *without, str(home.folder)], check=True, timeout=LIMIT_S)
    return home


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)],
        cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The wheel installed alone; its dependencies are this environment's, by a path that comes after it.

    Folders named in a .pth file are added without their own .pth files: the editable install of the checkout is not
    seen.
    """
    made = new_home(tmp_path_factory.mktemp("home"))
    installer = [sys.executable, "-m", "pip", "--python", str(made.bin / "python"), "install"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*installer, *quiet, str(wheel)], check=True, timeout=LIMIT_S)
    (packages,) = made.folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    yield made


def test_the_wheel_holds_the_contract_its_code_its_types_and_nothing_of_the_workshop(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"agentreach", "agent_sdk", "reach"}
    for proto in (ROOT / "proto/agentreach/v1").glob("*.proto"):
        stem = f"agentreach/v1/{proto.stem}"
        assert {f"{stem}.proto", f"{stem}_pb2.py", f"{stem}_pb2.pyi"} <= set(names), stem
    for service in ("mesh", "registry", "admin", "peer"):
        assert {f"agentreach/v1/{service}_pb2_grpc.py", f"agentreach/v1/{service}_pb2_grpc.pyi"} <= set(names)
    assert {"agentreach/py.typed", "agent_sdk/py.typed", "reach/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_asks_for_what_the_project_says(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {line.split(":", 1)[1].split(";")[0].strip() for line in metadata.splitlines() if "Requires-Dist:" in line}
    wanted = {requirement.split(";")[0].strip() for requirement in project["dependencies"]}
    assert {normal(each) for each in asked} == {normal(each) for each in wanted}
    assert "Name: agent-reach-mesh" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def normal(requirement: str) -> tuple[str, frozenset[str]]:
    """A requirement whose order of bounds says nothing."""
    name, bounds = re.fullmatch(r"([A-Za-z0-9._-]+)(.*)", requirement).groups()  # type: ignore[union-attr]  # it matches
    return name, frozenset(bound.strip() for bound in bounds.split(","))


def test_every_module_is_imported_from_an_empty_folder_without_a_warning(home: Home) -> None:
    done = home.run("python", "-W", "error", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 100
    assert done.stderr == ""


def test_the_command_says_its_version(home: Home, wheel: Path) -> None:
    done = home.run("reach", "version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Agent-Reach {wheel.name.split('-')[1]} (python ")


def test_node_agents_and_calls_work_away_from_the_checkout(home: Home) -> None:
    assert_works(home)


def assert_works(home: Home) -> None:
    """A node, agents in processes of their own, and calls: `reach demo`, from the empty folder."""
    listen, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    done = home.run("reach", "demo", "--once", "--listen", listen, "--http", http)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '{"hello": "world"}' in done.stdout


def test_a_proto_of_the_same_name_in_the_process_does_no_harm(home: Home) -> None:
    done = home.run("python", "-W", "error", "-c", SAME_NAMED)
    assert done.stdout == "agentreach.v1.Envelope agentreach/v1/envelope.proto\n", done.stderr


LOWEST = ("grpcio==1.76.0", "grpcio-health-checking==1.76.0", "grpcio-reflection==1.76.0", "protobuf==6.31.1")


@pytest.mark.soak
@pytest.mark.parametrize("pins", [LOWEST, ()], ids=["lowest", "newest"])
def test_the_wheel_works_on_both_ends_of_the_range_we_allow(wheel: Path, tmp_path: Path, pins: tuple[str, ...]) -> None:
    """In a clean environment, from the package index: import with -W error, a node, agents, calls."""
    made = new_home(tmp_path, pip=True)
    done = made.run(
        "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:",
        str(wheel), *pins, limit_s=INSTALL_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    done = made.run("python", "-W", "error", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_works(made)


@pytest.mark.soak
def test_the_wheel_works_on_exactly_what_is_locked_for_it(wheel: Path, tmp_path: Path) -> None:
    """As docs/howto/dependencies.md says: each dependency by its hash, then ours alone, and nothing is missing."""
    made = new_home(tmp_path, pip=True)
    quiet = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for what in (("--require-hashes", "-r", str(ROOT / "requirements/run.txt")), ("--no-deps", str(wheel))):
        done = made.run(*quiet, *what, limit_s=INSTALL_LIMIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
    assert made.run("python", "-m", "pip", "check").returncode == 0
    done = made.run("python", "-W", "error", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_works(made)
