"""Importing anything of ours has no effect, and gives no warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT, sources

PROBE = """
import asyncio, importlib, logging, os, random, signal, sys, threading, warnings
sys.path[:0] = sys.argv[1:2]

def facts():
    return {
        "environment": dict(os.environ), "threads": threading.active_count(), "handlers": list(logging.root.handlers),
        "level": logging.root.level, "folder": os.getcwd(), "signals": [signal.getsignal(n) for n in (2, 15)],
        "hook": sys.excepthook, "policy": type(asyncio.get_event_loop_policy()), "filters": list(warnings.filters),
        "recursion": sys.getrecursionlimit(), "random": random.getstate(), "files": sorted(os.listdir(".")),
    }

names = sys.argv[2:]
for name in names[:1]:
    importlib.import_module(name)      # what third parties do when they are imported is not ours
before = facts()
for name in names[1:]:
    importlib.import_module(name)
after = facts()
changed = [what for what in before if before[what] != after[what]]
print("changed:", *changed)
"""

THIRD_PARTY = """
import aiohttp.web, click, google.protobuf.json_format, google.rpc.error_details_pb2, google.rpc.status_pb2, grpc.aio
import grpc_health.v1.health_pb2_grpc, grpc_reflection.v1alpha.reflection_pb2_grpc, packaging.version, prometheus_client
import rich.console, rich.table, structlog, uhashring
"""


def run_probe(folder: Path, modules: list[str], extra: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "third_party_first.py").write_text(THIRD_PARTY)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, extra or str(folder), "third_party_first", *modules],
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def every_module() -> list[str]:
    generated = list((ROOT / "proto/agentreach/v1").glob("*_pb2*.py"))
    names = [f"agentreach.v1.{path.stem}" for path in generated] + [source.module for source in sources()]
    return sorted(name for name in names if not name.endswith("__main__"))


def test_every_module_is_imported_without_effect_and_without_a_warning(tmp_path: Path) -> None:
    done = run_probe(tmp_path, every_module())
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout, done.stderr) == ("changed:\n", "")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("import os\nos.environ['X'] = '1'", "environment"),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
        ("import logging\nlogging.basicConfig()", "handlers"),
        ("import random\nrandom.seed(1)", "random"),
    ],
)
def test_an_effect_of_an_import_is_found(tmp_path: Path, text: str, changed: str) -> None:
    (tmp_path / "with_effect.py").write_text(text)
    done = run_probe(tmp_path, ["with_effect"])
    assert done.stdout == f"changed: {changed}\n", done.stderr[-2000:]


def test_a_warning_at_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "with_warning.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)")
    done = run_probe(tmp_path, ["with_warning"])
    assert done.returncode != 0
    assert "DeprecationWarning" in done.stderr


def test_the_sdk_brings_neither_the_node_nor_its_libraries() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, agent_sdk, agent_sdk.sync; print(*sorted(sys.modules))"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & {"reach", "aiohttp", "structlog", "click", "rich", "prometheus_client", "uhashring"} == set()


ALONE = """
import importlib, os, sys
for name in ("third_party_first", *sys.argv[1].split()):
    importlib.import_module(name)
for name in sys.argv[2].split():
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_module_of_the_core_can_be_imported_before_any_other(tmp_path: Path) -> None:
    """They know each other in circles: which of them comes first must not matter."""
    (tmp_path / "third_party_first.py").write_text(THIRD_PARTY)
    ours = every_module()
    others, core = (
        " ".join(name for name in ours if name.startswith(package)) for package in ("agentreach.", "reach.core.")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, others, core],
        cwd=tmp_path, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr[-3000:]
