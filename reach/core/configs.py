"""The settings that operators give to agents: which an agent shall have, and who must be told.

`agents` is for all of them, `agents/<agent type>` for one type, whose settings win over those for all. Each has as its
version the store's revision at which it was written. To an agent that is a name, not an order: a store that was brought
back from a backup counts again from there. An agent whose heartbeat shows another version than its settings have is
told them again. What settings mean is the agent's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentreach.v1 import frame_pb2 as pb
from agentreach.v1.frame_pb2 import Signal
from agentreach.wire.errors import clean
from agentreach.wire.names import CALLER_TYPE, NAME_RULE, agent_type_fault, is_name, shown
from reach.core.requests import Attachment

if TYPE_CHECKING:
    from reach.core.state import State

ALL = "agents"
OF_TYPE = "agents/"
SETTINGS_MAX = 64
SETTINGS_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings and the version they have; 0: never set."""

    values: Mapping[str, str]
    version: int


_NONE = Settings({}, 0)


class Configs:
    """All that is set, by name."""

    def __init__(self) -> None:
        self.version = 0
        """The newest version there is."""
        self._by_name: dict[str, Settings] = {}
        self._merged: dict[str, Settings] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Settings:
        """What stands under a name."""
        return self._by_name.get(name, _NONE)

    def put(self, name: str, settings: Settings) -> bool:
        """Take in what the store has under a name. False if it is no newer than what is known."""
        if settings.version <= self.get(name).version:
            return False
        self._by_name[name] = settings
        self.version = max(self.version, settings.version)
        self._merged.clear()
        return True

    def drop(self, name: str) -> None:
        """Somebody deleted the key from the store by hand. Agents for whom nothing else is set keep what they have."""
        if self._by_name.pop(name, None) is not None:
            self._merged.clear()

    def of(self, agent_type: str) -> Settings:
        """What agents of a type shall have."""
        found = self._merged.get(agent_type)
        if found is None:
            everybody, own = self.get(ALL), self.get(OF_TYPE + agent_type)
            values = {**everybody.values, **own.values}
            found = self._merged[agent_type] = Settings(values, max(everybody.version, own.version))
        return found


def tell(state: State, attachment: Attachment) -> None:
    """Send an agent its settings if it has others. What nobody has set, or nobody has set any more, it may keep."""
    agent = attachment.agent
    settings = state.configs.of(agent.agent_type)
    if settings.version in (0, agent.config_version):
        return
    update = pb.ConfigUpdate(agent_id=agent.agent_id, config_version=settings.version, settings=settings.values)
    attachment.peer.link.signal(Signal(config_update=update))
    state.woken.add(attachment.peer)


def attached_here(state: State) -> list[Attachment]:
    """Everybody whom this node tells."""
    return [each for peer in state.peers.values() for each in peer.attachments.values()]


def name_fault(name: str) -> str | None:
    """Why there can be no settings of this name, or None."""
    agent_type = name.removeprefix(OF_TYPE)
    if name == ALL:
        return None
    if not name.startswith(OF_TYPE):
        return f"name: {shown(name)} is nothing to set; allowed are {ALL!r} and '{OF_TYPE}<agent type>'"
    why = agent_type_fault(agent_type)
    if why is None and agent_type == CALLER_TYPE:
        why = "callers have no settings"
    return f"name: after {OF_TYPE!r} comes an agent type; {why}" if why is not None else None


def fault(name: str, settings: Mapping[str, str]) -> str | None:
    """Why this cannot be set, naming the field; None if it can."""
    why = name_fault(name)
    if why is not None:
        return why
    if len(settings) > SETTINGS_MAX:
        return f"settings: {len(settings)} keys; the limit is {SETTINGS_MAX}"
    for key, value in settings.items():
        if not is_name(key):
            return f"settings: key {shown(key)} is not a name: {NAME_RULE}"
        if clean(value, len(value)) != value:
            return f"settings: the value of {key} has a line break or another control character"
    size = sum(len(key) + len(value.encode("utf-8", "surrogatepass")) for key, value in settings.items())
    if size > SETTINGS_BYTES_MAX:
        return f"settings: {size} bytes of keys and values; the limit is {SETTINGS_BYTES_MAX}"
    return None
