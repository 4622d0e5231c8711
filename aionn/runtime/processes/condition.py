"""How the driver process of a device does, read from the process's statistics page without a message. Any thread may read."""

from __future__ import annotations

import time

from aionn.pages.layout import Activity
from aionn.runtime.health import DeviceHealth
from aionn.runtime.processes.process import DriverProcess
from aionn.runtime.processes.restarts import Restarts


def health_of(name: str, low_priority: bool, process: DriverProcess | None, restarts: Restarts) -> DeviceHealth | None:
    """Return how a device's driver process does. Returns None if no process runs, and none has died."""
    now_ns, deaths = time.monotonic_ns(), restarts.deaths
    if process is None:
        return DeviceHealth(name, low_priority, "starting", None, 0.0, deaths) if deaths else None
    life = process.life
    if not process.alive:
        ended_by = process.connection.ended_by
        seconds = _since(now_ns, life.ended_ns or now_ns)
        return DeviceHealth(name, low_priority, "ended", None, seconds, deaths, "" if ended_by is None else str(ended_by))
    activity, hang = _activity(process), life.hang
    if process.serving is None or activity is None:
        return DeviceHealth(name, low_priority, "starting", process.pid, _since(now_ns, life.started_ns), deaths)
    seconds = _since(now_ns, activity.since_ns or life.started_ns)
    if hang is not None:
        return DeviceHealth(name, low_priority, "hung", process.pid, max(seconds, hang.waited_s), deaths, hang.why)
    return DeviceHealth(name, low_priority, activity.state, process.pid, seconds, deaths)


def _activity(process: DriverProcess) -> Activity | None:
    try:
        return process.activity
    except ValueError:
        return None  # the loop's thread has unmapped the page of a driver that ended just now


def _since(now_ns: int, then_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9)
