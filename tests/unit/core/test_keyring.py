"""API keys: their text, their records, and who is known by them until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.v1.admin_pb2 import KeyInfo
from agentreach.v1.peer_pb2 import StoredKey
from reach.core import keyring
from reach.core.keyring import Kept, Keyring
from reach.core.ports import Change, End
from tests.support.api_keys import info, minted

NOW = 1_000_000.0
LOOKUP_KEY = b"l" * 32


def record(key: str, **fields: object) -> StoredKey:
    wanted = info("alice", now=NOW, **fields)  # type: ignore[arg-type]
    wanted.key_id, wanted.tenant = key.split("_")[1], wanted.tenant or "default"
    return keyring.stored(wanted, key, b"s" * 16, LOOKUP_KEY)


def ring(*records: StoredKey, at: float = NOW) -> Keyring:
    made = Keyring(b"p" * 32)
    made.take(Kept(LOOKUP_KEY, records), at)
    return made


def ended_by(change: tuple[bool, Change]) -> dict[str, End]:
    """By key_id: how those ended that did."""
    return {who.key_id: end for who, end in change[1].ended}


def let_in(made: Keyring, key: str, at: float = NOW) -> str:
    """The key_id under which the key's holder is known from now on; empty: it is not let in."""
    found = made.candidate(key, at)
    if found is None or not keyring.proves(key, found):
        return ""
    who = made.verified(key, found, at)
    return who.key_id if who is not None else ""


@given(st.binary(min_size=4, max_size=4), st.binary(min_size=32, max_size=32))
def test_a_key_has_its_shape_whatever_its_random_bytes(key_id: bytes, secret: bytes) -> None:
    key = keyring.key_text(key_id.hex(), secret)
    assert keyring.looks_like_a_key(key)
    assert key.startswith(f"reach_{key_id.hex()}_") and len(key) == 6 + 8 + 1 + 43


@pytest.mark.parametrize("text", ["", " ", "reach_", "reach_1a2b3c4d_", "reach_1A2B3C4D_" + "x" * 43, "x" * 58])
def test_what_has_not_the_shape_of_a_key_is_looked_up_nowhere(text: str) -> None:
    assert not keyring.looks_like_a_key(text)
    assert ring().candidate(text, NOW) is None


def test_what_is_stored_holds_neither_the_key_nor_its_secret() -> None:
    new = minted()
    kept = record(new.key).SerializeToString()
    assert new.key.encode() not in kept and new.key.split("_", 2)[2].encode() not in kept


def test_a_key_is_known_only_after_it_was_proved_and_then_at_once() -> None:
    new = minted()
    made = ring(record(new.key, may_call=["x"]))
    assert made.known(new.key, NOW) is None
    assert let_in(made, new.key)
    who = made.known(new.key, NOW)
    assert who is not None and (who.tenant, who.principal) == ("default", "alice")
    assert who.rights is not None and who.rights.call.texts == ("x",)
    assert keyring.key_id_of(who) == new.key_id


def test_another_key_finds_no_record_and_costs_no_slow_hash() -> None:
    made = ring(record(minted().key))
    assert made.candidate(minted().key, NOW) is None


def test_a_key_whose_lookup_fits_by_chance_is_not_proved() -> None:
    mine, other = minted(), minted()
    kept = record(mine.key)
    kept.lookup = keyring.lookup(LOOKUP_KEY, other.key)
    assert let_in(ring(kept), other.key) == ""


def test_a_key_that_was_altered_in_one_character_is_nobodys() -> None:
    new = minted()
    made = ring(record(new.key))
    assert let_in(made, new.key)
    for at in (7, 20, len(new.key) - 1):
        altered = new.key[:at] + ("A" if new.key[at] != "A" else "B") + new.key[at + 1 :]
        assert made.known(altered, NOW) is None and let_in(made, altered) == ""


def test_an_expired_key_ends_at_its_time_to_the_second() -> None:
    new = minted()
    made = ring(record(new.key, expires_in_s=10.0))
    key_id = let_in(made, new.key)
    assert made.known(new.key, NOW + 9.9) is not None and made.look(NOW + 9.9) == (False, Change())
    assert made.known(new.key, NOW + 10) is None and made.candidate(new.key, NOW + 10) is None
    assert ended_by(made.look(NOW + 10)) == {key_id: End.KEY}
    assert made.look(NOW + 11) == (False, Change()) and made.principals() == {}


def test_a_revoked_key_and_one_that_is_gone_end_and_are_told_once() -> None:
    new, other = minted(), minted()
    kept, kept_other = record(new.key), record(other.key)
    made = ring(kept, kept_other)
    ids = {let_in(made, new.key), let_in(made, other.key)}
    revoked = StoredKey()
    revoked.CopyFrom(kept)
    revoked.revoked_at.CopyFrom(keyring.stamp(NOW))
    assert ended_by(made.take(Kept(LOOKUP_KEY, (revoked,)), NOW + 1)) == dict.fromkeys(ids, End.KEY)
    assert made.known(new.key, NOW + 1) is None and made.known(other.key, NOW + 1) is None
    assert made.take(Kept(LOOKUP_KEY, (revoked,)), NOW + 2) == (False, Change())
    assert made.usable == 0


def test_a_key_that_comes_back_is_held_under_another_id_and_the_ended_one_stays_ended() -> None:
    new = minted()
    made = ring(record(new.key))
    before = let_in(made, new.key)
    assert ended_by(made.take(Kept(LOOKUP_KEY, ()), NOW)) == {before: End.KEY}
    _, change = made.take(Kept(LOOKUP_KEY, (record(new.key),)), NOW)
    assert [who.principal for who in change.begun] == ["alice"] and not change.ended
    assert made.known(new.key, NOW) is None, "it must be proved again"
    after = let_in(made, new.key)
    assert after and after != before


def test_a_key_with_other_rights_ends_so_that_its_streams_are_opened_anew() -> None:
    new = minted()
    made = ring(record(new.key, may_call=["a"]))
    before = let_in(made, new.key)
    change = made.take(Kept(LOOKUP_KEY, (record(new.key, may_call=["b"]),)), NOW)
    assert ended_by(change) == {before: End.CHANGED}, "its holder may come again"
    assert let_in(made, new.key) != before
    who = made.known(new.key, NOW)
    assert who is not None and who.rights is not None and who.rights.call.texts == ("b",)


def test_its_holder_is_known_with_the_secret_that_it_signs_with() -> None:
    new = minted()
    kept = record(new.key, signs=True)
    kept.signing_secret = b"g" * 32
    made = ring(kept)
    let_in(made, new.key)
    who = made.known(new.key, NOW)
    assert who is not None and who.signing_key == b"g" * 32 and "ggg" not in repr(who)
    other = StoredKey()
    other.CopyFrom(kept)
    other.signing_secret = b"h" * 32
    assert ended_by(made.take(Kept(LOOKUP_KEY, (other,)), NOW)) == {who.key_id: End.CHANGED}


def test_a_key_that_shall_end_later_goes_on_until_then() -> None:
    new = minted()
    made = ring(record(new.key))
    key_id = let_in(made, new.key)
    assert made.take(Kept(LOOKUP_KEY, (record(new.key, expires_in_s=5.0),)), NOW) == (True, Change())
    assert made.known(new.key, NOW + 4) is not None
    assert ended_by(made.look(NOW + 5)) == {key_id: End.KEY}


def test_a_proof_that_took_until_the_key_was_gone_counts_for_nothing() -> None:
    new = minted()
    made = ring(record(new.key))
    found = made.candidate(new.key, NOW)
    assert found is not None
    made.take(Kept(LOOKUP_KEY, ()), NOW)
    assert made.verified(new.key, found, NOW) is None and made.known(new.key, NOW) is None


def test_a_proof_of_what_stands_there_no_more_opens_nothing_that_stands_there_now() -> None:
    new = minted()
    made = ring(record(new.key, expires_in_s=10.0))
    found = made.candidate(new.key, NOW)
    assert found is not None
    assert made.verified(new.key, found, NOW + 10) is None, "it has expired while it was proved"
    exchanged = record(keyring.key_text(new.key_id, b"o" * 32), admin=True)
    made.take(Kept(LOOKUP_KEY, (exchanged,)), NOW)
    assert made.verified(new.key, found, NOW) is None and made.known(new.key, NOW) is None


def test_a_key_that_is_another_tenants_now_ends() -> None:
    new = minted()
    made = ring(record(new.key))
    before = let_in(made, new.key)
    assert ended_by(made.take(Kept(LOOKUP_KEY, (record(new.key, tenant="acme"),)), NOW)) == {before: End.CHANGED}
    assert let_in(made, new.key) and set(made.principals()) == {("acme", "alice")}


def test_a_principal_has_the_rights_of_each_of_its_keys_that_hold() -> None:
    first, second, third = minted(), minted(), minted()
    made = ring(
        record(first.key, may_call=["a"]),
        record(second.key, may_call=["b"], admin=True),
        record(third.key, may_call=["c"], expires_in_s=1.0),
    )
    made.look(NOW + 2)
    rights = made.principals()[("default", "alice")]
    assert rights.admin
    assert {text for each in (rights, *rights.also) for text in each.call.texts} == {"a", "b"}


def test_two_keys_with_the_same_rights_count_once() -> None:
    made = ring(*(record(minted().key, may_call=["a"]) for _ in range(5)))
    assert made.principals()[("default", "alice")].also == ()


def test_the_same_principal_of_two_tenants_are_two() -> None:
    made = ring(record(minted().key, tenant="one"), record(minted().key, tenant="two"))
    assert set(made.principals()) == {("one", "alice"), ("two", "alice")}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"principal": ""}, "principal is ''"),
        ({"principal": "a b"}, "principal"),
        ({"principal": "a/b"}, "principal"),
        ({"principal": "a" * 101}, "principal"),
        ({"tenant": "\n"}, "tenant"),
        ({"envs": ["a b"]}, "env 'a b'"),
        ({"may_call": ["a b"]}, "may_call: 'a b'"),
        ({"may_register": [""]}, "may_register"),
        ({"may_publish": ["cap:x"]}, "may_publish: 'cap:x'"),
        ({"envs": [f"env-{n}" for n in range(2_000)]}, "at most 8192"),
        ({"may_subscribe": ["x"] * 101}, "may_subscribe has 101 patterns"),
    ],
)
def test_what_is_no_principal_no_env_or_no_pattern_is_named(fields: dict[str, object], part: str) -> None:
    given_fields = {"principal": "alice", "tenant": "default", **fields}
    assert part in keyring.info_fault(KeyInfo(**given_fields))  # type: ignore[arg-type]


def test_a_record_with_hashes_of_another_length_or_times_that_are_none_cannot_be_used() -> None:
    kept = record(minted().key)
    assert keyring.record_fault(kept) == ""
    kept.info.expires_at.seconds = 1 << 60
    assert "a time of key" in keyring.record_fault(kept)
    kept.hash = b""
    assert "hashes" in keyring.record_fault(kept)


def test_only_what_ended_a_month_ago_may_be_forgotten() -> None:
    old, fresh, lasting = (record(minted().key, expires_in_s=s) for s in (0.0, 86_400.0, 1e8))
    assert keyring.forgettable((old, fresh, lasting), NOW + keyring.ENDED_KEPT_S + 1) == [old.info.key_id]
