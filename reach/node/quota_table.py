"""The `quotas` of a configuration file: limits of some tenants that are other than everybody's.

[quotas.acme]
tenant_requests_per_s = 500
principal_links_max = 20
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from agentreach.wire.names import is_name
from reach.core.quotas import LIMITS

_NAMES = tuple(f"{whose}_{limit}" for whose in ("principal", "tenant") for limit in LIMITS)
_MOST = 1 << 40


def check(quotas: Mapping[str, Any]) -> None:
    """Raise `ValueError`, with one line for whoever wrote it, if a table names what is no limit."""
    for tenant, table in quotas.items():
        if not is_name(tenant):
            raise ValueError(
                f"quotas has {tenant!r}, which is no tenant's name; allowed: letters, digits, '.', '_', '-'"
            )
        if not isinstance(table, Mapping):
            raise ValueError(f"quotas.{tenant} is {table!r}; allowed: a table of limits, such as tenant_links_max = 10")
        for name, limit in table.items():
            if name not in _NAMES:
                near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(_NAMES)}"
                raise ValueError(f"quotas.{tenant} has {name}, which is no limit: {hint}")
            if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= _MOST:
                raise ValueError(f"quotas.{tenant}.{name} is {limit!r}; allowed: a whole number from 0 (no limit)")
