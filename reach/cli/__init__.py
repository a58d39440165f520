"""The command `reach`."""


def main() -> None:
    """Entry point of the console script."""
