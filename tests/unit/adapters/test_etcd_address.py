"""Reading what an operator writes about etcd."""

from pathlib import Path

import pytest

from reach.adapters.etcd import EtcdAddress, EtcdTls, parse_endpoints


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
    ["", "a:1", "http://a:1", "etcd://", "etcd://a:1,", "etcd://a:x", "etcd://a:99999", "etcd://u:p@a:1", "etcd://a/b"],
)
def test_what_is_no_address_is_refused_with_its_text(url: str) -> None:
    with pytest.raises(ValueError, match="not an etcd"):
        parse_endpoints(url)


def test_a_client_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ValueError, match="both"):
        EtcdTls(cert=Path("cert.pem"))
