"""Reading what an operator writes about etcd."""

import pytest

from reach.adapters.etcd import EtcdAddress, parse_endpoints


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("etcd://a:1,b:2", EtcdAddress(("a:1", "b:2"))),
        ("etcds://etcd.example.org:2379", EtcdAddress(("etcd.example.org:2379",), tls=True)),
        ("etcd://a", EtcdAddress(("a:2379",))),
        (" etcd://a:1, b:2/ ", EtcdAddress(("a:1", "b:2"))),
        ("etcd://[::1]:5,[fe80::2]", EtcdAddress(("[::1]:5", "[fe80::2]:2379"))),
    ],
)
def test_an_address_is_read(url: str, address: EtcdAddress) -> None:
    assert parse_endpoints(url) == address


@pytest.mark.parametrize(
    "url",
    ["", "a:1", "http://a:1", "etcd://", "etcd://a:1,", "etcd://a:x", "etcd://a:99999", "etcd://a/b"],
)
def test_what_is_no_address_is_refused_with_its_text(url: str) -> None:
    with pytest.raises(ValueError, match="not an etcd"):
        parse_endpoints(url)


def test_an_address_that_holds_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="settings of their own") as refused:
        parse_endpoints("etcd://u:hunter2@a:1")
    assert "hunter2" not in str(refused.value)
