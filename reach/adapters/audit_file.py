"""The file of the audit log: lines are only ever added to it, whole, and it may be rotated under the node's feet.

Each line is handed to the system with one write, so what a killed node has said is in the file. It is not forced on
the disk: a power cut may take the last seconds. What cannot be written is counted, and the next line that can be is
preceded by one that says how many are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable

CHECK_S = 1.0  # how often it is looked whether the path still leads to the open file


class AuditFileUnavailable(Exception):
    """The file cannot be opened for adding lines; the text says why, for who configured it."""


class AuditFile:
    """An open file; `write` never raises. Make it before the node starts."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never run backwards. Raises `AuditFileUnavailable`."""
        self._path = path
        self._clock = clock
        self._checked_at = clock()
        self._torn = False
        self.why = ""
        """Why the last line could not be written; empty: it was."""
        try:
            self._fd = _opened(path)
        except OSError as error:
            raise AuditFileUnavailable(f"audit_log {path}: {error.strerror or error}") from error

    def write(self, line: bytes) -> bool:
        """Add a line, without its newline. False: it is lost, and `why` says why."""
        now = self._clock()
        if now - self._checked_at >= CHECK_S or self._fd < 0:
            self._checked_at = now
            if self._fd < 0 or self._rotated():
                self.reopen()
        if self._fd < 0:
            return False
        data = b"\n" + line + b"\n" if self._torn else line + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self.why = error.strerror or str(error)
            return False
        if written < len(data):
            self.why = "the disk is full: a line was cut short"
            self._cut_back(written)
            return False
        self._torn = False
        self.why = ""
        return True

    def reopen(self) -> None:
        """Go on in whatever file the path names now, and make it if there is none. If that fails, each write tries."""
        self.close()
        try:
            self._fd = _opened(self._path)
            self._torn = False
        except OSError as error:
            self.why = error.strerror or str(error)

    def close(self) -> None:
        """Let go of the file. May be called more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rotated(self) -> bool:
        opened = os.fstat(self._fd)
        try:
            named = os.stat(self._path)
        except OSError:
            return True
        return (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino)

    def _cut_back(self, written: int) -> None:
        """Take half a line away again; where that is not allowed, the next one begins on a line of its own."""
        try:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
        except OSError:
            self._torn = True


def _opened(path: str) -> int:
    """The file, only to be added to, readable by its owner alone if it is new. Nothing of it is waited for."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
