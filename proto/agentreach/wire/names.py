"""The grammar of every name in the mesh (contract.md, "Identities"), and how names are compared.

A name is an ASCII letter or digit followed by at most 62 letters, digits, `.`, `_` or `-`. Agent types and
instances, capabilities, label keys, environments and node ids are names; topics may also hold `/`. Nothing here
knows which names exist.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

NAME_CHARS_MAX: Final = 63
TOPIC_CHARS_MAX: Final = 255
DEFAULT_ENV: Final = "production"
CALLER_TYPE: Final = "caller"  # agent type of callers' ids; nobody can register it

NAME_RULE: Final = "a letter or digit, then at most 62 of letters, digits, '.', '_' and '-'"
TOPIC_RULE: Final = "a letter or digit, then at most 254 of letters, digits, '.', '_', '-' and '/'"

_FIRST: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_REST: Final = "".join(sorted(_FIRST)) + "._-"
_TOPIC: Final = _REST + "/"
_CAPABILITIES_CACHED: Final = 4096


def is_name(text: str) -> bool:
    """True if `text` is a name. Case is free here; agent types must be lower case as well."""
    # strip() eats legal characters from both ends, so anything left begins and ends with an illegal one.
    return 0 < len(text) <= NAME_CHARS_MAX and text[0] in _FIRST and not text.strip(_REST)


def as_name(text: str) -> str:
    """A name for what need not be one, a principal that is a SPIFFE id for instance; two may get the same."""
    if is_name(text):
        return text
    letters = "".join(letter if letter in _REST else "-" for letter in text).strip("-._")
    return letters[-NAME_CHARS_MAX:].lstrip("-._") or "unnamed"


def is_topic(text: str) -> bool:
    """True if `text` can be a topic. Topics match exactly: `/` has no meaning to the mesh."""
    return 0 < len(text) <= TOPIC_CHARS_MAX and text[0] in _FIRST and not text.strip(_TOPIC)


def topic_fault(text: str) -> str | None:
    """Why `text` cannot be a topic, or None if it can."""
    return None if is_topic(text) else f"{shown(text)} is not a topic: {TOPIC_RULE}"


def agent_type_fault(text: str) -> str | None:
    """Why `text` cannot be an agent type, or None if it can. `caller` passes: it can be addressed."""
    if not is_name(text):
        return f"{shown(text)} is not a name: {NAME_RULE}"
    if text != text.lower():
        return f"{shown(text)} is not in lower case"
    return None


def agent_id_fault(agent_id: str) -> str | None:
    """Why `agent_id` is not of the form `agent_type/instance`, or None if it is."""
    agent_type, slash, instance = agent_id.partition("/")
    if not slash:
        return f"{shown(agent_id)} has no '/': an agent_id is agent_type/instance"
    fault = agent_type_fault(agent_type)
    if fault is not None:
        return f"agent type {fault}"
    if not is_name(instance):
        return f"instance {shown(instance)} is not a name: {NAME_RULE}"
    return None


def split_agent_id(agent_id: str) -> tuple[str, str]:
    """The agent type and the instance of an agent_id. Raises `ValueError` saying what is wrong with it."""
    fault = agent_id_fault(agent_id)
    if fault is not None:
        raise ValueError(fault)
    agent_type, _, instance = agent_id.partition("/")
    return agent_type, instance


def normalise_capability(text: str) -> str:
    """The form in which capabilities are compared: lower case, `-` is `_`."""
    if len(text) > NAME_CHARS_MAX:  # no legal one is so long: it must not sit in the cache
        return text.lower().replace("-", "_")
    return _normalised(text)


@lru_cache(maxsize=_CAPABILITIES_CACHED)
def _normalised(text: str) -> str:
    return text.lower().replace("-", "_")


def normalise_env(text: str) -> str:
    """The environment a message or agent belongs to: `production` if it names none."""
    return text or DEFAULT_ENV


def shown(text: str) -> str:
    """`text` quoted for an error message, cut to 80 characters."""
    return repr(text) if len(text) <= 80 else repr(text[:79]) + "…"
