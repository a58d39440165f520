"""`reach keys`: who has an API key, and what it allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reach.cli.ending import Ended, Exit
from reach.cli.key_places import Place, place
from reach.cli.key_places import tenant as tenant_given
from reach.cli.output import as_json, message_as_dict, note, print_json, print_table
from reach.cli.times import Span

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from agentreach.v1.admin_pb2 import CreateKeyReply, KeyInfo, RotateKeyReply

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS = ("KEY", "PRINCIPAL", "TENANT", "ENVS", "RIGHTS", "CREATED", "EXPIRES", "LAST USED", "STATE")
_COLOURS = {"valid": "green", "expired": "yellow", "revoked": "red"}


@click.group()
def keys() -> None:
    """API keys: make, list, revoke and rotate them.

    They are where the nodes of the mesh look for them: in a file (--keys-file), or in etcd. With --registry the command
    goes to etcd itself, as for the first key; with neither it asks the node at --url, as an admin (--api-key).

    \b
    Examples:
      reach keys create --keys-file keys.json --principal extractors --may-register extractor
      reach keys list --keys-file keys.json
    """


_RIGHTS = (
    click.option("--principal", required=True, metavar="NAME", help="Who the key stands for."),
    click.option("--tenant", default="", metavar="NAME", callback=tenant_given,
                 help="Its tenant.  [default: default, or your own]"),
    click.option("--env", "envs", multiple=True, metavar="ENV",
                 help="What it allows holds in this environment only; may be repeated.  [default: all]"),
    click.option("--may-register", multiple=True, metavar="PATTERN",
                 help="It may attach agents of these types: TYPE, TYPE/INSTANCE or cap:CAPABILITY, * for any text; "
                 "may be repeated."),
    click.option("--may-call", multiple=True, metavar="PATTERN", help="It may send to these; may be repeated."),
    click.option("--may-publish", multiple=True, metavar="TOPIC",
                 help="It may publish to these topics, with * for any text; may be repeated."),
    click.option("--may-subscribe", multiple=True, metavar="TOPIC", help="It may listen to these; may be repeated."),
    click.option("--admin", is_flag=True, help="It may do what operators do, in its tenant."),
    click.option("--may-scrape", is_flag=True, help="It may read /metrics."),
    click.option("--signs", is_flag=True, help="What it sends must be signed; a secret for that is printed too."),
)  # fmt: skip


def _rights_options(function: F) -> F:
    for option in reversed(_RIGHTS):
        function = option(function)
    return function


@keys.command()
@_rights_options
@click.option("--expires", type=Span(), metavar="TIME", help="How long it holds: 30m, 12h, 90d.  [default: for ever]")
@as_json
@place
def create(
    where: Place,
    principal: str,
    tenant: str,
    envs: tuple[str, ...],
    may_register: tuple[str, ...],
    may_call: tuple[str, ...],
    may_publish: tuple[str, ...],
    may_subscribe: tuple[str, ...],
    admin: bool,
    may_scrape: bool,
    signs: bool,
    expires: float | None,
    json_wanted: bool,
) -> None:
    """Make a key and print it, once: nobody can show it again.

    The key alone goes to standard output, what is to be said about it to standard error. A file that is not there is
    made; only its owner can read it.

    \b
    Examples:
      reach keys create --keys-file keys.json --principal ops --admin > ops.key
      reach keys create --keys-file keys.json --principal shop --may-call extractor --expires 90d
    """
    from agentreach.v1.admin_pb2 import CreateKeyRequest, KeyInfo
    from reach.core.keyring import info_fault, stamp

    info = KeyInfo(
        principal=principal,
        tenant=tenant,
        envs=envs,
        may_register=may_register,
        may_call=may_call,
        may_publish=may_publish,
        may_subscribe=may_subscribe,
        admin=admin,
        scrape=may_scrape,
        signs=signs,
    )
    if expires is not None:
        info.expires_at.CopyFrom(stamp(time.time() + expires))
    fault = info_fault(info, tenant_needed=False)
    if fault:
        raise Ended(fault, Exit.USAGE)
    _give(where.run(lambda desk: desk.create(CreateKeyRequest(key=info))), json_wanted)


@keys.command("list")
@as_json
@place
def list_(where: Place, json_wanted: bool) -> None:
    """List the keys: whose they are, what they allow, and whether they hold. The keys themselves nobody can show.

    \b
    Examples:
      reach keys list --keys-file keys.json
      reach keys list --json
    """
    reply = where.run(lambda desk: desk.list())
    if json_wanted:
        print_json([message_as_dict(info) for info in reply.keys])
    elif not reply.keys:
        note("there are no keys; make one with: reach keys create")
    else:
        now = time.time()
        print_table(COLUMNS, (_row(info, now) for info in reply.keys))


@keys.command()
@click.argument("key_id", metavar="KEY_ID")
@place
def revoke(where: Place, key_id: str) -> None:
    """End a key now. Within seconds, on every node, whatever it opened ends too.

    KEY_ID is what `reach keys list` shows, and the first part of the key: reach_KEY_ID_…

    \b
    Example:
      reach keys revoke --keys-file keys.json 1a2b3c4d
    """
    key_id = _key_id(key_id)
    where.run(lambda desk: desk.revoke(key_id))
    note(f"key {key_id} is revoked")


@keys.command()
@click.argument("key_id", metavar="KEY_ID")
@click.option(
    "--overlap",
    type=Span(zero=True),
    default="1h",
    show_default=True,
    metavar="TIME",
    help="How long the old key goes on; 0: it ends at once.",
)
@as_json
@place
def rotate(where: Place, key_id: str, overlap: float, json_wanted: bool) -> None:
    """Make a key with the same rights in place of another, and print it, once. The old one ends after the overlap.

    \b
    Example:
      reach keys rotate --keys-file keys.json --overlap 12h 1a2b3c4d > ops.key
    """
    from agentreach.v1.admin_pb2 import RotateKeyRequest

    request = RotateKeyRequest(key_id=_key_id(key_id), overlap_s=overlap)
    _give(where.run(lambda desk: desk.rotate(request)), json_wanted)


def _key_id(text: str) -> str:
    """What is shown of a key names it as well as its id; a whole key is never repeated."""
    from reach.core.keyring import is_key_id, looks_like_a_key

    if looks_like_a_key(text):
        return text.split("_")[1]
    if not is_key_id(text):
        raise click.BadParameter("a key's id has 8 hex digits; `reach keys list` shows them", param_hint="KEY_ID")
    return text


def _give(reply: CreateKeyReply | RotateKeyReply, json_wanted: bool) -> None:
    if json_wanted:
        print_json(message_as_dict(reply))
        return
    info = reply.key
    until = f"until {_when(info.expires_at)}" if info.HasField("expires_at") else "for ever"
    rights = _rights(info) if _rights(info) != "–" else "nothing: give it rights by --may-call and the like"
    note(f"key {info.key_id} of principal {info.principal}, tenant {info.tenant}, {until}; it may {rights}")
    if reply.signing_secret:
        note(f"what it sends must be signed with {reply.signing_secret}")
    note("this is the only time it is shown:")
    click.echo(reply.secret)


def _row(info: KeyInfo, now: float) -> tuple[Any, ...]:
    from rich.text import Text

    state = "revoked" if info.revoked else "valid"
    if state == "valid" and info.HasField("expires_at") and info.expires_at.seconds <= now:
        state = "expired"
    return (
        Text(info.key_id, style="bold"),
        info.principal,
        info.tenant,
        ", ".join(info.envs) or "*",
        _rights(info),
        _when(info.created_at),
        _when(info.expires_at) if info.HasField("expires_at") else "never",
        _when(info.last_used_at) if info.HasField("last_used_at") else "–",
        Text(state, style=_COLOURS[state]),
    )


def _rights(info: KeyInfo) -> str:
    """What a key allows, in words."""
    parts = [
        f"{verb} {', '.join(patterns)}"
        for verb, patterns in (
            ("register", info.may_register),
            ("call", info.may_call),
            ("publish", info.may_publish),
            ("subscribe", info.may_subscribe),
        )
        if patterns
    ]
    parts += [word for word, there in (("admin", info.admin), ("scrape", info.scrape), ("signs", info.signs)) if there]
    return "; ".join(parts) or "–"


def _when(at: Timestamp) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at.seconds))
