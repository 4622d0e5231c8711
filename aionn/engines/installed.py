"""Which engines are installed: the entry points of the group `aionn.engines`. Looking imports no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "aionn.engines"


def installed_engines() -> dict[str, EntryPoint]:
    """Return every installed engine's entry point by name. The first of a name wins."""
    from importlib.metadata import entry_points  # costs 10 ms; a driver that knows its engine's home never looks

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found
