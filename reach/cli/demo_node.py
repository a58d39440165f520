"""The demo's node, a process of its own: `python -m reach.cli.demo_node LISTEN HTTP`."""

from __future__ import annotations

import sys

from agentreach.aio import loop
from reach.adapters import logs
from reach.adapters.binding import PortTaken
from reach.cli.lifeline import end_with_parent
from reach.node.app import run_node
from reach.node.config import ConfigError, load


def main(listen: str, http: str) -> int:
    """Run the node; its exit code."""
    end_with_parent()
    try:
        config = load(flags={"listen": listen, "http": http, "log_level": "warning", "node_id": "demo"})
        logs.configure(config.log_level, config.log_format)
        return loop.run(run_node(config))
    except (PortTaken, ConfigError) as error:
        print(f"reach: {error}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
