"""What a failed call to etcd means for us. Pure.

etcd tells most things by the text of the status only; the texts are those of its `rpctypes`, alike in 3.4 and 3.5.
"""

from __future__ import annotations

from enum import Enum

from grpc import StatusCode

NOSPACE_ADVICE = (
    "its database quota is exceeded (alarm NOSPACE) and it refuses all writes: compact, defragment, "
    "then `etcdctl alarm disarm`; see https://etcd.io/docs/latest/op-guide/maintenance/#space-quota"
)


class Verdict(Enum):
    """What to do about a failure."""

    ELSEWHERE = "try another endpoint; the request may have been applied"
    NOT_APPLIED = "try again; the request was certainly not applied"
    FROZEN = "no answer in time; leave this endpoint with everything, the request may have been applied"
    SIGN_IN = "the token is missing, too old or not enough; the request was not applied"
    LEASE_GONE = "the lease does not exist"
    COMPACTED = "the revision is compacted"
    FUTURE = "the revision does not exist yet: the store lost data"
    NO_SPACE = "the quota is exceeded"
    INVALID = "etcd will never take this request"
    REFUSED = "asking again will not help"


_BY_TEXT = (
    ("requested lease not found", Verdict.LEASE_GONE),
    ("required revision has been compacted", Verdict.COMPACTED),
    ("required revision is a future revision", Verdict.FUTURE),
    ("database space exceeded", Verdict.NO_SPACE),
    ("authentication failed, invalid user ID or password", Verdict.REFUSED),
    ("invalid auth token", Verdict.SIGN_IN),
    ("revision of auth store is old", Verdict.SIGN_IN),
    ("user name is empty", Verdict.SIGN_IN),
    ("permission denied", Verdict.SIGN_IN),  # before 3.5.6 also the answer to an expired token
    ("etcdserver: no leader", Verdict.NOT_APPLIED),
    ("too many requests", Verdict.NOT_APPLIED),
    ("received message larger than max", Verdict.INVALID),
)

_BY_CODE = {
    StatusCode.UNAVAILABLE: Verdict.ELSEWHERE,
    StatusCode.UNKNOWN: Verdict.ELSEWHERE,
    StatusCode.INTERNAL: Verdict.ELSEWHERE,
    StatusCode.CANCELLED: Verdict.ELSEWHERE,  # by the server: our own cancellation is never judged
    StatusCode.DEADLINE_EXCEEDED: Verdict.FROZEN,
    StatusCode.INVALID_ARGUMENT: Verdict.INVALID,
    StatusCode.UNAUTHENTICATED: Verdict.SIGN_IN,
    StatusCode.PERMISSION_DENIED: Verdict.SIGN_IN,
}


def judge(code: StatusCode, details: str) -> Verdict:
    """The verdict on a status that is not OK."""
    for text, verdict in _BY_TEXT:
        if text in details:
            return verdict
    return _BY_CODE.get(code, Verdict.REFUSED)
