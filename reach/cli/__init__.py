"""The command `reach`, one file a command."""

import gc


def main() -> None:
    """Entry point of the console script."""
    # What is imported stays: looking through it for garbage again and again takes a tenth of a node's start.
    gc.set_threshold(20_000)

    from agentreach.aio import grpc_runtime

    # Both are read when gRPC is first imported, and hold for the processes that a command starts, too.
    grpc_runtime.hush()
    grpc_runtime.prepare()
    try:
        from reach.cli.root import run

        run()
    except KeyboardInterrupt:  # while still importing; later the commands themselves see to it
        raise SystemExit(130) from None
