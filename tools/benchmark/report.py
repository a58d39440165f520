"""What the measurements say: medians, ratios round by round, bounds; as a table and as JSON. Pure.

A ratio is taken within one round, where both systems ran one after the other on the same machine in the same state;
of these the median counts. It need not equal the quotient of the two medians beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .rows import (
    ALONE,
    AMPLIFICATION,
    AMPLIFICATION_MAX,
    DECISION_US_MAX,
    FROZEN,
    FROZEN_RATIO_MAX,
    IDLE_BYTES_MAX,
    RECOVERY,
    Row,
)

Rounds = Sequence[Mapping[str, Any]]
"""One system's measurements of one row, a round each; a round that failed has `failed` and nothing else."""
FOREIGN_MAX = 0.10
"""Share of the machine that others may use before the figures are called disturbed."""
BASE = "direct"


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """The spread of some values; None of none."""
        return cls(median(values), min(values), max(values)) if values else None

    def json(self) -> dict[str, float]:
        """As JSON has it."""
        return {"median": self.median, "min": self.low, "max": self.high}


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound, what was measured, and whether it holds (None: not measured)."""

    what: str
    limit: str
    measured: str
    holds: bool | None
    aim_met: bool | None = None


def value(row: Row, measurement: Mapping[str, Any]) -> float | None:
    """The figure of one round; None if it failed or answered nothing."""
    if "failed" in measurement or not measurement["units"]:
        return None
    return float(measurement["p50_ms"] if row.kind == ALONE else measurement["per_s"])


def spread(row: Row, rounds: Rounds) -> Spread | None:
    """Median and range over the rounds."""
    return Spread.of([found for one in rounds if (found := value(row, one)) is not None])


def ratio(row: Row, rounds: Rounds, base: Rounds) -> Spread | None:
    """Median and range of the ratios to another system, round by round."""
    found = []
    for one, other in zip(rounds, base, strict=False):
        above, below = value(row, one), value(row, other)
        if above is not None and below:
            found.append(above / below)
    return Spread.of(found)


def errors(rounds: Rounds) -> int:
    """Requests that failed, and rounds that did."""
    return sum(1 if "failed" in one else int(one["errors"]) for one in rounds)


def cpu(rounds: Rounds) -> dict[str, float]:
    """Median CPU seconds per 10,000 requests of each process."""
    known = [one["cpu_s_per_10k"] for one in rounds if "cpu_s_per_10k" in one]
    return {part: median(one[part] for one in known) for part in (known[0] if known else ())}


def foreign(measured: Mapping[str, Mapping[str, Rounds]]) -> list[float]:
    """Share of the machine that other processes used, of each measurement."""
    every = [one for by in measured.values() for rounds in by.values() for one in rounds]
    return [one["foreign_cpu"] for one in every if "foreign_cpu" in one]


def foreign_note(shares: Sequence[float]) -> str:
    """What to say of other processes' work; a warning where it disturbed a measurement."""
    text = f"other processes used {median(shares):.0%} of the machine (median; most {max(shares):.0%})"
    disturbed = sum(1 for share in shares if share > FOREIGN_MAX)
    if not disturbed:
        return text
    return (
        f"WARNING: {text}; {disturbed} of {len(shares)} measurements had more than {FOREIGN_MAX:.0%}: "
        "their figures are disturbed, trust ratios and CPU seconds more"
    )


def row_bound(row: Row, system: Rounds, base: Rounds) -> Bound | None:
    """The bound of a row; None if it has none. Requests that failed fail it."""
    if row.bound is None:
        return None
    found = ratio(row, system, base)
    sign = "≤" if row.less_is_better else "≥"
    limit = f"{sign} {row.bound:g}" + (f", aim {row.aim:g}" if row.aim else "")
    if found is None:
        return Bound(row.title, limit, "not measured", None)
    failed = errors(system)
    text = f"{found.median:.2f}" + (f", {failed} errors" if failed else "")
    aim_met = None if row.aim is None else found.median >= row.aim
    return Bound(row.title, limit, text, bool(row.holds(found.median)) and not failed, aim_met)


def memory_bound(found: Mapping[str, Any]) -> Bound:
    """The bound on an idle agent's memory."""
    what = f"node memory per idle agent ({found['agents']:,} agents, a connection each)"
    each = found["bytes_per_agent"]
    return Bound(what, f"≤ {IDLE_BYTES_MAX / 1e3:g} KB", f"{each / 1e3:.1f} KB", each <= IDLE_BYTES_MAX)


def decision_bounds(found: Mapping[str, Any]) -> list[Bound]:
    """The bounds on a routing decision."""
    names = {"us_100_types_of_100": "100 types of 100", "us_10000_of_a_type": "10,000 of one type"}
    return [
        Bound(f"routing decision, {title}", f"≤ {DECISION_US_MAX:g} µs", f"{found[name]:.2f} µs",
              found[name] <= DECISION_US_MAX)
        for name, title in names.items()
    ]  # fmt: skip


def fault_bounds(frozen: Mapping[str, Any] | None, amplification: Mapping[str, Any] | None) -> list[Bound]:
    """The bounds of the rows with faults."""
    found = []
    if frozen is not None:
        ratio, what = frozen["ratio"], "p99 of nine agents beside a frozen one / without it"
        found.append(Bound(what, f"≤ {FROZEN_RATIO_MAX:g}", f"{ratio:.2f}", ratio <= FROZEN_RATIO_MAX))
    if amplification is not None:
        ratio, what = amplification["ratio"], "requests that reach a target that only fails / requests made"
        found.append(Bound(what, f"≤ {AMPLIFICATION_MAX:g}", f"{ratio:.2f}", ratio <= AMPLIFICATION_MAX))
    return found


def fault_lines(single: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """What the rows with faults found, a sentence each."""
    lines = []
    for name, result in single[RECOVERY].items():
        for victim, of in (("an agent", result["agent"]), ("the node", result["node"])):
            lines.append(
                f"recovery after SIGKILL of {victim}, {titles[name]}: {of['silence_s']:.2f} s without an answer"
                + (f" ({of['started_s']:.2f} s of them until it listened again)" if of["started_s"] else "")
                + f", {of['failed']} of {of['requests']:,} requests failed"
            )
    for name, result in single[FROZEN].items():
        lines.append(
            f"p99 of nine agents, {titles[name]}: {result['without_ms']:.2f} ms, "
            f"{result['beside_ms']:.2f} ms beside a frozen tenth"
        )
    for name, result in single[AMPLIFICATION].items():
        lines.append(
            f"retries against a target that only fails, {titles[name]}: {result['reached']:,} requests reached it "
            f"of {result['made']:,} made"
        )
    return lines


def number(amount: float) -> str:
    """A figure with as many digits as it deserves."""
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def cell(row: Row, rounds: Rounds) -> str:
    """One system's figure in the table."""
    found = spread(row, rounds)
    failed = errors(rounds)
    text = "–" if found is None else f"{number(found.median)} ({number(found.low)}–{number(found.high)})"
    return text + (f" **{failed} errors**" if failed else "")


def ratio_cell(found: Spread | None) -> str:
    """A ratio in the table."""
    return "–" if found is None else f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]

    def written(line: Sequence[str]) -> str:
        first, *others = line
        padded = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(
        "-" * (width + 2) if number == 0 else "-" * (width + 1) + ":" for number, width in enumerate(widths)
    )
    return "\n".join([written(header), rule + "|", *(written(line) for line in lines)])


def figures(rows: Sequence[Row], titles: Mapping[str, str], measured: Mapping[str, Mapping[str, Rounds]]) -> str:
    """The first table: each system's figures, and its ratio to direct unary calls (or to their stream)."""
    compared = [name for name in titles if name != BASE] if BASE in titles else []
    header = ["median (range)", "", *titles.values(), *(f"{titles[name]} / {titles[BASE]}" for name in compared)]
    lines = []
    for row in rows:
        by = measured.get(row.name, {})
        line = [row.title, row.unit, *(cell(row, by.get(name, [])) for name in titles)]
        lines.append(line + [ratio_cell(ratio(row, by.get(name, []), by.get(BASE, []))) for name in compared])
    return table(header, lines)


def cpu_table(rows: Sequence[Row], titles: Mapping[str, str], measured: Mapping[str, Mapping[str, Rounds]]) -> str:
    """The second table: CPU seconds per 10,000 requests (items, in the row of streams) of each process."""
    lines = []
    for row in rows:
        line = [row.title]
        for name in titles:
            parts = cpu(measured.get(row.name, {}).get(name, []))
            each = " + ".join(f"{seconds:.2f}" for seconds in parts.values())
            line.append(f"{each} = {sum(parts.values()):.2f}" if parts else "–")
        lines.append(line)
    return table(["CPU s per 10,000: requester + node + responder", *titles.values()], lines)


def bounds_table(bounds: Sequence[Bound]) -> str:
    """The third table: each bound and whether it holds."""
    marks = {True: "pass", False: "FAIL", None: "–"}
    lines = [
        [one.what, one.limit, one.measured, marks[one.holds] + (" (aim met)" if one.aim_met else "")] for one in bounds
    ]
    return table(["bound", "limit", "measured", ""], lines)


def summary(rows: Sequence[Row], measured: Mapping[str, Mapping[str, Rounds]]) -> dict[str, Any]:
    """The same for a program: per row and system the spread, the ratio to direct, the CPU seconds, the errors."""
    found: dict[str, Any] = {}
    for row in rows:
        by = measured.get(row.name, {})
        found[row.name] = {"title": row.title, "unit": row.unit, "systems": {}}
        for name, rounds in by.items():
            whole = spread(row, rounds)
            against = ratio(row, rounds, by.get(BASE, []))
            found[row.name]["systems"][name] = {
                "value": whole.json() if whole else None,
                "ratio_to_direct": against.json() if against else None,
                "cpu_s_per_10k": cpu(rounds),
                "errors": errors(rounds),
                "rounds": list(rounds),
            }
    return found
