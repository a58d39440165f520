"""Hello and welcome of one stream. Nothing of the link is used for it: another stream may still carry the link."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from agent_sdk.ending import Ended
from agent_sdk.identity import incarnation
from agentreach.aio.transport import Stream, StreamBroken
from agentreach.v1 import frame_pb2 as frames
from agentreach.v1.error_pb2 import SHUTTING_DOWN
from agentreach.wire.limits import PROTOCOL_VERSION

if TYPE_CHECKING:
    from agent_sdk.host import Host
    from agent_sdk.link import MeshLink

WELCOME_TIMEOUT_S = 12.0  # a node that cannot register agents says so after 10 s (register_wait_s)
SDK_NAME = "agent-reach-python/0.1.0"


class Greeting:
    """From hello to the node's answer. The node counts the process, and its agents, as its own from the welcome on."""

    def __init__(self, owner: MeshLink, stream: Stream, address: str) -> None:
        self.stream = stream
        self.address = address
        self.declared: list[Host] = []
        """The agents that the hello named, in its order."""
        self.first: frames.Frame | None = None
        """The frame with the welcome."""
        self.welcome = frames.Welcome()
        self.goodbye: frames.Goodbye | None = None
        """What the node said instead."""
        self.ended = Ended.CUT
        self.why = ""
        self._owner = owner

    async def greet(self) -> bool:
        """Say hello and read up to the welcome; False if there is none. Raises `StreamBroken`."""
        if self.first is not None:
            return True
        limit = asyncio.get_running_loop().call_later(WELCOME_TIMEOUT_S, self.stream.cancel)
        try:
            await self.stream.write(frames.Frame(signals=[frames.Signal(hello=self._hello())]).SerializeToString())
            while self.first is None and self.goodbye is None and (data := await self.stream.read()) is not None:
                self._take(data)
        except DecodeError:
            self.why, self.ended = "the node's answer to hello does not parse", Ended.SCRATCH
        finally:
            limit.cancel()
        self.why = self.why or self.stream.why_ended or "the stream ended before welcome"
        return self.first is not None

    def _take(self, data: bytes) -> None:
        frame = frames.Frame.FromString(data)
        for signal in frame.signals:
            kind = signal.WhichOneof("kind")
            if kind == "welcome" and self.first is None:
                self.first, self.welcome = frame, signal.welcome
            elif kind == "goodbye" and self.first is None:
                self.goodbye = signal.goodbye

    def _hello(self) -> frames.Hello:
        owner = self._owner
        self.declared = list(owner.hosts.values())
        token = owner.resume_token if owner.resumes_at == self.address else b""
        return frames.Hello(
            agents=[host.attach() for host in self.declared],
            incarnation=incarnation(),
            protocol_version=PROTOCOL_VERSION,
            sdk=SDK_NAME,
            resume_token=token,
            last_seq=owner.link.last_accepted if token else 0,
            env=owner.env,
            name=owner.name,
        )

    @property
    def lets_agents_in(self) -> bool:
        """False when the node has welcomed us although it is leaving."""
        return not any(each.error.code == SHUTTING_DOWN for each in self.welcome.agents)

    async def decline(self) -> None:
        """Leave a node that has welcomed us and that we do not need after all."""
        goodbye = frames.Goodbye(code=frames.Goodbye.NORMAL, reason="not needed")
        with contextlib.suppress(StreamBroken):
            await self.stream.write(frames.Frame(signals=[frames.Signal(goodbye=goodbye)]).SerializeToString())
            await self.stream.half_close()
