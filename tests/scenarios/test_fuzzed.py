"""The core against anything that a peer can send: nothing leaves it but LinkError, a neighbour is always served, and
when the attackers are gone nothing of theirs is left. First what this has found, then the searches that found it.
"""

from __future__ import annotations

import contextlib
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from agentreach.v1.frame_pb2 import Attach, Frame, Goodbye, Hello, Signal, Subscribe
from agentreach.wire.link import LinkError
from reach.core import links, mesh
from reach.core.ports import ANYBODY
from tests.support.core import CoreMesh, record
from tools.fuzzing import seeds
from tools.fuzzing.core_world import ATTACKERS, CoreWorld, Step, packed, unpacked
from tools.fuzzing.drawing import Drawing

SOURCE = st.randoms(use_true_random=False)
WHO = st.integers(0, ATTACKERS - 1)
GOODBYE = Signal(goodbye=Goodbye(code=Goodbye.NORMAL))


@pytest.mark.parametrize(
    "after", [Signal(subscribe=Subscribe(topics=["news"])), Signal(attach=Attach(record=record("late/1")))]
)
def test_what_follows_a_goodbye_in_its_frame_counts_for_nothing(after: Signal) -> None:
    core = CoreMesh()
    process = core.process()
    assert process.peer is not None
    number = process.peer.link.last_accepted + 1
    process.connected = False  # the frame goes past its link: it would not put both into one
    with core.step() as state:
        mesh.frame(state, process.peer, Frame(seq=number, signals=[GOODBYE, after]), 0)
    core.advance(30.0)
    assert core.state.topics.count == 0 and not list(core.state.directory)


@pytest.mark.parametrize("number", [1, 99], ids=["seen before", "a gap"])
def test_what_a_frame_acknowledged_that_was_not_acted_on_is_not_kept_for_ever(number: int) -> None:
    core = CoreMesh()
    core.agent("echo/1").handler = lambda process, envelope: process.answer(envelope, pump=False)
    with core.step() as state:
        peer = links.hello(state, ANYBODY, Hello(protocol_version=1))
        assert peer is not None
    with core.step() as state:
        mesh.frame(state, peer, Frame(seq=1, envelopes=[core.envelope("hi", agent_id="echo/1")]), 0)
    core.pump()
    while peer.link.next_frame(core.state.now) is not None:
        pass  # the reply is under way
    with contextlib.suppress(LinkError), core.step() as state:
        mesh.frame(state, peer, Frame(seq=number, ack=peer.link._next_seq - 1), 0)
    with core.step() as state:
        links.farewell(state, peer, Goodbye.PROTOCOL_ERROR, "it broke the numbering")
    core.assert_settled()


class Attack(RuleBasedStateMachine):
    """Two attackers do anything, at any time, beside a pair that must be served."""

    @initialize(seed=st.integers(0, 3))
    def begin(self, seed: int) -> None:
        words = seeds.words()
        self.world = CoreWorld(words, seed)
        self.drawing = Drawing(Random(seed), words)

    def do(self, step: Step, who: int, data: bytes = b"\xff") -> None:
        self.world.step(step * ATTACKERS + who, data)

    @rule(rng=SOURCE, who=WHO)
    def frame_that_gets_past_the_link(self, rng: Random, who: int) -> None:
        self.drawing.rng = rng
        self.do(Step.NUMBERED, who, self.drawing.frame().SerializeToString())

    @rule(rng=SOURCE, who=WHO)
    def frame_with_any_number(self, rng: Random, who: int) -> None:
        self.drawing.rng = rng
        self.do(Step.RAW, who, self.drawing.frame().SerializeToString())

    @rule(data=st.binary(max_size=200), who=WHO)
    def bytes_that_are_no_frame(self, data: bytes, who: int) -> None:
        self.do(Step.RAW, who, data)

    @rule(rng=SOURCE, who=WHO)
    def hello(self, rng: Random, who: int) -> None:
        self.drawing.rng = rng
        self.do(Step.HELLO, who, self.drawing.hello())

    @rule(rng=SOURCE, who=WHO, kind=st.sampled_from((Step.INVOKE, Step.PUBLISH)))
    def call(self, rng: Random, who: int, kind: Step) -> None:
        self.drawing.rng = rng
        self.do(kind, who, self.drawing.envelope().SerializeToString())

    @rule(who=WHO, kind=st.sampled_from((Step.CUT, Step.HANG_UP, Step.READ, Step.READ)), data=st.binary(max_size=1))
    def something_else(self, who: int, kind: Step, data: bytes) -> None:
        self.do(kind, who, data)

    @rule(duration=st.binary(min_size=1, max_size=1))
    def time_passes(self, duration: bytes) -> None:
        self.do(Step.WAIT, 0, duration)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


Attack.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAttack = Attack.TestCase


@pytest.mark.parametrize("seed", range(16))
def test_after_any_attack_the_neighbour_was_served_and_nothing_is_left(seed: int) -> None:
    words = seeds.words()
    world, drawing = CoreWorld(words, seed), Drawing(Random(seed), words)
    world.play(drawing.step() for _ in range(400))
    world.settle()
    assert world.asked > 2


def test_a_script_of_steps_survives_being_bytes() -> None:
    drawing = Drawing(Random(1), seeds.words())
    steps = [drawing.step() for _ in range(50)]
    assert list(unpacked(packed(steps))) == [step for step in steps if len(step[1]) < 1 << 16]
