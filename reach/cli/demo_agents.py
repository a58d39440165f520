"""The demo's agents, each a process of its own: `python -m reach.cli.demo_agents echo|thinker|memory`.

They are examples too: each is what a person would write with the SDK.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import agent_sdk
from agent_sdk import Agent, Context
from reach.cli.lifeline import end_with_parent

_CONVERSATIONS_MAX = 1000
_SENTENCES_MAX = 100
_WORD_EVERY_S = 0.12

_THOUGHT = "Let me see … it depends on who is asked, and the mesh finds that out for you."


def echo() -> tuple[Agent, ...]:
    """Answers with what it was asked; and one that asks somebody else, on the same link."""
    agent = Agent("echo", capabilities=["echo"], version="1.0.0", description="answers with what it was asked")

    @agent.handler
    async def answer(data: Any) -> Any:
        return data

    reporter = Agent("reporter", capabilities=["report"], description="asks an echo, and reports what it said")

    @reporter.handler
    async def report(data: Any, ctx: Context) -> Any:
        reply = await ctx.request(data, capabilities=["echo"])
        return {"said": reply.data, "by": reply.source}

    return agent, reporter


def thinker() -> tuple[Agent, ...]:
    """Takes its time and streams its words."""
    agent = Agent("thinker", capabilities=["think"], max_concurrency=8, description="thinks aloud, word by word")

    @agent.handler
    async def think(question: Any) -> AsyncIterator[str]:
        for word in _THOUGHT.split(" "):
            await asyncio.sleep(_WORD_EVERY_S)
            yield word

    return (agent,)


def memory() -> tuple[Agent, ...]:
    """Remembers what was said in each conversation; the mesh keeps a conversation with one instance."""
    agent = Agent("memory", capabilities=["remember"], description="remembers a conversation")
    conversations: OrderedDict[str, list[Any]] = OrderedDict()

    @agent.handler
    async def remember(sentence: Any, ctx: Context) -> dict[str, Any]:
        heard = conversations.setdefault(ctx.session_id or "", [])
        conversations.move_to_end(ctx.session_id or "")
        heard.append(sentence)
        del heard[:-_SENTENCES_MAX]
        while len(conversations) > _CONVERSATIONS_MAX:
            conversations.popitem(last=False)
        return {"turn": len(heard), "heard_so_far": list(heard)}

    return (agent,)


ROLES = {"echo": echo, "thinker": thinker, "memory": memory}


def main(role: str) -> None:
    """Run one role until SIGTERM or the end of the parent."""
    logging.basicConfig(level=logging.WARNING, format=f"{role}: %(levelname)s %(message)s")
    end_with_parent()
    agent_sdk.run(*ROLES[role]())


if __name__ == "__main__":
    main(sys.argv[1])
