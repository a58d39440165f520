"""Asks the store for an agent that the core does not know while the view is old."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import structlog

from reach.core import lookups
from reach.core.effects import LookUpAgent
from reach.core.state import State
from reach.core.store import StoreUnavailable

log = structlog.get_logger("reach.view")


async def look_up(
    effect: LookUpAgent,
    read: Callable[[str, str, str], Awaitable[bool]] | None,
    step: Callable[[], AbstractContextManager[State]],
) -> None:
    """Read the agent's record, which tells the core of it, and let the requests that wait for that go on."""
    key, known = (effect.tenant, effect.env, effect.agent_id), False
    try:
        if read is not None:
            await read(*key)
            known = True
    except StoreUnavailable as error:
        log.debug("the registry was asked for an agent in vain", agent=effect.agent_id, why=str(error))
    finally:  # whatever happened: nobody may wait for an answer that does not come
        with step() as state:
            lookups.answered(state, key, known)
