"""What drivers print reaches the app's stderr with control characters as escapes, and never holds up the app or the driver."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.driver.beginning import PATIENCE_S
from aionn.errors import DriverDiedError, again
from aionn.escapes import escaped
from aionn.runtime.processes.child import PIPE_BYTES, output_pipe
from aionn.runtime.processes.spawning import USUAL, Settings, Spawned
from aionn.testing import identity_model
from tests.leaks import driver_pids, leak_check, wait_for_end
from tests.runtime.printing_engine import BYTES, LAST_WORDS, NAME, Act, flood

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops, pytest.mark.usefixtures("surroundings")]

ONE_LOOP = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
"""For tests in which a thread of the driver waits for `PATIENCE_S`, and no loop of the app does anything meanwhile."""


def test_a_pipe_may_have_the_number_0_where_the_app_has_no_stdin() -> None:
    kept = os.dup(0)
    try:
        output, theirs = output_pipe()
        os.dup2(output._fd, 0, inheritable=False)
        os.close(output._fd)
        output._fd = 0
        os.write(theirs, b"words\n")
        os.close(theirs)
        output.end()
        assert output.last_lines == "words"
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_what_was_dropped_is_counted_where_the_system_refuses_a_read_that_does_not_wait(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", refused)
    output, theirs = output_pipe()
    os.eventfd_write(output.counter, 7)
    os.write(theirs, b"words\n")
    os.close(theirs)
    output.end()
    assert "7 bytes" in output.last_lines
    assert output.last_lines.endswith("words")


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


def x(act: Act) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full((1, 16), act, np.float32)}


async def acted(model: aionn.Model, act: Act) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(NAME,))
        await compilation.compute(x(act))


async def died(model: aionn.Model, act: Act) -> DriverDiedError:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(NAME,))
        try:
            await compilation.compute(x(act))
        except DriverDiedError as error:
            return again(error)  # without the frames of the call
    raise AssertionError("the driver lives")


SHOWN = escaped(BYTES.decode("utf-8", "backslashreplace")).encode()


async def test_lines_arrive_in_order_and_steer_no_terminal(model: aionn.Model, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    await acted(model, Act.PRINT)
    assert capfdbinary.readouterr() == (b"", SHOWN + b"to stdout\nto stderr\n")
    assert set(SHOWN) <= {*range(32, 127), *b"\t\n"}


def told(err: bytes) -> tuple[bytes, int]:
    """What was shown without the lines about lost output, and how many bytes these lines say are lost."""
    lines = re.compile(rb"\n\[aionn: the app did not read what this driver process prints; (\d+) bytes are lost\]\n")
    return lines.sub(b"", err), sum(map(int, lines.findall(err)))


async def test_nothing_of_a_flood_is_lost_while_the_loop_runs(model: aionn.Model, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A driver drops output after `PATIENCE_S` in which the loop does not read. So a busy machine may stop this test's loop for longer."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        before_s = time.monotonic()
        while True:
            await anyio.sleep(0.01)
            now_s = time.monotonic()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await acted(model, Act.FLOOD)
        tasks.cancel_scope.cancel()
    (err, lost), lines = told(capfdbinary.readouterr().err), b"".join(flood())
    assert lost == 0 or longest_s > PATIENCE_S / 2
    assert len(err) + lost == len(lines)
    assert err[-200:] == lines[-200:]
    assert lost or hash(err) == hash(lines)


@ONE_LOOP
async def test_a_loop_that_stands_still_does_not_hold_up_the_driver(model: aionn.Model, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    async with leak_check(), aionn.Runtime() as runtime, anyio.create_task_group() as tasks:
        compilation = await runtime.compile(model, devices=(NAME,))
        (pid,) = driver_pids()
        found: list[int | None] = []

        async def compute() -> None:
            with pytest.raises(DriverDiedError) as caught:
                await compilation.compute(x(Act.FLOOD_AND_EXIT))
            found.append(caught.value.exit_code)

        tasks.start_soon(compute)
        while not os.fstat(2).st_size:  # the flood has begun
            await anyio.lowlevel.checkpoint()
        assert wait_for_end(pid, 60)  # the loop stands still meanwhile
    assert found == [3]
    shown, lost = told(capfdbinary.readouterr().err)
    lines = b"".join(flood()) + LAST_WORDS.encode() + b"\n"
    assert lost > 0
    assert len(shown) + lost == len(lines)
    assert shown[-PIPE_BYTES // 8 :] == lines[-PIPE_BYTES // 8 :]  # the oldest is lost


@pytest.mark.parametrize(
    ("act", "exit_code", "words"),
    [
        (Act.TERMINATE, -signal.SIGABRT, ("terminate called without an active exception", "Python error: Aborted", "printing_engine.py")),
        (Act.CRASH, -signal.SIGSEGV, ("Fatal Python error: Segmentation fault", "printing_engine.py")),
        (Act.KILL, -signal.SIGKILL, (rf"{LAST_WORDS} \x1b[31m\x07",)),
        (Act.EXIT, 3, (LAST_WORDS,)),
    ],
    ids=["terminate", "crash", "kill", "exit"],
)
async def test_the_last_lines_of_a_driver_are_in_the_error_and_in_the_log(
    model: aionn.Model,
    act: Act,
    exit_code: int,
    words: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    error = await died(model, act)
    assert error.exit_code == exit_code
    for copy in (error, pickle.loads(pickle.dumps(error))):
        (note,) = copy.__notes__
        assert note.startswith("the last lines that the driver process printed:\n")
        assert all(word in note for word in words)
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert record.getMessage().startswith(f"{error} (process ")
    assert all(word in record.getMessage() for word in words)
    assert words[-1].split(" \\")[0] in capfd.readouterr().err


async def test_a_driver_holds_nothing_of_the_apps_terminal_or_log(model: aionn.Model, capfd: pytest.CaptureFixture[str]) -> None:
    app = os.stat(2).st_ino
    await acted(model, Act.DESCRIPTORS)
    found = json.loads(capfd.readouterr().err)
    assert found["0"][0] == "/dev/null"
    assert found["1"] == found["2"]
    assert found["1"][0].startswith("pipe:")
    assert app not in [inode for _, inode in found.values()]


@pytest.mark.own_process("forks of test_driver_output.py")
async def test_a_child_of_fork_does_not_hold_the_pipe_open(model: aionn.Model) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(NAME,))
        (pid,) = driver_pids()
        inode = os.stat(f"/proc/{pid}/fd/2").st_ino
        child = os.fork()
        if child == 0:
            os._exit(int(inode in open_inodes()))
        assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222
        assert inode in open_inodes()


def open_inodes() -> set[int]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found.add(os.fstat(int(fd)).st_ino)
    return found


async def test_a_driver_that_was_started_early_and_is_not_taken_over_leaves_nothing() -> None:
    async with leak_check():
        Spawned(NAME, "", USUAL, Settings()).end()


@contextmanager
def stderr_is(fd: int) -> Iterator[None]:
    before = os.dup(2)
    os.dup2(fd, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@ONE_LOOP
async def test_a_full_stderr_holds_up_neither_the_loop_nor_for_long_the_driver(model: aionn.Model) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filled = 0
    try:
        while True:
            filled += os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    try:
        with anyio.fail_after(60), stderr_is(writing):
            async with leak_check(), aionn.Runtime() as runtime:
                compilation = await runtime.compile(model, devices=(NAME,))
                await compilation.compute(x(Act.FLOOD))  # returns, although no byte of it can be written
                os.set_blocking(reading, False)
                read = b""
                while b"are lost]" not in read:
                    await anyio.wait_readable(reading)
                    read += os.read(reading, 1 << 20)
        assert read.startswith(bytes(filled))
    finally:
        os.close(reading)
        os.close(writing)


APP = """
import os, signal, sys
import numpy as np
import aionn
from aionn.testing import identity_model
from tests.runtime.printing_engine import NAME, Act
{before}

async def main():
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(NAME,))
        await compilation.compute({{"input": np.full((1, 16), Act.{act}, np.float32)}})
        {then}

aionn.run(main)
os._exit(42)
"""


def started(before: str = "", then: str = "pass", act: str = "PRINT", stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    code = textwrap.dedent(APP.format(before=before, then=then, act=act))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr)


def test_what_stands_in_the_place_of_a_closed_stderr_gets_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    app = started(before=f"os.close(2); assert os.open({str(other)!r}, os.O_RDWR | os.O_CREAT) == 2")
    assert app.communicate(timeout=60)[0] == b""
    assert app.returncode == 42
    assert other.read_bytes() == b""


def test_a_stderr_that_nobody_reads_does_not_end_an_app_that_dies_of_sigpipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    app = started(before="signal.signal(signal.SIGPIPE, signal.SIG_DFL)", stderr=writing)
    os.close(writing)
    app.communicate(timeout=60)
    assert app.returncode == 42


def test_the_drivers_of_a_killed_app_do_not_keep_its_stderr_open() -> None:
    """The app is killed once its loop has written what the driver printed. The answer of an execution may come before that."""
    app = started(then="print('at work', flush=True); await __import__('asyncio').sleep(3600)")
    assert app.stdout is not None
    assert app.stderr is not None
    assert app.stdout.readline() == b"at work\n"
    printed, found = SHOWN + b"to stdout\nto stderr\n", b""
    try:
        while len(found) < len(printed) and select.select([app.stderr], [], [], 30)[0] and (piece := os.read(app.stderr.fileno(), 4096)):
            found += piece
    finally:
        app.kill()
    assert app.communicate(timeout=30) == (b"", b"")
    assert (found, app.returncode) == (printed, -signal.SIGKILL)


def test_a_driver_that_takes_off_nonblock_cannot_make_the_loop_wait() -> None:
    """The flag belongs to the description of an eventfd, which app and driver share."""
    app = started(act="BLOCK")
    try:
        out, err = app.communicate(timeout=60)
    finally:
        app.kill()
    assert (out, err, app.returncode) == (b"", b"blocking\n", 42)


FULL_OF_PARTS_OF_PAGES = """
import os, select
from aionn.driver._valve import open_valve

reading, writing = os.pipe2(os.O_NONBLOCK)
counter = os.eventfd(0, os.EFD_NONBLOCK)
written = b""
try:
    while True:
        line = b"%2499d\\n" % len(written)  # only one goes into a page
        written += line[:os.write(writing, line)]
except BlockingIOError:
    pass
open_valve(os.dup(reading), writing, counter, 100)
lost = 0
while lost < len(written) // 4 * 3 or select.select([counter], [], [], 0.5)[0]:
    select.select([counter], [], [])
    lost += os.eventfd_read(counter)
left = os.read(reading, 1 << 20) if lost < len(written) else b""
print(len(written), lost, left == written[lost:])
"""


def test_a_full_pipe_whose_pages_are_not_full_keeps_the_newest_output() -> None:
    ran = subprocess.run([sys.executable, "-c", FULL_OF_PARTS_OF_PAGES], capture_output=True, text=True, timeout=60, check=True)
    written, lost, newest = ran.stdout.split()
    assert int(lost) == int(written) // 4 * 3
    assert newest == "True"
