"""What is recognised as a secret, that nothing of it is left, and that looking for it takes no time to speak of."""

from __future__ import annotations

import json
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentreach.wire.redaction import NAMES, STANDARD, TEXT_CHARS, WITHHELD, Redaction, names_of

B64 = string.ascii_letters + string.digits + "-_"
ALNUM = string.ascii_letters + string.digits


def body(alphabet: str, least: int, most: int = 60) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=least, max_size=most)


SHAPES = {
    "our own key": (st.from_regex(r"reach_([0-9a-f]{8}|sign)_", fullmatch=True), body(B64, 8)),
    "bearer": (st.sampled_from(["Bearer ", "bearer ", "BEARER  ", "Basic "]), body(ALNUM + "._~+/=-", 8)),
    "aws": (st.sampled_from(["AKIA", "ASIA"]), body(string.ascii_uppercase + string.digits, 16, 16)),
    "github": (st.sampled_from(["ghp_", "gho_", "ghs_"]), body(ALNUM, 36, 36)),
    "github's fine-grained": (st.just("github_pat_"), body(ALNUM + "_", 22)),
    "slack": (st.sampled_from(["xoxb-", "xoxp-", "xoxa-"]), body(ALNUM + "-", 10)),
    "openai and anthropic": (st.sampled_from(["sk-", "sk-proj-", "sk-ant-api03-"]), body(B64, 20)),
    "stripe": (st.sampled_from(["sk_live_", "sk_test_"]), body(ALNUM, 20)),
    "google": (st.just("AIza"), body(B64, 35, 35)),
}


@pytest.mark.parametrize("kind", SHAPES)
@given(data=st.data())
def test_nothing_of_a_secrets_body_is_left_wherever_it_stands(kind: str, data: st.DataObject) -> None:
    starts, bodies = SHAPES[kind]
    start, secret = data.draw(starts), data.draw(bodies)
    before = data.draw(st.sampled_from(["", "it said: ", "(", "\n", "key=", '{"x": "']))
    after = data.draw(st.sampled_from(["", " and went", ")", "\n", '"}', "…"]))
    shown = STANDARD.text(f"{before}{start}{secret}{after}")
    assert secret not in shown.replace(start, "", 1) and WITHHELD in shown


@pytest.mark.parametrize("secret", ["NODE", "node-7f5c", "Bearer", "basic.x"])
def test_a_value_that_is_or_begins_with_the_name_of_a_scheme_is_withheld_too(secret: str) -> None:
    assert secret not in STANDARD.text(f"password={secret}")


@given(st.text(ALNUM + "!$%^*+-_.~", min_size=4, max_size=40), st.sampled_from(NAMES), st.data())
def test_what_follows_a_telling_name_is_withheld_however_it_is_written(
    secret: str, name: str, data: st.DataObject
) -> None:
    written = data.draw(
        st.sampled_from(
            [
                f"{name}={secret}",
                f"{name}: {secret}",
                f"my_{name.upper()} = '{secret}'",
                json.dumps({name: secret}),
                repr({name: secret}),
                json.dumps({"inner": json.dumps({name: secret})}),
                f"{name.replace('_', '-')}={secret}&x=y",
                f"https://host/path?{name}={secret}",
            ]
        )
    )
    assert secret not in STANDARD.text(written).replace(name, "")


@given(st.text(B64 + ".", min_size=8, max_size=60), st.text(B64, min_size=8, max_size=60))
def test_a_jwt_is_withheld_with_all_its_parts(claims: str, signature: str) -> None:
    claims = claims.replace(".", "x")
    shown = STANDARD.text(f"token was eyJhbGciOiJIUzI1NiJ9.{claims}.{signature} here")
    assert claims not in shown and signature not in shown and shown.endswith(" here")


@given(st.text(B64 + "\n+/", min_size=30, max_size=300))
def test_a_private_key_is_withheld_even_if_its_end_was_cut_off(inside: str) -> None:
    whole = f"x -----BEGIN EC PRIVATE KEY-----\n{inside}\n-----END EC PRIVATE KEY----- y"
    assert STANDARD.text(whole) == f"x {WITHHELD} y"
    assert STANDARD.text(whole[:-35]) == f"x {WITHHELD}"


@given(body(ALNUM + "!$%^*:@", 1, 30), body(ALNUM + "!$%^*:@", 1, 30))
def test_who_and_how_in_a_url_are_withheld_and_where_is_shown(user: str, password: str) -> None:
    assert STANDARD.text(f"at etcd://{user}:{password}@host:2379, twice") == f"at etcd://{WITHHELD}@host:2379, twice"


@pytest.mark.parametrize(
    "text",
    [
        "no agent of type extractor holds session s-1 in env production; see: reach sessions",
        "send it as `authorization: Bearer KEY`",
        "task-0123456789abcdef0123456789abcdef failed",
        "https://example.org/@someone/page",
        "max_tokens=512 is too much",
        "the key was refused",
        "a disk-0123456789abcdef is full",
        "",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert STANDARD.text(text) == text


@given(st.text())
def test_withholding_twice_changes_nothing_more(text: str) -> None:
    once = STANDARD.text(text)
    assert STANDARD.text(once) == once


@pytest.mark.parametrize("secret", ["AKIAIOSFODNN7EXAMPLE", "password=hunter22", "ghp_" + "a" * 36])
def test_a_text_that_is_cut_in_the_midst_of_a_secret_shows_nothing_of_it(secret: str) -> None:
    for kept in range(6, len(secret), 3):
        text = " " * (TEXT_CHARS - 1 - kept) + secret + "." * 100
        shown = STANDARD.text(text)
        assert len(shown) <= TEXT_CHARS + len(WITHHELD)
        assert shown.strip() in {f"{WITHHELD}…", f"password={WITHHELD}", secret[:kept] + "…"}
        if shown.strip().startswith(secret[:kept]):
            assert secret.startswith("password=") and kept < 10 + 3  # a name, and less than would be one


def test_a_field_is_withheld_by_its_name_or_the_end_of_it() -> None:
    for name in ("password", "db_password", "DB-PASSWORD", "accessToken", "x-api-key", "apikey", "Set-Cookie"):
        assert STANDARD.field(name, "anything") == WITHHELD, name
    for name in ("key_id", "max_tokens", "passwords_seen", "author"):
        assert STANDARD.field(name, "anything") == "anything", name
    assert STANDARD.field("password", "") == ""


def test_other_names_take_the_place_of_the_standard_ones() -> None:
    redaction = Redaction(names_of(" iban, blood_group,"))
    assert redaction.text("iban: DE1234567890, password: hunter22") == f"iban: {WITHHELD} password: hunter22"
    assert redaction.field("bloodGroup", "AB") == WITHHELD
    assert Redaction(()).text("password=hunter22 ghp_" + "a" * 36) == f"password=hunter22 {WITHHELD}"


@pytest.mark.parametrize(
    "piece",
    [
        "a", "password", 'password="', "password=\\", "password:'\\", "://", "://a", "eyJ", "eyJa.", "bearer ",
        "bearer  ", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "-----END", "sk-", "ghp_", "xoxb-", "AKIA", "AIza",
        "token : ", "authorization: node ", "reach_", "reach_0123abcd_", "'", "\\", "github_pat_", "secret=>",
    ],
)  # fmt: skip
def test_no_text_takes_longer_than_its_length_allows(piece: str) -> None:
    text = (piece * TEXT_CHARS)[:TEXT_CHARS]
    started = time.perf_counter()
    STANDARD.text(text)
    assert time.perf_counter() - started < 0.5  # a few milliseconds; what is quadratic takes many seconds
