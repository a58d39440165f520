"""The registry store on etcd; implements `reach.core.store.Store`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from agentreach.aio.tls import Tls, explained
from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd.calls import RANGE, TXN, CallFailed, Calls
from reach.adapters.etcd.channels import Endpoints
from reach.adapters.etcd.convert import Codec
from reach.adapters.etcd.lease import EtcdLease, LeaseKeeper
from reach.adapters.etcd.watch import Watch
from reach.core.store import (
    Change,
    Compare,
    Item,
    Listing,
    Operation,
    StoreUnavailable,
    Summary,
    TxnResult,
    check_txn,
)

DEFAULT_PREFIX = "/agentreach/v1/"


class EtcdStore:
    """A store on one etcd cluster. Made by `connect`, ended by `close`; belongs to one event loop.

    `tls` gives the CAs by which etcd is checked and our own certificate, if etcd asks for one; it is asked again
    whenever an endpoint has failed, so that renewed certificates are used. None: in the clear.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = DEFAULT_PREFIX,
        tls: Callable[[], Tls] | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self._endpoints = Endpoints(endpoints, tls)
        self._calls = Calls(self._endpoints, user, password)
        self._codec = Codec(prefix)
        self._keeper = LeaseKeeper(self._calls)
        start, end = self._codec.range_of("")
        self._probe = pb.RangeRequest(key=start, range_end=end, limit=1, keys_only=True)

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[str],
        *,
        prefix: str = DEFAULT_PREFIX,
        tls: Callable[[], Tls] | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> EtcdStore:
        """A store that has answered once.

        Endpoints are `host:port`, tried in order. `StoreUnavailable` within about 6 s if none answers or the user is
        refused, and what `tls` raises. The constructor takes the same and does not try: such a store becomes usable
        when etcd does.
        """
        store = cls(endpoints, prefix=prefix, tls=tls, user=user, password=password)
        try:
            await store.revision()
        except StoreUnavailable as error:
            await store.close()
            raise StoreUnavailable(await store._explained(error)) from error
        except BaseException:
            await store.close()
            raise
        return store

    async def _explained(self, error: StoreUnavailable) -> str:
        failure = error.__cause__
        if not isinstance(failure, CallFailed) or not failure.details:
            return str(error)
        name, details = failure.endpoint.name, failure.details
        return str(error).replace(details, await explained(name, details, self._endpoints.tls, "etcd"))

    async def get(self, key: str) -> Item | None:
        """See `Store.get`."""
        response = await self._calls.again(RANGE, pb.RangeRequest(key=self._codec.key(key)))
        return self._codec.item(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Listing:
        """See `Store.list`."""
        start, end = self._codec.range_of(prefix)
        response = await self._calls.again(RANGE, pb.RangeRequest(key=start, range_end=end))
        return Listing(tuple(self._codec.item(kv) for kv in response.kvs), response.header.revision)

    async def revision(self) -> int:
        """See `Store.revision`."""
        return (await self._calls.again(RANGE, self._probe)).header.revision

    async def summary(self, prefix: str) -> Summary:
        """See `Store.summary`."""
        start, end = self._codec.range_of(prefix)
        request = pb.RangeRequest(
            key=start,
            range_end=end,
            limit=1,
            keys_only=True,
            sort_order=pb.RangeRequest.DESCEND,
            sort_target=pb.RangeRequest.MOD,
        )
        response = await self._calls.again(RANGE, request)
        newest = response.kvs[0].mod_revision if response.kvs else 0
        return Summary(response.header.revision, response.count, newest)

    def watch(
        self, prefix: str, from_revision: int, *, deletes_only: bool = False
    ) -> AsyncGenerator[Sequence[Change], None]:
        """See `Store.watch`."""
        return Watch(self._calls, self._codec, prefix, from_revision, deletes_only=deletes_only).changes()

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """See `Store.txn`."""
        check_txn(compares, then, otherwise)
        request = self._codec.txn(compares, then, otherwise)
        return self._codec.result(await self._calls.once(TXN, request, self._probe))

    async def hold_lease(self, ttl_s: float) -> EtcdLease:
        """See `Store.hold_lease`."""
        return await self._keeper.grant(ttl_s)

    async def revoke(self, lease_id: int) -> None:
        """See `Store.revoke`."""
        await self._keeper.revoke(lease_id)

    async def close(self) -> None:
        """See `Store.close`."""
        try:
            await self._keeper.close()
        finally:
            await self._endpoints.close()
