"""How long an end of a burst may stay awake before it sleeps: the reasons and the windows. `spin_policy` in fmq/spin.h is the rule.

Waking a sleeping peer costs tens of microseconds where idle CPUs halt. That is more than most of a short exchange. So an end that
expects its peer soon looks again for a while before it arms the event flag. Five conditions must hold.
    The burst is open, and its preference is not LOW_POWER.
    There is more than one CPU to spend (machine and cgroup quota), and the peer was last seen on another CPU than this one.
        Processes that are all confined to one CPU see each other there, so they never stay awake.
    Recent waits were shorter than the window. Their moving average decides, and one wait in `SPIN_PROBE_EVERY` is watched regardless.
        A watched wait takes the peer's own pace. A slept one also contains the two wake-ups that sleeping costs. So a probe that
        succeeds counts for all the slept waits before it.
    In an app, at most four of its bursts take turns (`SPIN_FEW`). With 64 streams of Silero at 31 frames a second, looking for the answers
        of all took 160 us of the app's CPU time a frame, and the calls themselves 110 (2 vCPUs, 2026-11).
    In a driver, no other model of the process has been served for `COMPANY_NS`, because a lane that looks delays the others. At most
        one lane of a model looks, and it looks for the requests of all bursts of that model.

With several requests in flight, the wait of the last one answered counts when the app's end looks, because it was sent last.

An app that copies a large input knows better than any average that a request is about to come. So while little is left to copy, the
app sets `SOON` in the request queue's event flag, if the driver sleeps. A lane that may stay awake then wakes and looks for one
window. Such a look does not count as a wait in the rule above, because it says nothing about the next one.

The app's end never holds its loop for longer than `INLINE_NS` at a time. After that it looks once per loop iteration. It holds the
loop only while no other caller of the burst waits, so that several callers fill the queue before any of them looks.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache

from aionn.cgroups import cpu_quota

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


def cpus_for_both_ends() -> int:
    """Return the CPUs that this process and its peers may spend: the machine's, cut by a cgroup quota (rounded down, at least 1).

    The affinity does not count, because an app and a driver that are pinned to one CPU each have two. Peers on the same CPU are
    recognised by the CPU on which each was last seen. The quota is read at most once a second, because it changes seldom.
    """
    return _cpus(time.monotonic_ns() // 10**9)


@lru_cache(maxsize=1)
def _cpus(second: int) -> int:
    cpus, quota = os.cpu_count() or 1, cpu_quota()
    return cpus if quota is None else min(cpus, max(1, int(quota.cpus)))


def may_stay_awake(*, low_power: bool) -> bool:
    """Return whether an end of a burst may look for its peer at all, rather than sleep at once."""
    return not low_power and cpus_for_both_ends() > 1
