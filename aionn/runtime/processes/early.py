"""Start driver processes early: when a runtime opens, before the app imports NumPy and what needs it.

The start of a driver takes longer than the imports of an app, so both go on at the same time. This module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aionn.engines.installed import BUILT_IN, home_of, installed_engines, not_installed
from aionn.errors import CallerError, DeviceUnavailableError
from aionn.runtime.processes.spawning import USUAL, Settings, Spawned

EARLY_S = 10.0
"""A driver that was started early is ended when no compile has asked for it for so long."""

BY_DEFAULT = True
"""Whether `Runtime(start=None)` starts the first installed device early."""


def checked_start(start: Any) -> tuple[str, ...] | None:
    """Return the names that `Runtime(start=)` gives. None stands for the first installed device.

    Raises:
        CallerError: `start` is not a sequence of names of devices, or a device is not installed.
    """
    if start is None:
        return None if BY_DEFAULT else ()
    names = None if isinstance(start, str) or not isinstance(start, Sequence) else tuple(start)
    if names is None or not all(isinstance(name, str) and name and "\0" not in name for name in names):
        raise CallerError(
            f"start={start!r}: give a sequence of device names, as in ('onnxruntime',), () for none, or None for the first device"
        )
    for name in names:
        if name not in BUILT_IN and ":" not in name and name not in (installed := installed_engines()):
            raise CallerError(f"start={start!r}: {not_installed(name, sorted(installed))}")
    return tuple(dict.fromkeys(names))


def spawn_early(names: Sequence[str] | None, settings: Settings) -> dict[str, Spawned]:
    """Start the driver processes of devices, without waiting. `Devices.start_early` takes them over, or `end_early` ends them.

    A process that cannot be started is missing in the result. `Devices.start_early` tries again, and reports the reason.
    """
    spawned: dict[str, Spawned] = {}
    for name in next(iter(BUILT_IN)).split() if names is None else names:
        if settings.needs and ":" in name:
            continue  # needs are kept by the name that `Devices` makes of this one
        with suppress(DeviceUnavailableError):
            spawned[name] = Spawned(name, home_of(name), USUAL, settings)
    return spawned


def end_early(spawned: dict[str, Spawned]) -> None:
    """End the processes that were not taken over."""
    while spawned:
        spawned.popitem()[1].end()
