"""API keys in a file: JSON that people can read, apart from the hashes, and that nobody else may.

Whoever changes it holds a lock beside it and puts a new file in its place in one step: who reads it at any time, or
after a crash at any time, has the old or the new one. When keys were used stands in a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from agentreach.v1 import error_pb2 as codes
from agentreach.v1.peer_pb2 import StoredKey
from reach.core import keyring
from reach.core.keyring import KEYS_MAX, LOOKUP_KEY_BYTES, Kept, KeyRefused, KeysUnusable

FILE_BYTES_MAX = 16 << 20
LOCK_WAIT_S = 5.0
_LOCK_LOOK_S = 0.02
_FORMAT = 1

Mark = tuple[int, int, int, int, int, int]
"""Which file it is, and which state of it: it differs if something else stands there."""


class KeyFile:
    """One such file. Everything here blocks, for milliseconds, and for `LOCK_WAIT_S` where others write too."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    # ---- reading ----

    def mark(self) -> Mark | None:
        """Tells one state of the file from another; None: nothing can be seen there."""
        try:
            seen = os.stat(self.path)
        except OSError:
            return None
        return (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_mode, seen.st_uid)

    def read(self) -> Kept:
        """All keys. Raises `KeysUnusable`."""
        try:
            with open(self.path, "rb") as file:
                self._check_access(os.fstat(file.fileno()))
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise self._unusable(f"it cannot be read: {error.strerror or error}") from error
        if len(data) > FILE_BYTES_MAX:
            raise self._unusable(f"it has more than {FILE_BYTES_MAX} bytes")
        if not data.strip():
            raise self._unusable("it is empty")
        try:
            return _kept(json.loads(data))
        except (ValueError, RecursionError) as error:
            # json's own errors may quote what stands there; a decoding error certainly does.
            why = str(error) if isinstance(error, _Malformed) else "it is not the JSON that `reach keys create` writes"
            raise self._unusable(why) from None

    def used(self) -> dict[str, float]:
        """When keys were used last, in Unix seconds, as far as that is known."""
        try:
            with open(self._used_path, "rb") as file:
                told = json.loads(file.read(FILE_BYTES_MAX))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(told, dict):
            return {}
        return {key_id: float(at) for key_id, at in told.items() if isinstance(at, int | float)}

    # ---- writing ----

    def change(self, decide: Callable[[Kept], Kept]) -> Kept:
        """Put what `decide` makes of the keys in their place; what stands there then.

        A file that is not there is made. Raises `KeysUnusable`, and what `decide` raises.
        """
        try:
            with self._locked():
                there = self.read() if self.path.exists() else Kept(os.urandom(LOOKUP_KEY_BYTES), ())
                kept = decide(there)
                if len(kept.records) > KEYS_MAX:
                    raise KeyRefused(f"{self.path} has {KEYS_MAX} keys already, the limit", codes.OVERLOADED)
                text = _text(kept)
                if len(text) > FILE_BYTES_MAX:
                    raise KeyRefused(f"{self.path} would have more than {FILE_BYTES_MAX} bytes", codes.OVERLOADED)
                self._put(self.path, text)
        except OSError as error:
            raise self._unusable(f"it cannot be written: {error.strerror or error}") from error
        return kept

    def put_used(self, used: Mapping[str, float]) -> None:
        """Remember when these keys were used. Raises `OSError`."""
        with self._locked():
            known = self.used()
            for key_id, at in used.items():
                known[key_id] = max(at, known.get(key_id, 0.0))
            self._put(self._used_path, json.dumps(known, indent=1, sort_keys=True).encode() + b"\n")

    @property
    def _used_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.used")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(0, f"somebody else has written to it for {LOCK_WAIT_S:g} s") from None
                    time.sleep(_LOCK_LOOK_S)
            yield
        finally:
            os.close(lock)

    def _put(self, path: Path, data: bytes) -> None:
        """In one step, to stay whatever happens then. A link leads to the same place as before."""
        path = Path(os.path.realpath(path))
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)  # of a process that was killed: nobody else writes while we hold the lock
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                before = os.stat(path)
                if before.st_uid != os.geteuid():
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _check_access(self, seen: os.stat_result) -> None:
        """Its owner alone may read and write it; of a file of root's, as secrets are mounted, its group may read."""
        if not stat.S_ISREG(seen.st_mode):
            raise self._unusable("it is no file")
        me = os.geteuid()
        if me and seen.st_uid not in (me, 0):
            raise self._unusable("it belongs to another user, who may write it")
        allowed = 0o040 if seen.st_uid != me and not seen.st_uid else 0
        if stat.S_IMODE(seen.st_mode) & 0o077 & ~allowed:
            raise self._unusable(f"others may read or write it; say: chmod 600 {self.path}")

    def _unusable(self, why: str) -> KeysUnusable:
        return KeysUnusable(f"the keys in {self.path} cannot be used: {why}")


class _Malformed(ValueError):
    """The text says what, and quotes nothing that may be secret."""


def _kept(told: Any) -> Kept:
    if not isinstance(told, dict) or told.get("format") != _FORMAT or not isinstance(told.get("keys"), list):
        raise _Malformed("it is not the JSON that `reach keys create` writes")
    try:
        lookup_key = bytes.fromhex(told.get("lookup_key", ""))
    except (TypeError, ValueError):
        lookup_key = b""
    if len(lookup_key) != LOOKUP_KEY_BYTES:
        raise _Malformed(f"lookup_key is not {LOOKUP_KEY_BYTES} bytes in hex")
    if len(told["keys"]) > KEYS_MAX:
        raise _Malformed(f"it has more than {KEYS_MAX} keys")
    records: dict[str, StoredKey] = {}
    for each in told["keys"]:
        record = _record(each)
        if record.info.key_id in records:
            raise _Malformed(f"key {record.info.key_id} stands there twice")
        records[record.info.key_id] = record
    return Kept(lookup_key, tuple(records.values()))


def _record(told: Any) -> StoredKey:
    try:
        record = ParseDict(told, StoredKey())
    except (ParseError, TypeError, AttributeError, ValueError):
        info = told.get("info") if isinstance(told, dict) else None
        key_id = info.get("key_id") if isinstance(info, dict) else None
        which = key_id if isinstance(key_id, str) and keyring.is_key_id(key_id) else "without a readable id"
        raise _Malformed(f"a key ({which}) has a field that is unknown or cannot be read") from None
    fault = keyring.record_fault(record)
    if fault:
        raise _Malformed(fault)
    return record


def _text(kept: Kept) -> bytes:
    told = {
        "format": _FORMAT,
        "lookup_key": kept.lookup_key.hex(),
        "keys": [MessageToDict(record, preserving_proto_field_name=True) for record in kept.records],
    }
    return json.dumps(told, indent=2, ensure_ascii=False).encode() + b"\n"
