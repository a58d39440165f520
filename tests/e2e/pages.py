"""Pages as plays: what their code blocks say is done, in order, by real processes against a real node.

A block's info string says what it is (Markdown viewers show only the language):

    python file=NAME      saved as NAME beside the other blocks of its page
    toml file=NAME        the same
    sh                    run with bash -e; it must exit 0
    sh background         started, and waited for until it is ready; ended when the page is
    text output           what the block before it printed: line by line, '…' for anything
    sh elsewhere=WHERE    not run as it stands; WHERE is in `ELSEWHERE`
    text, mermaid         pictures

Ports of the pages (7070, 7071, those of etcd and of `make cluster`) are replaced by free ones.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import free_first_port
from tests.support.etcd import free_port
from tools.cluster import COUNT, FIRST_PORT, Place

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 90.0  # of a block on a machine that is busy with other tests; no promise
POLL_S = 0.03

ELSEWHERE = {
    "demo": "`make run` is `reach demo`, which the page's play starts in its place",
    "cluster": "`make cluster` is tools/cluster.py, which a page's play starts in its place if it has no node yet",
    "ci": "`make setup`, `make test`, `make check`: what CI does before and around this test",
    "bench": "`make bench` takes minutes; its own smoke test runs it",
    "docs": "`make docs` and its like change the tree; tests/tidy runs what they call",
    "etcd": "needs an etcd at 2379; tests/integration runs a node on a real one",
}
ETCD_PORTS = (2379, 2380)
GRPCURL_IS_INSTALLED = (sys.platform, platform.machine()) == ("linux", "x86_64")
"""Elsewhere there is no wheel of it; blocks with grpcurl are then run only if one is on the PATH."""
READY = re.compile(r'serving |"event": "ready"|\bready\b|Ctrl-C ends it')
"""What an agent, a node, or the demo says when it can be used."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the words behind it, its text, and where it stands."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    def word(self, name: str) -> str:
        """The value of `name=value` in the info string; empty if it is not there."""
        return next((w.partition("=")[2] for w in self.words if w.startswith(f"{name}=")), "")

    @property
    def runs(self) -> bool:
        """True if the play does something with it."""
        return not self.word("elsewhere") and (
            self.language == "sh" or bool(self.word("file")) or "output" in self.words
        )


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    out = []
    for match in found:
        language, *words = match[1].split() or [""]
        out.append(Block(language, tuple(words), match[2], text.count("\n", 0, match.start()) + 1))
    return out


class Play:
    """One page being played in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grpc, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._addresses = {"127.0.0.1:7070": self.grpc, "127.0.0.1:7071": self.http}
        self._addresses |= {f"127.0.0.1:{port}": f"127.0.0.1:{free_port()}" for port in ETCD_PORTS}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("REACH_", "PYTEST"))}
        self.environment = clean | {
            "PATH": f"{BIN}{os.pathsep}{clean.get('PATH', '')}",
            "REACH_URL": self.grpc, "REACH_LISTEN": self.grpc, "REACH_HTTP": self.http,
            "PYTHONUNBUFFERED": "1", "COLUMNS": "120",
        }  # fmt: skip
        self.running: list[subprocess.Popen[bytes]] = []
        self.printed = ""

    def run(self, block: Block) -> None:
        """Do what a block says."""
        if block.word("elsewhere") == "demo":
            self._start(f"reach demo --listen {self.grpc} --http {self.http}")
        if block.word("elsewhere") == "cluster" and not self.running:
            self._start_cluster()
        if not block.runs:
            return
        if block.word("file"):
            (self.folder / block.word("file")).write_text(self._here(block.text))
        elif "output" in block.words:
            self._compare(block)
        elif "background" in block.words:
            self._start(self._here(block.text))
        else:
            self._shell(block)

    def _start_cluster(self) -> None:
        """From here on the page is about its nodes."""
        first_port = free_first_port()
        self._start(f"{sys.executable} {ROOT / 'tools' / 'cluster.py'} --first-port {first_port}")
        for place, shown in ((Place(n, first_port), Place(n, FIRST_PORT)) for n in range(1, COUNT + 1)):
            for address in ("grpc", "http", "etcd"):
                self._addresses[getattr(shown, address)] = getattr(place, address)
        self.environment["REACH_URL"] = self._addresses["127.0.0.1:7070"]

    def close(self) -> None:
        """End what was started, the last first, each by its own id."""
        for process in reversed(self.running):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _here(self, text: str) -> str:
        activate = BIN / "activate"
        text = text.replace("source .venv/bin/activate", f"source {activate}" if activate.exists() else "true")
        for shown, address in self._addresses.items():
            text = text.replace(shown, address)
        return text

    def _shell(self, block: Block) -> None:
        if "grpcurl" in block.text and not GRPCURL_IS_INSTALLED and shutil.which("grpcurl") is None:
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._here(block.text)],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"line {block.line}:\n{block.text}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        self.printed = done.stdout

    def _compare(self, block: Block) -> None:
        expected = block.text.rstrip("\n").split("\n")
        printed = self.printed.rstrip("\n").split("\n")
        pattern = "\n".join(".*".join(map(re.escape, line.split("…"))) for line in expected)
        assert re.fullmatch(pattern, "\n".join(printed)), (
            f"line {block.line}: the block before printed:\n{self.printed}"
        )

    def _start(self, command: str) -> None:
        log = self.folder / f"background-{len(self.running)}.log"
        exports = "".join(re.findall(r"^export .*\n", command, re.MULTILINE))
        started = f"{exports}exec {command.removeprefix(exports).strip()}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", started], cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self.running.append(process)
        give_up = time.monotonic() + LIMIT_S
        while not READY.search(log.read_text(errors="replace")):
            assert process.poll() is None, f"{command} has ended:\n{log.read_text()}"
            assert time.monotonic() < give_up, f"{command} is not ready:\n{log.read_text()}"
            time.sleep(POLL_S)

    def logs(self) -> str:
        """The ends of all background outputs, for a failure's message."""
        return "\n".join(
            f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.folder.glob("background-*.log"))
        )
