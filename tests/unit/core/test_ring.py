"""reach.core.ring: failures I1, I2, I3, I5 and the traps of uhashring (house.md 16)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reach.core.ring import Ring, stable_hash

KEYS = [f"session-{n}" for n in range(1000)]
MAP_OF_KEYS = """
from reach.core.ring import Ring
ring = Ring({f"extractor/{n}": 100 for n in range(7)})
print(*[ring.pick(f"session-{n}") for n in range(10_000)])
"""


def members(count: int, weight: int = 100) -> dict[str, int]:
    return {f"extractor/{n}": weight for n in range(count)}


def test_every_process_maps_every_key_alike_whatever_its_hash_seed():
    def mapped(seed: str) -> bytes:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", MAP_OF_KEYS], env=env, check=True, capture_output=True, timeout=60
        ).stdout

    assert mapped("1") == mapped("2") != b""


@given(st.text())
def test_text_and_bytes_of_one_id_belong_to_the_same_member(key: str):
    ring = Ring(members(5))
    assert ring.pick(key) == ring.pick(key.encode())
    assert list(ring.walk(key)) == list(ring.walk(key.encode()))


@given(st.binary())
def test_bytes_that_are_no_text_and_their_escaped_form_belong_together(key: bytes):
    ring = Ring(members(5))
    assert ring.pick(key) == ring.pick(key.decode("utf-8", "surrogateescape"))


def test_ids_that_only_look_alike_are_different_keys():
    assert len({stable_hash(key) for key in ("A", "a", "a ", "é", "e\u0301")}) == 5


@pytest.mark.parametrize("weight", [0, -1, 0.5, 1.0, float("nan"), True, "7", None])
def test_a_bad_weight_is_refused_before_anything_changes(weight: object):
    ring = Ring(members(2))
    before = [ring.pick(key) for key in KEYS]
    with pytest.raises(ValueError, match="weight"):
        ring.add("extractor/bad", weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight"):
        Ring({"extractor/bad": weight})  # type: ignore[dict-item]
    assert [ring.pick(key) for key in KEYS] == before and len(ring) == 2
    ring.add("extractor/bad", 100)
    assert "extractor/bad" in ring


def test_a_huge_weight_neither_fills_the_memory_nor_starves_the_rest():
    ring = Ring(members(10))
    ring.add("extractor/huge", 10**9)
    counts = Counter(map(ring.pick, KEYS))
    assert len(counts) == 11
    ring.remove("extractor/huge")
    assert "extractor/huge" not in set(map(ring.pick, KEYS))


def test_an_empty_ring_has_nobody():
    ring = Ring()
    assert ring.pick("k") is None
    assert list(ring.walk("k")) == []
    assert ring.pick_bounded("k", load=lambda name: 0, total=0) is None
    ring.remove("nobody")
    ring.add("extractor/0", 1)
    assert ring.pick("k") == "extractor/0"
    ring.remove("extractor/0")
    assert ring.pick("k") is None


def test_a_new_member_takes_only_its_share_and_moves_no_other_key():
    ring = Ring(members(9))
    before = {key: ring.pick(key) for key in KEYS}
    ring.add("extractor/new", 100)
    moved = [key for key in KEYS if ring.pick(key) != before[key]]
    assert {ring.pick(key) for key in moved} == {"extractor/new"}
    assert 0.04 < len(moved) / len(KEYS) < 0.2  # a tenth, by 40 points a member
    ring.remove("extractor/new")
    assert {key: ring.pick(key) for key in KEYS} == before


def test_weights_are_shares():
    ring = Ring({"a/light": 100, "a/heavy": 300})
    counts = Counter(map(ring.pick, KEYS))
    assert 1.8 < counts["a/heavy"] / counts["a/light"] < 5


def test_every_change_counts_in_the_rings_version():
    ring = Ring(members(2))
    versions = [ring.version]
    for change in (lambda: ring.add("x", 1), lambda: ring.add("x", 2), lambda: ring.remove("x")):
        change()
        versions.append(ring.version)
    assert versions == [0, 1, 2, 3]


changes = st.lists(st.tuples(st.integers(0, 30), st.sampled_from((0, 1, 50, 100, 900))), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), changes)
def test_a_ring_that_was_changed_step_by_step_equals_one_built_anew(start: int, steps: list[tuple[int, int]]):
    weights = members(start)
    ring = Ring(weights)
    for number, weight in steps:
        name = f"extractor/{number}"
        if weight:
            ring.add(name, weight)
            weights[name] = weight
        else:
            ring.remove(name)
            weights.pop(name, None)
    twin = Ring(weights)
    assert len(ring) == len(twin) and ring.weight_total == twin.weight_total
    for key in KEYS[:50]:
        assert list(ring.walk(key)) == list(twin.walk(key))
        assert ring.pick(key) == twin.pick(key) == next(ring.walk(key), None)


def test_a_walk_names_each_member_once():
    ring = Ring(members(20))
    assert sorted(ring.walk("k")) == sorted(members(20))
    assert len(list(ring.walk("k", limit=3))) == 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 300))
def test_no_member_gets_more_than_its_bound_of_sessions(count: int, sessions: int):
    ring = Ring(members(count))
    load: Counter[str] = Counter()
    for number in range(sessions):
        name = ring.pick_bounded(f"s{number}", load=load.__getitem__, total=number)
        assert name is not None
        load[name] += 1
        assert load[name] <= ceil(1.25 * (number + 1) / count)


def test_a_bounded_pick_passes_over_those_that_are_not_usable():
    ring = Ring(members(5))
    for key in KEYS[:50]:
        order = list(ring.walk(key))
        usable = set(order[2:])
        assert ring.pick_bounded(key, lambda name: 0, 0, usable=usable.__contains__) == order[2]
    assert ring.pick_bounded("k", lambda name: 0, 0, usable=lambda name: False) is None


def test_where_all_are_over_their_bound_the_keys_own_place_takes_it():
    ring = Ring(members(5))
    assert ring.pick_bounded("k", load=lambda name: 1000, total=5) == ring.pick("k")


def test_a_ring_can_be_pickled():
    ring = pickle.loads(pickle.dumps(Ring(members(3))))
    assert ring.pick("k") == Ring(members(3)).pick("k")
