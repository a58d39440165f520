"""`reach test-agent`: an agent that answers with what it was asked, late or not at all if you like."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import click

from reach.cli import targets


@click.command("test-agent")
@click.option("--type", "-t", "agent_type", default="test", show_default=True, metavar="TYPE", help="The agent's type.")
@click.option("--capabilities", "-c", default="echo", show_default=True, metavar="A,B", help="What it says it can do.")
@click.option("--version", default="", metavar="VERSION", help="The version it says it has.")
@click.option(
    "--delay",
    "delay_s",
    type=click.FloatRange(0, 600),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each answer takes.",
)
@click.option(
    "--fail",
    "fail_rate",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    metavar="RATE",
    help="The share of requests that fail, 0 to 1.",
)
@click.option(
    "--max-concurrency",
    type=click.IntRange(0, 100_000),
    default=0,
    show_default=True,
    metavar="N",
    help="Requests at once; 0: any number.",
)
@click.option("--env", default="", metavar="NAME", help="The environment.  [default: production]")
@targets.url
def test_agent(
    agent_type: str,
    capabilities: str,
    version: str,
    delay_s: float,
    fail_rate: float,
    max_concurrency: int,
    env: str,
    url: str | None,
) -> None:
    """Run an agent that echoes. It redials by itself; Ctrl-C drains it. Exit code 4: another process took its name.

    \b
    Examples:
      reach test-agent
      reach test-agent --type slow --capabilities ner,summarize --delay 2 --fail 0.1
    """
    from agent_sdk import Agent, AgentError
    from reach.adapters import logs

    logs.configure("info", "auto")
    names = [name.strip() for name in capabilities.split(",") if name.strip()]
    try:
        agent = Agent(
            agent_type,
            capabilities=names,
            version=version,
            max_concurrency=max_concurrency,
            env=env,
            description="reach test-agent: echoes",
            url=url,
            **targets.sdk_access(),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error

    @agent.handler
    async def echo(data: Any) -> Any:
        if delay_s:
            await asyncio.sleep(delay_s)
        if random.random() < fail_rate:
            raise AgentError("failed on purpose (--fail)", retryable=True)
        return data

    agent.run()
