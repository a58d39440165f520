"""How a node is put together: what must be secret comes from the system's randomness."""

from __future__ import annotations

import random

from agentreach.v1.frame_pb2 import Hello
from reach.core import links
from reach.core.ports import ANYBODY
from reach.node.app import make_engine
from reach.node.config import Config


async def test_resume_tokens_cannot_be_told_from_what_the_node_shows() -> None:
    """156 trace_ids give the whole state of a Mersenne twister, and with it every token it ever drew."""
    engine = make_engine(Config(), unix=0.0)
    state = engine.state
    assert isinstance(state.secrets, random.SystemRandom) and state.rng is not state.secrets
    assert isinstance(state.rng, random.Random)
    tokens = set()
    drawn = state.rng.getstate()
    for _ in range(2):
        state.rng.setstate(drawn)
        with engine.step():
            peer = links.hello(state, ANYBODY, Hello())
        assert peer is not None
        tokens.add(peer.token)
        state.peers.clear()
    assert len(tokens) == 2 and all(len(token) == 16 for token in tokens)
