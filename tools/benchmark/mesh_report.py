"""What the rows of several nodes say: their bounds, and a sentence each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .report import Bound, cpu, number, ratio, ratio_cell, spread
from .rows import (
    ACROSS,
    CROWD_BACK,
    CROWD_BACK_S_MAX,
    CROWD_RATIO_MAX,
    ETCD,
    LEADER,
    NODE_KILLED,
    NODES,
    OTHER_NODE_RATIOS,
    REACHABLE_S_MAX,
    REGISTERED_S_MAX,
    WRITES_PER_AGENT_MINUTE_MAX,
)

Found = Mapping[str, Any]


def bounds(found: Mapping[str, Found]) -> list[Bound]:
    """The bounds of those rows that were measured."""
    held = {NODES: _nodes, NODE_KILLED: _node_killed, LEADER: _leader, ETCD: _etcd, CROWD_BACK: _crowd}
    return [bound for name, of in held.items() if name in found for bound in of(found[name])]


def measured(single: Mapping[str, Mapping[str, Found]]) -> dict[str, Found]:
    """The measurements of the row nodes, as those of other rows are kept: who else used the machine is told of both."""
    return {f"{NODES} {name} {where}": by for name, found in single[NODES].items() for where, by in found.items()}


def _at_most(what: str, measured: float, most: float, unit: str = "", *, wrong: str = "") -> Bound:
    text = f"{measured:.2f}{unit}" + (f", {wrong}" if wrong else "")
    return Bound(what, f"≤ {most:g}{unit}", text, measured <= most and not wrong)


def _nodes(found: Found) -> Iterator[Bound]:
    for row in ACROSS:
        limit = OTHER_NODE_RATIOS[row.name]
        compared = ratio(row, found["other"][row.name], found["same"][row.name])
        failed = sum(one["errors"] for where in found.values() for one in where[row.name])
        what = f"{row.title}, caller and agent at two nodes / at one"
        sign = "≤" if row.less_is_better else "≥"
        if compared is None:
            yield Bound(what, f"{sign} {limit:g}", "not measured", None)
            continue
        holds = compared.median <= limit if row.less_is_better else compared.median >= limit
        text = f"{compared.median:.2f}" + (f", {failed} errors" if failed else "")
        yield Bound(what, f"{sign} {limit:g}", text, holds and not failed)


def _node_killed(found: Found) -> Iterator[Bound]:
    wrong = f"{found['twice']} ran twice" if found["twice"] else ""
    yield _at_most(
        "a node killed: its agents reachable again", found["reachable_s"], REACHABLE_S_MAX, " s", wrong=wrong
    )


def _leader(found: Found) -> Iterator[Bound]:
    yield _at_most("the leader killed: new agents registered", found["registered_s"], REGISTERED_S_MAX, " s")
    wrong = f"{found['twice']} ran twice" if found["twice"] else ""
    what = "the leader killed: known agents reachable again"
    yield _at_most(what, found["reachable_s"], REACHABLE_S_MAX, " s", wrong=wrong)


def _etcd(found: Found) -> Iterator[Bound]:
    what = "etcd writes per idle agent and minute"
    yield _at_most(what, found["writes_per_agent_minute"], WRITES_PER_AGENT_MINUTE_MAX)


def _crowd(found: Found) -> Iterator[Bound]:
    what = f"{found['lost']:,} of {found['agents']:,} agents lose their node: all attached again"
    yield _at_most(what, found["back_s"], CROWD_BACK_S_MAX, " s")
    wrong = f"{found['failed']} requests failed" if found["failed"] else ""
    yield _at_most("p99 of a pair at the other nodes meanwhile / before", found["ratio"], CROWD_RATIO_MAX, wrong=wrong)


def lines(single: Mapping[str, Mapping[str, Found]], titles: Mapping[str, str]) -> list[str]:
    """What was found, a sentence each."""
    said = {NODES: _say_nodes, NODE_KILLED: _say_kill, LEADER: _say_kill, ETCD: _say_etcd, CROWD_BACK: _say_crowd}
    return [
        line
        for row, say in said.items()
        for name, found in single[row].items()
        for line in say(found, f"{row}, {titles[name]}")
    ]


def _say_nodes(found: Found, of: str) -> Iterator[str]:
    for row in ACROSS:
        same, other = found["same"][row.name], found["other"][row.name]
        medians = [spread(row, rounds) for rounds in (same, other)]
        texts = ["–" if one is None else f"{number(one.median)} {row.unit}" for one in medians]
        compared = ratio_cell(ratio(row, other, same))
        yield f"{of}: {row.title}: {texts[0]} at one node, {texts[1]} at two, ratio {compared}"
        for where, rounds in (("one", same), ("two", other)):
            parts = cpu(rounds)
            if parts:
                each = " + ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
                yield f"{of}: {row.title}: CPU s per 10,000 at {where}: {each} = {sum(parts.values()):.2f}"


def _say_kill(found: Found, of: str) -> Iterator[str]:
    for kill in found["kills"]:
        yield (
            f"{of}: {kill['reachable_s']:.2f} s until its agents were reachable again, "
            f"{kill['registered_s']:.2f} s until new ones were registered; "
            f"{kill['failed']} of {kill['requests']:,} requests failed"
            + (f" ({_counts(kill['failed_with'])})" if kill["failed"] else "")
            + f"; of those to its agents by name {_counts(kill['named_failed_with']) or 'none'}"
            + f"; {kill['twice']} ran twice"
        )


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(found.items()))


def _say_etcd(found: Found, of: str) -> Iterator[str]:
    yield (
        f"{of}: {found['writes']} writes in {found['seconds']:g} s for {found['idle_agents']:,} idle agents; "
        f"{found['new_agents']:,} new agents in {found['registered_s']:.2f} s: "
        f"{found['registrations_per_s']:,.0f} registrations/s, {found['writes_per_registration']:.2f} writes each"
    )


def _say_crowd(found: Found, of: str) -> Iterator[str]:
    yield (
        f"{of}: {found['lost']:,} of {found['agents']:,} agents back after {found['back_s']:.2f} s; "
        f"p99 of a pair at the other nodes {found['before_ms']:.1f} ms before, {found['during_ms']:.1f} ms meanwhile, "
        f"ratios {', '.join(f'{ratio:.2f}' for ratio in found['ratios'])}"
        + (f" (others used {found['foreign_cpu']:.0%} of the machine)" if found["foreign_cpu"] is not None else "")
    )
