"""The options by which a person names a node and a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentreach.wire.addresses import DEFAULT_URL, addresses
from reach.cli.ending import Ended, Exit

if TYPE_CHECKING:
    from agentreach.v1.envelope_pb2 import Target
    from reach.adapters.admin_client import AdminClient

F = TypeVar("F", bound=Callable[..., Any])

PROFILES = ("CACHE", "RPC", "LLM", "EXTERNAL", "TASK")
POLICIES = (
    "RANDOM", "WEIGHTED_RANDOM", "ROUND_ROBIN", "LEAST_ACTIVE", "LEAST_LOAD", "SCORE", "CONSISTENT_HASH",
)  # fmt: skip


def _addresses(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse what is no address before anything is dialled."""
    if value:
        try:
            addresses(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return value


@dataclass(frozen=True, slots=True)
class Access:
    """How a command gets in: its key, and the files of its TLS connection."""

    api_key: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def identified(self) -> bool:
        """By something that tells who it is."""
        return bool(self.api_key or self.cert)

    @property
    def encrypted(self) -> bool:
        """By TLS; without any file in the clear."""
        return bool(self.ca or self.cert or self.key)


def _keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Commands hand the node's address along, and none of them the ways to get in: `access` knows them."""
    text = (value or "").strip()
    if parameter.name == "api_key" and not (text.isascii() and (text.isprintable() or not text)):
        raise click.BadParameter("it holds characters that no key has", context, parameter)
    context.meta[f"reach.{parameter.name}"] = text


_FILE: dict[str, Any] = {"metavar": "FILE", "show_envvar": True, "expose_value": False, "callback": _keep}
_NODE = (
    click.option("--url", metavar="HOST:PORT[,…]", envvar="REACH_URL", show_envvar=True, callback=_addresses,
                 help="The node.  [default: 127.0.0.1:7070]"),
    click.option("--api-key", "api_key", metavar="KEY", envvar="REACH_API_KEY", show_envvar=True, expose_value=False,
                 callback=_keep, help="The key to get in with. Other users of this machine see options: prefer the "
                 "variable."),
    click.option("--tls-ca", "tls_ca", envvar="REACH_CLIENT_TLS_CA", **_FILE,
                 help="Speak TLS, and check the node's certificate by the CAs in this file; 'system': those of this "
                 "machine."),
    click.option("--tls-cert", "tls_cert", envvar="REACH_CLIENT_TLS_CERT", **_FILE,
                 help="The certificate to show to the node."),
    click.option("--tls-key", "tls_key", envvar="REACH_CLIENT_TLS_KEY", **_FILE, help="That certificate's key."),
)  # fmt: skip


def url(function: F) -> F:
    """The options that name a node and say how to get in; the function gets `url`, `access` knows the rest."""
    for option in reversed(_NODE):
        function = option(function)
    return function


def access() -> Access:
    """How the running command gets in."""
    known = click.get_current_context().meta
    return Access(*(known.get(f"reach.{name}", "") for name in ("api_key", "tls_ca", "tls_cert", "tls_key")))


def _usable(way: Access) -> Access:
    """The same, if its TLS files are there and fit together; else a mistake of whoever typed it, and no node's."""
    if not way.encrypted:
        return way
    import ssl  # only now: it takes long, and most commands do without

    from agentreach.aio.tls import TlsFileError, TlsFiles

    try:
        TlsFiles(way.ca, way.cert, way.key).read()
        if way.cert:
            # without a password it would ask for one at the terminal
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(way.cert, way.key, password=lambda: "")
    except TlsFileError as error:
        raise Ended(str(error), Exit.USAGE) from error
    except (ssl.SSLError, ValueError) as error:
        fault = f"the key {way.key} does not belong to the certificate {way.cert}, or one of the two cannot be used"
        raise Ended(fault, Exit.USAGE) from error
    return way


def client(given: str | None) -> AdminClient:
    """A client of the node at `--url`, with the key and the TLS files of the running command."""
    from agentreach.aio.tls import TlsFiles
    from reach.adapters.admin_client import AdminClient

    way = _usable(access())
    tls = TlsFiles(way.ca, way.cert, way.key) if way.encrypted else None
    return AdminClient(addresses(given or DEFAULT_URL), api_key=way.api_key, tls=tls)


def sdk_access() -> dict[str, Any]:
    """The same for `agent_sdk.connect` and `Agent`, as their arguments. What they cannot use is a mistake of usage."""
    from agent_sdk import Tls, settings
    from agent_sdk.errors import ConnectFailed

    way = _usable(access())
    tls = Tls(way.ca or None, way.cert or None, way.key or None) if way.encrypted else None
    try:
        settings.access(api_key=way.api_key, tls=tls)
    except ConnectFailed as error:
        raise Ended(error.message, Exit.USAGE) from error
    return {"api_key": way.api_key, "tls": tls}


def _not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("an empty ID names no conversation; leave the option out", context, option)
    return value


_OPTIONS = (
    click.option("--capability", "-c", "capabilities", multiple=True, metavar="NAME",
                 help="What it can do; may be repeated."),
    click.option("--type", "-t", "agent_type", metavar="TYPE", help="The agent's type."),
    click.option("--id", "agent_id", metavar="TYPE/INSTANCE", help="Exactly this agent."),
    click.option("--label", "-l", "labels", multiple=True, metavar="KEY=VALUE",
                 help="A label it must have; may be repeated."),
    click.option("--version", "version", metavar="RANGE", help="Its version, or a range such as '>=2.1,<3'."),
    click.option("--policy", type=click.Choice(POLICIES, case_sensitive=False), help="How to choose among several."),
    click.option("--session", metavar="ID", callback=_not_empty,
                 help="The conversation it belongs to: it stays with one instance."),
    click.option("--env", metavar="NAME", default="", help="The environment.  [default: production]"),
)  # fmt: skip


def target(function: F) -> F:
    """The options that name a target."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def labels_of(pairs: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE pairs as a mapping; a usage error for anything else."""
    labels: dict[str, str] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        labels[key] = value
    return labels


def require_target(
    agent_id: str | None,
    agent_type: str | None,
    capabilities: Sequence[str],
    labels: Sequence[str],
    version: str | None,
) -> None:
    """A usage error if nothing, or two kinds of target, were named."""
    selector = agent_type or capabilities or labels or version
    if agent_id and selector:
        raise click.UsageError("--id names one agent: leave out --type, --capability, --label and --version")
    if not agent_id and not selector:
        raise click.UsageError(
            "say whom to reach: --capability NAME, --type TYPE, --label KEY=VALUE or --id TYPE/INSTANCE"
        )


def target_message(
    agent_id: str | None,
    agent_type: str | None,
    capabilities: Sequence[str],
    labels: Sequence[str],
    version: str | None,
    policy: str | None,
) -> Target:
    """The options as the contract's Target."""
    from agentreach.v1.envelope_pb2 import RoutingPolicy, Target

    message = Target(
        agent_id=agent_id or "",
        agent_type=agent_type or "",
        capabilities=capabilities,
        labels=labels_of(labels),
        version=version or "",
    )
    if policy:
        message.policy = RoutingPolicy.Value(policy.upper())
    return message
