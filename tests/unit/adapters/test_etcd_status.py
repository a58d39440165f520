"""What a failed call means; the texts are those that etcd 3.4 and 3.5 send."""

import pytest
from grpc import StatusCode

from reach.adapters.etcd.status import Verdict, judge


@pytest.mark.parametrize(
    ("code", "details", "verdict"),
    [
        (StatusCode.UNAVAILABLE, "failed to connect to all addresses", Verdict.ELSEWHERE),
        (StatusCode.UNAVAILABLE, "etcdserver: request timed out", Verdict.ELSEWHERE),
        (StatusCode.UNAVAILABLE, "etcdserver: leader changed", Verdict.ELSEWHERE),
        (StatusCode.UNAVAILABLE, "etcdserver: no leader", Verdict.NOT_APPLIED),
        (StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Verdict.NOT_APPLIED),
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Verdict.FROZEN),
        (StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", Verdict.SIGN_IN),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Verdict.SIGN_IN),
        (StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", Verdict.SIGN_IN),
        (StatusCode.UNAVAILABLE, "rpc error: code = PermissionDenied desc = permission denied", Verdict.SIGN_IN),
        (
            StatusCode.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            Verdict.REFUSED,
        ),
        (StatusCode.NOT_FOUND, "etcdserver: requested lease not found", Verdict.LEASE_GONE),
        (StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Verdict.COMPACTED),
        (StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision", Verdict.FUTURE),
        (StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Verdict.NO_SPACE),
        (StatusCode.RESOURCE_EXHAUSTED, "grpc: received message larger than max (3 vs. 2)", Verdict.INVALID),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large", Verdict.INVALID),
        (StatusCode.UNIMPLEMENTED, "unknown service etcdserverpb.KV", Verdict.REFUSED),
    ],
)
def test_judge(code: StatusCode, details: str, verdict: Verdict) -> None:
    assert judge(code, details) is verdict
