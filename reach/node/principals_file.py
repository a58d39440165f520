"""The table `principals` where it stands, the configuration file: read again when that changes.

Of the other settings none is: they hold from one start to the next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reach.core.certificates import Named
from reach.node.config import principals_in
from reach.node.principals import named

Mark = tuple[int, int, int, int]
"""Which file it is, and which state of it."""
_NEVER: Mark = (0, 0, 0, 0)


class PrincipalsFile:
    """One such file. Everything here blocks, for as long as it takes to read it."""

    def __init__(self, path: Path, table: Mapping[str, Any]) -> None:
        """`table` is what was read from it at the start."""
        self._path = path
        self._table = dict(table)
        self._looked: Mark | None = _NEVER
        self._seen: Mark | None = _NEVER

    def look(self) -> tuple[Named, ...] | None:
        """The entries, if they are others than before; None: they are not.

        A file that has changed since the last look is left for the next one: it may be half written, and an entry that
        is only not there yet must not cost anybody its streams. What cannot be used leaves everything as it was and
        raises `ConfigError` or `ValueError`, once.
        """
        mark = self._mark()  # None: it is not there, which is found out below
        if mark == self._seen:
            return None
        if mark != self._looked:
            self._looked = mark
            return None
        self._seen = mark
        table = principals_in(self._path)
        if table == self._table:
            return None
        entries = named(table, needed=True)
        self._table = dict(table)
        return entries

    def _mark(self) -> Mark | None:
        try:
            seen = os.stat(self._path)
        except OSError:
            return None
        return (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size)
