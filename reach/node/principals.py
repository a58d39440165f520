"""The table `principals` of the configuration: whose a certificate is, and what they may do. Read strictly.

[principals."spiffe://acme.org/ns/prod/extractor"]
principal = "extractor"
may_register = ["extractor"]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from reach.core.access import Patterns, Rights, pattern_fault
from reach.core.certificates import Named, name_fault
from reach.core.ports import OWNERS_TENANT

PRINCIPALS_MAX = 10_000
_LISTS = ("envs", "may_register", "may_call", "may_publish", "may_subscribe")
_TEXTS = ("principal", "tenant")
_SWITCHES = ("admin", "scrape", "node")
_FIELDS = (*_TEXTS, *_LISTS, *_SWITCHES)
_PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_ENV = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def named(table: Mapping[str, Any], *, needed: bool = False) -> tuple[Named, ...]:
    """The entries; `needed`: at least one. Raises `ValueError` in one line that names the entry and what is wrong."""
    if needed and not table:
        raise ValueError(
            "auth is mtls and principals is empty: nobody could get in; say in a configuration file whom certificates "
            "stand for, as docs/howto/tls.md shows"
        )
    if len(table) > PRINCIPALS_MAX:
        raise ValueError(f"principals has {len(table)} entries; at most {PRINCIPALS_MAX} are allowed")
    return tuple(_entry(name, fields) for name, fields in table.items())


def _entry(name: str, fields: Any) -> Named:
    fault = name_fault(name)
    if fault:
        raise ValueError(f"principals: {fault}")
    where = f'principals."{name}"'
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where} is {fields!r}; allowed: a table with some of {', '.join(_FIELDS)}")
    for field, value in fields.items():
        _check(where, field, value)
    node = bool(fields.get("node"))
    if node and len(fields) > 1:
        raise ValueError(f"{where} is a node: it has no rights besides; leave out all but node = true")
    return Named(
        name,
        principal=fields.get("principal", ""),
        tenant="" if node else fields.get("tenant", OWNERS_TENANT),
        rights=Rights(
            envs=frozenset(fields.get("envs", ("*",))),
            register=Patterns(fields.get("may_register", ())),
            call=Patterns(fields.get("may_call", ())),
            publish=Patterns(fields.get("may_publish", ()), topics=True),
            subscribe=Patterns(fields.get("may_subscribe", ()), topics=True),
            admin=bool(fields.get("admin")),
            scrape=bool(fields.get("scrape")),
        ),
        node=node,
    )


def _check(where: str, field: str, value: Any) -> None:
    if field in _SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {field} is {value!r}; allowed: true or false")
    elif field in _TEXTS:
        if not isinstance(value, str) or not _PRINCIPAL.fullmatch(value):
            raise ValueError(f"{where}: {field} is {value!r}; allowed: letters, digits, '.', '_', '@', '-'")
    elif field in _LISTS:
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{where}: {field} is {value!r}; allowed: a list of texts")
        for each in value:
            _check_each(where, field, each)
    else:
        near = difflib.get_close_matches(str(field), _FIELDS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}"
        raise ValueError(f"{where}: unknown field {field}: {hint}")


def _check_each(where: str, field: str, text: str) -> None:
    if field == "envs":
        fault = "" if _ENV.fullmatch(text) else f"{text!r} is no env; allowed: a name, or * for all"
    else:
        fault = pattern_fault(text, topic=field in ("may_publish", "may_subscribe"))
    if fault:
        raise ValueError(f"{where}: {field}: {fault}")
