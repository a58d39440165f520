"""Keeps secrets out of what people read: logs, errors, traces, dead letters, the audit log.

Two things are withheld from a text: what follows a name that stands for a secret (`password=…`, `"api_key": "…"`), and
what has the shape of a known kind of secret, wherever it stands. The patterns need time in proportion to the text, and
a text is cut before it is looked at. A secret of no known shape under no telling name is not found: what handlers
raise should not hold any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

WITHHELD: Final = "(withheld)"
TEXT_CHARS = 65_536  # of one text that is looked at; the rest is cut off

NAMES: Final[tuple[str, ...]] = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "api_key", "access_key", "private_key",
    "signing_key", "authorization", "cookie", "credential", "credentials",
)  # fmt: skip
"""What stands for a secret by default: a field of this name, or of one that ends with it (`db_password`)."""

_CUT = "…"  # where a text was cut short, what is left of a secret is one


def _shape(start: str, body: str, least: int) -> str:
    return rf"{start}(?:{body}{{{least},}}|{body}*(?={_CUT}))"


_B64 = "[A-Za-z0-9_-]"
_SHAPES = re.compile(
    "|".join(
        (
            r"-----BEGIN[A-Z ]{0,40}PRIVATE KEY(?:-----|(?=…)).*?(?:-----END[A-Z ]{0,40}PRIVATE KEY-----|\Z)",
            r"(?P<url>://)[^\s/\"'<>]{0,4096}@",
            r"(?P<ours>reach_(?:[0-9a-f]{8}|sign)_)[A-Za-z0-9_-]+",
            r"(?i:(?P<scheme>\b(?:bearer|basic)\s{1,4}))[A-Za-z0-9._~+/=-]{4,}",
            _shape("(?:AKIA|ASIA)", "[0-9A-Z]", 12),
            _shape("gh[pousr]_", "[A-Za-z0-9]", 12),
            _shape("github_pat_", "[A-Za-z0-9_]", 12),
            _shape("xox[a-z]-", "[A-Za-z0-9-]", 8),
            _shape("xapp-", "[A-Za-z0-9-]", 8),
            _shape("(?<![A-Za-z0-9])sk[-_]", _B64, 12),
            _shape("AIza", _B64, 20),
            rf"eyJ(?:{_B64}{{4,}}|{_B64}*(?={_CUT}))(?:\.{_B64}*){{0,4}}",
        )
    ),
    re.DOTALL,
)

_SIGNS = (
    "://", "reach_", "-----BEGIN", "AKIA", "ASIA", "gh", "github_pat_", "xox", "xapp-", "sk-", "sk_", "AIza", "eyJ",
)  # fmt: skip
_SCHEMES = ("bearer", "basic")
# Most texts hold none of these: looking for them first is twenty times as fast.


class Redaction:
    """What is withheld: the known shapes, and what goes by these names."""

    def __init__(self, names: Iterable[str] = NAMES) -> None:
        """Names match whole or as an ending, whatever their case and however `-` and `_` stand in them."""
        self._names = tuple(dict.fromkeys(filter(None, map(_plain, names))))
        self._pairs = _pairs(self._names) if self._names else None

    def text(self, text: str) -> str:
        """`text` without what is recognised as a secret."""
        if len(text) > TEXT_CHARS:
            text = text[: TEXT_CHARS - 1] + _CUT
        plain = _plain(text)
        if any(map(text.__contains__, _SIGNS)) or any(map(plain.__contains__, _SCHEMES)):
            text = _SHAPES.sub(_hide_shape, text)
        if self._pairs is not None and any(map(plain.__contains__, self._names)):
            text = self._pairs.sub(_hide_value, text)
        return text

    def field(self, name: str, value: str) -> str:
        """The value of a field: nothing of it under a telling name, else as a text."""
        return WITHHELD if value and self.withholds(name) else self.text(value)

    def withholds(self, name: str) -> bool:
        """Whether a field of this name is a secret whatever it holds."""
        return _plain(name[-_NAME_CHARS:]).endswith(self._names)


_NAME_CHARS = 200  # of a name, from its end: nothing that could be configured is longer


def names_of(setting: str) -> tuple[str, ...]:
    """The names that a comma-separated setting lists."""
    return tuple(filter(None, (name.strip() for name in setting.split(","))))


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _pairs(names: tuple[str, ...]) -> re.Pattern[str]:
    """A name, the sign that gives it a value, and the value: `name=value`, `name: "value"`, also in escaped JSON."""
    spelled = "|".join("[_-]?".join(map(re.escape, name)) for name in sorted(names, key=len, reverse=True))
    quoted = r"[bBuUrR]?\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|[bBuUrR]?'(?:[^'\\]|\\.)*(?:'|\\?\Z)|\\+[\"'][^\"'\\]*"
    scheme = r"(?i:(?:bearer|basic|digest)\s{1,4}|node\s{1,4}[^\s`]{1,64}\s{1,4})?"
    plain = scheme + r"(?!(?i:bearer|basic|digest|node)\s)[^\s`]{4,}"
    return re.compile(rf"((?i:{spelled})(?:\\*[\"'])?\s{{0,4}}(?:=>|[:=])\s{{0,4}})(?:{quoted}|{plain})", re.DOTALL)


def _hide_shape(found: re.Match[str]) -> str:
    if found.lastgroup is None:
        return WITHHELD
    kept = found[found.lastgroup]
    return f"{kept}{WITHHELD}@" if found.lastgroup == "url" else kept + WITHHELD


def _hide_value(found: re.Match[str]) -> str:
    return found[1] + WITHHELD


STANDARD: Final = Redaction()
"""By the default names: where no settings are known."""
