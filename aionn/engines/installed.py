"""Which engines are installed: the entry points of the group `aionn.engines`. Nothing is imported by looking."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "aionn.engines"


def installed_engines() -> dict[str, EntryPoint]:
    """Every installed engine's entry point by name; the first of a name wins."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found
