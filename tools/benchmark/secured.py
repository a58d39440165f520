"""The row with everything locked: TLS and API keys on, beside a node without either, in one run; and what a door costs.

The keys and certificates are made by the commands that people use. Only Agent-Reach is in it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import report
from .processes import HOST, Child, Children, free_port, python_path
from .report import Bound
from .rows import ACROSS, Scale
from .systems import Running, System, measure

RATIO_MIN = 0.7
GATE_US_MAX = 30.0
_COMMAND_S = 30.0
_OPEN, _LOCKED = "open", "locked"

_GATE = "import sys, bench_gate; bench_gate.main(int(sys.argv[1]))"


async def secured(plan: Scale, tree: Path | None) -> dict[str, Any]:
    """Caller, node and agent in the clear and with TLS and keys, measured in turn. Raises `Failed`."""
    ways: dict[str, Running] = {}
    with tempfile.TemporaryDirectory(prefix="agent-reach-bench-") as scratch:
        async with Children() as children:
            locked = await _locked(Path(scratch), tree, children)
            for name, (options, environment) in {_OPEN: ([], {}), _LOCKED: locked}.items():
                ways[name] = await _start(name, options, environment, tree, children)
            found: dict[str, Any] = {name: {row.name: [] for row in ACROSS} for name in ways}
            everybody = [child.pid for running in ways.values() for child in running.everybody]
            for number in range(plan.rounds):
                for row in ACROSS:
                    for name in list(ways) if number % 2 else reversed(ways):
                        found[name][row.name].append(await measure(ways[name], row, plan, everybody))
        async with Children() as children:
            arguments = [sys.executable, "-c", _GATE, str(20_000 if plan.fresh else 2_000)]
            child = children.add(await Child.start("gate", arguments, python_path(tree)))
            return found | await child.answer(_COMMAND_S)


async def _locked(folder: Path, tree: Path | None, children: Children) -> tuple[list[str], dict[str, str]]:
    """What a locked node is started with, and what its clients have in their environment."""
    certificates, keys = folder / "certificates", folder / "keys.json"

    async def reach(*arguments: str) -> str:
        call = f"import sys; from reach.cli import main; sys.argv = {['reach', *arguments]!r}; main()"
        child = children.add(
            await Child.start("reach " + arguments[0], [sys.executable, "-c", call], python_path(tree))
        )
        out, _ = await child.process.communicate()
        return out.decode().strip()

    await reach("certs", "dev", "--dir", str(certificates))
    key = await reach(
        "keys", "create", "--keys-file", str(keys), "--principal", "bench", "--may-register", "*", "--may-call", "*"
    )
    options = [
        "--auth", "keys", "--keys-file", str(keys),
        "--tls-cert", str(certificates / "node.pem"), "--tls-key", str(certificates / "node-key.pem"),
    ]  # fmt: skip
    return options, {"REACH_API_KEY": key, "REACH_CLIENT_TLS_CA": str(certificates / "ca.pem")}


async def _start(
    name: str, options: list[str], environment: dict[str, str], tree: Path | None, children: Children
) -> Running:
    port = free_port()
    arguments = ["serve", "--listen", f"{HOST}:{port}", "--http", f"{HOST}:{free_port()}", "--log-format", "json"]
    path = python_path(tree)
    node = children.add(await Child.worker(f"{name} node", "node", {"arguments": [*arguments, *options]}, path))
    await node.listens(port)
    settings = {"system": "reach", "url": f"{HOST}:{port}", "environment": environment}

    async def worker(role: str) -> Child:
        child = children.add(await Child.worker(f"{name} {role}", role, settings, path))
        await child.answer()
        return child

    responder = await worker("responder")
    running = Running(System("reach", "Agent-Reach", "reach", tree), await worker("requester"), node, responder, None)
    running.everybody = [running.requester, node, responder]
    return running


def bounds(found: Mapping[str, Any]) -> Iterator[Bound]:
    """Throughput with TLS and keys over that without, and what the gate costs a stream."""
    for row in ACROSS:
        if row.less_is_better:
            continue
        what = f"{row.title}, with TLS and keys / without"
        compared = report.ratio(row, found[_LOCKED][row.name], found[_OPEN][row.name])
        failed = sum(one["errors"] for name in (_OPEN, _LOCKED) for one in found[name][row.name])
        if compared is None:
            yield Bound(what, f"≥ {RATIO_MIN:g}", "not measured", None)
        else:
            text = f"{compared.median:.2f}" + (f", {failed} errors" if failed else "")
            yield Bound(what, f"≥ {RATIO_MIN:g}", text, compared.median >= RATIO_MIN and not failed)
    cost = found["gate_us"]
    yield Bound(
        "the gate, for a stream with a known key", f"≤ {GATE_US_MAX:g} µs", f"{cost:.1f} µs", cost <= GATE_US_MAX
    )


def lines(found: Mapping[str, Any], of: str) -> Iterator[str]:
    """What was found, a sentence each."""
    for row in ACROSS:
        medians = [report.spread(row, found[name][row.name]) for name in (_OPEN, _LOCKED)]
        texts = ["–" if one is None else f"{report.number(one.median)} {row.unit}" for one in medians]
        compared = report.ratio_cell(report.ratio(row, found[_LOCKED][row.name], found[_OPEN][row.name]))
        yield f"{of}: {row.title}: {texts[0]} in the clear, {texts[1]} with TLS and keys, ratio {compared}"
    yield f"{of}: the gate: {found['gate_us']:.1f} µs a stream with a known key, {found['stranger_us']:.1f} µs without"
