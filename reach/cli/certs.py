"""`reach certs`: certificates for trying TLS."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reach.cli.ending import Ended, Exit

if TYPE_CHECKING:
    from reach.adapters.dev_certificates import Authority, Issued

F = TypeVar("F", bound=Callable[..., Any])

_LOCAL = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_DOMAIN = re.compile(r"[a-z0-9._-]{1,200}")
_TAKEN = frozenset({"ca", "node"})
_DAY_S = 86_400.0
_CA_DAYS = 3650


@click.group()
def certs() -> None:
    """Certificates for TLS."""


_OPTIONS = (
    click.option("--dir", "folder", required=True, metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
                 help="Where the files go; made if it is not there."),
    click.option("--host", "hosts", multiple=True, metavar="NAME_OR_IP",
                 help="A further name or address of the node; may be repeated. localhost, 127.0.0.1 and ::1 are in."),
    click.option("--client", "clients", multiple=True, metavar="NAME",
                 help="Make a client's certificate, with the SPIFFE id spiffe://DOMAIN/NAME; may be repeated."),
    click.option("--trust-domain", "domain", default="reach.local", show_default=True, metavar="DOMAIN",
                 help="The trust domain of the SPIFFE ids."),
    click.option("--days", type=click.FloatRange(0.0001, 825), default=90.0, show_default=True, metavar="N",
                 help="How long the certificates hold."),
    click.option("--force", is_flag=True, help="Make new ones in place of those that are there; the authority stays."),
)  # fmt: skip


def _options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@certs.command()
@_options
def dev(folder: Path, hosts: tuple[str, ...], clients: tuple[str, ...], domain: str, days: float, force: bool) -> None:
    """Make a certificate authority, a node's certificate and clients' certificates, for trying TLS.

    The authority's key lies beside them: whoever reads it can be anybody. In production take certificates from your
    own authority (cert-manager, SPIRE, Vault), with the same options of `reach serve`.

    \b
    Examples:
      reach certs dev --dir certs
      reach certs dev --dir certs --host reach-1.lan --client extractor --client planner
    """
    _check("--host", _HOST, hosts)
    _check("--client", _NAME, clients)
    _check("--trust-domain", _DOMAIN, (domain,))
    try:
        _make(folder, hosts, clients, domain, days * _DAY_S, force)
    except OSError as error:
        raise Ended(f"cannot write {error.filename or folder}: {error.strerror or error}", Exit.USAGE) from error
    _tell(folder, clients)


def _check(option: str, pattern: re.Pattern[str], names: tuple[str, ...]) -> None:
    for name in names:
        if not pattern.fullmatch(name) or (option == "--client" and name in _TAKEN):
            raise click.BadParameter(f"{name!r} is no name that can be used here", param_hint=option)


def _make(
    folder: Path, hosts: tuple[str, ...], clients: tuple[str, ...], domain: str, lasts_s: float, force: bool
) -> None:
    from reach.adapters.dev_certificates import Subject

    there = [name for name in clients if (folder / f"{name}.pem").exists()]
    if (folder / "node.pem").exists() and (hosts or not clients):
        there.append("node")
    if there and not force:
        raise Ended(f"{folder / there[0]}.pem is there already: --force makes a new one in its place", Exit.USAGE)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, now = _authority(folder), time.time()
    if force or not (folder / "node.pem").exists():
        subject = Subject((*_LOCAL, *hosts), (f"spiffe://{domain}/node",))
        _put(folder, "node", authority.issue("Agent-Reach node", subject, now, lasts_s))
    for name in clients:
        subject = Subject(uris=(f"spiffe://{domain}/{name}",), server=False)
        _put(folder, name, authority.issue(name, subject, now, lasts_s))
    if clients:
        _add_principals(folder / "principals.toml", clients, domain)


def _authority(folder: Path) -> Authority:
    from reach.adapters.dev_certificates import Authority, AuthorityUnusable

    cert, key = folder / "ca.pem", folder / "ca-key.pem"
    if cert.exists() or key.exists():
        try:
            return Authority.read(cert.read_bytes(), key.read_bytes())
        except (AuthorityUnusable, FileNotFoundError) as error:
            raise Ended(
                f"the authority in {folder} cannot sign: {error}; choose another directory", Exit.USAGE
            ) from error
    made = Authority.made("Agent-Reach development CA", time.time(), _CA_DAYS * _DAY_S)
    _put(folder, "ca", made.pem)
    return made


def _add_principals(path: Path, clients: tuple[str, ...], domain: str) -> None:
    """Entries as `reach serve --config` reads them. Those that are there stay as they are."""
    text = path.read_text() if path.exists() else "# Who comes with which certificate, and what they may do.\n"
    for name in clients:
        header = f'[principals."spiffe://{domain}/{name}"]'
        if header not in text:
            text += (
                f'\n{header}\nprincipal = "{name}"\nmay_register = ["{name}"]\n'
                'may_call = ["*"]\nmay_publish = ["*"]\nmay_subscribe = ["*"]\n'
            )
    _write(path, text.encode())


def _put(folder: Path, name: str, issued: Issued) -> None:
    _write(folder / f"{name}-key.pem", issued.key)
    _write(folder / f"{name}.pem", issued.cert)


def _write(path: Path, data: bytes) -> None:
    """In one step: whoever reads it meanwhile has the old or the new one. Nobody else may read it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)


def _tell(folder: Path, clients: tuple[str, ...]) -> None:
    node = f"--tls-cert {folder}/node.pem --tls-key {folder}/node-key.pem"
    click.echo(f"made in {folder}; its ca-key.pem signs for everybody: keep it from others, and out of production\n")
    if not clients:
        click.echo("a node that speaks TLS:")
        click.echo(f"  reach serve {node}")
        click.echo("whoever talks to it:")
        click.echo(f"  export REACH_CLIENT_TLS_CA={folder}/ca.pem")
        click.echo("  reach agents")
        return
    name = clients[0]
    click.echo("a node that lets in who shows a certificate:")
    click.echo(f"  reach serve --auth mtls {node} --tls-ca {folder}/ca.pem --config {folder}/principals.toml")
    click.echo(f"as {name}:")
    click.echo(f"  export REACH_CLIENT_TLS_CA={folder}/ca.pem")
    click.echo(f"  export REACH_CLIENT_TLS_CERT={folder}/{name}.pem REACH_CLIENT_TLS_KEY={folder}/{name}-key.pem")
    click.echo(f"  reach test-agent --type {name}")
    click.echo('  reach call --capability echo \'{"hello": "world"}\'')
