"""Compiles the hot modules: a copy of the packages whose extension modules stand beside their source.

    make fast                         compile what the sources say now, if that was not done yet
    python tools/compiled.py --path    print where that is; nothing if it was not compiled
    python tools/compiled.py --into D  put the extension modules alone into a folder (for a wheel)

The copy's folder is named by a hash of everything it is made from. So it never stands in front of newer source: who
wants it asks for the one of today's sources, puts that folder first on PYTHONPATH, or goes on in plain Python. Nothing
is ever compiled in place. docs/decisions/0014-compiled-hot-path.md says why, and what compiled code must not contain.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"reach": "reach", "agent_sdk": "agent_sdk", "agentreach": "proto/agentreach"}
"""Where each package is in the checkout."""
CHOSEN = (
    "agentreach/wire/*.py",
    "agentreach/policy/*.py",
    "agentreach/aio/clock.py",
    "reach/core/*.py",
    "agent_sdk/calls.py",
    "agent_sdk/composing.py",
    "agent_sdk/host.py",
    "agent_sdk/identity.py",
    "agent_sdk/intake.py",
    "agent_sdk/lanes.py",
    "agent_sdk/outgoing.py",
    "agent_sdk/pending.py",
    "agent_sdk/replies.py",
    "agent_sdk/responses.py",
    "agent_sdk/watch.py",
    "agent_sdk/work.py",
)
LEFT_OUT = {
    "agentreach/wire/errors.py": "for failures only",
    "agentreach/wire/redaction.py": "for failures only",
    "agentreach/wire/signing.py": "for principals that must sign only, and most of its time is hashing",
    "agentreach/policy/backoff.py": "for failures only",
    "reach/core/arrivals.py": "no message passes it",
    "reach/core/auditing.py": "no message passes it",
    "reach/core/configs.py": "no message passes it",
    "reach/core/departures.py": "no message passes it",
    "reach/core/effects.py": "fields of its dataclasses are of classes that come later in a cycle of imports",
    "reach/core/explain.py": "no message passes it",
    "reach/core/fair.py": "no message passes it while there is room",
    "reach/core/heartbeats.py": "no message passes it",
    "reach/core/hints.py": "for failures only",
    "reach/core/ports.py": "protocols only",
    "reach/core/profiles.py": "a table",
    "reach/core/redacting.py": "for failures only",
    "reach/core/ring.py": "its base class is uhashring's, which is not compiled",
    "reach/core/shares.py": "no message passes it while there is room",
    "reach/core/shelves.py": "no message passes it while there is room",
    "reach/core/signed.py": "for principals that must sign only",
    "reach/core/snapshots.py": "a protocol",
    "reach/core/store.py": "protocols and plain values",
    "reach/core/takeover.py": "no message passes it",
    "reach/core/watching.py": "no message passes it",
    "reach/core/waitqueue.py": "no message passes it while there is room",
}
KEPT = 3  # copies of former sources that stay: something may still run from them
OPTIMISE = "2"


class CannotCompile(Exception):
    """This machine lacks what it takes; the text says what."""


def say(text: str) -> None:
    """Progress; standard output is for the path."""
    print(text, file=sys.stderr, flush=True)


def sources(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Every file of the packages: where it stands when installed, and where it is now."""
    for package, place in PACKAGES.items():
        for path in sorted((root / place).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield f"{package}/{path.relative_to(root / place).as_posix()}", path


def chosen(root: Path = ROOT) -> list[str]:
    """The modules to compile, as installed paths."""
    names = {Path(name) for name, _ in sources(root)}
    found = {name.as_posix() for pattern in CHOSEN for name in names if name.match(pattern)}
    return sorted(name for name in found if name not in LEFT_OUT and not name.endswith("/__init__.py"))


def key(root: Path = ROOT) -> str:
    """A name for what the sources, this file, the interpreter and the compiler make."""
    digest = hashlib.blake2b(digest_size=10)
    facts = [sysconfig.get_config_var("EXT_SUFFIX") or "", sys.version, _version_of_mypy(), Path(__file__).read_text()]
    for text in facts:
        digest.update(text.encode() + b"\0")
    for name, path in sources(root):
        data = path.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _version_of_mypy() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mypy")
    except PackageNotFoundError:
        return ""


def place(root: Path = ROOT) -> Path:
    """Where the compiled copy of today's sources is, or would be."""
    return root / "build" / "compiled" / key(root)


def missing() -> str | None:
    """What this machine lacks to compile; None if nothing."""
    if sys.implementation.name != "cpython":
        return "CPython"
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        return "mypyc and setuptools (dependency group dev)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h (the development files of this Python)"
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if os.name != "nt" and shutil.which(compiler.split()[0]) is None:
        return f"a C compiler ({compiler.split()[0]})"
    return None


def compile_extensions(root: Path, into: Path) -> None:
    """Compile the chosen modules in a scratch folder and put the extension modules into `into`. `CannotCompile`."""
    lacking = missing()
    if lacking is not None:
        raise CannotCompile(f"this machine has no {lacking}")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="agent-reach-compile-") as scratch:
        copied = Path(scratch) / "packages"
        _copy(root, copied)
        worker = [sys.executable, str(Path(__file__).resolve()), "--work", str(into.resolve())]
        done = subprocess.run(worker, cwd=copied, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotCompile(f"mypyc or the C compiler failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def _copy(root: Path, into: Path) -> None:
    for name, path in sources(root):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def work(into: Path) -> None:
    """The compiler's own process, in a scratch copy of the packages: C source beside it, extensions to `into`."""
    from mypyc.build import mypycify  # type: ignore[import-untyped]
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class OnEveryCore(build_ext):
        """Compiles the C files of one extension at once; setuptools does so one after another."""

        def build_extensions(self) -> None:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = []
                one = self.compiler._compile
                self.compiler._compile = lambda *given: compiled.append(pool.submit(one, *given))
                link = self.compiler.link_shared_object

                def link_when_compiled(*given: Any, **named: Any) -> None:
                    for each in compiled:
                        each.result()
                    link(*given, **named)

                self.compiler.link_shared_object = link_when_compiled
                super().build_extensions()

    scratch = Path.cwd().parent
    options = ["--ignore-missing-imports", f"--cache-dir={scratch / 'cache'}", "--python-executable", sys.executable]
    names = chosen_here()
    extensions = mypycify(
        [*options, *names], opt_level=OPTIMISE, debug_level="0", multi_file=True, target_dir=str(scratch / "c")
    )
    command = OnEveryCore(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = str(into), str(scratch / "objects")
    command.ensure_finalized()
    command.run()


def chosen_here() -> list[str]:
    """The modules to compile in a copy of the packages."""
    found = {path.as_posix() for pattern in CHOSEN for path in Path().glob(pattern)}
    return sorted(name for name in found if name not in LEFT_OUT and not name.endswith("/__init__.py"))


# ---- the compiled copy ----

_TRIAL = """
import asyncio, importlib, sys
for name in sys.argv[1:]:
    file = importlib.import_module(name).__file__
    assert not file.endswith(".py"), f"{file} is not compiled"
from agent_sdk import Agent
from agent_sdk.testing import InProcessMesh

async def main():
    agent = Agent("echo")
    @agent.handler
    async def echo(data):
        return data
    async with InProcessMesh() as mesh:
        await mesh.add(agent)
        assert (await mesh.request({"n": 1}, agent_type="echo", timeout=5)).data == {"n": 1}

asyncio.run(main())
"""


def built(root: Path = ROOT) -> Path | None:
    """The compiled copy of today's sources, if there is one."""
    found = place(root)
    return found if found.is_dir() else None


def build(root: Path = ROOT) -> Path:
    """Make the compiled copy of today's sources unless it is there, and try that it works. `CannotCompile`."""
    target = place(root)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as making:
        whole = Path(making) / "whole"
        _copy(root, whole)
        began = time.monotonic()
        say(f"compiling {len(chosen(root))} modules (a few minutes, once for each state of the sources) …")
        compile_extensions(root, whole)
        _try(whole, chosen(root))
        if key(root) != target.name:
            raise CannotCompile("the sources changed meanwhile")
        try:
            whole.rename(target)
        except OSError:  # somebody else was faster
            if not target.is_dir():
                raise
        say(f"compiled in {time.monotonic() - began:.0f} s: {target}")
    _forget(target)
    return target


def _try(whole: Path, names: Sequence[str]) -> None:
    """Import everything that was compiled, in a process of its own: a crash there is a failure here."""
    modules = [name.removesuffix(".py").replace("/", ".") for name in names]
    environment = os.environ | {"PYTHONPATH": str(whole), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _TRIAL, *modules], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotCompile(f"what was compiled does not work ({done.returncode}):\n{done.stderr[-4000:]}")


def _forget(current: Path) -> None:
    """Remove the oldest copies of former sources."""
    others = [path for path in current.parent.iterdir() if path != current and not path.name.startswith(".")]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    """Entry point."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="store_true", help="print the compiled copy of today's sources, if any")
    parser.add_argument("--into", type=Path, metavar="D", help="only the extension modules, into this folder")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the compiler ends, too, and nothing is left over
    if given.work is not None:
        work(given.work)
        return 0
    if given.path:
        found = built()
        if found is not None:
            print(found)
        return 0
    try:
        if given.into is not None:
            compile_extensions(ROOT, given.into)
        else:
            print(build())
    except CannotCompile as why:
        say(f"not compiled, all goes on in plain Python: {why}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
