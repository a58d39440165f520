"""Plays: a TASK whose attempts are used up is a dead letter; what fails otherwise is none."""

from __future__ import annotations

from agentreach.v1 import admin_pb2 as admin
from agentreach.v1 import envelope_pb2 as pb
from agentreach.v1 import error_pb2 as codes
from agentreach.wire.errors import failure
from reach.core import redriving
from reach.core.ports import ANYBODY
from reach.core.redriving import Redriven
from tests.support.core import CoreMesh


def listed(core: CoreMesh) -> admin.ListDeadLettersReply:
    return redriving.listed(core.state, ANYBODY, admin.ListDeadLettersRequest())


def redriven(core: CoreMesh, message_id: str) -> Redriven:
    with core.step() as state:
        made = redriving.redrive(state, ANYBODY, admin.RedriveDeadLetterRequest(message_id=message_id))
    core.pump()
    assert isinstance(made, Redriven), made
    return made


def test_a_task_whose_attempts_are_used_up_is_kept_and_runs_when_it_is_redriven() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    message = caller.request("work", profile=pb.TASK, timeout_ms=0, idempotent=True)
    for _ in range(400):
        if caller.replies_to(message):
            break
        for running in list(agent.running.values()):
            agent.answer(running, error=failure(codes.AGENT_ERROR, "down", retryable=True, may_have_executed=True))
        core.advance(0.5)
    assert caller.error_of(message).code == codes.AGENT_ERROR
    (letter,) = listed(core).dead_letters
    assert (letter.message_id, letter.reason) == (message, "AGENT_ERROR")
    assert letter.error.attempts == caller.error_of(message).attempts >= 4 and letter.error.may_have_executed
    assert letter.envelope.profile == pb.TASK and letter.envelope.timeout_ms == 0, "it has its profile's time again"
    made = redriven(core, message)
    agent.answer(made.message_id, "done")
    late = core.process("late")
    late.request("work", profile=pb.TASK, timeout_ms=0, message_id=made.message_id, fresh=False)
    assert late.text_of(made.message_id) == "done", "its principal can fetch the result"
    core.assert_settled()


def test_other_requests_that_fail_are_not_kept() -> None:
    core = CoreMesh()
    agent, caller = core.agent(), core.caller()
    agent.refuse(caller.request(profile=pb.TASK))
    caller.request(agent_type="nobody")
    caller.request(profile=pb.TASK, timeout_ms=200)
    core.advance(10)
    assert not listed(core).dead_letters
