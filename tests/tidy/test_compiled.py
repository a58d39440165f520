"""What the compiled modules must not contain; docs/decisions/0014-compiled-hot-path.md says why.

mypyc finds some of this itself, minutes later; the rest would crash when it is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.sources import Source, sources
from tools import compiled

NATIVE_BASES = {
    "Protocol",
    "NamedTuple",
    "Generic",
    "Enum",
    "IntEnum",
    "StrEnum",
    "TypedDict",
    "Exception",
    "ValueError",
}
"""Bases from the standard library that mypyc knows."""


def installed(source: Source) -> str:
    return source.path.removeprefix("proto/")


def name_of(node: ast.expr) -> str:
    """`a.b[c]` and `b` are both `b`."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def for_types_only(source: Source) -> set[str]:
    """Names that a module imports under `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING":
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom):
                    found |= {each.asname or each.name for each in inner.names}
    return found


def crashing_fields(source: Source) -> Iterator[str]:
    """Fields, in classes whose annotations are kept at run time, of types that are imported for the checker only."""
    absent = for_types_only(source)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        kept = any(name_of(each) == "dataclass" for each in node.decorator_list) or any(
            name_of(base) in ("NamedTuple", "TypedDict") for base in node.bases
        )
        for line in node.body if kept else ():
            if isinstance(line, ast.AnnAssign) and name_of(line.annotation) in absent:
                yield f"{source.path}:{line.lineno} {node.name}.{name_of(line.target)}"


def classes_of(chosen: list[Source]) -> set[str]:
    return {node.name for source in chosen for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}


def foreign_bases(source: Source, native: set[str]) -> Iterator[str]:
    """Classes that inherit from what is not compiled."""
    for node in ast.walk(source.tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if name_of(base) not in native | NATIVE_BASES:
                yield f"{source.path}:{node.lineno} {node.name}({name_of(base)})"


GUARDS = ast.Try | ast.With | ast.AsyncWith | ast.AsyncFor


def guarded_waits(source: Source) -> Iterator[str]:
    """Coroutines that wait inside `try` or `with`, and async generators."""
    for name, function in source.functions():
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            inside = ast.walk(node) if isinstance(node, GUARDS) else ()
            if isinstance(node, ast.Yield | ast.AsyncWith | ast.AsyncFor) or any(
                isinstance(inner, ast.Await) for inner in inside
            ):
                yield f"{source.path}:{node.lineno} {name}"


def unset_defaults(source: Source) -> Iterator[str]:
    """Defaults of attributes, written in the class, that are not literals."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef) or any(name_of(each) == "dataclass" for each in node.decorator_list):
            continue
        if any(name_of(base) in ("Enum", "StrEnum", "NamedTuple") for base in node.bases):
            continue
        for line in node.body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
            literal = (
                value is None or isinstance(value, ast.Constant) or (isinstance(value, ast.Tuple) and not value.elts)
            )
            if isinstance(target, ast.Name) and not literal and target.id[:2] != "__":
                yield f"{source.path}:{line.lineno} {node.name}.{target.id}"


_COMPILED = frozenset(compiled.chosen())  # once: it walks through all packages, and every test run collects this file
CHOSEN = [source for source in sources() if installed(source) in _COMPILED]
PLAIN = [source for source in sources() if installed(source) not in _COMPILED]


def test_every_pattern_and_every_exception_names_a_module_that_exists() -> None:
    names = {installed(source) for source in sources()}
    assert compiled.LEFT_OUT.keys() <= names
    assert {name for name in compiled.CHOSEN if "*" not in name} <= names
    assert len(CHOSEN) == len(_COMPILED) > 40


def test_no_compiled_class_keeps_an_annotation_of_a_class_that_may_come_later() -> None:
    assert [fault for source in CHOSEN for fault in crashing_fields(source)] == []


def test_no_compiled_class_inherits_from_one_that_is_not_compiled() -> None:
    native = classes_of(CHOSEN)
    assert [fault for source in CHOSEN for fault in foreign_bases(source, native)] == []


def test_nothing_that_is_not_compiled_inherits_from_a_compiled_class() -> None:
    native = classes_of(CHOSEN) - classes_of(PLAIN)
    protocols = {
        node.name
        for source in CHOSEN
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and any(name_of(base) in NATIVE_BASES - {"Generic"} for base in node.bases)
    }
    found = [
        f"{source.path}:{node.lineno} {node.name}({name_of(base)})"
        for source in PLAIN
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if name_of(base) in native - protocols
    ]
    assert found == []


def test_no_compiled_coroutine_waits_where_an_exception_is_or_may_be_handled() -> None:
    assert [fault for source in CHOSEN for fault in guarded_waits(source)] == []


def test_the_default_of_a_compiled_class_s_attribute_is_a_literal() -> None:
    assert [fault for source in CHOSEN for fault in unset_defaults(source)] == []


@pytest.mark.parametrize(
    ("text", "finds"),
    [
        (
            "if TYPE_CHECKING:\n    from a import B\n@dataclass(frozen=True)\nclass C:\n    b: B\n",
            crashing_fields,
        ),
        ("class C:\n    credit = INITIAL\n", unset_defaults),
        ("class C(HashRing): ...\n", lambda source: foreign_bases(source, {"C"})),
        ("async def f():\n    yield 1\n", guarded_waits),
        ("async def f():\n    try:\n        await g()\n    finally:\n        h()\n", guarded_waits),
        ("async def f():\n    async with g():\n        pass\n", guarded_waits),
    ],
)
def test_the_checks_find(text: str, finds) -> None:  # type: ignore[no-untyped-def]
    assert list(finds(Source("reach/core/example.py", text)))
