"""How addresses of nodes are read."""

from __future__ import annotations

import pytest

from agentreach.wire.addresses import DEFAULT_URL, addresses, is_address


def test_a_list_is_split_in_its_order_and_each_address_stands_once() -> None:
    assert addresses("b:1, a:2,b:1,[::1]:3") == ("b:1", "a:2", "[::1]:3")
    assert addresses(DEFAULT_URL) == (DEFAULT_URL,)


@pytest.mark.parametrize(
    "url",
    ["", "host", "host:", "host:0", "host:70000", "http://host:1", "a:1,,b:2", "::1:5", "a b:1", "a:٣", "u@h:1", ":1"],
)
def test_what_cannot_be_read_says_how_one_looks(url: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT.*as in 127\.0\.0\.1:7070"):
        addresses(url)
    assert not is_address(url)
