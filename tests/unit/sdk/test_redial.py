"""Which node is dialled, and when."""

from __future__ import annotations

import random

from agent_sdk.redial import CAP_S, Redial
from agentreach.wire.limits import RESUME_WINDOW_S


def draw() -> float:
    return 1.0


def test_the_first_dial_waits_for_nothing_and_the_same_node_is_redialled_within_200_ms() -> None:
    redial = Redial(["a:1", "b:1"])
    assert redial.wait_s(draw) == 0
    redial.connected(0.0, [])
    redial.failed(60.0)
    assert redial.wait_s(draw) <= 0.2
    assert redial.address == "a:1"


def test_after_a_second_of_failing_the_next_address_has_its_turn() -> None:
    redial = Redial(["a:1", "b:1"])
    redial.connected(-9.0, [])
    redial.failed(0.0)
    redial.failed(0.5)
    assert redial.address == "a:1"
    redial.failed(1.0)
    assert redial.address == "b:1"
    redial.failed(2.5)
    assert redial.address == "a:1"


def test_without_a_link_to_resume_the_whole_list_is_tried_at_once_and_the_waits_grow_by_round() -> None:
    redial = Redial(["a:1", "b:1", "c:1"])
    dialled, waits = [], []
    for n in range(12):
        waits.append(redial.wait_s(draw))
        dialled.append(redial.address)
        redial.failed(n * 0.01)
    assert dialled == ["a:1", "b:1", "c:1"] * 4
    assert waits == [0.0, 0.2, 0.2] + [0.2] * 3 + [0.5, 0.2, 0.2] + [1.0, 0.2, 0.2]


def test_when_the_node_of_the_link_stays_away_the_others_are_dialled_at_once() -> None:
    redial = Redial(["a:1", "b:1", "c:1"])
    redial.wait_s(draw)
    redial.connected(0.0, [])
    redial.failed(60.0)
    redial.wait_s(draw)
    redial.failed(61.0)
    assert (redial.address, redial.wait_s(draw)) == ("b:1", 0.2)
    redial.failed(61.2)
    assert (redial.address, redial.wait_s(draw)) == ("c:1", 0.2)


def test_a_node_that_names_others_without_a_welcome_skips_nobody() -> None:
    redial = Redial(["a:1", "b:1"])
    redial.wait_s(draw)
    redial.failed(0.0, moved=True)
    redial.move_on([])
    assert redial.address == "b:1"


def test_a_node_that_flaps_is_dialled_ever_more_rarely() -> None:
    redial = Redial(["a:1"])
    redial.wait_s(draw)
    waits, now = [], 0.0
    for _ in range(8):
        redial.connected(now, [])
        now += 1.0
        redial.failed(now)
        waits.append(redial.wait_s(draw))
    assert waits == sorted(waits) and waits[-1] == CAP_S
    redial.connected(now, [])
    redial.failed(now + 60)
    assert redial.wait_s(draw) <= 0.2


def test_a_way_that_is_cut_again_and_again_is_redialled_at_once_as_long_as_the_link_resumes() -> None:
    redial = Redial(["a:1"])
    redial.wait_s(draw)
    now = 0.0
    for _ in range(20):
        redial.connected(now, [], resumed=True)
        now += 1.0
        redial.failed(now)
        assert redial.wait_s(draw) <= 0.2


def test_resuming_and_breaking_in_the_same_moment_is_no_success() -> None:
    redial = Redial(["a:1"])
    redial.wait_s(draw)
    waits, now = [], 0.0
    for _ in range(8):
        redial.connected(now, [], resumed=True)
        now += 0.1
        redial.failed(now)
        waits.append(redial.wait_s(draw))
    assert waits[-1] == CAP_S


def test_peers_that_a_node_told_are_dialled_after_the_list() -> None:
    redial = Redial(["a:1"])
    assert not redial.elsewhere
    redial.connected(0.0, ["p:1"])
    assert redial.elsewhere
    redial.move_on(["q:1", "p:1"])
    assert redial.address == "q:1"
    redial.move_on()
    assert redial.address == "p:1"
    redial.move_on()
    assert redial.address == "a:1"


def test_after_an_outage_of_any_length_a_fleet_is_back_in_time_and_not_all_in_one_second() -> None:
    """K1. Each client's present wait is drawn anew: the node that comes back sees where in it they are."""
    rng = random.Random(7)
    back: list[float] = []
    for _ in range(2000):
        redial, now = Redial(["a:1"]), 0.0
        redial.wait_s(rng.random)
        redial.connected(now, [])
        while now < 30:
            redial.failed(now)
            now += redial.wait_s(rng.random)
        back.append(now - 30)
    assert max(back) <= CAP_S < RESUME_WINDOW_S
    assert max(sum(second <= each < second + 1 for each in back) for second in range(8)) < 0.27 * len(back)
