"""The command `reach`, one file a command."""


def main() -> None:
    """Entry point of the console script."""
    from reach.cli.root import run

    run()
