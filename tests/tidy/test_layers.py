"""Arrows go down only, and what decides is pure."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tidy.sources import PURE, ROOT, Source, sources

IMPURE_MODULES = frozenset(
    {"asyncio", "time", "random", "grpc", "logging", "os", "socket", "threading", "uuid", "structlog", "secrets"}
)
IMPURE_CALLS = frozenset({"open", "print", "input"})
LINTER = Path(sys.executable).with_name("lint-imports")


def lint_imports(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINTER), "--config", str(config), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def impurities(source: Source) -> list[str]:
    """What a pure module may not have: waiting, the outside world, output."""
    found = []
    for node in ast.walk(source.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{source.path}:{node.lineno} imports {n}" for n in names if n.split(".")[0] in IMPURE_MODULES]
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith) and not _is_port(source):
            found.append(f"{source.path}:{node.lineno} waits")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"{source.path}:{node.lineno} calls {node.func.id}")
    return found


def _is_port(source: Source) -> bool:
    """The shapes of what adapters implement: protocols and plain values, with `async def` in their signatures."""
    return source.path in ("reach/core/ports.py", "reach/core/store.py", "reach/core/snapshots.py")


SHARED_ADAPTERS = frozenset({"binding", "http_guard", "memory_keyspace", "told"})
"""What both servers do to take an address; the outer half of the HTTP server, the inner half of the memory store; what
a node's refusal says."""


def adapters_met(source: Source) -> list[str]:
    """Other adapters that an adapter imports."""
    own = source.module.split(".")[2:3]
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reach.adapters"):
            parts = (node.module or "").split(".")[2:3] or [each.name for each in node.names]
            found += [f"{source.path}: {name}" for name in parts if [name] != own and name not in SHARED_ADAPTERS]
    return found


def test_adapters_do_not_import_one_another() -> None:
    assert [fault for source in sources("reach/adapters") for fault in adapters_met(source)] == []


def test_an_adapter_that_imports_another_is_found() -> None:
    for text in ("from reach.adapters.metrics import render", "from reach.adapters import metrics"):
        assert adapters_met(Source("reach/adapters/http_server.py", text))
    assert not adapters_met(Source("reach/adapters/etcd/store.py", "from reach.adapters.etcd.watch import Watch"))


def test_the_import_linter_finds_every_layer_kept() -> None:
    done = lint_imports(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "0 broken" in done.stdout


def test_the_import_linter_breaks_on_an_arrow_that_goes_up(tmp_path: Path) -> None:
    upside_down = (ROOT / "pyproject.toml").read_text().replace(
        '["reach.cli", "reach.node", "reach.adapters", "reach.core"]',
        '["reach.core", "reach.adapters", "reach.node", "reach.cli"]',
    )  # fmt: skip
    config = tmp_path / "pyproject.toml"
    config.write_text(upside_down)
    done = lint_imports(config)
    assert done.returncode != 0
    assert "node layers BROKEN" in done.stdout


def test_the_linter_knows_all_contracts_of_the_house() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = {contract["name"] for contract in contracts}
    assert names >= {"node layers", "contract layers", "pure", "sdk and node apart", "grpc at the rim"}


def test_decisions_neither_wait_nor_touch_the_outside() -> None:
    assert [fault for source in sources(*PURE) for fault in impurities(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from asyncio import sleep",
        "import os.path",
        "async def f(): ...",
        "def f():\n    return open('x')",
        "def f():\n    print('x')",
    ],
)
def test_the_check_of_purity_finds(text: str) -> None:
    assert impurities(Source("reach/core/example.py", text))


def test_ports_hold_shapes_only() -> None:
    """Where `async def` is allowed in the core, nothing is awaited."""
    for source in sources(*PURE):
        if _is_port(source):
            waits = [
                node for node in ast.walk(source.tree) if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)
            ]
            assert waits == [], source.path


def test_nothing_is_called_helpers_or_utils() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
    found = [source.path for source in sources() if vague & set(source.module.split("."))]
    assert found == []


def test_the_linter_is_installed_beside_python() -> None:
    assert LINTER.exists() or shutil.which("lint-imports")
