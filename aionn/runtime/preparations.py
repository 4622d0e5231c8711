"""`Preparations`: which compilations are being prepared now, in which step, and since when.

The code that prepares a model has a `Progress` (`preparing.progress`), which enters the steps here. `expecting` is for an app that keeps
trying: a context variable connects its attempts, and tasks inherit the variable from the task that starts them.

Invariants
    Only the loop's thread changes a preparation or `under_way`. Any thread may read them: each number and each text is stored whole,
    and `list(under_way.values())` is one step.
    A step that is entered after the end of its preparation is seen by no reader.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

__all__ = [
    "ASKING",
    "ASKING_BACKEND",
    "COMPILING",
    "FAILED",
    "LOADING",
    "LOOKING",
    "READING",
    "STARTING",
    "WAITING",
    "Preparation",
    "Preparations",
]

STARTING = "starting the driver"
READING = "reading the model"
LOOKING = "looking into the cache"
LOADING = "loading from the cache"
ASKING = "asking what the device can run"
ASKING_BACKEND = "asking the compile backend"
COMPILING = "compiling"
WAITING = "waiting for another process that compiles it"
FAILED = "waiting after a failure"

Cause = Literal["first", "death", "idle"]

_current: ContextVar[Preparation | None] = ContextVar("aionn preparation", default=None)


class Preparation:
    """One compilation that is being prepared.

    Attributes:
        name: of the compilation. required: whether the runtime's health waits for it.
        cause: "first", or why it is prepared again: "death" of its driver, or "idle" time.
        device: where it is prepared. At first that of the first candidate.
        step: what is done now. While a compile backend is asked, the words that it reports.
        began_ns, step_ns: when the preparation and the step began (CLOCK_MONOTONIC).
        failure: why the last attempt failed, in words, and whether there will be another one. Else empty.
    """

    __slots__ = ("began_ns", "cause", "device", "expected", "failure", "name", "required", "step", "step_ns")

    def __init__(self, name: str, required: bool, device: str, cause: Cause, expected: bool = False) -> None:
        """`expected`: whether the app keeps it under way over several attempts."""
        self.name = name
        self.required = required
        self.cause = cause
        self.device = device
        self.step = STARTING
        self.began_ns = self.step_ns = time.monotonic_ns()
        self.failure = ""
        self.expected = expected

    def enter(self, step: str, device: str = "") -> None:
        """Note that a step begins. `device`: where, or empty for the same device."""
        if step != self.step or (device and device != self.device):
            self.step_ns = time.monotonic_ns()
        self.device = device or self.device
        self.step = step

    def failed(self, why: str) -> None:
        """Note that an attempt has failed."""
        self.failure = why
        self.enter(FAILED)


class Preparations:
    """The preparations of one runtime that are under way.

    Attributes:
        under_way: by number, the oldest first.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, Preparation] = {}
        self._numbers = itertools.count()

    @contextmanager
    def preparing(self, name: str, required: bool, device: str, cause: Cause = "first") -> Iterator[Preparation]:
        """Show a preparation during the body. In the body of `expecting` with the same name it is that one."""
        expected = _current.get()
        if expected is None or not expected.expected or expected.name != name:
            with self._shown(Preparation(name, required, device, cause)) as preparation:
                yield preparation
            return
        expected.failure, expected.device = "", device
        expected.enter(STARTING)
        yield expected

    @contextmanager
    def expecting(self, name: str, required: bool) -> Iterator[Preparation]:
        """Show during the body that the app will have this compilation, over all its attempts."""
        with self._shown(Preparation(name, required, "", "first", expected=True)) as preparation:
            yield preparation

    @contextmanager
    def _shown(self, preparation: Preparation) -> Iterator[Preparation]:
        number = next(self._numbers)
        self.under_way[number] = preparation
        before = _current.set(preparation)
        try:
            yield preparation
        finally:
            _current.reset(before)
            del self.under_way[number]
