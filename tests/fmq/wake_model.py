"""The wake protocol as the tasks of one loop use it (`waiting`), searched exhaustively: every interleaving, every delay of a store.

Two sides. The waker commits `MESSAGES` elements; the sleeper has `WAITERS` tasks, each of which needs one, in one loop.
Memory is TSO (x86): a store may sit in its core's buffer while later loads of that core are done. Each side has a FIFO
store buffer. It drains one entry at any moment (a step of its own), and at once at a fence, at an atomic exchange and at a
system call. Loads see the own buffer first. `test_weak_memory` searches the C code itself, under a weaker memory.

The steps, as in ring.h (one direction; the other is the same with the names swapped):

    waker    W1 counter := new       sleeper  S0 look; take what is there; done when each task has one
             W2 fence                         S1 armed := 1
             W3 load armed; if set,           S2 fence
                exchange(armed, 0)            S3 look again: something there -> exchange(armed, 0), S0
             W4 if it was set: eventfd+1      S4 sleep until eventfd > 0; eventfd := 0; S0

A hang is a state from which nothing can move though a task has not got its element: the sleeper sleeps at S4, the
eventfd is 0, and the waker has finished. `search` returns the first one found, with the way there, or None.

The faults that can be put back:
    waker_fence=False, sleeper_fence=False   without W2, without S2.
    rearms=False      5a: after a wake that finds nothing, straight back to S4. Such wakes exist: the waker loads an arming,
                      is delayed, and swaps a later one.
    settles=False     5b: a task that finds its element without sleeping disarms and leaves, though others still sleep.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

Buffer: TypeAlias = tuple[tuple[str, int], ...]


class State(NamedTuple):
    """Everything that matters, hashable. Shared words are what has left the store buffers."""

    written: int = 0
    armed: int = 0
    eventfd: int = 0
    waker_at: str = "W1"
    waker_made: int = 0  # commits begun, the waker's own counter
    waker_buffer: Buffer = ()
    sleeper_at: str = "S0"
    taken: int = 0
    left: int = 0  # waiting tasks that have not got theirs
    sleeper_buffer: Buffer = ()
    inline: int = 0  # tasks that still come and look by themselves (5b), without sleeping


@dataclass(frozen=True)
class Protocol:
    """The shipped protocol, or one with a fault put back."""

    messages: int = 3
    waiters: int = 2
    inline: int = 1
    waker_fence: bool = True
    sleeper_fence: bool = True
    rearms: bool = True
    settles: bool = True


def _load(word: str, memory: int, buffer: Buffer) -> int:
    return next((value for name, value in reversed(buffer) if name == word), memory)


def _waker_steps(p: Protocol, s: State) -> list[tuple[str, State]]:
    at, drained = s.waker_at, not s.waker_buffer
    if at == "W1":
        if s.waker_made == p.messages:
            return []
        made = s.waker_made + 1
        return [("W1 commit", s._replace(waker_made=made, waker_buffer=(*s.waker_buffer, ("written", made)), waker_at="W2"))]
    if at == "W2":
        return [("W2 fence", s._replace(waker_at="W3"))] if drained or not p.waker_fence else []
    if at == "W3":
        seen = _load("armed", s.armed, s.waker_buffer)
        return [(f"W3 armed is {seen}", s._replace(waker_at="W3x" if seen else "W1"))]
    if at == "W3x":  # an exchange is a full barrier: it waits for the buffer
        return [(f"W3 exchange gave {s.armed}", s._replace(armed=0, waker_at="W4" if s.armed else "W1"))] if drained else []
    return [("W4 eventfd", s._replace(eventfd=1, waker_at="W1"))]


def _sleeper_steps(p: Protocol, s: State) -> list[tuple[str, State]]:
    at, drained = s.sleeper_at, not s.sleeper_buffer
    there = s.written - s.taken  # the sleeper never stores `written`
    steps: list[tuple[str, State]] = []
    if at in ("S0", "S0woken"):
        served = min(there, s.left)
        after = s._replace(taken=s.taken + served, left=s.left - served)
        if not after.left:
            steps.append(("S0 all served", after._replace(sleeper_at="done")))
        elif at == "S0woken" and not served and not p.rearms:
            steps.append(("S0 nothing: sleeps again", after._replace(sleeper_at="S4")))
        else:
            steps.append((f"S0 takes {served}", after._replace(sleeper_at="S1")))
    elif at == "S1":
        steps.append(("S1 arms", s._replace(sleeper_buffer=(*s.sleeper_buffer, ("armed", 1)), sleeper_at="S2")))
    elif at == "S2":
        if drained or not p.sleeper_fence:
            steps.append(("S2 fence", s._replace(sleeper_at="S3")))
    elif at == "S3":
        steps.append((f"S3 looks: {there}", s._replace(sleeper_at="S3x" if there else "S4")))
    elif at == "S3x":
        if drained:
            steps.append(("S3 disarms", s._replace(armed=0, sleeper_at="S0")))
    elif at == "S4":
        if drained and s.eventfd:  # reading the eventfd is a system call
            steps.append(("S4 wakes", s._replace(eventfd=0, sleeper_at="S0woken")))
        if s.inline and drained and there:
            # Another task of the same loop runs while these sleep: it looks, takes its element and is done. Like the
            # loop itself it leaves through `_settle`: armed again, and looked at again, for those who still sleep.
            gone = s._replace(taken=s.taken + 1, inline=s.inline - 1, armed=0)
            steps.append(("inline take", gone._replace(sleeper_at="S1" if p.settles else "S4")))
    return steps


def _drains(s: State) -> list[tuple[str, State]]:
    steps: list[tuple[str, State]] = []
    if s.waker_buffer:
        (_, value), *rest = s.waker_buffer
        steps.append(("waker's store lands", s._replace(written=value, waker_buffer=tuple(rest))))
    if s.sleeper_buffer:
        (_, value), *rest = s.sleeper_buffer
        steps.append(("sleeper's store lands", s._replace(armed=value, sleeper_buffer=tuple(rest))))
    return steps


def search(p: Protocol) -> tuple[list[str] | None, int]:
    """The way to a hang, or None; and how many states were seen."""
    if p.messages < p.waiters + p.inline:
        raise ValueError("a sleeper that waits for more than is ever sent sleeps rightly")
    return explore(
        State(left=p.waiters, inline=p.inline),
        lambda s: _waker_steps(p, s) + _sleeper_steps(p, s) + _drains(s),
        lambda s: s.sleeper_at == "done",
    )


S = TypeVar("S", bound=NamedTuple)


def explore(start: S, steps_of: Callable[[S], list[tuple[str, S]]], served: Callable[[S], bool]) -> tuple[list[str] | None, int]:
    """The way to a state that has no step and is not `served`, or None; and how many states were seen."""
    came_from: dict[S, tuple[S, str] | None] = {start: None}
    stack = [start]
    gc.disable()  # states have no cycles, and a collection would visit all of them
    try:
        while stack:
            state = stack.pop()
            steps = steps_of(state)
            if not steps and not served(state):
                return _way_to(state, came_from), len(came_from)
            for name, following in steps:
                came = state, name
                if came_from.setdefault(following, came) is came:
                    stack.append(following)
        return None, len(came_from)
    finally:
        gc.enable()


def _way_to(state: S, came_from: dict[S, tuple[S, str] | None]) -> list[str]:
    way: list[str] = []
    while (step := came_from[state]) is not None:
        state, name = step
        way.append(name)
    return way[::-1]
