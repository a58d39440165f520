"""Lets hatchling build a compiled wheel where it is told to: `AGENT_REACH_COMPILE=1 pip wheel .`

Without that variable the wheel is plain Python and fits every platform; an editable install always is.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NEEDED = ["mypy[mypyc]==2.4.1", "setuptools>=75", "types-grpcio", "types-protobuf"]


def wanted() -> bool:
    """Whether this build shall be compiled."""
    return os.environ.get("AGENT_REACH_COMPILE", "") not in ("", "0")


class CompiledWheel(BuildHookInterface[Any]):
    """Adds the extension modules beside their sources, and the platform to the wheel's name."""

    PLUGIN_NAME = "custom"
    _made: Path | None = None

    def dependencies(self) -> list[str]:
        """What the build needs besides hatchling."""
        return _NEEDED if wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of the wheel are gathered. Raises what the compiler said, if it failed."""
        if version == "editable" or not wanted():
            return
        self._made = into = Path(tempfile.mkdtemp(prefix="agent-reach-wheel-"))
        _compiled(Path(self.root)).compile_extensions(Path(self.root), into)
        build_data["pure_python"], build_data["infer_tag"] = False, True
        for path in into.rglob("*"):
            if path.is_file():
                build_data["force_include"][str(path)] = path.relative_to(into).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _compiled(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("compiled", root / "tools" / "compiled.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
