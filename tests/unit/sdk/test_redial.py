"""Which node is dialled, when, and for how long."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agent_sdk.redial import CAP_S, DIAL_S, SAME_NODE_S, SPREAD_S, Redial
from agentreach.wire.limits import PEERS_MAX, RESUME_WINDOW_S

LIST = ["a:1", "b:1", "c:1"]


def longest() -> float:
    return 1.0


def drawing(seed: int = 7) -> Redial:
    return Redial(LIST, random.Random(seed).random)


def linked(redial: Redial, now: float = 0.0, peers: tuple[str, ...] = ()) -> Redial:
    redial.connected(now, peers)
    return redial


def dialled(redial: Redial, now: float, count: int, step_s: float = 0.01) -> list[str]:
    """The next addresses, if nobody answers."""
    found = []
    for _ in range(count):
        found.append(redial.address)
        redial.failed(now)
        now += step_s
    return found


class TestTheFirstTime:
    """Before any node was reached."""

    def test_the_whole_list_is_tried_at_once_in_its_order_and_the_waits_grow_by_round(self) -> None:
        redial = Redial(LIST, longest)
        tried, waits = [], []
        for n in range(12):
            waits.append(redial.wait_s)
            tried.append(redial.address)
            redial.failed(n * 0.01)
        assert tried == LIST * 4
        assert waits == [0.0, 0.2, 0.2] + [0.2] * 3 + [0.5, 0.2, 0.2] + [1.0, 0.2, 0.2]

    def test_each_address_gets_a_fair_part_of_the_time_and_later_all_of_it(self) -> None:
        redial = Redial(LIST, longest)
        limits = []
        for _ in range(6):
            limits.append(redial.limit_s)
            redial.failed(0.0)
        assert limits == [DIAL_S / 3] * 3 + [DIAL_S] * 3
        assert Redial(LIST[:1], longest).limit_s == DIAL_S
        assert Redial([f"{n}:1" for n in range(100)], longest).limit_s == 1.0

    def test_a_node_that_is_leaving_before_it_welcomes_anybody_skips_nobody(self) -> None:
        redial = Redial(LIST, longest)
        redial.left(0.0, "a:1")
        assert dialled(redial, 0.0, 3) == ["b:1", "c:1", "a:1"]


class TestALoss:
    """The node of the link does not answer any more."""

    def test_the_same_node_is_redialled_within_200_ms_then_the_others_in_a_random_order(self) -> None:
        orders: Counter[tuple[str, ...]] = Counter()
        for seed in range(300):
            redial = linked(drawing(seed))
            redial.failed(60.0)
            assert redial.address == "a:1" and redial.wait_s <= 0.2 and redial.limit_s == SAME_NODE_S
            redial.failed(60.1)
            assert redial.address == "a:1" and redial.wait_s <= 0.5
            redial.failed(60.3)
            assert 0 <= redial.wait_s <= SPREAD_S
            order = tuple(dialled(redial, 60.4, 3))
            assert order[2] == "a:1"
            orders[order[:2]] += 1
        assert set(orders) == {("b:1", "c:1"), ("c:1", "b:1")} and min(orders.values()) > 100

    def test_a_node_that_does_not_answer_at_all_gets_one_second(self) -> None:
        redial = linked(drawing())
        redial.failed(60.0)
        redial.failed(60.0 + SAME_NODE_S)
        assert redial.address != "a:1"

    def test_a_crowd_comes_to_the_others_over_a_while_and_within_four_seconds(self) -> None:
        """K1, of those who lost one node of two: so many each second are at most a quarter of all."""
        fleet, back = 2000, []
        for seed in range(fleet // 2):
            redial, now = linked(Redial(LIST[:2], random.Random(seed).random), -60.0), 0.0
            redial.failed(now)
            while redial.address == "a:1":
                now += redial.wait_s
                redial.failed(now)
            back.append(now + redial.wait_s)
        assert max(back) < 4
        assert max(sum(at <= each < at + 1 for each in back) for at in (n / 10 for n in range(40))) < fleet / 4

    def test_with_one_address_there_is_no_other_and_the_same_is_tried_on(self) -> None:
        redial = linked(Redial(["a:1"], longest))
        assert not redial.elsewhere
        assert set(dialled(redial, 60.0, 20, step_s=1.0)) == {"a:1"}

    def test_a_node_that_does_not_hold_its_links_is_left_for_another(self) -> None:
        redial, now = drawing(), 0.0
        for _ in range(8):
            redial.connected(now, [])
            now += 1.0
            redial.failed(now)
            if redial.address != "a:1":
                return
        pytest.fail("it was dialled on and on")


class TestLeaving:
    """A node that says that it is leaving."""

    def test_the_others_come_first_and_the_leaving_one_last_for_as_long_as_it_leaves(self) -> None:
        for seed in range(50):
            redial = linked(drawing(seed))
            redial.left(100.0, "a:1", ["p:1"], 55.0, in_time=True)
            assert redial.wait_s == 0.0
            assert set(dialled(redial, 100.0, 3)) == {"b:1", "c:1", "p:1"}
            assert redial.address == "a:1", "nobody else answers"
            redial.failed(101.0)
            assert dialled(redial, 101.0, 4)[-1] == "a:1"

    def test_it_is_not_gone_back_to_when_the_next_one_is_lost_until_its_time_is_over(self) -> None:
        for seed in range(50):
            redial = linked(drawing(seed))
            redial.left(100.0, "a:1", [], 30.0, in_time=True)
            next_one = redial.address
            redial.connected(100.1, [])
            for _ in range(3):
                redial.failed(115.0)
            assert redial.address not in ("a:1", next_one)
            redial.connected(116.0, [])
            third = redial.address
            seen = set()
            for _ in range(3):
                redial.failed(200.0)
            seen.update(dialled(redial, 200.0, 2))
            assert seen == set(LIST) - {third}

    def test_who_is_told_only_by_the_goodbye_waits_a_while(self) -> None:
        redial = linked(Redial(LIST, longest))
        redial.left(60.0, "a:1")
        assert redial.address != "a:1" and redial.wait_s == SPREAD_S


class TestAddresses:
    """One configured address is enough."""

    def test_those_that_a_node_names_are_added_behind_the_list_once(self) -> None:
        redial = linked(drawing(), peers=("p:1", "b:1", "q:1"))
        assert redial.known == ("a:1", "b:1", "c:1", "p:1", "q:1")

    def test_those_that_a_newer_welcome_does_not_name_are_forgotten(self) -> None:
        redial = linked(Redial(["a:1"], longest), peers=("p:1", "q:1"))
        assert redial.elsewhere
        redial.connected(1.0, ["q:1"])
        assert redial.known == ("a:1", "q:1")
        redial.told(["r:1"])
        assert redial.known == ("a:1", "r:1")
        redial.told([])
        assert redial.known == ("a:1", "r:1")
        redial.connected(2.0, [])
        assert redial.known == ("a:1",) and not redial.elsewhere

    def test_there_are_never_more_than_a_bound_of_them(self) -> None:
        many = [f"10.0.0.{n}:1" for n in range(1000)]
        redial = linked(Redial(["a:1"], longest), peers=tuple(many))
        assert len(redial.known) == 1 + PEERS_MAX
        redial.told(many)
        assert len(redial.known) == 1 + PEERS_MAX

    def test_where_we_were_last_is_known_though_nobody_names_it(self) -> None:
        redial = linked(Redial(["a:1"], longest), peers=("p:1",))
        redial.left(60.0, "a:1", in_time=True)
        assert redial.address == "p:1"
        redial.connected(60.1, [])
        assert {"a:1", "p:1"} == set(dialled(redial, 100.0, 8))


class TestWaits:
    """How long, over many failures."""

    def test_a_node_that_flaps_is_dialled_ever_more_rarely(self) -> None:
        redial = Redial(["a:1"], longest)
        waits, now = [], 0.0
        for _ in range(8):
            redial.connected(now, [])
            now += 1.0
            redial.failed(now)
            waits.append(redial.wait_s)
        assert waits == sorted(waits) and waits[-1] == CAP_S
        redial.connected(now, [])
        redial.failed(now + 60)
        assert redial.wait_s <= 0.2

    def test_a_fleet_that_a_flapping_node_has_gathered_is_spread_again(self) -> None:
        waits = []
        for seed in range(1000):
            redial = Redial(["a:1"], random.Random(seed).random)
            for n in range(20):
                redial.failed(float(n))
            redial.connected(100.0, [])
            redial.failed(101.0)
            waits.append(redial.wait_s)
        assert max(sum(at <= each < at + 1 for each in waits) for at in range(5)) < len(waits) / 4

    def test_a_way_that_is_cut_again_and_again_is_redialled_at_once_as_long_as_the_link_resumes(self) -> None:
        redial, now = Redial(LIST, longest), 0.0
        for _ in range(20):
            redial.connected(now, [], resumed=True)
            now += 1.0
            redial.failed(now)
            assert (redial.address, redial.wait_s) == ("a:1", 0.2)

    def test_resuming_and_breaking_in_the_same_moment_is_no_success(self) -> None:
        redial, now = Redial(["a:1"], longest), 0.0
        waits = []
        for _ in range(8):
            redial.connected(now, [], resumed=True)
            now += 0.1
            redial.failed(now)
            waits.append(redial.wait_s)
        assert waits[-1] == CAP_S

    @pytest.mark.parametrize("away_s", [1, 3, 5, 8, 13, 30, 300])
    def test_after_an_outage_of_any_length_everybody_is_back_within_five_seconds(self, away_s: int) -> None:
        """K1. And of a long one, at most a quarter in any one second."""
        back = []
        for seed in range(2000):
            redial, now = linked(Redial(["a:1"], random.Random(seed).random), -60.0), 0.0
            while now < away_s:
                redial.failed(now)
                now += redial.wait_s
            back.append(now - away_s)
        assert max(back) <= CAP_S < 5 < RESUME_WINDOW_S
        if away_s >= 13:
            assert max(sum(at <= each < at + 1 for each in back) for at in (n / 10 for n in range(50))) < len(back) / 4
