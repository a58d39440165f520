"""The short run without coverage of every target, and what happens when something is found."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tools import fuzz
from tools.fuzzing import targets
from tools.fuzzing.messages import Words
from tools.fuzzing.octets import BYTES_MAX, damage
from tools.fuzzing.targets import TARGETS, Found, Fuzzed, wander

INPUTS = {"core": 40, "sdk": 3, "envelope": 2000, "record": 2000, "link": 100, "selector": 1500, "lineage": 3000}


def test_every_target_has_a_short_run() -> None:
    assert set(INPUTS) == set(TARGETS) == set(fuzz.NAMES)


@pytest.mark.parametrize("name", INPUTS)
def test_the_target_stands_a_short_run(name: str) -> None:
    wander(name, Random(2026), INPUTS[name])


def test_what_is_found_is_kept_with_a_way_to_see_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(data: bytes) -> None:
        assert not data.startswith(b"bad")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(targets.TARGETS, "record", Fuzzed(fails, lambda rng: [b"good", b"bad input"], damage))
    with pytest.raises(Found) as found:
        wander("record", Random(1), 2)
    assert found.value.data == b"bad input"
    assert fuzz.main(["record", "--plain", "--seconds", "5", "--seed", "1"]) == 1
    (kept,) = (tmp_path / "found").iterdir()
    assert f"--replay found/{kept.name}" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        fuzz.main(["record", "--replay", str(kept)])


@pytest.mark.parametrize("seed", range(5))
def test_damage_never_fails_and_stays_within_bounds(seed: int) -> None:
    rng, data = Random(seed), b"something"
    for _ in range(2000):
        data = damage(rng, data, data[:10])
        assert len(data) < BYTES_MAX + 100_000


def test_learned_words_are_bounded() -> None:
    words = Words()
    words.learn([str(number) for number in range(10_000)])
    assert len(words.texts) == 256 and words.texts[0] != "0"
