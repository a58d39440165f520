"""What becomes of the envelopes of a frame: answers go to the calls, events to the topics, all else to an agent."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agent_sdk.responses import refusal
from agentreach.aio.clock import boot_time
from agentreach.v1 import envelope_pb2 as pb

if TYPE_CHECKING:
    from agent_sdk.link import MeshLink

log: Final = logging.getLogger("agent_sdk")

RESPONSE: Final = int(pb.RESPONSE)
EVENT: Final = int(pb.EVENT)
CALLBACK: Final = int(pb.CALLBACK)
CANCEL: Final = int(pb.CANCEL)


def take(owner: MeshLink, envelopes: Iterable[pb.Envelope], age_ms: int) -> None:
    """Give each envelope to whom it is for; they are `age_ms` old. A fault in one costs the others nothing."""
    now = boot_time()
    lost_ms = age_ms + int(owner.stalls.stall_s(now) * 1000)
    calls, hosts = owner.calls, owner.hosts
    for envelope in envelopes:
        try:
            kind = int(envelope.type)
            if kind == RESPONSE:
                calls.on_response(envelope, now)
            elif kind in (EVENT, CALLBACK):
                owner.topics.on_event(envelope, now, lost_ms)
            else:
                host = hosts.get(envelope.recipient)
                if host is not None:
                    host.deliver(envelope, now, lost_ms, kind)
                elif kind != CANCEL:
                    owner.send(refusal(envelope, "CONNECT_FAILED", f"{envelope.recipient} is not served here"))
        except Exception:  # one envelope must not end the link for the others
            log.exception("an envelope could not be handled")
