"""The table `principals` while its file changes: what is taken, when, and what leaves everything as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reach.node.config import ConfigError
from reach.node.principals_file import PrincipalsFile

FIRST = '[principals."spiffe://test/a"]\nprincipal = "a"\n'
SECOND = FIRST + '[principals."spiffe://test/b"]\nprincipal = "b"\n'


class Written:
    """The file, and what looks at it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "reach.toml"
        self.path.write_text(FIRST)
        self.file = PrincipalsFile(self.path, {"spiffe://test/a": {"principal": "a"}})

    def put(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    def names(self) -> list[str] | None:
        """Those of a look, if there is something new."""
        entries = self.file.look()
        return [entry.name for entry in entries] if entries is not None else None


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_what_stands_there_at_the_start_is_nothing_new(written: Written) -> None:
    assert [written.names() for _ in range(3)] == [None] * 3


def test_other_entries_are_taken_once_as_soon_as_the_file_stands_still(written: Written) -> None:
    assert [written.names() for _ in range(2)] == [None] * 2
    written.put(SECOND)
    looks = [written.names() for _ in range(3)]
    assert looks == [None, ["spiffe://test/a", "spiffe://test/b"], None]


def test_a_file_that_was_changed_before_the_first_look_is_taken_too(written: Written) -> None:
    written.put(SECOND)
    assert [written.names() for _ in range(2)][-1] == ["spiffe://test/a", "spiffe://test/b"]


def test_an_entry_that_is_not_written_yet_costs_nobody_anything(written: Written) -> None:
    written.put(SECOND)
    assert [written.names() for _ in range(2)][-1] is not None
    written.path.write_text(FIRST)  # as an editor writes: in place, and not all at once
    assert written.names() is None
    with written.path.open("a") as more:
        more.write(SECOND.removeprefix(FIRST))
    assert [written.names() for _ in range(3)] == [None] * 3


def test_other_settings_than_principals_are_no_change(written: Written) -> None:
    written.put('listen = "127.0.0.1:1"\nunknown = 1\n' + FIRST)
    assert [written.names() for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nobody could get in"),
        ("principals = 3", "principals in"),
        ("[principals", "not valid TOML"),
        ('[principals."spiffe://test/a"]\nmay_cal = ["x"]\n', "did you mean may_call"),
    ],
)
def test_what_cannot_be_used_is_told_once_and_the_next_that_can_is_taken(written: Written, text: str, why: str) -> None:
    written.put(text)
    assert written.names() is None
    with pytest.raises((ConfigError, ValueError), match=why):
        written.names()
    assert [written.names() for _ in range(2)] == [None] * 2
    written.put(SECOND)
    assert [written.names() for _ in range(2)][-1] is not None


def test_a_file_that_is_gone_is_told_once(written: Written) -> None:
    assert [written.names() for _ in range(2)] == [None] * 2
    os.unlink(written.path)
    assert written.names() is None
    with pytest.raises(ConfigError, match="cannot read"):
        written.names()
    assert written.names() is None
