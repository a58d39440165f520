"""What gRPC's C core takes from the environment only, and only when it is first imported.

- Its fork handlers crash one forked child in five while gRPC's threads work. The SDK tells a forked child itself.
- Its newer event engine moves each message through one thread more. With the older polling a message of a stream costs
  a quarter less processor time and arrives a quarter sooner (measured with grpcio 1.85.3, both ends). The switches
  exist from the oldest release we support to the newest we tried; a newer one that does not know them would say so on
  standard error, so it is left alone.
"""

from __future__ import annotations

import os
from importlib.metadata import version

_OLDER_POLLING = "-event_engine_client,-event_engine_listener"
_TRIED_UP_TO = (1, 85)


def prepare() -> None:
    """Set what nobody has set yet. After grpc was imported, by us or by others, it has no effect."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    major, minor = version("grpcio").split(".")[:2]
    if (int(major), int(minor)) <= _TRIED_UP_TO:
        os.environ.setdefault("GRPC_EXPERIMENTS", _OLDER_POLLING)
