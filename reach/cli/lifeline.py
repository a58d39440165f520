"""A child process that ends with its parent, however that ends: it is told by the end of its standard input."""

from __future__ import annotations

import os
import signal
import threading


def end_with_parent() -> None:
    """Send this process SIGTERM when standard input ends: a pipe that the parent holds, and writes nothing to."""
    # A daemon thread in a plain read: one inside sys.stdin's lock would abort the interpreter's exit.
    threading.Thread(target=_wait_for_end, name="lifeline", daemon=True).start()


def _wait_for_end() -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except InterruptedError:
            continue
        except OSError:
            break
    os.kill(os.getpid(), signal.SIGTERM)
