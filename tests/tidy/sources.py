"""The project's own files, as the checks of this folder read them. Generated code is not ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("reach", "agent_sdk", "proto/agentreach")
PURE = ("proto/agentreach/wire", "proto/agentreach/policy", "reach/core")
WORKSHOP = ("tools", "tests")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path below the root, its text, and what the checks ask of it."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The name it is imported by."""
        parts = Path(self.path.removeprefix("proto/")).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function with its name within the module: `Class.method`, `outer.inner`."""
        yield from _functions(self.tree, "")

    def inside(self) -> Iterator[tuple[str, ast.AST]]:
        """Every node with the name of the innermost function around it; empty at the top of the module."""
        yield from _inside(self.tree, "", "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        named = isinstance(child, Function | ast.ClassDef)
        yield from _functions(child, f"{prefix}{child.name}." if named else prefix)  # type: ignore[union-attr]


def _inside(node: ast.AST, prefix: str, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        yield function, child
        if isinstance(child, Function):
            yield from _inside(child, f"{prefix}{child.name}.", prefix + child.name)
        elif isinstance(child, ast.ClassDef):
            yield from _inside(child, f"{prefix}{child.name}.", function)
        else:
            yield from _inside(child, prefix, function)


def sources(*folders: str) -> list[Source]:
    """Our files below these folders (all of the product if none is given)."""
    return [source for folder in folders or OURS for source in _below(folder)]


@cache
def _below(folder: str) -> list[Source]:
    found = sorted((ROOT / folder).rglob("*.py"))
    return [Source(str(path.relative_to(ROOT)), path.read_text()) for path in found if "_pb2" not in path.name]
