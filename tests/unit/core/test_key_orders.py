"""Who may have which keys made and ended, and what becomes of the keys."""

from __future__ import annotations

from typing import Any

import pytest

from agentreach.aio.tls import Tls
from agentreach.v1 import error_pb2 as codes
from agentreach.v1.peer_pb2 import StoredKey
from reach.core import key_orders, keyring
from reach.core.access import Rights
from reach.core.key_orders import Issued
from reach.core.keyring import Kept, KeyRefused
from reach.core.ports import Identity
from tests.support.api_keys import info, minted

NOW = 1_000_000.0
EMPTY = Kept(b"l" * 32, ())
OWNER = Identity("default", "ops", Rights(admin=True))
TENANTS = Identity("acme", "boss", Rights(admin=True))


def create(kept: Kept = EMPTY, by: Identity | None = None, **fields: Any) -> tuple[Kept, Issued]:
    return key_orders.create(kept, info("alice", now=NOW, **fields), minted(), NOW, by)


def only(kept: Kept) -> StoredKey:
    assert len(kept.records) == 1
    return kept.records[0]


def test_a_new_key_opens_what_was_stored_of_it() -> None:
    kept, issued = create(may_call=["x"])
    assert keyring.proves(issued.key, only(kept))
    assert only(kept).lookup == keyring.lookup(kept.lookup_key, issued.key)
    assert (issued.info.tenant, issued.info.principal) == ("default", "alice")
    assert keyring.unix_of(issued.info.created_at) == NOW
    assert issued.signing_text == "" and only(kept).signing_secret == b""


def test_nothing_that_holds_a_secret_shows_it_where_it_is_printed() -> None:
    new = minted()
    kept, issued = key_orders.create(EMPTY, info("alice", now=NOW, signs=True), new, NOW)
    printed = repr((new, kept, issued, Tls(key=b"of the node")))
    secrets = (new.key, issued.signing_text, repr(new.signing_secret), repr(kept.lookup_key), "of the node")
    assert new.key_id in printed and not [each for each in secrets if each in printed]


def test_a_key_that_signs_has_a_secret_of_its_own_for_that() -> None:
    kept, issued = create(signs=True)
    assert issued.signing_text == key_orders.signing_text(only(kept).signing_secret)
    assert len(only(kept).signing_secret) == 32 and issued.signing_text not in issued.key


@pytest.mark.parametrize("expires_in_s", [0.0, -1.0, 101 * 366 * 86_400.0])
def test_a_key_that_has_expired_already_or_lasts_for_ages_is_refused(expires_in_s: float) -> None:
    with pytest.raises(KeyRefused, match="expired already"):
        create(expires_in_s=expires_in_s)


def test_a_time_with_parts_beyond_their_bounds_is_stored_as_the_time_it_is() -> None:
    wanted = info("alice", now=NOW, expires_in_s=10.0)
    wanted.expires_at.nanos = 2_000_000_000
    kept, issued = key_orders.create(EMPTY, wanted, minted(), NOW)
    assert keyring.unix_of(issued.info.expires_at) == NOW + 12
    assert keyring.record_fault(only(kept)) == ""


def test_what_a_caller_says_about_id_times_and_state_counts_for_nothing() -> None:
    wanted = info("alice", key_id="00000000", revoked=True)
    wanted.created_at.CopyFrom(keyring.stamp(1.0))
    wanted.last_used_at.CopyFrom(keyring.stamp(1.0))
    wanted.MergeFromString(b"\xfa\x3f\x04more")  # a field that nobody knows: it would be kept for ever
    new = minted()
    kept, issued = key_orders.create(EMPTY, wanted, new, NOW)
    assert issued.info.key_id == new.key_id and not issued.info.revoked
    assert b"more" not in only(kept).SerializeToString()
    assert keyring.unix_of(issued.info.created_at) == NOW and not issued.info.HasField("last_used_at")
    assert not keyring.ended(only(kept), NOW)


def test_a_key_takes_no_other_ones_place_by_its_id() -> None:
    kept, issued = create()
    again = minted(key_id=issued.info.key_id)
    with pytest.raises(KeyRefused, match="the same id"):
        key_orders.create(kept, info("mallory"), again, NOW)
    with pytest.raises(KeyRefused, match="the same id"):
        key_orders.rotate(kept, issued.info.key_id, 0, again, NOW)


def test_an_admin_makes_keys_of_its_own_tenant_and_those_who_run_the_mesh_of_any() -> None:
    _, issued = create(by=TENANTS)
    assert issued.info.tenant == "acme"
    _, issued = create(by=OWNER, tenant="acme")
    assert issued.info.tenant == "acme"
    with pytest.raises(KeyRefused, match="for that tenant only") as refused:
        create(by=TENANTS, tenant="default")
    assert refused.value.code == codes.PERMISSION_DENIED


def test_only_those_who_run_the_mesh_let_others_read_metrics() -> None:
    assert create(by=OWNER, scrape=True)[1].info.scrape
    with pytest.raises(KeyRefused, match="metrics") as refused:
        create(by=TENANTS, scrape=True)
    assert refused.value.code == codes.PERMISSION_DENIED


@pytest.mark.parametrize(("envs", "may"), [(["staging"], True), (["production"], False), ([], False), (["*"], False)])
def test_an_admin_of_one_env_gives_rights_in_no_other(envs: list[str], may: bool) -> None:
    by = Identity("acme", "boss", Rights(envs=frozenset({"staging"}), admin=True))
    if may:
        create(by=by, envs=envs)
        return
    with pytest.raises(KeyRefused) as refused:
        create(by=by, envs=envs)
    assert refused.value.code == codes.PERMISSION_DENIED


@pytest.mark.parametrize(("envs", "may"), [(["staging"], True), (["staging", "production"], False), ([], False)])
def test_an_admin_of_one_env_takes_rights_in_no_other(envs: list[str], may: bool) -> None:
    """Found by attack: it could not make or rotate such a key, and could revoke it."""
    by = Identity("acme", "boss", Rights(envs=frozenset({"staging"}), admin=True))
    kept, issued = create(envs=envs, tenant="acme")
    if may:
        assert only(key_orders.revoke(kept, issued.info.key_id, NOW, by)).HasField("revoked_at")
        return
    with pytest.raises(KeyRefused) as refused:
        key_orders.revoke(kept, issued.info.key_id, NOW, by)
    assert refused.value.code == codes.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"envs": ["staging"]}, True),
        ({"envs": ["staging", "production"]}, False),
        ({"envs": []}, False),
        ({"envs": ["staging"], "scrape": True}, False),
    ],
)
def test_who_may_not_hand_out_a_key_may_not_have_it_by_rotation(fields: dict[str, Any], may: bool) -> None:
    by = Identity("acme", "boss", Rights(envs=frozenset({"staging"}), admin=True))
    kept, issued = create(tenant="acme", **fields)
    if may:
        assert key_orders.rotate(kept, issued.info.key_id, 0, minted(), NOW, by)[1].key
        return
    with pytest.raises(KeyRefused) as refused:
        key_orders.rotate(kept, issued.info.key_id, 0, minted(), NOW, by)
    assert refused.value.code == codes.PERMISSION_DENIED


def test_a_revoked_key_keeps_the_time_at_which_that_was_done_first() -> None:
    kept, issued = create()
    kept = key_orders.revoke(kept, issued.info.key_id, NOW + 1)
    kept = key_orders.revoke(kept, issued.info.key_id, NOW + 2)
    assert keyring.unix_of(only(kept).revoked_at) == NOW + 1


@pytest.mark.parametrize("key_id", ["12345678", "", "../etc", "x" * 1000])
def test_a_key_that_is_not_there_is_not_revoked_and_its_name_is_not_repeated_at_length(key_id: str) -> None:
    kept, _ = create()
    with pytest.raises(KeyRefused) as refused:
        key_orders.revoke(kept, key_id, NOW)
    assert refused.value.code == codes.NO_ROUTE and len(str(refused.value)) < 200


def test_another_tenants_key_is_as_unknown_as_one_that_never_was() -> None:
    kept, issued = create(tenant="default")
    others = issued.info.key_id
    texts = []
    for key_id in (others, "12345678"):
        with pytest.raises(KeyRefused) as refused:
            key_orders.revoke(kept, key_id, NOW, TENANTS)
        texts.append(str(refused.value).replace(key_id, "ID"))
        with pytest.raises(KeyRefused):
            key_orders.rotate(kept, key_id, 0, minted(), NOW, TENANTS)
    assert texts[0] == texts[1]
    assert key_orders.visible(kept.records, TENANTS) == [] and len(key_orders.visible(kept.records, OWNER)) == 1


@pytest.mark.parametrize(
    ("envs", "shown"),
    [
        (["staging"], ["staging"]),
        (["staging", "production"], ["staging"]),
        (["*"], ["*"]),
        ([], []),
        (["production"], None),
    ],
)
def test_an_admin_of_one_env_sees_the_keys_that_hold_there_and_no_other_env(
    envs: list[str], shown: list[str] | None
) -> None:
    by = Identity("acme", "boss", Rights(envs=frozenset({"staging", "test"}), admin=True))
    kept, issued = create(envs=envs, tenant="acme")
    seen = [list(key_orders.shown(keyring.shown(each), by).envs) for each in key_orders.visible(kept.records, by)]
    assert seen == ([] if shown is None else [shown])
    assert [list(key_orders.shown(keyring.shown(only(kept)), each).envs) for each in (None, OWNER)] == [envs] * 2
    if shown is None:  # as unknown as one that never was
        with pytest.raises(KeyRefused, match="there is no key") as refused:
            key_orders.revoke(kept, issued.info.key_id, NOW, by)
        assert refused.value.code == codes.NO_ROUTE


def test_a_rotated_key_goes_on_for_the_overlap_and_the_new_one_has_its_rights_and_its_span() -> None:
    kept, old = create(may_call=["x"], admin=True, expires_in_s=1000.0)
    kept, new = key_orders.rotate(kept, old.info.key_id, 60, minted(), NOW + 500)
    records = {record.info.key_id: record for record in kept.records}
    assert keyring.ended_at(records[old.info.key_id]) == NOW + 560
    assert keyring.ended_at(records[new.info.key_id]) == NOW + 1500
    assert keyring.rights_of(new.info) == keyring.rights_of(old.info) and new.key != old.key


def test_an_overlap_never_makes_the_old_key_last_longer() -> None:
    kept, old = create(expires_in_s=30.0)
    kept, _ = key_orders.rotate(kept, old.info.key_id, 3600, minted(), NOW)
    assert keyring.ended_at(kept.records[0]) == NOW + 30


def test_without_overlap_the_old_key_ends_at_once() -> None:
    kept, old = create()
    kept, new = key_orders.rotate(kept, old.info.key_id, 0, minted(), NOW)
    assert [keyring.ended(record, NOW) for record in kept.records] == [True, False]
    assert new.info.key_id == kept.records[1].info.key_id


def test_a_key_that_has_ended_is_not_rotated() -> None:
    kept, old = create()
    kept = key_orders.revoke(kept, old.info.key_id, NOW)
    with pytest.raises(KeyRefused, match="has ended"):
        key_orders.rotate(kept, old.info.key_id, 0, minted(), NOW)


@pytest.mark.parametrize("overlap_s", [-1.0, float("nan"), float("inf"), 91 * 86_400.0])
def test_an_overlap_beyond_its_bounds_is_refused(overlap_s: float) -> None:
    kept, old = create()
    with pytest.raises(KeyRefused, match="overlap"):
        key_orders.rotate(kept, old.info.key_id, overlap_s, minted(), NOW)


def test_an_admin_does_not_fill_the_room_of_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_orders, "TENANT_KEYS_MAX", 2)
    kept, _ = create(by=OWNER, tenant="other")
    for _ in range(2):
        kept, last = create(kept, by=TENANTS)
    with pytest.raises(KeyRefused, match="the limit") as refused:
        create(kept, by=TENANTS)
    assert refused.value.code == codes.OVERLOADED
    with pytest.raises(KeyRefused, match="the limit"):
        key_orders.rotate(kept, last.info.key_id, 0, minted(), NOW, TENANTS)
    assert len(create(kept, by=OWNER, tenant="acme")[0].records) == 4


def test_records_of_long_ended_keys_go_when_others_change() -> None:
    kept, _ = create(expires_in_s=10.0)
    later = NOW + keyring.ENDED_KEPT_S + 60
    kept, new = key_orders.create(kept, info("bob"), minted(), later)
    assert only(kept).info.key_id == new.info.key_id
