"""Token buckets and counters of principals and tenants."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from reach.core import quotas
from reach.core.bucket import Bucket
from reach.core.quotas import ACCOUNTS_MAX, BYTES, LINKS, REQUESTS, Quotas

BURST_S = 2.0


def taken(bucket: Bucket, now: float, wanted: int) -> int:
    """How many of so many tokens, one by one, it gives at this moment."""
    got = 0
    for _ in range(wanted):
        if not bucket.wait_s(now):
            bucket.take(now, 1)
            got += 1
    return got


def of(
    principal: dict[str, int] | None = None, tenant: dict[str, int] | None = None, **tenants: dict[str, int]
) -> Quotas:
    return Quotas(principal or {}, tenant or {}, BURST_S, tenants)


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = Bucket(10, BURST_S)
    assert taken(bucket, 100.0, 50) == 20
    assert taken(bucket, 100.5, 50) == 5
    assert taken(bucket, 200.0, 50) == 20, "a long rest saves up no more than a burst"


def test_a_rate_below_one_a_burst_still_gives_one() -> None:
    bucket = Bucket(1, 0.1)
    assert taken(bucket, 0.0, 3) == 1
    assert taken(bucket, 0.9, 3) == 0
    assert taken(bucket, 1.0, 3) == 1


class Drops:
    """The dumb twin: a level that is topped up."""

    def __init__(self, rate: float, capacity: float) -> None:
        self.rate, self.capacity, self.level, self.at = rate, capacity, capacity, 0.0

    def take(self, now: float) -> bool:
        self.level = min(self.capacity, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1 - 1e-6:
            return False
        self.level -= 1
        return True


@given(st.integers(1, 1000), st.sampled_from([0.5, 2.0, 10.0]), st.integers(0, 2**32))
def test_a_bucket_decides_like_a_level_that_is_topped_up(rate: int, burst_s: float, seed: int) -> None:
    rng, now = Random(seed), 0.0
    bucket, twin = Bucket(rate, burst_s), Drops(rate, max(1.0, rate * burst_s))
    for _ in range(200):
        now += rng.choice((0.0, 0.0, 1 / 64, 1 / rate, 3 * burst_s))
        may = not bucket.wait_s(now)
        assert may == twin.take(now)
        if may:
            bucket.take(now, 1)


@given(st.integers(1, 10_000), st.integers(1, 50))
def test_the_time_that_it_says_is_true_and_not_too_long(rate: int, beyond: int) -> None:
    bucket, now = Bucket(rate, BURST_S), 50.0
    bucket.take(now, int(rate * BURST_S) + beyond)
    wait_s = bucket.wait_s(now)
    assert wait_s > 0
    assert bucket.wait_s(now + wait_s) == 0
    assert bucket.wait_s(now + wait_s * 0.99) > 0


def test_bytes_that_are_too_many_are_owed_and_further_ones_do_not_make_it_more() -> None:
    account = of({BYTES: 100}).of(("acme", "bob"), 0.0)
    account.received(0.0, 1_000)
    assert account.short_s == 0, "what was there before them is what counts"
    for _ in range(5):
        account.received(0.0, 1_000)
    assert account.short_s == 8.01, "800 too many, at 100 a second, and one more"
    account.received(8.02, 1_000)
    assert account.short_s == 0


def test_a_tenants_limit_holds_for_all_its_principals_together_and_nobody_elses() -> None:
    accounts = of({LINKS: 3}, {LINKS: 4})
    bob, eve, other = (accounts.of(owner, 0.0) for owner in (("acme", "bob"), ("acme", "eve"), ("else", "bob")))
    for _ in range(3):
        bob.take(LINKS)
    assert bob.over(LINKS) is bob and eve.over(LINKS) is None
    eve.take(LINKS)
    assert eve.over(LINKS) is eve.tenant and other.over(LINKS) is None
    assert quotas.why_full(eve, LINKS).startswith("tenant acme has 4 links to this node, its limit (tenant_links_max)")
    bob.give_back(LINKS)
    assert eve.over(LINKS) is None and bob.over(LINKS) is None


def test_a_tenant_may_have_limits_of_its_own() -> None:
    accounts = of({LINKS: 1}, {LINKS: 2}, acme={"tenant_links_max": 0, "principal_links_max": 5})
    acme, other = accounts.of(("acme", "bob"), 0.0), accounts.of(("else", "bob"), 0.0)
    assert (acme.limit(LINKS), other.limit(LINKS)) == (5, 1)
    assert acme.tenant is not None and acme.tenant.limit(LINKS) == 0
    assert other.tenant is not None and other.tenant.limit(LINKS) == 2


def test_accounts_of_those_who_have_nothing_are_forgotten_and_those_of_others_are_not() -> None:
    accounts = of({REQUESTS: 10})
    busy, owing = accounts.of(("t", "busy"), 0.0), accounts.of(("t", "owing"), 0.0)
    busy.take(LINKS)
    owing.count_request(1e6 + 5)
    for number in range(3 * ACCOUNTS_MAX):
        accounts.of(("t", f"p{number}"), 1e6)
    assert accounts.known <= ACCOUNTS_MAX + 1
    assert accounts.of(("t", "busy"), 1e6) is busy and accounts.of(("t", "owing"), 1e6) is owing


def test_a_request_that_the_tenant_is_too_much_for_costs_its_principal_nothing() -> None:
    accounts = of({REQUESTS: 5}, {REQUESTS: 2})
    bob, eve = accounts.of(("acme", "bob"), 0.0), accounts.of(("acme", "eve"), 0.0)
    assert [eve.admits(0.0) for _ in range(5)] == [True] * 4 + [False]
    assert not any(bob.admits(0.0) for _ in range(50))
    assert bob.wait_s(0.0, 1.0) == 0 and [bob.admits(1.0) for _ in range(3)] == [True, True, False]
