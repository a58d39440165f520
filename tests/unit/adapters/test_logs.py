"""What a log line looks like, and what never stands in one."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from agentreach.wire.redaction import Redaction
from reach.adapters import logs


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_trace_comes_first_and_everything_is_one_json_line(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    structlog.get_logger("reach").info("agent lost", error="AGENT_LOST", agent_id="a/1", links=3, trace_id="t1")
    (line,) = lines(stream)
    assert next(iter(line)) == "trace_id"
    assert list(line).index("agent_id") < list(line).index("links")
    assert line["level"] == "info" and line["event"] == "agent lost" and line["timestamp"]


def test_agent_target_and_error_class_come_before_the_other_facts_by_the_names_the_node_uses(
    stream: io.StringIO,
) -> None:
    logs.configure("info", "json", stream)
    structlog.get_logger("reach").info(
        "request failed", why="it was cut", code="AGENT_LOST", target="type echo", agent="echo/1", trace_id="t1"
    )
    (line,) = lines(stream)
    assert list(line)[:7] == ["trace_id", "timestamp", "level", "event", "agent", "target", "code"]


def test_lines_of_the_standard_library_go_the_same_way_with_their_facts(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    logging.getLogger("somewhere").warning("odd: %s", "x", extra={"trace_id": "t2"})
    (line,) = lines(stream)
    assert (line["trace_id"], line["event"], line["logger"]) == ("t2", "odd: x", "somewhere")


def test_what_is_below_the_level_is_not_written(stream: io.StringIO) -> None:
    logs.configure("warning", "json", stream)
    structlog.get_logger().info("chatter")
    logging.getLogger("x").info("chatter")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("name", ["payload", "body", "data", "lineage", "resume_token", "password", "api_key"])
def test_payloads_and_secrets_are_withheld_whoever_logs_them(stream: io.StringIO, log_format: str, name: str) -> None:
    logs.configure("debug", log_format, stream)
    structlog.get_logger().error("oops", **{name: "hunter2"})
    logging.getLogger("x").error("oops", extra={name: "hunter2"})
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count("(withheld)") == 2


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_cause_is_written_with_its_traceback(stream: io.StringIO, log_format: str) -> None:
    logs.configure("info", log_format, stream)
    try:
        raise ValueError("the cause")
    except ValueError:
        logging.getLogger("x").exception("it broke")
        structlog.get_logger().exception("it broke")
    assert stream.getvalue().count("ValueError: the cause") == 2
    if log_format == "json":
        assert len(lines(stream)) == 2


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_values_of_what_failed(stream: io.StringIO, log_format: str) -> None:
    """structlog's own for a terminal prints every local variable: a payload, a key."""
    logs.configure("info", log_format, stream)
    for logger in (logging.getLogger("x"), structlog.get_logger()):
        key = f"hunter{len('12')}"
        try:
            raise ValueError(len(key))
        except ValueError:
            logger.exception("it broke")
    assert stream.getvalue().count("ValueError: 7") == 2
    assert "hunter2" not in stream.getvalue()


def test_an_exit_is_not_logged_as_a_fault(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    logging.getLogger("x").error("unexpected", exc_info=SystemExit(0))
    logging.getLogger("x").error("unexpected", exc_info=KeyboardInterrupt())
    assert stream.getvalue() == ""


def test_a_line_break_in_a_value_does_not_make_a_second_line(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    structlog.get_logger().info("a\nb", agent_id="x\ny")
    assert len(stream.getvalue().splitlines()) == 1


def test_auto_is_json_where_there_is_no_terminal(stream: io.StringIO) -> None:
    logs.configure("info", "auto", stream)
    structlog.get_logger().info("hello")
    assert lines(stream)[0]["event"] == "hello"


def test_configuring_again_replaces_and_does_not_double(stream: io.StringIO) -> None:
    logs.configure("info", "json", io.StringIO())
    logs.configure("info", "json", stream)
    structlog.get_logger().info("once")
    assert len(lines(stream)) == 1


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_secrets_are_taken_out_of_every_value_whoever_logs_it(stream: io.StringIO, log_format: str) -> None:
    logs.configure("debug", log_format, stream)
    secret = "ghp_" + "S3cret" * 6
    structlog.get_logger().error(
        f"event with {secret}", why=f"password={secret}", nested={"a": [secret], "token": "t0p"}
    )
    logging.getLogger("x").error("with %s", secret, extra={"db_password": "t0p", "odd": ValueError(secret)})
    try:
        raise ValueError(f"postgres://app:{secret}@db")
    except ValueError as error:
        structlog.get_logger().exception("it broke", cause=error)
        logging.getLogger("x").exception("it broke")
    said = stream.getvalue()
    assert "S3cret" not in said and "t0p" not in said
    assert said.count("postgres://(withheld)@db") >= 2 and "Traceback" in said


def test_names_that_are_withheld_can_be_chosen(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream, redaction=Redaction(["iban"]))
    structlog.get_logger().info("paid", iban="DE12", count=3, done=True, nothing=None, token="shown")
    (line,) = lines(stream)
    assert (line["iban"], line["count"], line["done"], line["nothing"]) == ("(withheld)", 3, True, None)
    assert line["token"] == "shown"
