"""The key that signs lineages, as nodes name it."""

from __future__ import annotations

import random

from agentreach.v1.peer_pb2 import Lineage
from reach.core.lineage import Forged
from reach.node.lineage_key import KEY_BYTES, named_by_itself


def test_a_lineage_of_a_key_that_was_lost_is_unknown_and_not_forged() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(1_000):
        before, after = rng.randbytes(KEY_BYTES), rng.randbytes(KEY_BYTES)
        signed = named_by_itself(before).sign(Lineage(message_id="m1"))
        assert named_by_itself(before).verify(signed) is not None
        try:
            assert named_by_itself(after).verify(signed) is None
        except Forged:
            refused += 1
    assert refused < 20  # one in 256
