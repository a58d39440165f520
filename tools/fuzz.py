"""Fuzz the parsers, the link, the core and the SDK: bytes that nobody would send, guided by coverage where possible.

    make fuzz                        every target, a minute in all
    make fuzz SECONDS=600
    python -m tools.fuzz core link --seconds 300 --seed 7
    python -m tools.fuzz core --replay found/core-1f2e3d

Coverage is atheris' (libFuzzer), where it is installed: Linux on x86-64. Elsewhere, and with --plain, inputs are
mutated without it. Nothing is kept between runs but what was found: an input that a target does not stand is written
to `found/`, the command to run it again is printed, and the exit code is 1. What the targets are and what must hold of
each stands in `tools/fuzzing/targets.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

NAMES = ("core", "sdk", "envelope", "record", "link", "selector", "lineage")
FOUND = Path("found")
INSTRUMENTED = ["agentreach.wire", "agentreach.policy", "reach.core", "agent_sdk"]
INPUT_BYTES_MAX = 16 << 10
INPUT_S_MAX = 30  # for one input, on a busy machine; longer counts as found
GRACE_S = 60.0  # for a target to begin and end


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all without it")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (60)")
    parser.add_argument("--seed", type=int, default=0, help="where randomness begins; 0: anywhere")
    parser.add_argument("--plain", action="store_true", help="without coverage, also where atheris is installed")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input of one target and show what happens")
    chosen = parser.parse_args(given)
    unknown = [name for name in chosen.targets if name not in NAMES]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if chosen.replay is not None and len(chosen.targets) != 1:
        parser.error("--replay needs one target")
    return chosen


def keep(name: str, data: bytes) -> Path:
    """Write an input that was found."""
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"{name}-{sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def plain(name: str, seconds: float, seed: int) -> bool:
    """Mutate without coverage for a while. False if something was found."""
    from tools.fuzzing.targets import TARGETS, Found, wander

    rng = Random(seed or time.time_ns())
    end, inputs, step = time.monotonic() + seconds, 0, max(1, 2000 // TARGETS[name].cost)
    while time.monotonic() < end:
        try:
            wander(name, rng, step)
        except Found as found:
            path = keep(name, found.data)
            print(f"{name}: {found.__cause__!r}\nagain with: python -m tools.fuzz {name} --replay {path}")
            return False
        inputs += step
    print(f"{name}: {inputs} inputs in {seconds:.0f} s, without coverage; nothing found")
    return True


def guided(name: str, seconds: float, seed: int) -> bool:
    """Fuzz one target with atheris, which never returns: in a process of its own. False if something was found."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        command = [sys.executable, "-m", "tools.fuzz", "--guided", name, str(seed), folder, str(int(max(1, seconds)))]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds + GRACE_S, check=False)
            code, text = ended.returncode, ended.stdout + ended.stderr
        except subprocess.TimeoutExpired as late:
            said = late.stderr or b""
            code, text = (
                -1,
                f"{said.decode(errors='replace') if isinstance(said, bytes) else said}\ndid not end in time",
            )
        found = [path.read_bytes() for path in Path(folder).glob("found-*")]
    if code == 0 and not found:
        print(f"{name}: {_last_words(text)}; nothing found")
        return True
    print(text[-4000:])
    for data in found:
        print(f"again with: python -m tools.fuzz {name} --replay {keep(name, data)}")
    return False


def _last_words(text: str) -> str:
    """libFuzzer's own count: `Done 1234 runs in 11 second(s)`."""
    done = [line for line in text.splitlines() if line.startswith("Done ")]
    return done[-1] if done else "ended"


def _guided_child(name: str, seed: int, folder: str, seconds: int) -> None:
    import atheris  # not everywhere: see the group `fuzz` in pyproject.toml

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tools.fuzzing.targets import TARGETS
    target = TARGETS[name]
    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.begin(Random(seed or time.time_ns()))):
        (corpus / str(number)).write_bytes(data[:INPUT_BYTES_MAX])

    def mutate(data: bytes, size_max: int, at: int) -> bytes:
        rng = Random(at)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, size_max))
        return target.mutate(rng, bytes(data))[:size_max]

    options = [
        "fuzz", f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}",
        f"-artifact_prefix={folder}/found-", "-rss_limit_mb=2048", "-verbosity=1", str(corpus),
    ]  # fmt: skip
    atheris.Setup(options, _taking_bytes(target.run), custom_mutator=mutate)
    atheris.Fuzz()


def _taking_bytes(run: Any) -> Any:
    def test_one_input(data: Any) -> None:
        run(bytes(data))

    return test_one_input


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    given = list(sys.argv[1:] if given is None else given)
    if given[:1] == ["--guided"]:
        _guided_child(given[1], int(given[2]), given[3], int(given[4]))
        return 0
    chosen = arguments(given)
    if chosen.replay is not None:
        from tools.fuzzing.targets import TARGETS

        TARGETS[chosen.targets[0]].run(chosen.replay.read_bytes())
        print(f"{chosen.targets[0]} stands {chosen.replay}")
        return 0
    with_coverage = not chosen.plain and importlib.util.find_spec("atheris") is not None
    if not with_coverage and not chosen.plain:
        print("atheris is not installed: without coverage")
    names = chosen.targets or list(NAMES)
    fuzz = guided if with_coverage else plain
    results = [fuzz(name, chosen.seconds / len(names), chosen.seed) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
