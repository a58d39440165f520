"""SECURITY.md: each line of the threat model names the tests that hold it, and those exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.sources import ROOT

PENDING: dict[str, str] = {}
"""Lines that no test holds yet, and what such a test shows. Its name goes into the page, and the line away here."""

_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def rows(page: str) -> dict[str, str]:
    """Number of each line → what stands in its last column. Numbers are used once."""
    found = [(number, held) for number, _, held in _ROW.findall(page)]
    assert len(found) == len(dict(found)), "a number is used twice"
    return dict(found)


def gone(page: str, root: Path) -> list[str]:
    """Tests that the page names and nobody can find."""
    missing = []
    for file, name in _TEST.findall(page):
        path = root / file
        if not path.exists() or name not in names_in(path.read_text()):
            missing.append(f"{file}::{name}")
    return missing


def names_in(text: str) -> set[str]:
    """The tests of a file, by the names that pytest gives them."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{name}" for name in _functions(node)}
    return found | _functions(ast.parse(text))


def _functions(node: ast.ClassDef | ast.Module) -> set[str]:
    return {
        each.name
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_")
    }


def page() -> str:
    return (ROOT / "SECURITY.md").read_text()


def test_every_test_that_the_page_names_is_there() -> None:
    assert gone(page(), ROOT) == []


def test_every_line_is_held_by_a_test_or_stands_among_the_pending() -> None:
    open_lines = {number for number, held in rows(page()).items() if not _TEST.search(held)}
    assert open_lines == set(PENDING)


def test_lines_are_numbered_without_a_gap() -> None:
    numbers: dict[str, list[int]] = {}
    for each in rows(page()):
        numbers.setdefault(each[0], []).append(int(each[1:]))
    assert "".join(numbers) == "NUTSPCEKDL"
    for letter, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), letter


def test_the_page_speaks_of_every_attacker_and_of_what_it_can_do() -> None:
    sections = page().split("\n### ")[1:]
    assert len(sections) == 10
    for section in sections:
        assert re.search(r"^(It|All) ", section.split("\n", 2)[2], re.MULTILINE), section[:40]


def test_a_test_that_is_gone_is_found(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "test_a.py"
    file.parent.mkdir()
    file.write_text("def test_one(): ...\n\nclass TestTwo:\n    async def test_three(self): ...\n")
    named = "`tests/test_a.py::test_one` `tests/test_a.py::TestTwo::test_three`"
    assert gone(named, tmp_path) == []
    lost = ["tests/test_a.py::test_two", "tests/test_a.py::test_three", "tests/test_b.py::test_one"]
    assert gone(" ".join(f"`{each}`" for each in lost), tmp_path) == lost
