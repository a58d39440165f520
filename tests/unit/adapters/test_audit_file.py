"""The audit log's file: whole lines only, whoever rotates it, and whatever the disk does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from reach.adapters.audit_file import CHECK_S, AuditFile, AuditFileUnavailable


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_are_added_to_what_is_there_and_a_new_file_is_its_owners_alone(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "audit.jsonl"
    umask = os.umask(0)
    try:
        first = AuditFile(str(path), clock)
    finally:
        os.umask(umask)
    assert first.write(b"one")
    first.close()
    second = AuditFile(str(path), clock)
    assert second.write(b"two")
    assert path.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second.close()


def test_what_cannot_be_opened_is_said_at_once(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(AuditFileUnavailable, match=r"audit_log .*nowhere/audit.jsonl: No such file or directory"):
        AuditFile(str(tmp_path / "nowhere" / "audit.jsonl"), clock)
    with pytest.raises(AuditFileUnavailable, match="Is a directory"):
        AuditFile(str(tmp_path), clock)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AuditFileUnavailable):  # and is not waited for
        AuditFile(str(tmp_path / "pipe"), clock)


def test_after_a_rotation_it_goes_on_in_the_new_file(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(str(path), clock)
    file.write(b"before")
    path.rename(tmp_path / "audit.jsonl.1")
    file.write(b"still before it was looked at")
    clock.now += CHECK_S
    assert file.write(b"after")
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "audit.jsonl.1").read_bytes() == b"before\nstill before it was looked at\n"
    path.unlink()
    file.reopen()
    assert file.write(b"asked to") and path.read_bytes() == b"asked to\n"
    file.close()


def test_a_full_disk_costs_lines_and_nothing_else(clock: Clock) -> None:
    file = AuditFile("/dev/full", clock)
    assert not file.write(b"lost")
    assert file.why == "No space left on device"
    file.close()


def test_half_a_line_is_taken_away_again(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(str(path), clock)
    file.write(b"whole")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
    assert not file.write(b"cut short") and "full" in file.why
    monkeypatch.undo()
    assert path.read_bytes() == b"whole\n"
    assert file.write(b"whole again") and file.why == ""
    assert path.read_bytes() == b"whole\nwhole again\n"
    file.close()


def test_where_nothing_can_be_taken_away_the_next_line_begins_anew(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(str(path), clock)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
    monkeypatch.setattr(os, "ftruncate", _refuse)  # as a file with `chattr +a` does
    file.write(b"cut short")
    monkeypatch.undo()
    file.write(b"whole")
    assert path.read_bytes() == b"cut \nwhole\n"
    file.close()


def test_a_path_that_is_gone_is_tried_again_with_each_line(tmp_path: Path, clock: Clock) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    path = directory / "audit.jsonl"
    file = AuditFile(str(path), clock)
    path.unlink()
    directory.rmdir()
    clock.now += CHECK_S
    assert not file.write(b"lost") and file.why == "No such file or directory"
    directory.mkdir()
    assert file.write(b"kept") and path.read_bytes() == b"kept\n"
    file.close()


def _refuse(fd: int, length: int) -> None:
    raise PermissionError(1, "Operation not permitted")
