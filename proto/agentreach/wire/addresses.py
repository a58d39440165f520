"""Where a node is, as people write it: `HOST:PORT`, several of them with commas between; IPv6 hosts in brackets."""

from __future__ import annotations

DEFAULT_URL = "127.0.0.1:7070"


def addresses(url: str) -> tuple[str, ...]:
    """Split `HOST:PORT[,HOST:PORT…]`, each address once. Raises `ValueError` saying what is wrong."""
    found: list[str] = []
    for part in url.split(","):
        text = part.strip()
        if not is_address(text):
            raise ValueError(f"cannot read the address {text!r}: expected HOST:PORT[,HOST:PORT…], as in {DEFAULT_URL}")
        if text not in found:
            found.append(text)
    return tuple(found)


def is_address(text: str) -> bool:
    """True for `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = bool(host) and not set(host) & set(":/[]@ \t")
    return (bracketed or plain) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
