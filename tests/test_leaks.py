"""The instrument itself: each kind of leak is named, and a clean body passes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable

import pytest

from aionn.memory.region import Region
from tests.leaks import LeakError, leak_check, left_running, processes_below, processes_with


def left_by(body: Callable[[], object], grace_s: float = 2.0) -> str:
    """The complaint about that body."""
    with pytest.raises(LeakError) as caught, leak_check(grace_s):
        body()
    return str(caught.value)


def kept_view() -> memoryview:
    region = Region.allocate(4096)
    view = region.view()
    region.close()
    return view


def test_a_clean_body_passes() -> None:
    with leak_check():
        kept_view()[0] = 1


def test_a_descriptor_is_named_though_another_of_its_kind_was_closed() -> None:
    one, other = socket.socketpair()
    leaked: list[socket.socket] = []

    def swap() -> None:
        one.close()
        leaked.append(socket.socket())

    assert "1 descriptor(s) of socket:" in left_by(swap)
    leaked[0].close()
    other.close()


def test_a_view_that_somebody_kept_is_named() -> None:
    kept: list[memoryview] = []
    assert "shared mapping rw-s of /memfd:aionn" in left_by(lambda: kept.append(kept_view()))


def test_a_thread_is_named() -> None:
    go = threading.Event()
    stayer = threading.Thread(target=go.wait, name="stayer")
    assert "thread 'stayer'" in left_by(stayer.start, grace_s=0.01)
    go.set()
    stayer.join()


def test_a_running_process_and_a_zombie_are_named() -> None:
    started: list[subprocess.Popen[bytes]] = []
    waiting = [sys.executable, "-c", "input()"]
    assert "-c input()" in left_by(lambda: started.append(subprocess.Popen(waiting, stdin=subprocess.PIPE)), grace_s=0.01)
    assert "a zombie" in left_by(lambda: started.append(subprocess.Popen(["true"])))
    started[0].communicate(b"\n")
    started[1].wait()


def test_what_a_child_of_another_thread_has_started_is_named() -> None:
    started: list[subprocess.Popen[bytes]] = []
    up, go = threading.Event(), threading.Event()

    def start() -> None:
        command = ["sh", "-c", "(echo up; cat; true); true"]  # the shell, a shell below it, and cat below that
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[0].stdout is not None
        started[0].stdout.readline()
        while len(list(processes_below(started[0].pid))) < 2:
            pass
        up.set()
        go.wait()

    thread = threading.Thread(target=start)

    def leave() -> None:
        thread.start()
        up.wait()

    complaint = left_by(leave, grace_s=0.01)
    go.set()
    thread.join()
    started[0].communicate(b"")
    assert complaint.count(": sh -c (echo up; cat; true); true") == 2
    assert complaint.count(": cat") == 1


def test_a_process_that_is_still_ending_is_waited_for() -> None:
    with leak_check():
        threading.Thread(target=subprocess.Popen(["true"]).wait).start()


def test_a_process_with_a_mark_is_waited_for_and_named_if_it_stays() -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "AIONN_LEAKS_MARK": mark}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        (named,) = left_running("AIONN_LEAKS_MARK", mark, timeout_s=0.01)
        assert f"process {process.pid}: " in named
        assert processes_with("AIONN_LEAKS_MARK", mark) == [named]
        threading.Timer(0.2, process.communicate, (b"\n",)).start()
        assert left_running("AIONN_LEAKS_MARK", mark) == []


def test_an_error_of_the_body_stays_itself() -> None:
    opened: list[int] = []

    def fail() -> None:
        with leak_check():
            opened.append(os.open("/dev/null", os.O_RDONLY))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    os.close(opened[0])


@pytest.mark.anyio
async def test_it_works_around_a_body_that_awaits() -> None:
    kept: list[memoryview] = []

    async def leave() -> None:
        async with leak_check():
            kept.append(kept_view())

    async with leak_check():
        pass
    with pytest.raises(LeakError, match="shared mapping"):
        await leave()
