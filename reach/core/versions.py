"""Does an agent's version satisfy what a target asks for? PEP 440, through `packaging`.

A target names one version or a range (`>=2.1,<3`). Where either side is not PEP 440 only equal text matches, so
`nightly-7` can be asked for by its name. Pre-releases are in a range only if the range itself names one, as pip does.
"""

from __future__ import annotations

from functools import lru_cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

_CACHED_MAX = 4096  # a caller can invent ranges without end; the cache must not grow with them


@lru_cache(maxsize=_CACHED_MAX)
def parsed_version(text: str) -> Version | None:
    """The PEP 440 version, or None if it is not one."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


@lru_cache(maxsize=_CACHED_MAX)
def parsed_range(text: str) -> SpecifierSet | None:
    """The PEP 440 range, or None if it is not one."""
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return None


@lru_cache(maxsize=_CACHED_MAX)
def version_matches(wanted: str, version: str) -> bool:
    """Whether an agent of `version` satisfies `wanted`. An empty `wanted` is satisfied by any version, even none."""
    if not wanted or wanted == version:
        return True
    actual = parsed_version(version)
    if actual is None:
        return False
    exact = parsed_version(wanted)
    if exact is not None:
        return exact == actual
    allowed = parsed_range(wanted)
    if allowed is None:
        return False
    return allowed.contains(actual, prereleases=bool(allowed.prereleases))
