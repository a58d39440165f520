"""The simulator: the whole mesh on virtual time, with faults drawn from a seed and a checker for every invariant.

    make sim                                 300 seeds on all cores
    python tools/sim.py --seeds 1-1000       more of them
    python tools/sim.py --seed 4711          one seed, told in short
    python tools/sim.py --seed 4711 --trace  the same, with everything that happens in it
    python tools/sim.py --invariants         what is checked

A seed replays exactly: the same events and frames. Exit code 0: all invariants held; 1: some did not; 2: used
wrongly. docs/howto/simulate.md says how it works.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

HASH_SEED = "0"  # sets of strings are walked in an order that it decides
FAILURES_TOLD = 5


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="sim.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, metavar="N", help="run this one")
    which.add_argument("--seeds", type=_range, metavar="A-B", default=range(1, 301), help="run these (default 1-300)")
    which.add_argument("--invariants", action="store_true", help="list what is checked, and run nothing")
    parser.add_argument("--trace", action="store_true", help="print everything that happens (with --seed)")
    parser.add_argument("--nodes", type=int, metavar="N", help="so many nodes on one store, whatever the seed draws")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes to run seeds in (default: cores)"
    )
    parser.add_argument("--keep-going", action="store_true", help=f"do not stop after {FAILURES_TOLD} failing seeds")
    options = parser.parse_args(given)
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    return options


def _range(text: str) -> range:
    first, dash, last = text.partition("-")
    try:
        seeds = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 1-300") from None
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed")
    return seeds


def main(given: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    options = arguments(given)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *(given or sys.argv[1:])], environment)
    if options.invariants:
        return _list_invariants()
    if options.seed is not None:
        return _one(options.seed, options.trace, options.nodes)
    return _many(options.seeds, options.jobs, options.keep_going, options.nodes)


def _list_invariants() -> int:
    from simulation import world  # with it all of them
    from simulation.invariants import ALL

    assert world.CHECKERS

    for moment, found in ALL.items():
        for each in found:
            print(f"{moment:10}  {each.name}: {each.statement}")
    return 0


def _one(seed: int, trace: bool, nodes: int | None) -> int:
    from simulation.seeds import run_seed

    found = run_seed(seed, trace=trace, nodes=nodes)
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(found.outcomes.items()))
    print(f"seed {seed}: {found.asks} requests ({outcomes}), {found.runs} handler runs, {found.steps} events")
    print(f"faults: {', '.join(found.faults) or 'none'}; digest {found.digest}")
    if found.report:
        print(found.report)
    return 1 if found.report else 0


def _many(seeds: Iterable[int], jobs: int, keep_going: bool, nodes: int | None) -> int:
    began = time.monotonic()
    done = failed = asks = runs = 0
    counts: dict[str, int] = {}
    chosen = list(seeds)
    for found in _results(chosen, jobs, nodes):
        done, asks, runs = done + 1, asks + found.asks, runs + found.runs
        for fault in found.faults:
            counts[fault] = counts.get(fault, 0) + 1
        if found.report:
            failed += 1
            print(f"\n{found.report}\n", flush=True)
            if failed == FAILURES_TOLD and not keep_going:
                break
        if sys.stderr.isatty() or done % 50 == 0 or done == len(chosen):
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{done} of {len(chosen)} seeds, {failed} failed", end=end, file=sys.stderr, flush=True)
    took_s = time.monotonic() - began
    faults = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{done} seeds in {took_s:.0f} s: {asks} requests, {runs} handler runs; faults: {faults}")
    print("all invariants held" if not failed else f"{failed} seeds failed")
    return 1 if failed else 0


def _results(seeds: list[int], jobs: int, nodes: int | None) -> Iterator[object]:
    from simulation.seeds import run_seed

    run = functools.partial(run_seed, nodes=nodes)
    if jobs == 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    context = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
    with context.Pool(min(jobs, len(seeds)), maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=2)


if __name__ == "__main__":
    sys.exit(main())
