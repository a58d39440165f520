"""A node's configuration: defaults, then a TOML file, then REACH_… variables, then flags; checked as a whole.

Nothing is guessed at: an unknown setting is refused with the nearest known one, a bad value names the setting, where
it came from, what it was, and what is allowed.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import secrets
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentreach.v1.envelope_pb2 import RoutingPolicy
from agentreach.wire.redaction import STANDARD, names_of
from reach.node import quota_table
from reach.node.principals import named
from reach.node.settings import Config, Setting, Table, settings

__all__ = ["Config", "ConfigError", "Setting", "describe", "load", "loopback", "split_address"]

_OTHERS = frozenset({"REACH_URL", "REACH_API_KEY", "REACH_SIGNING_SECRET", "REACH_SOAK", "REACH_CONFIG"})
"""Of the SDK, of tests, and where the file is."""
_OTHERS_PREFIX = "REACH_CLIENT_"
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_WORDS = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("auto", "console", "json"),
    "auth": ("none", "keys", "mtls"),
    "keys": ("", "etcd"),
    "health_access": ("open", "closed"),
    "reflection_access": ("auto", "open", "closed"),
    "metrics_access": ("auto", "open", "closed"),
    "snapshots": ("auto", "memory", "directory", "etcd"),
}
_REDACTED = re.compile(r"[A-Za-z0-9._-]{3,64}")  # a shorter name would be the ending of everything
REDACTED_NAMES_MAX = 100
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line for the person who wrote it, without their secrets."""

    def __init__(self, text: str) -> None:
        super().__init__(STANDARD.text(text))


def describe() -> list[Setting]:
    """Every setting with its meaning, for the reference page and `reach check-config`."""
    return list(settings())


def load(
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Read all sources and check them. `environment` None: the process's own; flags that are None were not given."""
    environment = os.environ if environment is None else environment
    table = {setting.name: setting for setting in settings()}
    given: dict[str, Any] = {}
    file = file or environment.get("REACH_CONFIG") or None
    if file is not None:
        for name, value in _read_file(file).items():
            setting = _known(name, table, f"in {file}")
            given[name] = _checked(setting, value, f"in {file}")
    variables = {setting.variable: setting for setting in table.values()}
    for variable, text in sorted(environment.items()):
        if not variable.startswith("REACH_") or variable in _OTHERS or variable.startswith(_OTHERS_PREFIX):
            continue
        setting = _known(variable, variables, "in the environment")
        given[setting.name] = _checked(setting, _from_text(setting, text, variable), f"from {variable}")
    for name, value in (flags or {}).items():
        if value is None:
            continue
        setting = _known(name, table, "among the flags")
        if isinstance(value, str):
            value = _from_text(setting, value, setting.flag)
        given[name] = _checked(setting, value, f"from {setting.flag}")
    if given.get("registry_password_file"):
        if given.get("registry_password"):
            raise ConfigError("registry_password and registry_password_file are given: one of them is enough")
        given["registry_password"] = _password_of(given["registry_password_file"])
    if not given.get("node_id"):
        given["node_id"] = _default_node_id()
    config = Config(**given)
    _check_together(config)
    return config


def principals_in(file: str | Path) -> Mapping[str, Any]:
    """The table `principals` of a configuration file; `named` checks what it says. Raises `ConfigError`."""
    setting = next(each for each in settings() if each.name == "principals")
    table: Mapping[str, Any] = _checked(setting, _read_file(file).get(setting.name, {}), f"in {file}")
    return table


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT as host and port; `ValueError` if it is neither."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address goes into brackets: [::1]:7070")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host, int(port)


def loopback(address: str) -> bool:
    """True if only this machine reaches `address` (HOST:PORT)."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_file(file: str | Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _known(name: str, table: Mapping[str, Setting], where: str) -> Setting:
    found = table.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`reach check-config` lists them all"
    raise ConfigError(f"unknown setting {name} {where}: {hint}")


def _from_text(setting: Setting, text: str, source: str) -> Any:
    """A variable's or flag's text as the setting's kind; what does not fit is left for `_checked` to refuse."""
    text = text.strip()
    if setting.kind is Table:
        raise ConfigError(f"{setting.name} from {source}: it holds tables, which stand in a configuration file only")
    if setting.kind is bool:
        return True if text.lower() in _YES else False if text.lower() in _NO else text
    if setting.kind is dict:
        pairs = [part.strip() for part in text.split(",") if part.strip()]
        if any("=" not in pair for pair in pairs):
            raise ConfigError(f"{setting.name} from {source} is {text!r}; allowed: NAME=VALUE[,NAME=VALUE…]")
        return {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in pairs)}
    if setting.kind is str:
        return text
    try:
        return int(text) if setting.kind is int else float(text)
    except ValueError:
        return text


def _checked(setting: Setting, value: Any, where: str) -> Any:
    def refuse(allowed: str) -> ConfigError:
        shown = "(secret)" if setting.secret else repr(value)
        return ConfigError(f"{setting.name} {where} is {shown}; allowed: {allowed}")

    if setting.kind is bool:
        if not isinstance(value, bool):
            raise refuse(setting.allowed)
        return value
    if setting.kind is Table:
        if not isinstance(value, Mapping):
            raise refuse(setting.allowed)
        return MappingProxyType(dict(value))
    if setting.kind is dict:
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value.values()):
            raise refuse(setting.allowed)
        return MappingProxyType(dict(value))
    if setting.kind is str:
        if not isinstance(value, str) or not value.isprintable():
            raise refuse(setting.allowed)
        allowed_words = _WORDS.get(setting.name)
        if allowed_words is not None:
            value = value.lower()
            if value not in allowed_words:
                raise refuse(", ".join(allowed_words))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refuse(setting.allowed)
    if setting.kind is int and value != int(value):
        raise refuse(setting.allowed)
    if (setting.least is not None and value < setting.least) or (setting.most is not None and value > setting.most):
        raise refuse(setting.allowed)
    return setting.kind(value)


def _default_node_id() -> str:
    """Host names are not unique in containers and clones, hence the random part."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")[:40] or "node"
    return f"{host}-{secrets.token_hex(3)}"


def _check_together(config: Config) -> None:
    _check_addresses(config)
    _check_registry(config)
    _check_access(config)
    _check_snapshots(config)
    _check_redact(config)
    try:
        quota_table.check(config.quotas)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not _NODE_ID.fullmatch(config.node_id):
        raise ConfigError(
            f"node_id is {config.node_id!r}; allowed: 1 to 63 letters, digits, '.', '_', '-', the first no mark"
        )
    if config.heartbeat_interval_s > config.lease_ttl_s / 2:
        raise ConfigError(
            f"heartbeat_interval_s is {config.heartbeat_interval_s:g} and lease_ttl_s {config.lease_ttl_s:g}: "
            "at most half of lease_ttl_s is allowed, or one late report unregisters an agent"
        )
    if config.settle_min_s > config.resume_window_s:
        raise ConfigError(
            f"settle_min_s is {config.settle_min_s:g} and resume_window_s {config.resume_window_s:g}: "
            "a request cannot wait for a link longer than the link can come back"
        )
    for name, other in config.aliases.items():
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(other):
            raise ConfigError(f"aliases has {name!r} = {other!r}; allowed: names of letters, digits, '.', '_', '-'")
    policies = [name for name in RoutingPolicy.keys() if name != "ROUTING_POLICY_UNSPECIFIED"]  # noqa: SIM118
    for agent_type, policy in config.policies.items():
        if policy not in policies:
            near = difflib.get_close_matches(policy.upper(), policies, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"policies has {agent_type} = {policy!r}; allowed: {', '.join(policies)}{hint}")


def _check_addresses(config: Config) -> None:
    for name, address in (("listen", config.listen), ("http", config.http)):
        if name == "http" and not address:
            continue
        try:
            local = loopback(address)
        except ValueError as error:
            raise ConfigError(f"{name} is {address!r}: {error}, such as 127.0.0.1:7070") from error
        if not local and not config.insecure and (config.auth == "none" or not config.tls_cert):
            lacking = " and ".join(
                what for what, there in (("auth", config.auth != "none"), ("tls_cert", config.tls_cert)) if not there
            )
            raise ConfigError(
                f"{name} is {address}, which other machines reach, without {lacking}: see docs/howto/secure.md, "
                "listen on 127.0.0.1, or say --insecure (insecure = true) if everybody there may do anything"
            )
    if config.advertise:
        try:
            split_address(config.advertise)
        except ValueError as error:
            raise ConfigError(f"advertise is {config.advertise!r}: {error}, such as reach-1:7070") from error


def _check_registry(config: Config) -> None:
    files = ("registry_tls_ca", "registry_tls_cert", "registry_tls_key")
    if config.registry != "memory":
        tls = config.registry.startswith("etcds://") or any(getattr(config, name) for name in files)
        away = _members_away(config.registry)
        if away and not tls and not config.insecure:
            raise ConfigError(
                f"registry is {config.registry}, and {away} is another machine, without TLS: whoever is in between "
                "reads and writes all of it; give registry_tls_ca, or say --insecure (docs/howto/secure-etcd.md)"
            )
    if bool(config.registry_tls_cert) != bool(config.registry_tls_key):
        raise ConfigError("registry_tls_cert and registry_tls_key go together: give both or none")
    if bool(config.registry_user) != bool(config.registry_password):
        raise ConfigError(
            "registry_user and registry_password (or registry_password_file) go together: give both, or none where "
            "the certificate names the user"
        )
    for name in files:
        path = getattr(config, name)
        if path and (name, path) != ("registry_tls_ca", "system") and not os.access(path, os.R_OK):
            raise ConfigError(f"{name} is {path!r}, which cannot be read")


def _members_away(registry: str) -> str:
    """The first member of this etcd that is not on this machine; empty: all are. Refuses what is no address."""
    if "@" in registry:
        raise ConfigError(
            "registry holds a user or a password: they are settings of their own, registry_user and "
            "registry_password_file"
        )
    scheme, found, rest = registry.partition("://")
    if scheme not in ("etcd", "etcds") or not found:
        raise ConfigError(
            f"registry is {registry!r}; allowed: memory, or etcd://HOST:PORT[,HOST:PORT…] (etcds: by TLS)"
        )
    members = rest.split(",")
    for address in members:
        try:
            split_address(address)
        except ValueError as error:
            raise ConfigError(f"registry is {registry!r}: {address!r}: {error}, such as 127.0.0.1:2379") from error
    return next((address for address in members if not loopback(address)), "")


def _password_of(file: str) -> str:
    """The first line of a file, which holds one."""
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"registry_password_file is {file!r}, which cannot be read: {why}") from error
    if not lines or not lines[0].strip():
        raise ConfigError(f"registry_password_file is {file!r}, whose first line is empty: it shall be the password")
    return lines[0]


def _check_access(config: Config) -> None:
    """Nothing that was meant to close the node may silently leave it open."""
    if config.auth == "keys":
        if bool(config.keys_file) == bool(config.keys):
            raise ConfigError(
                "auth is keys: say where the keys are, by keys_file (made by `reach keys create`) or keys = etcd"
            )
        if config.keys == "etcd" and config.registry == "memory":
            raise ConfigError("keys is etcd and registry is memory: there is no etcd to keep them in")
    elif config.keys_file or config.keys:
        raise ConfigError(f"keys are given and auth is {config.auth}, which looks at none: say auth = keys")
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("tls_cert and tls_key go together: give both or none")
    if config.auth == "mtls" and not (config.tls_cert and config.tls_ca):
        raise ConfigError("auth is mtls: tls_cert, tls_key and tls_ca are needed")
    if config.tls_ca and not config.tls_cert:
        raise ConfigError("tls_ca is given without tls_cert and tls_key: without them there is no TLS")
    if config.tls_cert:
        _check_certificate(config)
    _check_principals(config)


def _check_certificate(config: Config) -> None:
    """Whoever only checks a configuration shall hear of a certificate that would not do."""
    from agentreach.aio.tls import TlsFiles
    from reach.adapters.certificates import CertificateUnusable, NodeCertificate  # 50 ms that only TLS costs

    try:
        NodeCertificate(TlsFiles(config.tls_ca, config.tls_cert, config.tls_key))
    except CertificateUnusable as error:
        raise ConfigError(str(error)) from error


def _check_principals(config: Config) -> None:
    try:
        named(config.principals, needed=config.auth == "mtls")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.principals and config.auth != "mtls":
        raise ConfigError(
            f"principals are given and auth is {config.auth}, which looks at no certificate: say auth = mtls"
        )


def _check_redact(config: Config) -> None:
    names = names_of(config.redact)
    if not names or len(names) > REDACTED_NAMES_MAX or not all(map(_REDACTED.fullmatch, names)):
        raise ConfigError(
            f"redact is {config.redact!r}; allowed: 1 to {REDACTED_NAMES_MAX} names, with commas, each of 3 to 64 "
            "letters, digits, '.', '_', '-'"
        )


def _check_snapshots(config: Config) -> None:
    etcd = config.registry != "memory"
    if config.snapshots == "directory" and not config.snapshots_dir:
        raise ConfigError("snapshots is directory: say which by snapshots_dir")
    if config.snapshots == "etcd" and not etcd:
        raise ConfigError(f"snapshots is etcd and registry is {config.registry}: there is no etcd to keep them in")
    if config.snapshots == "memory" and etcd:
        raise ConfigError(
            "snapshots is memory and the registry is etcd: no other node could read them; leave snapshots at auto"
        )
    if config.snapshots == "directory" and etcd and not config.snapshots_shared:
        raise ConfigError(
            "snapshots is directory and the registry is etcd: other nodes must see the same directory; if they do, say "
            "snapshots_shared = true, else leave snapshots at auto"
        )
