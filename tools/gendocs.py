"""Write docs/reference/ from the code (no arguments), or check that it is current (--check).

Settings, metrics, errors and the command line are described where they are defined; these pages only lay that out.
The limits page is a table of its own (tools/limits_table.py), whose numbers are read from the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click

from agentreach.v1 import error_pb2
from agentreach.wire import errors
from reach.adapters.metrics import BREAKER_STATES, METRICS
from reach.cli.ending import Exit
from reach.cli.root import reach
from reach.node.config import describe
from reach.node.settings import Setting, Table
from tools.limits_table import LIMITS

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by tools/gendocs.py from the code. Change the code, then run: make docs -->"

GRPC_STATUS = {
    1: "CANCELLED", 2: "UNKNOWN", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 10: "ABORTED", 13: "INTERNAL",
    14: "UNAVAILABLE", 16: "UNAUTHENTICATED",
}  # fmt: skip


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def page(title: str, *parts: str) -> str:
    """One page: the notice, the title, its parts."""
    return "\n\n".join([NOTICE, f"# {title}", *parts]) + "\n"


# ---- settings ----


def settings() -> str:
    """Every setting of a node."""
    rows = [
        (f"`{each.name}`", _default(each), _allowed(each), each.meaning, _ends(each.low, each.high))
        for each in describe()
    ]
    return page(
        "Settings of a node",
        "A setting is a key of the TOML file (`lane_max = 50`), a variable (`REACH_LANE_MAX=50`) and an option of "
        "`reach serve` (`--lane-max 50`), but for passwords. Options win over variables, variables over the file. An "
        "unknown setting or variable, or a value out of bounds, ends the start with one line and exit code 2. "
        "`reach check-config` shows what a node would run with.",
        "`REACH_CONFIG` names the file. `REACH_URL`, `REACH_API_KEY` and `REACH_CLIENT_…` are the SDK's and are not "
        "settings of a node.",
        table(("setting", "default", "allowed", "meaning", "too low / too high"), rows),
        "Pairs (`aliases`, `policies`) are a table in the file and `NAME=VALUE,NAME=VALUE` in a variable or an option. "
        "`principals` stands in the file only: [TLS](../howto/tls.md) shows its tables.",
    )


def _default(setting: Setting) -> str:
    if setting.default in ("", {}):
        return "–"
    if setting.kind is bool:
        return str(setting.default).lower()
    if setting.kind is str:
        return f"`{setting.default}`"
    return quantity(setting.default, setting.unit)


def _allowed(setting: Setting) -> str:
    if setting.least is None or setting.most is None:
        return setting.allowed
    return f"{quantity(setting.least, setting.unit)} to {quantity(setting.most, setting.unit)}"


def _ends(low: str, high: str) -> str:
    return " / ".join(part for part in (low, high) if part) or "–"


def quantity(number: float, unit: str) -> str:
    """A number as people read it: `1 MiB`, `100,000`, `0.5 s`."""
    if unit == "bytes":
        for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if number >= size and number % size == 0:
                return f"{number // size:,.0f} {name}"
        return f"{number:,.0f} bytes"
    text = f"{number:,.0f}" if number == int(number) else f"{number:g}"
    return f"{text} {unit}" if unit else text


# ---- limits ----


def limits() -> str:
    """Every bound, with its value now."""
    parts = [
        "Nothing that a peer can grow is without a bound. A bound with a setting can be changed (see "
        "[settings](settings.md)); the others are constants of the code, named by module. The numbers on this page "
        "are read from the code."
    ]
    for title, rows in LIMITS.items():
        parts.append(f"## {title}")
        parts.append(
            table(
                ("what", "bound", "where", "what happens at it"),
                [(row.what, quantity(row.value(), row.unit), f"`{row.where}`", row.at_it) for row in rows],
            )
        )
    return page("Limits", *parts)


# ---- metrics ----


def metrics() -> str:
    """Every metric of a node."""
    states = ", ".join(f"{number} {name.replace('_', '-')}" for name, number in BREAKER_STATES.items())
    rows = [
        (f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels) or "–", metric.meaning)
        for metric in METRICS
    ]
    return page(
        "Metrics",
        "`GET /metrics` on the HTTP address answers in Prometheus' text format. Besides these there are the ordinary "
        "`process_…`, `python_info` and `python_gc_…` metrics.",
        table(("metric", "kind", "labels", "meaning"), rows),
        "`agent_type` is a type that registered here, or `unknown`. `agent_id` is an agent attached here now; its "
        "series go with it. A breaker is the view of this node's own callers, of agents of all nodes. No label is a "
        f"value that a caller chose. States of a breaker: {states}.",
    )


# ---- errors ----


def comments() -> dict[str, str]:
    """The comment beside each ErrorCode in the contract."""
    text = (ROOT / "proto/agentreach/v1/error.proto").read_text()
    found = re.findall(r"^  ([A-Z_]+) = \d+;(?:[ ]+// (.+))?$", text, re.MULTILINE)
    return dict(found)


def error_codes() -> str:
    """Every ErrorCode."""
    said = comments()
    rows = []
    for code, (status, retryable) in errors.TABLE.items():
        name = error_pb2.ErrorCode.Name(code)  # type: ignore[arg-type]  # the table's keys are codes
        rows.append((f"`{name}`", _class_name(name), GRPC_STATUS[status], said[name] or "–", _yes(retryable)))
    return page(
        "Errors",
        "A request that has no result ends with an `Error`: `code`, `message` (what happened, to whom, what to do), "
        "`retryable`, `retry_after_ms`, `may_have_executed`, `agent_id`, `attempts`, `details`. In Python it is an "
        "exception of `agent_sdk`, a subclass of `ReachError` with the same facts. On a unary gRPC call it is a "
        f"status with `google.rpc.ErrorInfo` (`reason` = the code, `domain` = `{errors.DOMAIN}`, `metadata` = the "
        "facts) and, where a time is known, `RetryInfo`; the status message starts with the code and ends with the "
        "trace_id.",
        table(("code", "Python", "gRPC status", "meaning", "retryable by default"), rows),
        "`retryable` can differ from the default in a single error: an `AGENT_ERROR` is retryable if the handler said "
        "so. `may_have_executed` says whether the handler may have run; `AGENT_LOST` always says so. "
        "`Timeout` is also a `TimeoutError`.",
    )


def _class_name(code: str) -> str:
    return "`" + "".join(word.capitalize() for word in code.split("_")) + "`"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# ---- command line ----


def command_line() -> str:
    """Every command with its options."""
    codes = {Exit.OK: "ok", Exit.MESH_ERROR: "the mesh answered an error", Exit.USAGE: "usage or configuration",
             Exit.NO_NODE: "no node reached", Exit.REPLACED: "replaced by another process"}  # fmt: skip
    known = {each.name for each in describe() if each.kind is not Table and not each.secret}
    parts = [
        _prose(reach),
        "Exit codes: " + ", ".join(f"{int(code)} {meaning}" for code, meaning in codes.items()) + ". Ctrl-C: 130.",
    ]
    for name, command in _commands(reach):
        parts += _command(name, command, known)
    return page("The command `reach`", *parts)


def _commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its whole name, those of a group after it."""
    for name, command in sorted(group.commands.items()):
        yield before + name, command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")


def _command(name: str, command: click.Command, known: set[str]) -> list[str]:
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    takes_settings = sum(each.name in known for each in options) == len(known)
    arguments = [_argument(each) for each in command.params if isinstance(each, click.Argument)]
    parts = [f"## `{' '.join(['reach', name, *arguments])}`", _prose(command)]
    shown = [each for each in options if not (takes_settings and each.name in known)]
    rows = [(_names(each), each.help or "") for each in shown]
    if takes_settings:
        rows.append(("every [setting](settings.md)", "As an option, `-` for `_`: `--lane-max 50`."))
    if rows:
        parts.append(table(("option", "meaning"), rows))
    return parts


def _argument(argument: click.Parameter) -> str:
    shown = (argument.metavar or argument.name or "").upper().strip("[]")
    return shown if argument.required else f"[{shown}]"


def _names(option: click.Option) -> str:
    shape = ""
    if not option.is_flag:
        shape = option.metavar or ("|".join(option.type.choices) if isinstance(option.type, click.Choice) else "TEXT")
    return ", ".join(f"`{name}`" for name in option.opts) + (f" `{shape}`" if shape else "")


def _prose(command: click.Command) -> str:
    """A command's help: paragraphs, and examples as a code block."""
    parts = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines = paragraph.removeprefix("\b\n").splitlines()
            if lines[0].startswith("Example"):
                lines = lines[1:]
            parts.append("```\n" + "\n".join(line.strip() for line in lines) + "\n```")
        else:
            parts.append(" ".join(paragraph.split()))
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "limits.md": limits,
    "metrics.md": metrics,
    "errors.md": error_codes,
    "cli.md": command_line,
}


def drift(folder: Path = REFERENCE) -> list[str]:
    """Names of pages that differ from what the code says now."""
    return [
        name for name, write in PAGES.items() if not (folder / name).exists() or (folder / name).read_text() != write()
    ]


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if anything differs")
    check = parser.parse_args().check
    try:
        if check:
            stale = drift()
            if stale:
                print("reference pages are not current (run: make docs):", *stale, sep="\n  ")
            return 1 if stale else 0
        REFERENCE.mkdir(parents=True, exist_ok=True)
        for name, write in PAGES.items():
            (REFERENCE / name).write_text(write())
    except LookupError as gone:
        print(f"tools/limits_table.py names {gone}, which is gone: follow it there")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
