"""Single calls to etcd: limits, another endpoint on failure, signing in.

Each attempt has 2 s, a call 5 s in all. What is idempotent is sent again; a transaction is sent once, over a
connection that stands, because an answer that was lost says nothing about what was done.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from agentreach.aio.clock import boot_time
from reach.adapters.etcd import etcd_private_pb2 as pb
from reach.adapters.etcd.channels import Endpoint, Endpoints
from reach.adapters.etcd.status import NOSPACE_ADVICE, Verdict, judge
from reach.core.store import LeaseGone, StoreUnavailable

ATTEMPT_S = 2.0  # etcd answers in milliseconds; an election of a new leader takes 1 to 2 s
CALL_S = 5.0  # an election and one more attempt; callers wait for a registry call, they must not wait long

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Res]):
    """A method of etcd's API: names do not travel, paths do."""

    path: str
    request: type[Req]
    response: type[Res]

    @property
    def name(self) -> str:
        """For a message."""
        return self.path.rpartition("/")[2]

    def serialize(self, request: Req) -> bytes:
        """The bytes of a request."""
        return request.SerializeToString()


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)


class CallFailed(Exception):
    """etcd answered with a status that is not OK."""

    def __init__(self, endpoint: Endpoint, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{endpoint.name}: {details or code.name}")
        self.endpoint = endpoint
        self.details = details
        self.verdict = judge(code, details)


class RevisionUnknown(Exception):
    """The revision asked for is compacted, or does not exist yet."""


class Calls:
    """Calls on the current endpoint, signed in as `user` if there is one."""

    def __init__(self, endpoints: Endpoints, user: str | None, password: str | None) -> None:
        self.endpoints = endpoints
        self._user = user
        self._password = password
        self._token: str | None = None
        self.locked_out = False
        """True while etcd refuses our user and password, as it did at the last sign-in."""
        self._signing_in = asyncio.Lock()

    async def again(self, method: Method[Req, Res], request: Req) -> Res:
        """Call something idempotent: sent again until it is answered or the time is over.

        `StoreUnavailable`, `LeaseGone`, `RevisionUnknown`, or `ValueError` for a request that etcd will never take.
        """
        return await self._call(method, request, resend=True)

    async def once(self, method: Method[Req, Res], request: Req, probe: pb.RangeRequest) -> Res:
        """Call something that must not be done twice. The errors of `again`.

        `probe` is a read that is sent first if there is no connection yet, so that a dead endpoint costs no doubt.
        """
        if not self.endpoints.current.connected:
            await self.again(RANGE, probe)
        return await self._call(method, request, resend=False)

    async def _call(self, method: Method[Req, Res], request: Req, *, resend: bool) -> Res:
        give_up = boot_time() + CALL_S
        failures, signed_in = 0, False
        while True:
            endpoint, token = self.endpoints.current, await self.token()
            try:
                timeout_s = min(ATTEMPT_S, max(0.1, give_up - boot_time()))
                return await self._attempt(endpoint, method, request, token, timeout_s)
            except CallFailed as error:
                failure = error
            match failure.verdict:
                case Verdict.SIGN_IN if self._user is not None and not signed_in:
                    signed_in = True
                    await self.sign_in(token)
                    continue
                case Verdict.ELSEWHERE | Verdict.FROZEN if resend:
                    self.endpoints.leave(endpoint, frozen=failure.verdict is Verdict.FROZEN)
                case Verdict.NOT_APPLIED:
                    self.endpoints.leave(endpoint)
                case Verdict.ELSEWHERE | Verdict.FROZEN:
                    self.endpoints.leave(endpoint, frozen=failure.verdict is Verdict.FROZEN)
                    raise StoreUnavailable(
                        f"etcd {method.name} was not answered, and may have been done ({failure})"
                    ) from failure
                case _:
                    raise self._final(method, failure) from failure
            failures += 1
            await self.endpoints.pause(failures, give_up - boot_time())
            if boot_time() >= give_up or self.endpoints.closed:
                raise StoreUnavailable(f"etcd cannot be reached at {self.endpoints.names} ({failure})") from failure

    def _final(self, method: Method[Req, Res], failure: CallFailed) -> Exception:
        match failure.verdict:
            case Verdict.LEASE_GONE:
                return LeaseGone(str(failure))
            case Verdict.COMPACTED | Verdict.FUTURE:
                return RevisionUnknown(str(failure))
            case Verdict.NO_SPACE:
                return StoreUnavailable(f"etcd {failure}: {NOSPACE_ADVICE}")
            case Verdict.SIGN_IN:
                who = f"user {self._user!r}" if self._user is not None else "a caller without a user"
                return StoreUnavailable(f"etcd refuses {method.name} to {who} ({failure})")
            case Verdict.INVALID:
                return ValueError(f"etcd does not take this {method.name} ({failure})")
            case _:
                return StoreUnavailable(f"etcd refuses {method.name} ({failure})")

    async def _attempt(
        self, endpoint: Endpoint, method: Method[Req, Res], request: Req, token: str | None, timeout_s: float
    ) -> Res:
        if self.endpoints.closed:
            raise StoreUnavailable("the connection to etcd is closed")
        rpc = endpoint.channel.unary_unary(
            method.path,
            request_serializer=method.serialize,
            response_deserializer=method.response.FromString,
        )
        call = rpc(request, timeout=timeout_s, metadata=metadata(token))
        try:
            # The status and not the call: closing the channel cancels the call, and awaiting that would look as if
            # our own task had been cancelled.
            code = await call.code()
            if code is grpc.StatusCode.OK:
                return await call
            raise CallFailed(endpoint, code, await call.details() or "")
        finally:
            call.cancel()  # nothing if it is done

    # Signing in

    async def token(self) -> str | None:
        """The token to send along, None without a user. Bounded by 5 s; `StoreUnavailable` if it cannot be had."""
        if self._user is not None and self._token is None:
            await self.sign_in(None)
        return self._token

    async def sign_in(self, stale: str | None) -> None:
        """Get a token in place of the `stale` one, unless another call already did (bcrypt costs etcd 70 ms)."""
        if self._user is None:
            return
        async with self._signing_in:
            if self._token == stale:
                self._token = await self._authenticate(self._user)

    async def _authenticate(self, user: str) -> str:
        request = pb.AuthenticateRequest(name=user, password=self._password or "")
        give_up, failures = boot_time() + CALL_S, 0
        while True:
            endpoint = self.endpoints.current
            try:
                token = (await self._attempt(endpoint, AUTHENTICATE, request, None, ATTEMPT_S)).token
                self.locked_out = False
                return token
            except CallFailed as error:
                failure = error
            if failure.verdict not in (Verdict.ELSEWHERE, Verdict.FROZEN, Verdict.NOT_APPLIED, Verdict.SIGN_IN):
                self.locked_out = True
                raise StoreUnavailable(f"etcd does not let in user {user!r} ({failure})") from failure
            if failure.verdict is not Verdict.SIGN_IN:  # that one: another sign-in changed the auth store meanwhile
                self.endpoints.leave(endpoint, frozen=failure.verdict is Verdict.FROZEN)
            failures += 1
            await self.endpoints.pause(failures, give_up - boot_time())
            if boot_time() >= give_up or self.endpoints.closed:
                raise StoreUnavailable(f"etcd cannot be reached at {self.endpoints.names} ({failure})") from failure


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """`hasleader` makes a partitioned member refuse at once instead of going quiet."""
    leader = ("hasleader", "true")
    return (leader,) if token is None else (leader, ("token", token))
