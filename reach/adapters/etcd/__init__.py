"""The registry store on etcd, over our own thin client (docs/decisions/0001-own-etcd-client.md)."""

from reach.adapters.etcd.address import EtcdAddress, parse_endpoints
from reach.adapters.etcd.store import EtcdStore

__all__ = ["EtcdAddress", "EtcdStore", "parse_endpoints"]
