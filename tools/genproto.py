"""Generate the Python code of the .proto files (make proto), or check that it is current (--check).

Generated with the one pinned grpcio-tools: its output imports on the oldest and the newest protobuf we support.
Two trees: the contract below proto/, and the private part of etcd's API beside its only user.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder of .proto files, and the source root (both relative to ROOT) that import names start from."""

    source: str
    folder: str


TREES = (Tree("proto", "proto/agentreach/v1"), Tree(".", "reach/adapters/etcd"))


def protoc(source_root: Path, out: Path, files: list[Path], *, services: bool) -> None:
    """Run protoc over `files`; `services` writes the gRPC stubs instead of the messages."""
    if not files:
        return
    out.mkdir(parents=True, exist_ok=True)
    kinds = ["grpc_python_out", "mypy_grpc_out"] if services else ["python_out", "mypy_out"]
    options = [f"--{kinds[0]}={out}", f"--{kinds[1]}=quiet:{out}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source_root}", *options, *map(str, files)]
    subprocess.run(command, check=True, env={"PATH": str(Path(sys.executable).parent)})


def generate(out: Path) -> None:
    """Write all generated files below `out`, laid out as below ROOT."""
    for tree in TREES:
        files = sorted((ROOT / tree.folder).glob("*.proto"))
        with_service = [f for f in files if "\nservice " in f.read_text()]
        protoc(ROOT / tree.source, out / tree.source, files, services=False)
        protoc(ROOT / tree.source, out / tree.source, with_service, services=True)


def generated(root: Path) -> dict[str, Path]:
    """The generated files of all trees below `root`, by their path relative to it."""
    found = (p for tree in TREES for p in (root / tree.folder).glob("*_pb2*") if p.suffix in (".py", ".pyi"))
    return {str(p.relative_to(root)): p for p in found}


def drift(root: Path = ROOT) -> list[str]:
    """Names of generated files below `root` that differ from what the .proto files give now."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        generate(out)
        fresh, checked_in = generated(out), generated(root)
        names = sorted(fresh.keys() | checked_in.keys())
        return [
            name
            for name in names
            if name not in fresh
            or name not in checked_in
            or not filecmp.cmp(fresh[name], checked_in[name], shallow=False)
        ]


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if anything differs")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = drift()
    if stale:
        print("generated code is not current (run: make proto):", *stale, sep="\n  ")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
