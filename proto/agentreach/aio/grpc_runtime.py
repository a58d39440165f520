"""What gRPC's C core takes from the environment only, and only when it is first imported.

- Its fork handlers crash one forked child in five while gRPC's threads work. The SDK tells a forked child itself.
- Its newer event engine moves each message through one thread more. With the older polling a message of a stream costs
  a quarter less processor time and arrives a quarter sooner (measured with grpcio 1.85.3, both ends). The switches
  exist from the oldest release we support to the newest we tried; a newer one that does not know them would say so on
  standard error, so it is left alone.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

_QUIET = "error"  # in lower case: set by us; gRPC takes either
_OLDER_POLLING = "-event_engine_client,-event_engine_listener"
_TRIED_UP_TO = (1, 85)


def prepare() -> None:
    """Set what nobody has set yet. After grpc was imported, by us or by others, it has no effect."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if _release() <= _TRIED_UP_TO:
        os.environ.setdefault("GRPC_EXPERIMENTS", _OLDER_POLLING)


def hush() -> None:
    """Have the C core write errors only; it would write routine events, such as a server's goodbye."""
    os.environ.setdefault("GRPC_VERBOSITY", _QUIET)


def tell_of_handshakes() -> None:
    """Undo `hush` for a server that speaks TLS: the C core alone knows why it refused a client's certificate."""
    if os.environ.get("GRPC_VERBOSITY") == _QUIET:
        os.environ["GRPC_VERBOSITY"] = "info"


def _release() -> tuple[int, int]:
    """Of the grpcio that will be imported: from its own file, since the packages' metadata costs every start 15 ms."""
    spec = find_spec("grpc")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).with_name("_grpcio_metadata.py")
        if file.exists() and (found := re.search(r"(\d+)\.(\d+)", file.read_text())):
            return int(found[1]), int(found[2])
    from importlib.metadata import version

    major, minor = version("grpcio").split(".")[:2]
    return int(major), int(minor)
