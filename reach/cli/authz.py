"""`reach authz`: who may do what, and by which rule."""

from __future__ import annotations

import sys

import click

from reach.cli.ending import Ended, Exit
from reach.cli.key_places import Place, place
from reach.cli.key_places import tenant as tenant_given
from reach.cli.output import as_json, message_as_dict, print_json

_ACTIONS = ("call", "register", "publish", "subscribe", "admin", "scrape")


@click.group()
def authz() -> None:
    """Who may do what."""


@authz.command()
@click.option("--principal", default="", metavar="NAME", help="Who wants to: by all its keys together.")
@click.option("--key-id", default="", metavar="KEY_ID", help="The same by this key alone.")
@click.option(
    "--tenant", default="", metavar="NAME", callback=tenant_given, help="Its tenant.  [default: default, or your own]"
)
@click.option("--action", required=True, type=click.Choice(_ACTIONS), help="What it wants to do.")
@click.option(
    "--target",
    "names",
    multiple=True,
    metavar="NAME",
    help="To whom: TYPE, TYPE/INSTANCE or cap:CAPABILITY, or a topic; may be repeated.",
)
@click.option("--env", default="", metavar="ENV", help="In which environment.  [default: production]")
@click.option(
    "--on-behalf-of",
    "actors",
    multiple=True,
    metavar="NAME",
    help="A principal for whom it does so, whose rights count too; may be repeated.",
)
@as_json
@place
def explain(
    where: Place,
    principal: str,
    key_id: str,
    tenant: str,
    action: str,
    names: tuple[str, ...],
    env: str,
    actors: tuple[str, ...],
    json_wanted: bool,
) -> None:
    """Say whether a principal may do something, by which rule, and why. Exit code 0: it may; 1: it may not.

    \b
    Examples:
      reach authz explain --keys-file keys.json --principal shop --action call --target extractor
      reach authz explain --principal shop --action publish --target orders/new --on-behalf-of alice
    """
    from agentreach.v1.admin_pb2 import ExplainAccessRequest
    from agentreach.v1.envelope_pb2 import Target
    from reach.core.access import CAPABILITY
    from reach.core.access_explained import fault

    target = Target()
    for name in names:
        if action in ("publish", "subscribe"):
            target.topic = name
        elif name.startswith(CAPABILITY):
            target.capabilities.append(name.removeprefix(CAPABILITY))
        elif "/" in name:
            target.agent_id = name
        else:
            target.agent_type = name
    request = ExplainAccessRequest(
        principal=principal, key_id=key_id, tenant=tenant, action=action, target=target, env=env, actors=actors
    )
    why = fault(request)
    if why:
        raise Ended(why, Exit.USAGE)
    reply = where.run(lambda desk: desk.explain(request))
    if json_wanted:
        print_json(message_as_dict(reply))
    else:
        click.echo(f"{'allowed' if reply.allowed else 'denied'}, by rule {reply.rule}: {reply.why}")
    sys.exit(Exit.OK if reply.allowed else Exit.MESH_ERROR)
