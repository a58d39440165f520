"""The command `reach`, one file a command."""

import gc
import os


def main() -> None:
    """Entry point of the console script."""
    # gRPC's C core writes routine events (a server that says goodbye) to standard error unless told not to, and reads
    # this when it is first imported; it holds for the processes that a command starts, too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    # What is imported stays: looking through it for garbage again and again takes a tenth of a node's start.
    gc.set_threshold(20_000)

    from agentreach.aio import grpc_runtime

    grpc_runtime.prepare()
    try:
        from reach.cli.root import run

        run()
    except KeyboardInterrupt:  # while still importing; later the commands themselves see to it
        raise SystemExit(130) from None
