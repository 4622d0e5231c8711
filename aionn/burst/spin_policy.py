"""How long an end of a burst may stay awake before it sleeps. The rule and its numbers are in this one place.

Waking a sleeping peer costs tens of microseconds where idle CPUs halt. That is more than most of a short exchange. So an end that
expects its peer soon looks again for a while before it arms the event flag. Four conditions must hold.
    The burst is open, and its preference is not LOW_POWER.
    There is more than one CPU to spend (machine and cgroup quota), and the peer was last seen on another CPU than this one.
        Processes that are all confined to one CPU see each other there, so they never stay awake.
    Recent waits were shorter than the window. Their moving average decides, and one wait in `PROBE_EVERY` is watched regardless.
        A watched wait takes the peer's own pace. A slept one also contains the two wake-ups that sleeping costs. So a probe that
        succeeds counts for all the slept waits before it.
    In a driver, no other burst of the process has been served for `COMPANY_NS`, because an end that looks delays the others.

With several requests in flight, the wait of the last one answered counts when the app's end looks, because it was sent last.

An app that copies a large input knows better than any average that a request is about to come. So while little is left to copy, the
app sets `SOON` in the request queue's event flag, if the driver sleeps. A driver that may stay awake, and has no company, then wakes
and looks for one window. Such a look does not count as a wait in the rule above, because it says nothing about the next one.

The app's end never holds its loop for longer than `INLINE_NS` at a time. After that it looks once per loop iteration. It holds the
loop only while no other caller of the burst waits, so that several callers fill the queue before any of them looks.
"""

from __future__ import annotations

import os
from pathlib import Path

APP_WINDOW_NS = 300_000
"""The app looks for this long, once per iteration of its loop. A small model's run time plus the exchange must fit well. Otherwise the
average stays near the window, and both ends fall asleep for good. Measured with Silero over a burst (2 vCPUs, 2026-11): 127 us per frame
with 300 us here and 100 us in the driver, 256 with 150 and 100, 290 with 150 and 50. With its state in the driver: 207, 417, 490 us."""

DRIVER_WINDOW_NS = 100_000
"""The driver looks for this long after its last answer, because an app in Python needs that time until its next request."""

INLINE_NS = 20_000
"""The app's loop is held for at most this long."""

YIELD_NS = 100_000
"""A caller whose answers come at once lets the app's loop run after this long. A busy listener does the same in the driver."""

COMPANY_NS = 1_000_000
"""A burst that has been served this lately counts as company for the others of its driver."""

SOON = 0x4
"""Bit of the request queue's event flag: a request will come soon. A driver's wake-up takes 40 to 70 us here, a copy of 1 MB 20 to 70."""

PROBE_EVERY = 64
"""While the average says sleep, one wait in so many is watched for twice the window."""

_WEIGHT = 0.125


def usable_cpus() -> int:
    """Return the CPUs that this process and its peers may spend: the machine's, cut by a cgroup quota (rounded down, at least 1).

    The affinity does not count, because an app and a driver that are pinned to one CPU each have two. Peers on the same CPU are
    recognised by the CPU on which each was last seen.
    """
    cpus = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus
    return cpus


class SpinPolicy:
    """The rule for one end of one burst. The app's end follows it in C (aionn/fmq/spin.h).

    Attributes:
        brisk: recent waits were shorter than the window, so the next one is watched: `budget_ns` is `window_ns`.

    Invariant: with `allowed` False every budget is 0.
    """

    __slots__ = ("_average_ns", "_waits", "allowed", "brisk", "window_ns")

    def __init__(self, window_ns: int, *, low_power: bool, cpus: int | None = None) -> None:
        self.allowed = not low_power and (usable_cpus() if cpus is None else cpus) > 1
        self.window_ns = window_ns
        self._average_ns = 0.0
        self._waits = 0
        self.brisk = self.allowed

    def budget_ns(self) -> int:
        """Return how long to look before arming, for a wait that begins now and a peer on another CPU."""
        if self.brisk:
            return self.window_ns
        if not self.allowed:
            return 0
        self._waits += 1
        return 2 * self.window_ns if self._waits % PROBE_EVERY == 0 else 0

    def waited(self, nanoseconds: int, *, slept: bool) -> None:
        """Note how long a wait took, and whether this end slept in it."""
        average = self._average_ns
        if not slept and nanoseconds <= self.window_ns < average:
            average = float(self.window_ns)
        # One long pause (the app was elsewhere, the peer was preempted) must not end a brisk stream's wakefulness.
        self._average_ns = average + _WEIGHT * (min(nanoseconds, 4 * self.window_ns) - average)
        self.brisk = self.allowed and self._average_ns <= self.window_ns

    def watched(self, waits: int, mean_ns: float) -> None:
        """Note several watched waits within the window. The effect is that of `waited` for each with the mean time."""
        average = min(self._average_ns, float(self.window_ns))
        self._average_ns = mean_ns + (1 - _WEIGHT) ** waits * (average - mean_ns)
        self.brisk = self.allowed
