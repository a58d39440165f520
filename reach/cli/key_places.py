"""Where a command about API keys looks for them: in a file, in a registry, or at a node."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from reach.cli import ending, targets
from reach.cli.ending import Ended, Exit

if TYPE_CHECKING:
    from agentreach.v1 import admin_pb2 as admin
    from reach.adapters.admin_client import AdminClient

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_OF_REGISTRY = (
    "registry_prefix", "registry_user", "registry_password", "registry_password_file", "registry_tls_ca",
    "registry_tls_cert", "registry_tls_key", "insecure",
)  # fmt: skip


class Desk(Protocol):
    """What can be done with keys, wherever they are."""

    async def create(self, request: admin.CreateKeyRequest) -> admin.CreateKeyReply: ...

    async def list(self) -> admin.ListKeysReply: ...

    async def revoke(self, key_id: str) -> None: ...

    async def rotate(self, request: admin.RotateKeyRequest) -> admin.RotateKeyReply: ...

    async def explain(self, request: admin.ExplainAccessRequest) -> admin.ExplainAccessReply: ...


class _AtNode:
    """A node's."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    async def create(self, request: admin.CreateKeyRequest) -> admin.CreateKeyReply:
        return await self._client.create_key(request)

    async def list(self) -> admin.ListKeysReply:
        return await self._client.list_keys()

    async def revoke(self, key_id: str) -> None:
        await self._client.revoke_key(key_id)

    async def rotate(self, request: admin.RotateKeyRequest) -> admin.RotateKeyReply:
        return await self._client.rotate_key(request)

    async def explain(self, request: admin.ExplainAccessRequest) -> admin.ExplainAccessReply:
        return await self._client.explain_access(request)


@dataclass(frozen=True, slots=True)
class Place:
    """One of the three."""

    keys_file: str | None
    registry: str | None
    url: str | None
    of_registry: dict[str, Any] = field(default_factory=dict)

    def run(self, work: Callable[[Desk], Coroutine[Any, Any, T]]) -> T:
        """What the work gives; what cannot be ends the command with one line."""
        from reach.core.keyring import KeyRefused, KeysUnusable
        from reach.core.store import StoreUnavailable

        async def there() -> T:
            async with self._desk() as desk:
                return await work(desk)

        try:
            return ending.run(there())
        except (KeyRefused, KeysUnusable) as error:
            raise Ended(str(error), Exit.USAGE) from error
        except StoreUnavailable as error:
            raise Ended(f"the registry {self.registry} cannot be used: {error}", Exit.NO_NODE) from error

    @asynccontextmanager
    async def _desk(self) -> AsyncIterator[Desk]:
        from reach.node.key_desk import StoreDesk

        if self.keys_file is not None:
            from reach.node.key_stores import FileOfKeys

            yield StoreDesk(FileOfKeys(self.keys_file))
        elif self.registry is not None:
            from reach.node.registry_access import make_store
            from reach.node.registry_keys import RegistryOfKeys

            store = await make_store(self._config())
            try:
                yield StoreDesk(RegistryOfKeys(store))
            finally:
                await store.close()
        else:
            async with targets.client(self.url) as client:
                yield _AtNode(client)

    def _config(self) -> Any:
        from reach.node.config import ConfigError, load

        try:
            return load(None, {}, {"registry": self.registry, **self.of_registry})
        except ConfigError as error:
            raise Ended(str(error), Exit.USAGE) from error


def _place(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """An empty place is a mistake (a variable that was not set), and not the node at `--url`."""
    if value is None:
        return None
    if not value.strip():
        raise click.BadParameter("it is empty", context, parameter)
    if parameter.name == "registry" and not value.startswith(("etcd://", "etcds://")):
        raise click.BadParameter(f"{value!r} keeps no keys; allowed: etcd://HOST:PORT[,HOST:PORT…]", context, parameter)
    return value


def tenant(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """An empty tenant that is given is a mistake, and not the tenant of those who run the mesh."""
    given = context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    if given and not value.strip():
        raise click.BadParameter("it is empty", context, parameter)
    return value


def place(function: F) -> Callable[..., Any]:
    """The options that say where the keys are; the function gets `where`, a `Place`. The innermost decorator."""

    @functools.wraps(function)
    def placed(**options: Any) -> Any:
        of_registry = {name: options.pop(name) for name in _OF_REGISTRY}
        keys_file, registry = options.pop("keys_file"), options.pop("registry")
        if keys_file and registry:
            raise click.UsageError("--keys-file and --registry are two places: name one of them")
        return function(where=Place(keys_file, registry, options.pop("url"), of_registry), **options)

    found: Callable[..., Any] = targets.url(placed)
    for option in reversed(_options()):
        found = option(found)
    return found


def _kind(name: str) -> dict[str, Any]:
    if name == "insecure":
        return {"is_flag": True, "flag_value": True}
    if name == "registry_password":
        return {"hidden": True, "callback": _not_typed}
    return {"metavar": "TEXT"}


def _not_typed(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """From the variable alone: what stands on a command line everybody on the machine can read."""
    if context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "--registry-password is no option, for others can read it there: give --registry-password-file, or set "
            "REACH_REGISTRY_PASSWORD"
        )
    return value


def _options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--keys-file", metavar="FILE", callback=_place, help="The keys are in this file."),
        click.option("--registry", metavar="etcd://HOST:PORT[,…]", callback=_place,
                     help="The keys are in this registry."),
        *(
            click.option(
                f"--{name.replace('_', '-')}", name, envvar=f"REACH_{name.upper()}", default=None,
                help="As for `reach serve`, with --registry.", **_kind(name),
            )
            for name in _OF_REGISTRY
        ),
    ]  # fmt: skip
