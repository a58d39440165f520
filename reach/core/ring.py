"""Which of the agents a key belongs to: consistent hashing, by uhashring.

The same key leads to the same agent in every process and after every restart, and when an agent joins or leaves only
its own share of the keys moves. The wrap is here for what was measured of uhashring (house.md, trap 16): text and
bytes of one id landed on different nodes, weights of 0 broke it on removal and fractions on adding, `range()` copies
the ring, and each change sorted it all again (0.3 s with 10,000 agents; here 40 insertions).

Bounded load: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from math import ceil
from struct import Struct
from typing import Any

from uhashring import HashRing
from uhashring.ring_meta import MetaRing

POINTS_PER_WEIGHT = 0.4  # 40 points for the default weight of 100: shares differ by ≈ 16 % (1/√40) from ideal
POINTS_MAX = 400  # of one agent: a weight of 10^9 must not fill the memory
WALK_MAX = 256  # distinct agents looked at before a walk gives up (balance.py then hashes over the few usable ones)
LOAD_BOUND = 1.25
_REBUILD_SHARE = 8  # more than this fraction (1/n) of the members at once: sorting anew is cheaper


def key_bytes(key: str | bytes) -> bytes:
    """One form for text and bytes of the same id. `UnicodeEncodeError` for text that no bytes can stand for."""
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")


def stable_hash(key: str | bytes) -> int:
    """64 bits of BLAKE2b: equal in every process, whatever its hash seed. Module level, so that rings pickle."""
    return int.from_bytes(blake2b(key_bytes(key), digest_size=8).digest(), "big")


def checked_weight(weight: object) -> int:
    """The weight, if it is a whole number ≥ 1; else `ValueError`. Drain is a status, not a weight of 0."""
    if isinstance(weight, bool) or not isinstance(weight, int) or weight < 1:
        raise ValueError(f"weight must be a whole number of 1 or more, not {weight!r}")
    return weight


def _points(weight: int) -> int:
    return min(POINTS_MAX, max(1, round(weight * POINTS_PER_WEIGHT)))


def _points_of(name: str, count: int) -> list[int]:
    """Where a member stands on the ring: eight points from each digest, so that a large ring is built sooner."""
    points: list[int] = []
    for block in range((count + 7) // 8):
        digest = blake2b(b"%s-%d" % (key_bytes(name), block), digest_size=64).digest()
        points.extend(_EIGHT_POINTS.unpack(digest))
    return points[:count]


_EIGHT_POINTS = Struct(">8Q")


class _Continuum(MetaRing):  # type: ignore[misc]  # uhashring carries no types
    """uhashring's ring, changed in place where few agents change."""

    _keys: list[int]
    _ring: dict[int, str]

    def _create_ring(self, nodes: Iterable[tuple[str, dict[str, Any]]]) -> None:
        nodes = list(nodes)
        in_place = len(nodes) * _REBUILD_SHARE <= len(self._nodes)
        for name, settings in nodes:
            self._forget_points(name, in_place)
            points = _points_of(name, settings["vnodes"] * settings["weight"])
            for point in points:
                if in_place and point not in self._ring:
                    insort(self._keys, point)
                self._ring[point] = name
            self._node_points[name] = points
            self._distribution[name] = len(points)
        if not in_place:
            self._keys = sorted(self._ring)

    def _remove_node(self, node_name: str) -> None:
        del self._nodes[node_name]
        self._forget_points(node_name, True)

    def _forget_points(self, name: str, in_place: bool) -> None:
        for point in self._node_points.pop(name, ()):
            if self._ring.get(point) == name:
                del self._ring[point]
                if in_place:
                    del self._keys[bisect_left(self._keys, point)]
        self._distribution.pop(name, None)


class Ring:
    """A ring of named members with weights. Not thread-safe: one event loop owns it."""

    __slots__ = ("_ring", "_weights", "version", "weight_total")

    def __init__(self, members: Mapping[str, int] | None = None) -> None:
        """Build it in one go (≈ 50 µs a member). `ValueError` for a weight that is no whole number ≥ 1."""
        self._weights = {name: checked_weight(weight) for name, weight in (members or {}).items()}
        self.weight_total = sum(self._weights.values())
        self.version = 0
        """Counts the changes."""
        self._ring = HashRing(hash_fn=stable_hash)
        self._ring.runtime = _Continuum(stable_hash)
        nodes = {name: {"weight": _points(weight), "vnodes": 1} for name, weight in self._weights.items()}
        if self._ring._configure_nodes(nodes):
            self._ring.runtime._create_ring(self._ring.nodes.items())

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def add(self, name: str, weight: int) -> None:
        """Add a member, or give it another weight. `ValueError` for a bad weight, before anything has changed."""
        checked = checked_weight(weight)
        self.weight_total += checked - self._weights.get(name, 0)
        self._weights[name] = checked
        self._ring.add_node(name, {"weight": _points(checked), "vnodes": 1})
        self.version += 1

    def remove(self, name: str) -> None:
        """Remove a member; one that is not there is ignored."""
        weight = self._weights.pop(name, 0)
        if weight:
            self.weight_total -= weight
            self._ring.remove_node(name)
            self.version += 1

    def pick(self, key: str | bytes) -> str | None:
        """The member that the key belongs to; None if the ring is empty."""
        name: str | None = self._ring.get_node(key)
        return name

    def walk(self, key: str | bytes, limit: int = WALK_MAX) -> Iterator[str]:
        """The members in the order in which they would take over the key, each once, at most `limit` of them."""
        continuum = self._ring.runtime
        points: list[int] = continuum._keys
        owners: dict[int, str] = continuum._ring
        if not points:
            return
        limit = min(limit, len(self._weights))
        start: int = self._ring.get_node_pos(key)
        seen: set[str] = set()
        for step in range(len(points)):
            position = start + step
            name = owners[points[position if position < len(points) else position - len(points)]]
            if name not in seen:
                yield name
                seen.add(name)
                if len(seen) >= limit:
                    return

    def pick_bounded(
        self,
        key: str | bytes,
        load: Callable[[str], int],
        total: int,
        bound: float = LOAD_BOUND,
        usable: Callable[[str], bool] = lambda name: True,
        weight_usable: int | None = None,
    ) -> str | None:
        """The first usable member from the key's place on whose load stays within `bound` times its fair share.

        `total` is the load of all together before this one, `weight_usable` the weight of the usable ones (all, if
        None). If each usable one looked at is over its bound: the first of them. None if there is no usable one.
        """
        weight_usable = weight_usable or self.weight_total
        first: str | None = None
        for name in self.walk(key):
            if not usable(name):
                continue
            if load(name) < ceil(bound * (total + 1) * self._weights[name] / weight_usable):
                return name
            if first is None:
                first = name
        return first
