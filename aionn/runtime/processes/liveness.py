"""Whether a driver process hangs or is busy, judged by its progress and never by a caller's deadline.

A driver hangs if one of these lasts for `hang_s`:

    a deadlock     it executes, finishes nothing, none of its threads is ready to run or waits for a disk, and it uses less
                   than 1 % of a CPU. Only for devices that are CPUs: an engine that waits for an accelerator uses none
    too long       one execution takes more than 20 times the 99th percentile of at least 100 executions of its model
    a dead loop    it does nothing, and its event loop does not write its heartbeat
    stopped        it starts, loads or compiles, and a signal (SIGSTOP) has stopped all of its threads

A first execution that computes, a load and a compile do not count as a hang, however long they run. A load or a compile that uses less
than 1 % of a CPU for COMPILE_STALL_S is reported in the same way, and never killed. The watch counts only time in which the watch
itself ran. So a stopped app or a suspended machine does not make a driver look hung. Time without CPU does not count either. A verdict
gives the time that the watch has counted, because a bug in the driver's engine may damage the page.

`Judge` and `StallJudge` decide without I/O, from what they are given. `Witness` looks at the process. `stacks_of` asks a driver that hangs
for its stacks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import anyio
import msgspec

from aionn.pages.layout import Activity, ShownExecution
from aionn.pages.page import BEAT_S, PageReader, start_time_of, until_beat_s

_LONGEST_TICK_S = 1.0
_TICKS = 5
"""How many looks at a driver's threads must agree before the driver counts as hung, where `hang_s` is short."""

COMPILE_STALL_S = 600.0
"""A load or a compile that uses no CPU for so long is reported as a hang."""

_CPU_SHARE = 0.01
_STARVED_SHARE = 0.1
"""A process that is ready to run and gets less than this share of a CPU waits for the CPU."""

_IDLE_STARVED_SHARE = 0.9
"""The same under SCHED_IDLE, where others may leave the process any share. Its usual times are those of an idle machine."""

_TIMES_USUAL = 20.0
_USUAL_QUANTILE = 0.99
_USUAL_RUNS = 100

_FIRST_STACK_S = 0.2
"""How long to wait for the first stack. A process that is stopped writes no stacks."""

_STACK_PAUSE_S = 0.05
"""Stacks that have not grown for this long are complete."""

_ALL_STACKS_S = 0.6


class Hang(msgspec.Struct, frozen=True):
    """A verdict.

    Attributes:
        waited_s: for how long the driver has made no progress.
        why: what was seen, as the rest of a sentence that begins with the device.
    """

    waited_s: float
    why: str


class Evidence(msgspec.Struct, frozen=True):
    """A process at one moment.

    Attributes:
        runnable: whether one of its threads runs, is ready to run, or waits for a disk.
        cpu_ns: CPU time that it has used since it began.
        stopped: whether a signal has stopped all of its threads.
    """

    runnable: bool
    cpu_ns: int
    stopped: bool = False


class Judge:
    """Decides whether one driver hangs.

    Args:
        hang_s: how long the driver may make no progress.
        cpu_decides: whether a driver that uses no CPU makes no progress. This is so if its device is a CPU.
        now_ns: by CLOCK_MONOTONIC.
        when_idle: whether the driver runs under SCHED_IDLE.
    """

    def __init__(self, hang_s: float, cpu_decides: bool, now_ns: int, when_idle: bool = False) -> None:
        self._hang_s = hang_s
        self._starved_share = _IDLE_STARVED_SHARE if when_idle else _STARVED_SHARE
        self._cpu_decides = cpu_decides
        self._tick_s = min(_LONGEST_TICK_S, hang_s / _TICKS)
        self._last_ns = now_ns
        self._last_cpu_ns: int | None = None
        self._ages: dict[ShownExecution, float] = {}
        self._stall: tuple[int, int] | None = None
        self._still_s = 0.0
        self._still_cpu_ns = 0
        self._heartbeat_ns = 0
        self._beatless_s = 0.0

    @property
    def next_look_s(self) -> float:
        """The seconds after which to observe the driver again."""
        left_s = self._hang_s - self._still_s
        if self._stall is None or not self._cpu_decides or left_s <= 0:
            return self._tick_s
        return min(self._tick_s, max(0.002, left_s + 0.001))

    def observe(
        self, now_ns: int, activity: Activity, evidence: Callable[[], Evidence | None], usual_s: Callable[[int], float | None]
    ) -> Hang | None:
        """Note what the driver does now. Returns a verdict if the driver hangs.

        Args:
            evidence: looks at the process. Returns None if the process cannot be seen.
            usual_s: returns the time within which 99 % of a slot's executions end, or None if too few have ended.
        """
        counted_s = min((now_ns - self._last_ns) / 1e9, 2 * self._tick_s)
        self._last_ns = now_ns
        if not activity.executing:
            self._ages.clear()
            self._stall = None
            return self._without_heartbeat(now_ns, counted_s, activity, evidence)
        self._beatless_s = 0.0
        seen = evidence()
        hang = self._deadlocked(now_ns, counted_s, activity, seen) or self._too_long(now_ns, counted_s, activity, seen, usual_s)
        self._last_cpu_ns = None if seen is None else seen.cpu_ns
        return hang

    def _deadlocked(self, now_ns: int, counted_s: float, activity: Activity, seen: Evidence | None) -> Hang | None:
        began_ns = max(activity.since_ns, activity.ended_ns)
        if seen is None:
            self._stall = None
            return None
        if self._stall != (began_ns, activity.finished):
            self._stall = began_ns, activity.finished
            self._still_s, self._still_cpu_ns = min(counted_s, max(0.0, (now_ns - began_ns) / 1e9)), seen.cpu_ns
        else:
            self._still_s += counted_s
        if seen.runnable or (seen.cpu_ns - self._still_cpu_ns) / 1e9 >= _CPU_SHARE * self._hang_s:
            self._still_s, self._still_cpu_ns = 0.0, seen.cpu_ns
        if not self._cpu_decides or self._still_s < self._hang_s:
            return None
        return Hang(self._still_s, f"has finished nothing and used no CPU for {self._still_s:.1f} s of an execution")

    def _too_long(
        self, now_ns: int, counted_s: float, activity: Activity, seen: Evidence | None, usual_s: Callable[[int], float | None]
    ) -> Hang | None:
        starved = seen is None
        if seen is not None and seen.runnable:
            used_s = 0.0 if self._last_cpu_ns is None else (seen.cpu_ns - self._last_cpu_ns) / 1e9
            starved = used_s < self._starved_share * counted_s
        ages = {}
        for execution in activity.executing:
            passed_s = min(counted_s, max(0.0, (now_ns - execution.since_ns) / 1e9))
            age_s = ages[execution] = self._ages.get(execution, 0.0) + (0.0 if starved else passed_s)
            if age_s <= self._hang_s:
                continue
            usual = usual_s(execution.slot)
            if usual is not None and age_s > _TIMES_USUAL * usual:
                self._ages = ages
                return Hang(age_s, f"executes one request for {age_s:.1f} s, where nearly all take at most {usual:.3g} s")
        self._ages = ages
        return None

    def _without_heartbeat(self, now_ns: int, counted_s: float, activity: Activity, evidence: Callable[[], Evidence | None]) -> Hang | None:
        if activity.heartbeat_ns != self._heartbeat_ns:
            self._heartbeat_ns, self._beatless_s = activity.heartbeat_ns, 0.0
            return None
        seen = evidence()
        if seen is None or seen.runnable or not (seen.stopped or activity.state == "idle"):
            self._beatless_s = 0.0
            return None
        self._beatless_s += counted_s
        if self._beatless_s <= self._hang_s + 2 * BEAT_S:
            return None
        waited_s = self._beatless_s
        if seen.stopped:
            return Hang(waited_s, f"was stopped by a signal, and has not gone on for {waited_s:.1f} s")
        return Hang(waited_s, f"executes nothing, and its event loop has stood still for {waited_s:.1f} s")


class StallJudge:
    """Decides whether a driver that loads or compiles has stopped working: it used no CPU for `COMPILE_STALL_S`, in the same act."""

    def __init__(self, now_ns: int) -> None:
        self._last_ns = now_ns
        self._act: tuple[str, int] = "idle", 0
        self._still_s = 0.0
        self._still_cpu_ns = 0

    def observe(self, now_ns: int, activity: Activity, evidence: Callable[[], Evidence | None]) -> Hang | None:
        """Note what the driver does now. Returns a verdict if it has stopped working. `evidence`: as for `Judge.observe`."""
        counted_s = min((now_ns - self._last_ns) / 1e9, 2 * _LONGEST_TICK_S)
        self._last_ns = now_ns
        act, self._act = self._act, (activity.state, activity.since_ns)
        if activity.state not in ("loading", "compiling") or (seen := evidence()) is None:
            self._act = "idle", 0
            return None
        used_s = (seen.cpu_ns - self._still_cpu_ns) / 1e9
        if act != self._act or seen.runnable or used_s >= _CPU_SHARE * COMPILE_STALL_S:
            self._still_s, self._still_cpu_ns = 0.0, seen.cpu_ns
            return None
        self._still_s += counted_s
        if self._still_s < COMPILE_STALL_S:
            return None
        return Hang(self._still_s, f"has used no CPU for {self._still_s:.0f} s of {activity.state} a model")


class Witness:
    """Looks at a process through /proc. The process must not be reaped meanwhile, or another process may get its number."""

    def __init__(self, pid: int, start_time: int) -> None:
        self._pid = pid
        self._start_time = start_time

    def look(self) -> Evidence | None:
        """Return the state of the process, or None if the process cannot be seen from here."""
        try:
            if start_time_of(self._pid) != self._start_time:
                return None
            states = set()
            for thread in os.listdir(f"/proc/{self._pid}/task"):
                try:
                    with open(f"/proc/{self._pid}/task/{thread}/stat", "rb") as file:
                        states.add(file.read().rpartition(b")")[2].split()[0])
                except FileNotFoundError:
                    continue  # this thread has ended meanwhile
            # The kernel's clock of another process's CPU time (clock_getcpuclockid). /proc counts in steps of 10 ms.
            return Evidence(not states.isdisjoint((b"R", b"D")), time.clock_gettime_ns((~self._pid << 3) | 2), states == {b"T"})
        except (OSError, IndexError, ValueError):
            return None


def waiting_cpu_ns(pid: int) -> int:
    """Return the CPU time of a process that is ready to run, or waits for a disk. Returns 0 for any other, and if it cannot be seen."""
    try:
        seen = Witness(pid, start_time_of(pid)).look()
    except OSError:
        return 0
    return seen.cpu_ns if seen is not None and seen.runnable else 0


async def watch(
    page: PageReader,
    judge: Judge,
    ended: anyio.Event,
    ask: Callable[[], None] | None,
    hangs: Callable[[Hang, str], None],
    note: Callable[[Hang | None], None],
) -> None:
    """Watch a driver until it has `ended` or is killed for hanging.

    Args:
        ask: sends the signal that the driver answers by its stacks. None if the driver cannot be asked.
        hangs: called with the verdict and the stacks when the driver hangs. It may kill the driver.
        note: takes the hang, as soon as it is found, and None once the driver has gone on.
    """
    witness, stalls = Witness(page.pid, page.start_time), StallJudge(time.monotonic_ns())
    reported: tuple[ShownExecution, ...] | int | None = None
    while not await _set_within(ended, until_beat_s() if (look_s := judge.next_look_s) == BEAT_S else look_s):
        activity, now_ns = page.read(), time.monotonic_ns()
        # A driver that stood still while it did nothing has gone on when its heart beats again.
        doing = activity.executing or activity.heartbeat_ns
        if reported is not None and doing == reported:
            continue
        reported = None
        hang = judge.observe(now_ns, activity, witness.look, lambda slot: page.usual_s(slot, _USUAL_QUANTILE, _USUAL_RUNS))
        note(hang or stalls.observe(now_ns, activity, witness.look))
        if hang is None:
            continue
        stack = "" if ask is None else await stacks_of(page, ask)
        if ended.is_set():
            return
        if (now := page.read()).executing != activity.executing or now.finished != activity.finished:
            note(None)
            continue  # it has gone on meanwhile
        hangs(hang, stack)
        reported = doing


async def watch_start(pid: int, judge: Judge, started: anyio.Event) -> Hang | None:
    """Watch a driver that has no page yet. Returns a hang if it is stopped, or None once it has `started` or ended."""
    try:
        witness = Witness(pid, start_time_of(pid))
    except OSError:  # it has ended, or there is no /proc
        await started.wait()
        return None
    starting = Activity("loading", 0, (), 0, 0, 0)
    while not await _set_within(started, judge.next_look_s):
        hang = judge.observe(time.monotonic_ns(), starting, witness.look, lambda slot: None)
        if hang is not None:
            return hang
    return None


async def _set_within(event: anyio.Event, seconds: float) -> bool:
    with anyio.move_on_after(seconds):
        await event.wait()
    return event.is_set()


async def stacks_of(page: PageReader, ask: Callable[[], None]) -> str:
    """Return the stacks of all threads of a driver; empty if it writes none, as a stopped process does.

    Args:
        ask: sends the driver the signal that it answers by its stacks.
    """
    try:
        return await _stacks_of(page, ask)
    except OSError:
        return ""  # the driver has ended meanwhile, and its page has been closed


async def _stacks_of(page: PageReader, ask: Callable[[], None]) -> str:
    page.clear_stacks()
    ask()
    began = anyio.current_time()
    written, grown = 0, began
    while True:
        await anyio.sleep(0.01)
        now = anyio.current_time()
        if (more := page.stack_bytes()) != written:
            written, grown = more, now
        elif now - grown >= _STACK_PAUSE_S if written else now - began >= _FIRST_STACK_S:
            break
        if now - began >= _ALL_STACKS_S:
            break
    return page.stacks()
