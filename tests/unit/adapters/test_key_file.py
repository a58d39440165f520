"""The file of API keys: who may touch it, what is refused, and what becomes of it when writers die."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reach.adapters import key_file
from reach.adapters.key_file import KeyFile
from reach.core.keyring import Kept, KeyRefused, KeysUnusable
from tests.support.api_keys import EVERYTHING, KeysFile


@pytest.fixture
def keys(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "keys.json")


def test_only_its_owner_can_read_and_write_what_is_made(keys: KeysFile, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys.add("alice")
        keys.file.put_used({"1a2b3c4d": 5.0})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"keys.json": 0o600, "keys.json.lock": 0o600, "keys.json.used": 0o600}


def test_people_can_read_it_and_the_key_is_not_in_it(keys: KeysFile) -> None:
    key = keys.add("alice", may_call=["extractor"])
    text = keys.path.read_text()
    assert key not in text and key.split("_", 2)[2] not in text
    told = json.loads(text)["keys"][0]["info"]
    assert (told["principal"], told["may_call"]) == ("alice", ["extractor"])


def test_what_was_written_is_read_again(keys: KeysFile) -> None:
    keys.add("alice", **EVERYTHING, admin=True, signs=True, expires_in_s=60)
    keys.add("bob", envs=["staging"])
    before = keys.file.read()
    keys.file.change(lambda kept: kept)
    assert keys.file.read() == before


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o640, 0o620, 0o666, 0o644])
def test_a_file_that_others_may_read_or_write_is_refused_and_the_cure_is_told(keys: KeysFile, mode: int) -> None:
    keys.add("alice")
    keys.path.chmod(mode)
    with pytest.raises(KeysUnusable, match="chmod 600"):
        keys.file.read()
    with pytest.raises(KeysUnusable, match="chmod 600"):
        keys.add("bob")


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda told: [told],
    "another format": lambda told: told | {"format": 2},
    "no keys": lambda told: {name: value for name, value in told.items() if name != "keys"},
    "keys are no list": lambda told: told | {"keys": {}},
    "no lookup key": lambda told: told | {"lookup_key": ""},
    "a short lookup key": lambda told: told | {"lookup_key": "00"},
    "a lookup key that is a number": lambda told: told | {"lookup_key": 7},
    "a key twice": lambda told: told | {"keys": told["keys"] * 2},
    "a key that is a text": lambda told: told | {"keys": ["SECRET"]},
    "an unknown field": lambda told: told | {"keys": [told["keys"][0] | {"password": "SECRET"}]},
    "a hash that is no base64": lambda told: told | {"keys": [told["keys"][0] | {"hash": "!!SECRET!!"}]},
    "no hash": lambda told: told | {"keys": [told["keys"][0] | {"hash": ""}]},
    "a wrong pattern": lambda told: (
        told | {"keys": [told["keys"][0] | {"info": told["keys"][0]["info"] | {"may_call": [" "]}}]}
    ),
    "an expiry that is no time": lambda told: (
        told | {"keys": [told["keys"][0] | {"info": told["keys"][0]["info"] | {"expires_at": "soon"}}]}
    ),
    "info that is a text": lambda told: told | {"keys": [told["keys"][0] | {"info": "SECRET"}]},
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_was_damaged_is_refused_in_one_line_without_what_stands_there(keys: KeysFile, what: str) -> None:
    keys.add("alice")
    told = json.loads(keys.path.read_text())
    keys.path.write_text(json.dumps(DAMAGE[what](told)))
    with pytest.raises(KeysUnusable) as refused:
        keys.file.read()
    assert str(keys.path) in str(refused.value)
    assert "\n" not in str(refused.value) and "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"   \n", b"\n", b"changeme", b"reach_1a2b3c4d_AAAA\n", b"\xff\xfe", b"{", b"[" * 100_000, b"null", b"{}"],
)
def test_what_is_no_file_of_keys_at_all_is_refused(keys: KeysFile, content: bytes) -> None:
    keys.path.write_bytes(content)
    keys.path.chmod(0o600)
    with pytest.raises(KeysUnusable) as refused:
        keys.file.read()
    assert "AAAA" not in str(refused.value)


def test_a_folder_and_a_path_without_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysUnusable):
        KeyFile(tmp_path).read()
    with pytest.raises(KeysUnusable, match="cannot be written"):
        KeysFile(tmp_path / "nowhere" / "keys.json").add("alice")


def test_a_damaged_file_is_not_written_over(keys: KeysFile) -> None:
    keys.path.write_text("precious")
    keys.path.chmod(0o600)
    with pytest.raises(KeysUnusable):
        keys.add("alice")
    assert keys.path.read_text() == "precious"


def test_what_a_killed_writer_left_is_in_nobodys_way(keys: KeysFile, tmp_path: Path) -> None:
    keys.add("alice")
    (tmp_path / ".keys.json.new").write_text("half a")
    keys.add("bob")
    assert [record.info.principal for record in keys.file.read().records] == ["alice", "bob"]
    assert not (tmp_path / ".keys.json.new").exists()


def test_a_link_still_leads_to_the_file_that_was_changed(tmp_path: Path) -> None:
    real = KeysFile(tmp_path / "real.json")
    real.add("alice")
    link = tmp_path / "keys.json"
    link.symlink_to(real.path)
    KeysFile(link).add("bob")
    assert link.is_symlink() and len(real.file.read().records) == 2


def test_each_state_of_the_file_has_a_mark_of_its_own(keys: KeysFile) -> None:
    assert keys.file.mark() is None
    key = keys.add("alice")
    first = keys.file.mark()
    keys.revoke(key)
    second = keys.file.mark()
    keys.path.chmod(0o644)
    assert len({first, second, keys.file.mark(), None}) == 4


def test_whoever_cannot_have_the_lock_in_time_says_so(keys: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "LOCK_WAIT_S", 0.05)
    keys.add("alice")
    with open(f"{keys.path}.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(KeysUnusable, match="somebody else"):
            keys.add("bob")
    keys.add("bob")


def test_a_file_never_grows_beyond_what_is_read(keys: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.add("alice")
    monkeypatch.setattr(key_file, "FILE_BYTES_MAX", len(keys.path.read_bytes()) + 10)
    with pytest.raises(KeyRefused, match="more than"):
        keys.add("bob")
    assert len(keys.file.read().records) == 1


def test_an_order_that_is_refused_changes_nothing(keys: KeysFile) -> None:
    keys.add("alice")
    before = keys.path.read_bytes()

    def refuse(_: Kept) -> Kept:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        keys.file.change(refuse)
    assert keys.path.read_bytes() == before


def test_when_keys_were_used_stands_beside_and_the_later_time_counts(keys: KeysFile) -> None:
    keys.add("alice")
    before = keys.path.read_bytes()
    keys.file.put_used({"1a2b3c4d": 50.0, "ffffffff": 7.0})
    keys.file.put_used({"1a2b3c4d": 40.0})
    assert keys.file.used() == {"1a2b3c4d": 50.0, "ffffffff": 7.0}
    assert keys.path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "x", "[]", '{"1a2b3c4d": "x"}'])
def test_what_cannot_be_read_of_that_counts_as_never_used(keys: KeysFile, content: str) -> None:
    keys.path.with_name("keys.json.used").write_text(content)
    assert keys.file.used() == {}


@pytest.mark.parametrize(("owner", "mode", "fault"), [
    (1000, 0o600, ""), (0, 0o640, ""), (0, 0o644, "others may"), (1000, 0o640, "others may"), (1001, 0o600, "another"),
])  # fmt: skip
def test_it_is_its_readers_own_or_roots(
    owner: int, mode: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    seen = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    if not fault:
        KeyFile(tmp_path / "keys.json")._check_access(seen)
        return
    with pytest.raises(KeysUnusable, match=fault):
        KeyFile(tmp_path / "keys.json")._check_access(seen)
