"""How long an end of a burst may stay awake before it sleeps: the rule and its numbers, in this one place.

Waking a sleeping peer costs tens of microseconds where idle CPUs halt, more than most of a short exchange. So an end that
expects its peer soon looks again for a while before it arms the event flag. It may do so only
    inside an open burst whose preference is not LOW_POWER,
    with more than one CPU to spend (machine and cgroup quota), and with the peer last seen on another CPU than this one;
        processes that are all confined to one CPU see each other there, so they never stay awake,
    while recent waits were shorter than the window: their moving average decides, and one wait in `PROBE_EVERY` is
        watched regardless. What a watched wait took is the peer's own pace; what a slept one took contains the two
        wake-ups that sleeping costs, so a probe that succeeds counts for all the slept waits before it,
    and, in a driver, while no other burst of the process has been served for `COMPANY_NS` (who looks holds up the others).

With several requests in flight the wait that counts is that of the last one answered when the app's end looks: it was sent last.

An app that copies a large input knows better than any average that a request is about to come: while little of it is left to
copy it sets `SOON` in the request queue's event flag, if the driver sleeps. A driver that may stay awake at all, and has no
company, wakes and looks for one window. Such a look is no wait of the rule above: it says nothing about the next one.

The app's end never holds its loop for longer than `INLINE_NS` at a time: past that it looks once per loop iteration. It
holds it at all only while no other caller of the burst waits, so that several callers fill the queue before anyone looks.
"""

from __future__ import annotations

import os
from pathlib import Path

APP_WINDOW_NS = 300_000
"""The app looks for this long, once per iteration of its loop: a small model's own run time plus the exchange must fit well, or the
average hovers about the window and both ends fall asleep for good. Silero over a burst, 2 vCPUs, 2026-11: 127 us per frame with 300 us
here and 100 us in the driver, 256 us with 150 and 100, 290 us with 150 and 50; with its state in the driver 207, 417 and 490 us."""

DRIVER_WINDOW_NS = 100_000
"""The driver looks for this long after its last answer: what an app in Python needs between an answer and its next request."""

INLINE_NS = 20_000
"""At most this long without letting the app's loop run."""

YIELD_NS = 100_000
"""A caller whose answers are always there lets the app's loop run after this long, and a busy listener the driver's."""

COMPANY_NS = 1_000_000
"""A burst that has been served this lately counts as company for the others of its driver."""

SOON = 0x4
"""Event flag bit of the request queue: a request is on its way. A driver's wake-up takes 40 to 70 us here, a copy of 1 MB 20 to 70."""

PROBE_EVERY = 64
"""While the average says sleep, every so manieth wait is watched for twice the window."""

_WEIGHT = 0.125


def usable_cpus() -> int:
    """CPUs that this process and its peers may spend: the machine's, cut by a cgroup quota (rounded down, at least 1).

    Not the affinity: an app pinned to one CPU beside a driver pinned to another has two. Peers on the same CPU are told
    by the CPU each was last seen on.
    """
    cpus = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus
    return cpus


class Awake:
    """The rule for one end of one burst.

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
        """How long to look before arming, for a wait that begins now and a peer on another CPU."""
        if self.brisk:
            return self.window_ns
        if not self.allowed:
            return 0
        self._waits += 1
        return 2 * self.window_ns if self._waits % PROBE_EVERY == 0 else 0

    def waited(self, nanoseconds: int, *, slept: bool) -> None:
        """Tell how long the wait took, and whether this end slept in it."""
        average = self._average_ns
        if not slept and nanoseconds <= self.window_ns < average:
            average = float(self.window_ns)
        # One long pause (the app was elsewhere, the peer was preempted) must not end a brisk stream's wakefulness.
        self._average_ns = average + _WEIGHT * (min(nanoseconds, 4 * self.window_ns) - average)
        self.brisk = self.allowed and self._average_ns <= self.window_ns

    def watched(self, waits: int, mean_ns: float) -> None:
        """Tell of several watched waits at once, each within the window: as `waited` for each, had each taken the mean."""
        average = min(self._average_ns, float(self.window_ns))
        self._average_ns = mean_ns + (1 - _WEIGHT) ** waits * (average - mean_ns)
        self.brisk = self.allowed


def apart(own_cpu: int | None, peer_cpu: int | None) -> bool:
    """Whether the peer was last seen on another CPU than this one. Not known: no."""
    return peer_cpu is not None and own_cpu != peer_cpu
