"""reach.cli: what strangers wrote, and what gRPC says, as tables show it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from agentreach.v1.admin_pb2 import Candidate, ExplainReply, GetTraceReply, SessionInfo
from reach.cli import trace
from reach.cli.explain import _choice
from reach.cli.nodes import brief
from reach.cli.output import short
from reach.cli.sessions import _row


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (
            "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7403: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            "connection refused",
        ),
        ("UNAVAILABLE: Socket closed", "socket closed"),
        ("DEADLINE_EXCEEDED: ", "deadline exceeded"),
        ("UNAVAILABLE: GOAWAY received", "GOAWAY received"),
        (
            "127.0.0.1:7072: UNAVAILABLE: the node does not speak TLS and this connection does: leave the TLS files "
            "out, or start it with TLS",
            "the node does not speak TLS and this connection does: leave the TLS files out, or start it with TLS",
        ),
        (
            "node-2.lan:7070: UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.2:70: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            "connection refused",
        ),
        ("not linked yet", "not linked yet"),
        ("a fault of this node: KeyError", "a fault of this node: KeyError"),
        ("its numbers do not fit ours", "its numbers do not fit ours"),
    ],
)
def test_why_a_node_is_not_linked_is_told_without_what_grpc_says_around_it(why: str, told: str) -> None:
    assert brief(why) == told


def test_the_reason_of_a_broken_link_never_widens_the_table() -> None:
    for why in ("x" * 500, "UNAVAILABLE: " + "x" * 500, "UNAVAILABLE: a\n" + "b" * 500):
        assert len(brief(why)) == 100 and brief(why).isprintable()


def test_what_does_not_print_is_escaped_and_long_text_loses_its_middle() -> None:
    assert short("größer 你好") == "größer 你好"
    assert short("a\u202eb\x1b[2J\n") == "a\\u202eb\\x1b[2J\\n"
    assert short("x" * 40) == "x" * 40
    cut = short("tenant-7/" + "x" * 500 + "/end")
    assert len(cut) == 40 and cut.startswith("tenant-7/") and cut.endswith("/end") and "…" in cut


def test_a_sessions_id_is_safe_and_short_in_the_table() -> None:
    session, *_ = _row(SessionInfo(session_id="\u202e" + "x" * 200, agent_id="memory/1"))
    assert str(session).startswith("\\u202exx") and len(str(session)) == 40


def test_an_explanation_says_whether_a_policy_chose_or_the_pin() -> None:
    owner = Candidate(agent_id="memory/1")
    assert _choice(ExplainReply(chosen="memory/1", candidates=[owner])) == "memory/1, to which the session is pinned"
    reply = ExplainReply(chosen="memory/1", candidates=[owner, Candidate(agent_id="memory/2")], policy="LEAST_ACTIVE")
    assert _choice(reply) == "memory/1 by LEAST_ACTIVE among 2"
    assert _choice(ExplainReply()) == "nobody"


@pytest.mark.parametrize(("silent", "told"), [([], "'abc'; traces are"), (["n2"], "'abc' (no answer from n2); traces")])
def test_a_trace_that_no_node_knows_is_said_to_be_known_to_none(
    monkeypatch: pytest.MonkeyPatch, silent: list[str], told: str
) -> None:
    async def ask(trace_id: str, url: str | None) -> GetTraceReply:
        return GetTraceReply(silent_nodes=silent)

    monkeypatch.setattr(trace, "_ask", ask)
    result = CliRunner().invoke(trace.trace, ["abc"])
    assert result.exit_code == 1 and f"no node knows a trace {told}" in result.stderr
