"""`reach serve`: one node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from agentreach.aio import grpc_runtime, loop
from reach.cli.ending import Ended, Exit
from reach.cli.settings_options import load_or_end, node_settings


@click.command()
@node_settings
def serve(file: Path | None, **flags: Any) -> None:
    """Run a node until SIGTERM or Ctrl-C, which drain it; a second one ends it at once.

    It is ready when GET /readyz answers 200. Every option is also a variable (REACH_LISTEN) and a key of the
    configuration file (listen); options win over variables, variables over the file.

    \b
    Examples:
      reach serve
      reach serve --listen 127.0.0.1:7080 --http 127.0.0.1:7081
      reach serve --registry etcd://127.0.0.1:2379 --config reach.toml
    """
    config = load_or_end(file, flags)
    if config.tls_cert:
        grpc_runtime.tell_of_handshakes()
    from agentreach.wire.redaction import Redaction, names_of
    from reach.adapters import logs
    from reach.adapters.binding import PortTaken
    from reach.node.app import run_node

    logs.configure(config.log_level, config.log_format, redaction=Redaction(names_of(config.redact)))
    try:
        code = loop.run(run_node(config, file))
    except PortTaken as error:
        raise Ended(str(error), Exit.USAGE) from error
    sys.exit(code)
