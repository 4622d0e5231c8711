"""When the system gives a driver process CPU time: like its app, in the background, or only when a CPU is idle.

`__main__` uses this module while the process has one thread. NumPy makes threads when it is imported. A thread keeps the schedule that the
process had when the thread was made.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

WHEN_IDLE = "idle"

_NICEST = 19
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3
_IOPRIO_CLASS_SHIFT = 13
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The kernel's number of ioprio_set by architecture, because glibc has no such function. Elsewhere the niceness alone decides."""


def schedule_of(arguments: Sequence[str]) -> str:
    """Return the argument SCHEDULE of a driver's command line, as `process.main` describes it."""
    return arguments[2] if len(arguments) > 2 else "0"


def is_schedule(word: str) -> bool:
    """Return whether that word is a SCHEDULE."""
    return word.isdigit() or word == WHEN_IDLE


def take_up(schedule: str) -> None:
    """Schedule this process so from now on. Threads made later inherit that. Ignores a word that is not a schedule."""
    if schedule == WHEN_IDLE:
        _run_when_idle()
    elif schedule.isdigit() and int(schedule):
        _stay_in_background(int(schedule))


def _run_when_idle() -> None:
    """Use only CPU time that no other process wants, on all CPUs.

    Under SCHED_IDLE, a process that wakes up never waits for this one. With the highest niceness it does.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _stay_in_background(cpus: int) -> None:
    """Use only little CPU and idle disk time, on `cpus` CPUs at most. Even beside a busy CPU the work comes to an end."""
    os.nice(_NICEST)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Take the last CPUs, because many programs take the first. An engine that counts its CPUs then counts these.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cpus:])
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << _IOPRIO_CLASS_SHIFT)
