"""However an app ends, its drivers end with it: Ctrl-C, SIGTERM, SIGKILL, in mid-stream and in mid-compilation."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.apps import App
from tests.leaks import leak_check, processes_below, wait_for_end
from tests.reaper import PR_SET_CHILD_SUBREAPER

ROOT = Path(__file__).parent.parent.parent
GONE_WITHIN_S = 30.0


def shm_names(app: int) -> list[str]:
    """Return the app's folders of files that its drivers export. Apps of tests beside this one have folders there, too."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"aionn-exports-{app}-")]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("doing", ["stream", "compile"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_an_app_that_is_ended_leaves_no_driver(silero_path: Path, how: signal.Signals, doing: str, loop: str) -> None:
    with leak_check():
        app = App(
            [sys.executable, "-W", "error", "-m", "tests.journeys.streaming_app", str(silero_path), doing, loop],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert app.stdout is not None
        try:
            assert app.stdout.readline() == b"at work\n"
            drivers = [child.pid for child in psutil.Process(app.pid).children(recursive=True) if "aionn.driver" in child.cmdline()]
            assert drivers
            deadline = time.monotonic() + GONE_WITHIN_S
            app.send_signal(how)
            # One deadline for all: the app's own end is not given extra time.
            assert wait_for_end(app.pid, deadline - time.monotonic()), "the app is still there"
            for pid in drivers:
                assert wait_for_end(pid, deadline - time.monotonic()), f"driver {pid} is still there"
        finally:
            app.kill()
            _, complaints = app.communicate()
        if how is signal.SIGINT:
            assert app.returncode == -signal.SIGINT
            # Its own KeyboardInterrupt, and nothing from a driver.
            assert complaints.endswith(b"KeyboardInterrupt\n")
            assert b"aionn.driver" not in complaints
        else:
            assert app.returncode == -how
            assert complaints == b""
    assert shm_names(app.pid) == []


HOLDING_APP = """
import os, stat, subprocess, sys
import anyio, numpy as np
import aionn
from aionn.testing import identity_model

HOLDER = "import select, sys; poll = select.poll(); [poll.register(int(fd), 0) for fd in sys.argv[1:]]; "
HOLDER += "print('holding', flush=True); ended = poll.poll(); print('stdin' if ended[0][0] == 0 else 'hung up', flush=True)"

async def main():
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
        await compilation.compute({"input": np.zeros((1, 16), np.float32)})
        sockets = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
        sockets = [fd for fd in sockets if stat.S_ISSOCK(os.fstat(fd).st_mode)]
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, "0", *map(str, sockets)], pass_fds=sockets)
        await anyio.sleep_forever()

aionn.run(main)
"""
"""Starts a process that holds the app's end of the control socket, and says when the driver has closed the other end."""


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Make this process the parent of what an app leaves, so that it sees how that ends."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("subreaper")
def test_a_driver_ends_with_its_app_although_another_process_holds_the_socket_open() -> None:
    with leak_check():
        below: list[int] = []
        app = App([sys.executable, "-c", HOLDING_APP], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert app.stdout is not None
        assert app.stdin is not None
        try:
            assert app.stdout.readline() == b"holding\n"
            below = list(processes_below(app.pid))
            (driver,) = (child.pid for child in psutil.Process(app.pid).children() if "aionn.driver" in child.cmdline())
            app.kill()
            assert wait_for_end(app.pid, GONE_WITHIN_S)
            assert wait_for_end(driver, GONE_WITHIN_S), f"driver {driver} is still there"
            # A driver that its app has ended would have been reaped by it, and one that ends by itself gets no signal.
            assert os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1]) == -signal.SIGKILL
            assert app.stdout.readline() == b"hung up\n", "the socket was open until the driver ended, so the case occurred"
        finally:
            app.kill()
            app.communicate()
            for pid in below:
                assert wait_for_end(pid, GONE_WITHIN_S)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_second_interrupt_while_the_runtime_closes_is_one_keyboard_interrupt(loop: str) -> None:
    with leak_check():
        app = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.journeys.closing_app", loop, "closing"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert app.stdout is not None
        try:
            assert app.stdout.readline() == b"at work\n"
            drivers = [child.pid for child in psutil.Process(app.pid).children(recursive=True) if "aionn.driver" in child.cmdline()]
            assert drivers
            app.send_signal(signal.SIGINT)
            assert app.stdout.readline() == b"closing\n"
            # Its driver hangs and is given time to end: the closing goes on.
            app.send_signal(signal.SIGINT)
            assert wait_for_end(app.pid, GONE_WITHIN_S), "the app is still there"
            for pid in drivers:
                assert wait_for_end(pid, GONE_WITHIN_S), f"driver {pid} is still there"
        finally:
            app.kill()
            _, complaints = app.communicate()
        assert app.returncode == -signal.SIGINT
        assert complaints.endswith(b"KeyboardInterrupt\n")
        for complaint in (b"Group", b"never retrieved", b"never awaited", b"was destroyed", b"Exception ignored"):
            assert complaint not in complaints, complaints.decode()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_second_interrupt_in_a_task_of_the_runtimes_prints_no_group(loop: str) -> None:
    arguments = [sys.executable, "-W", "error", "-m", "tests.journeys.closing_app", loop, "interrupted"]
    app = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert app.returncode == -signal.SIGINT, app.stderr
    assert app.stdout == "closing\n"
    assert app.stderr.endswith("KeyboardInterrupt\n")
    assert "Group" not in app.stderr, app.stderr
