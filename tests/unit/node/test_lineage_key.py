"""The keys that sign lineages: how nodes name them, and how one follows another without a call that breaks."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator

import pytest

from agentreach.v1.peer_pb2 import Lineage, LineageSecrets
from reach.adapters.memory_store import MemoryStore
from reach.core.lineage import Forged, LineageKeys
from reach.core.rules import Rules
from reach.core.state import State
from reach.core.store import StoreUnavailable
from reach.node.election import Election
from reach.node.lineage_key import (
    KEY,
    KEY_BYTES,
    ROTATE_S,
    SHOWN_S,
    LineageKeeper,
    keys_of,
    lineage_secrets,
    next_step,
    secrets_in,
)

NOW = 1_800_000_000.0
ONE, TWO, THREE = b"1" * KEY_BYTES, b"2" * KEY_BYTES, b"3" * KEY_BYTES
SAID = Lineage(message_id="m1")


def test_a_lineage_of_a_key_that_was_lost_is_unknown_and_not_forged() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(1_000):
        before, after = (keys_of(LineageSecrets(signing=rng.randbytes(KEY_BYTES))) for _ in range(2))
        signed = before.sign(SAID)
        assert before.verify(signed) is not None
        try:
            assert after.verify(signed) is None
        except Forged:
            refused += 1
    assert refused < 20  # one in 256


class TestSteps:
    def test_a_key_is_shown_before_anybody_signs_with_it(self) -> None:
        first = LineageSecrets(signing=ONE, since_unix_s=NOW)
        assert next_step(first, NOW + ROTATE_S - 1, TWO) is None
        shown = next_step(first, NOW + ROTATE_S, TWO)
        assert shown == LineageSecrets(signing=ONE, other=TWO, coming=True, since_unix_s=NOW + ROTATE_S)
        assert next_step(shown, shown.since_unix_s + SHOWN_S - 1, THREE) is None

    def test_the_old_key_is_believed_for_a_day_after_the_new_one_signs(self) -> None:
        shown = LineageSecrets(signing=ONE, other=TWO, coming=True, since_unix_s=NOW)
        used = next_step(shown, NOW + SHOWN_S, THREE)
        assert used == LineageSecrets(signing=TWO, other=ONE, since_unix_s=NOW + SHOWN_S)
        assert next_step(used, used.since_unix_s + ROTATE_S - 1, THREE) is None
        following = next_step(used, used.since_unix_s + ROTATE_S, THREE)
        assert following is not None and (following.signing, following.other) == (TWO, THREE)

    def test_a_node_one_step_behind_and_a_node_ahead_believe_each_other(self) -> None:
        steps = [
            LineageSecrets(signing=ONE, other=THREE),
            LineageSecrets(signing=ONE, other=TWO, coming=True),
            LineageSecrets(signing=TWO, other=ONE),
        ]
        for behind, ahead in itertools.pairwise(steps):
            for signs, reads in ((behind, ahead), (ahead, behind)):
                assert keys_of(reads).verify(keys_of(signs).sign(SAID)) == SAID

    def test_a_candidate_of_the_same_name_is_not_taken(self) -> None:
        first = LineageSecrets(signing=ONE, since_unix_s=NOW)
        assert next_step(first, NOW + ROTATE_S, ONE) is None

    def test_a_clock_that_went_back_changes_nothing(self) -> None:
        assert next_step(LineageSecrets(signing=ONE, since_unix_s=NOW), NOW - 1e6, TWO) is None


class TestWhatStands:
    def test_a_bare_key_of_an_earlier_version_is_read(self) -> None:
        assert secrets_in(ONE) == LineageSecrets(signing=ONE)

    @pytest.mark.parametrize("value", [b"", b"x", b"\xff" * 40, LineageSecrets(signing=b"short").SerializeToString()])
    def test_anything_else_is_refused(self, value: bytes) -> None:
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            secrets_in(value)


async def test_the_leader_replaces_the_key_and_every_node_follows() -> None:
    store = MemoryStore()
    first = await lineage_secrets(store)
    assert await lineage_secrets(store) == first  # the second node takes what the first one made
    election = Election(store, "node-1", ttl_s=5)
    await election.start()
    states = [_state(keys_of(first)) for _ in range(2)]
    keepers = [
        LineageKeeper(store, election, lambda: _step(states[0])),
        LineageKeeper(store, Election(store, "node-2", ttl_s=5), lambda: _step(states[1])),
    ]
    unix = first.since_unix_s + ROTATE_S
    seen = []
    try:
        for later_s in (0.0, SHOWN_S, SHOWN_S + 1):
            for keeper in keepers:
                await keeper.look(unix + later_s)
            item = await store.get(KEY)
            assert item is not None
            seen.append(secrets_in(item.value))
            lineage = states[0].lineage.sign(SAID)
            assert states[1].lineage.verify(lineage) == SAID
        assert [(each.signing == first.signing, each.coming) for each in seen] == [
            (True, True),
            (False, False),
            (False, False),
        ]
        await keepers[0].look(unix + SHOWN_S + 2)
        assert states[0].lineage.verify(keys_of(first).sign(SAID)) == SAID  # calls under way go on
        assert states[0].lineage.sign(SAID) != keys_of(first).sign(SAID)
    finally:
        await election.stop()
        await store.close()


def _state(keys: LineageKeys) -> State:
    return State(Rules(), rng=random.Random(1), nonce=b"12345678", lineage=keys, now=0.0, unix=NOW)


@contextlib.contextmanager
def _step(state: State) -> Iterator[State]:
    yield state
