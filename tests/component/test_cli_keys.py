"""`reach keys` and `reach authz` on a file of keys, as a person and as a script use them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from reach.cli.ending import Ended
from reach.cli.root import reach
from tests.support.api_keys import KeysFile, key_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code, its standard output, and that with its standard error."""

    exit_code: int
    stdout: str
    output: str


def run(*arguments: str) -> Done:
    """As the rim of the command line ends it, without a process for it."""
    done = CliRunner().invoke(reach, arguments, standalone_mode=False)
    error = done.exception
    if isinstance(error, click.ClickException):
        code = int(error.code) if isinstance(error, Ended) else error.exit_code
        return Done(code, done.stdout, f"{done.output}reach: {error.format_message()}\n")
    assert error is None or isinstance(error, SystemExit), error
    return Done(done.exit_code, done.stdout, done.output)


def create(path: Path, *arguments: str, principal: str = "alice") -> str:
    """The new key: all that is printed to standard output."""
    done = run("keys", "create", "--keys-file", str(path), "--principal", principal, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.removesuffix("\n")


def listed(path: Path) -> list[dict[str, Any]]:
    done = run("keys", "list", "--keys-file", str(path), "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_key_alone_is_printed_to_standard_output_and_shown_nowhere_again(path: Path) -> None:
    key = create(path, "--admin", "--signs")
    assert key.startswith("reach_") and len(key) == 58 and "\n" not in key
    for command in (["keys", "list"], ["keys", "list", "--json"]):
        done = run(*command, "--keys-file", str(path))
        assert key_id(key) in done.output and key not in done.output
        assert "reach_sign" not in done.output, "nor what it signs with"


def test_a_key_allows_what_its_options_say_each_of_them_as_often_as_it_is_given(path: Path) -> None:
    create(
        path,
        *("--tenant", "acme", "--env", "staging", "--env", "qa", "--may-register", "extractor", "--may-register", "b*"),
        *("--may-call", "cap:NER", "--may-publish", "orders/*", "--may-subscribe", "news", "--may-scrape", "--signs"),
        *("--expires", "12h"),
    )
    (info,) = listed(path)
    assert info["tenant"] == "acme" and info["envs"] == ["staging", "qa"]
    assert (info["mayRegister"], info["mayCall"]) == (["extractor", "b*"], ["cap:NER"])
    assert (info["mayPublish"], info["maySubscribe"]) == (["orders/*"], ["news"])
    assert info["scrape"] and info["signs"] and not info["admin"]
    (record,) = KeysFile(path).file.read().records
    assert abs(record.info.expires_at.seconds - time.time() - 12 * 3600) < 60


def test_json_gives_everything_there_is_to_know_once(path: Path) -> None:
    told = json.loads(create(path, "--signs", "--json"))
    assert told["secret"].startswith(f"reach_{told['key']['keyId']}_")
    assert told["signingSecret"].startswith("reach_sign_")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--principal", ""], "principal is ''"),
        (["--principal", "  "], "principal"),
        (["--principal", "a", "--tenant", "b c"], "tenant is 'b c'"),
        (["--principal", "a", "--may-call", "x y"], "'x y' is no pattern"),
        (["--principal", "a", "--may-call", ""], "a pattern has 1 to"),
        (["--principal", "a", "--may-publish", "cap:x"], "'cap:x' is no pattern"),
        (["--principal", "a", "--env", ""], "env ''"),
        (["--principal", "a", "--expires", "0d"], "above 0"),
        (["--principal", "a", "--tenant", "", "--admin"], "it is empty"),
        (["--principal", "a", "--tenant", " "], "it is empty"),
        (["--principal", "a", "--expires", "0"], "above 0"),
        (["--principal", "a", "--expires", "-1d"], "above 0"),
        (["--principal", "a", "--expires", "soon"], "above 0"),
        (["--principal", "a", "--expires", "90"], "above 0"),
        (["--principal", "a", "--expires", "999999d"], "100 years"),
        ([], "--principal"),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2_and_leaves_no_file(
    path: Path, arguments: list[str], part: str
) -> None:
    done = run("keys", "create", "--keys-file", str(path), *arguments)
    assert (done.exit_code, part in done.output, path.exists()) == (2, True, False), done.output


@pytest.mark.parametrize(
    "where",
    [
        ["--keys-file", ""],
        ["--keys-file", "  "],
        ["--registry", ""],
        ["--registry", "memory"],
        ["--keys-file", "a.json", "--registry", "etcd://127.0.0.1:1"],
    ],
)
def test_a_place_that_is_none_is_not_taken_for_the_node(where: list[str]) -> None:
    done = run("keys", "list", *where)
    assert done.exit_code == 2, done.output


def test_a_revoked_key_and_an_expired_one_are_told_apart(path: Path) -> None:
    keys = KeysFile(path)
    create(path)
    revoked, _ = create(path), keys.add("bob", made_ago_s=60, expires_in_s=30)
    done = run("keys", "revoke", "--keys-file", str(path), key_id(revoked))
    assert done.exit_code == 0 and done.stdout == ""
    told = run("keys", "list", "--keys-file", str(path)).output
    states = [line.split()[-1] for line in told.splitlines()]
    assert states == ["STATE", "expired", "valid", "revoked"], "the eldest first"


def test_a_whole_key_names_itself_and_is_not_repeated(path: Path) -> None:
    key = create(path)
    done = run("keys", "revoke", "--keys-file", str(path), key)
    assert done.exit_code == 0 and key not in done.output
    assert listed(path)[0]["revoked"]


@pytest.mark.parametrize("text", ["12345678", "", "nonsense", "reach_12345678_short"])
@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_an_unknown_id_is_refused_with_exit_code_2(path: Path, command: str, text: str) -> None:
    create(path)
    done = run("keys", command, "--keys-file", str(path), text)
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert len(listed(path)) == 1


def test_a_rotated_key_is_printed_like_a_new_one_and_the_old_one_ends_after_the_overlap(path: Path) -> None:
    old = create(path, "--may-call", "x")
    done = run("keys", "rotate", "--keys-file", str(path), "--overlap", "30m", key_id(old))
    assert done.exit_code == 0, done.output
    new = done.stdout.strip()
    assert new.startswith("reach_") and new != old
    first, second = KeysFile(path).file.read().records
    assert abs(first.info.expires_at.seconds - time.time() - 1800) < 60 and not second.info.HasField("expires_at")
    done = run("keys", "rotate", "--keys-file", str(path), "--overlap", "0", key_id(new))
    assert done.exit_code == 0 and KeysFile(path).file.read().records[1].HasField("revoked_at")


@pytest.mark.parametrize("place", ["missing.json", "nowhere/keys.json"])
def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, place: str) -> None:
    done = run("keys", "list", "--keys-file", str(tmp_path / place))
    assert done.exit_code == 2 and done.output.count("\n") == 1 and "cannot be read" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--action", "call", "--target", "extractor"], 0, "allowed, by rule extractor"),
        (["--action", "call", "--target", "extractor/1"], 0, "allowed"),
        (["--action", "call", "--target", "planner"], 1, "denied, by rule default"),
        (["--action", "call", "--target", "cap:ner"], 0, "allowed"),
        (["--action", "register", "--target", "extractor"], 1, "denied"),
        (["--action", "publish", "--target", "orders/new"], 0, "by rule orders/*"),
        (["--action", "admin"], 1, "is no admin"),
        (["--action", "call", "--target", "extractor", "--env", "qa"], 1, "by rule envs"),
        (["--action", "call", "--target", "extractor", "--on-behalf-of", "nobody"], 1, "principal nobody"),
        (["--action", "call", "--target", "extractor", "--tenant", "acme"], 1, "by rule unknown"),
        (["--action", "publish"], 2, "needs a topic"),
        (["--action", "fly"], 2, "fly"),
    ],
)
def test_explain_says_what_decides_by_its_exit_code_too(path: Path, arguments: list[str], code: int, part: str) -> None:
    rights = ("--may-call", "extractor", "--may-call", "cap:ner", "--may-publish", "orders/*", "--env", "production")
    create(path, *rights, principal="shop")
    done = run("authz", "explain", "--keys-file", str(path), "--principal", "shop", *arguments)
    assert (done.exit_code, part in done.output) == (code, True), done.output


def test_explain_by_one_key_leaves_out_what_another_of_the_principal_allows(path: Path) -> None:
    narrow, _ = create(path, "--may-call", "a"), create(path, "--may-call", "b")
    ask = ("authz", "explain", "--keys-file", str(path), "--action", "call", "--target", "b")
    assert run(*ask, "--principal", "alice").exit_code == 0
    assert run(*ask, "--key-id", key_id(narrow)).exit_code == 1
    assert run(*ask, "--key-id", "12345678").exit_code == 2


def test_check_config_finds_keys_that_no_node_would_start_with(path: Path) -> None:
    check = ("check-config", "--auth", "keys", "--keys-file", str(path))
    assert "cannot be read" in run(*check).output and run(*check).exit_code == 2
    key = create(path)
    assert run(*check).exit_code == 0
    KeysFile(path).revoke(key)
    assert "all 1 have ended" in run(*check).output and run(*check).exit_code == 2


@pytest.mark.parametrize("command", [("call", "--type", "x", "1"), ("test-agent", "--type", "x")])
def test_a_signing_secret_that_is_none_is_a_mistake_of_usage_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("REACH_SIGNING_SECRET", "changeme")
    done = run(*command, "--url", "127.0.0.1:1")
    assert (done.exit_code, "signing secret" in done.output) == (2, True), done.output
    assert "changeme" not in done.output
