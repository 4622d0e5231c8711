"""Steers the fake engine from a test: `hang`, `crash`, `delay`, `fail`, `answer`. Waits for what the engine does.

Acts are "run", "compile", "export", "load", "supported" (the question what it can run) and "start". Each method adds to the earlier
orders, and `behave` cancels them all. A change forgets the events before it. So after `fake.hang()` and a call,
`await fake.heard("run")` waits for that call and not for an earlier one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import msgspec

from aionn.testing.answers import Answer, AnswerThread
from aionn.testing.fake_engine import EVENTS_SUFFIX, HOLD_SUFFIX, Behaviour, FakeEngine, lock_of


class FakeDevice:
    """A fake device for the body of a `with` block. Its driver processes must be started inside.

    Args:
        engine: `SecondFakeEngine` for a second device beside the first.

    Attributes:
        name: the device's name, for `devices=(fake_device.name,)`.
    """

    name = "aionn.testing.fake_engine:FakeEngine"

    def __init__(self, engine: type[FakeEngine] = FakeEngine) -> None:
        self.name = f"{engine.__module__}:{engine.__qualname__}"
        self._variable = engine.variable
        self._path = Path()
        self._pid = os.getpid()
        self._events_fd = -1
        self._heard = b""
        self._before: str | None = None
        self._behaviour = Behaviour()
        self._hold_fd = -1
        self._answers: AnswerThread | None = None
        self._seen = 0

    def __enter__(self) -> FakeDevice:
        self._path = Path(tempfile.mkdtemp(prefix="aionn-fake-"), f"{self.name}.json")  # `engines.needs.is_test_double`
        self._pid = os.getpid()
        self._hold_fd = os.open(f"{self._path}{HOLD_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write(Behaviour())
        os.mkfifo(f"{self._path}{EVENTS_SUFFIX}")
        # Read-write, so that the FIFO is never at its end while no engine has it open.
        self._events_fd = os.open(f"{self._path}{EVENTS_SUFFIX}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = os.environ.get(self._variable)
        os.environ[self._variable] = str(self._path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if os.getpid() != self._pid:
            return  # in a child of fork, where the directory and the drivers are the parent's
        if self._before is None:
            os.environ.pop(self._variable, None)
        else:
            os.environ[self._variable] = self._before
        self.behave()
        if self._answers is not None:
            self._answers.close()
        os.close(self._hold_fd)
        self._hold_fd = -1
        os.close(self._events_fd)
        self._events_fd = -1
        shutil.rmtree(self._path.parent)
        unseen = self.answer_errors()
        if unseen and error is None:
            raise AssertionError(
                f"answer() failed, and the test did not look at answer_errors(): {type(unseen[0]).__name__}: {unseen[0]}"
            ) from unseen[0]

    def _write(self, behaviour: Behaviour) -> None:
        behaviour = msgspec.structs.replace(behaviour, hold=self._behaviour.hold + 1)
        self._behaviour = behaviour
        self._clear_heard()
        fcntl.fcntl(self._hold_fd, fcntl.F_OFD_SETLK, lock_of(fcntl.F_WRLCK, behaviour.hold))
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(behaviour))
        os.replace(new, self._path)  # the engine reads the old or the new one, never half
        fcntl.fcntl(self._hold_fd, fcntl.F_OFD_SETLK, lock_of(fcntl.F_UNLCK, behaviour.hold - 1))  # an act that hangs reads the new one

    def _clear_heard(self) -> None:
        self._heard = b""
        while self._events_fd >= 0:
            try:
                os.read(self._events_fd, 65536)
            except BlockingIOError:
                return

    def tell(self, **changes: Any) -> None:
        """Change any field of `Behaviour`."""
        self._write(msgspec.structs.replace(self._behaviour, **changes))

    def behave(self) -> None:
        """Cancel all orders. An act that hangs goes on."""
        if self._answers is not None:
            self._answers.order(None)
        self._write(Behaviour())

    def hang(self, act: str = "run", *, with_gil: bool = False, after: int = 0) -> None:
        """Hang in that act until the next order.

        Args:
            act: the kind of act, as the module describes.
            with_gil: keep the GIL meanwhile, so that the whole driver stands still.
            after: so many acts of that kind succeed first in each driver process. The same holds for the methods below.
        """
        self.tell(hang=(*self._behaviour.hang, act), hang_with_gil=with_gil, after=self._after(act, after))

    def crash(self, act: str = "run", signal_number: int = signal.SIGKILL, *, after: int = 0) -> None:
        """Die in that act by that signal."""
        self.tell(crash=(*self._behaviour.crash, act), crash_signal=int(signal_number), after=self._after(act, after))

    def delay(self, seconds: float, act: str = "run", *, after: int = 0) -> None:
        """Take that much longer for the act."""
        self.tell(delay_s={**self._behaviour.delay_s, act: seconds}, after=self._after(act, after))

    def fail(self, message: str = "failed on demand", act: str = "run", *, after: int = 0) -> None:
        """Raise in that act."""
        self.tell(fail=(*self._behaviour.fail, act), fail_message=message, after=self._after(act, after))

    def answer(self, outputs: Answer | Sequence[Answer]) -> None:
        """Answer runs with these outputs, in place of the usual ones.

        Args:
            outputs: all outputs of the model by name, as arrays of the declared shapes and element types. Or a function that gets the
                inputs by name, read-only, and returns such a dict. It runs in a thread of this process, for one run at a time. Or a list
                of these, one for each run; the last one stays.

        What a function raises, and an answer that does not fit the model, ends the run with `ExecutionError` and its text. It also
        fails the test at the end, unless the test asks for `answer_errors`.

        Raises:
            CallerError: `outputs` is something else.

        Examples:
            >>> fake_device.answer({"boxes": np.zeros((1, 100, 4), np.float32)})
            >>> fake_device.answer(lambda inputs: {"y": inputs["x"] * 2})
        """
        if self._answers is None:
            self._answers = AnswerThread(self._path.parent)
        self._answers.order(outputs)
        self.tell(answer=True)

    def answer_errors(self) -> list[BaseException]:
        """Return what went wrong in answers since the last call, the oldest first."""
        errors = [] if self._answers is None else self._answers.errors[self._seen :]
        self._seen += len(errors)
        return errors

    def _after(self, act: str, after: int) -> dict[str, int]:
        return {**self._behaviour.after, act: after}

    async def heard(self, act: str) -> int:
        """Wait until the engine has begun that act since the last change. Return the driver's process id. Other acts are dropped."""
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                event, _, pid = line.decode().partition(" ")
                if event == act:
                    return int(pid)
                continue
            await anyio.wait_readable(self._events_fd)
            try:
                self._heard += os.read(self._events_fd, 4096)
            except BlockingIOError:
                continue
