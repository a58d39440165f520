"""What commands print: tables and colours on a terminal, plain wide text into a pipe, JSON when asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console

_PIPE_WIDTH = 400  # nothing is cut or wrapped for a reader that is a program

how_many = click.IntRange(1, 1_000_000)  # of what is listed: a number that fits into any request
as_json = click.option("--json", "json_wanted", is_flag=True, help="Print JSON instead of a table.")


def console() -> Console:
    """Standard output. Markup is off: what agents send is shown as it is."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to the command's rim, which knows that it is no failure; rich would exit with 1."""
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Piped(width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON value, readable, with what letters it has."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def message_as_dict(message: Message) -> dict[str, Any]:
    """A message as the JSON that grpcurl shows, with defaults written out so that 0 and false are seen."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, always_print_fields_with_no_presence=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows under columns; a cell is text or rich text."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=False)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console().print(table)


def note(text: str) -> None:
    """A remark for the person, beside the result: on standard error."""
    click.echo(click.style(text, dim=True), err=True)


def short(text: str, chars_max: int = 40) -> str:
    """What a stranger wrote, for one line: what does not print is escaped, and a long text loses its middle."""
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    if len(text) <= chars_max:
        return text
    tail = chars_max // 4
    return f"{text[: chars_max - tail - 1]}…{text[-tail:]}"


def size(count: int) -> str:
    """Bytes as people read them: 512 B, 1.5 KiB, 12 MiB."""
    if count < 1024:
        return f"{count} B"
    if count < 1 << 20:
        return f"{count / 1024:.1f} KiB"
    return f"{count / (1 << 20):.1f} MiB"


def duration(seconds: float) -> str:
    """A time as people read it: 0.4 ms, 12 ms, 1.25 s, 2 min 3 s."""
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
