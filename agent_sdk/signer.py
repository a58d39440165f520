"""Signs what is sent, where the API key says that it must be: each sending anew, for the link that it goes out on."""

from __future__ import annotations

import os
import time

from agent_sdk.outgoing import SIGNATURE, field
from agentreach.v1.envelope_pb2 import Envelope
from agentreach.wire import signing


class Signer:
    """The signing half of one link."""

    def __init__(self, key_id: str, secret: bytes) -> None:
        self._key_id = key_id
        self._secret = secret
        self.audience = ""
        """The node's name for the link, once it has welcomed us. What was signed before is sent, and signed, again."""

    def signed(self, data: bytes) -> bytes:
        """A serialised envelope without a signature, with one."""
        unix_ms, nonce = int(time.time() * 1000), os.urandom(signing.NONCE_BYTES)
        envelope = Envelope.FromString(data)
        return data + field(
            SIGNATURE, signing.sign(envelope, self._secret, self._key_id, self.audience, unix_ms, nonce)
        )
