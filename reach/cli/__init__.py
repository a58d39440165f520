"""The command `reach`, one file a command."""

import os


def main() -> None:
    """Entry point of the console script."""
    # gRPC's C core writes routine events (a server that says goodbye) to standard error unless told not to, and reads
    # this when it is first imported; it holds for the processes that a command starts, too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    from agentreach.aio import grpc_runtime

    grpc_runtime.prepare()
    try:
        from reach.cli.root import run

        run()
    except KeyboardInterrupt:  # while still importing; later the commands themselves see to it
        raise SystemExit(130) from None
