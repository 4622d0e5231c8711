"""What /proc says of a process, for `aionn top`, the exporter, traces and the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from aionn.pages.page import start_time_of
from aionn.pages.process_use import driver_device, own_pid_of, stat_of, status_of

WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("engine", "device"),
    [
        ("onnxruntime=aionn.engines.onnxruntime:Engine", "onnxruntime"),
        ("far:a=b=module:Engine", "far:a=b"),
        ("module:Engine", "module:Engine"),
    ],
)
def test_a_driver_is_named_by_its_device(engine: str, device: str) -> None:
    command = [sys.executable, "-c", WAITING, "aionn.driver", engine]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its command line is the new one now
        assert driver_device(process.pid) == device
        process.communicate()
    assert driver_device(process.pid) is None
    assert driver_device(os.getpid()) is None


def test_all_readers_see_the_same_of_this_process() -> None:
    pid = os.getpid()
    stat, status = stat_of(pid), status_of(pid)
    assert (stat.parent, own_pid_of(pid, status)) == (os.getppid(), pid)
    assert stat.start_time == start_time_of(pid)
    assert 0 < stat.started_s < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert stat.resident_bytes == pytest.approx(int(status["VmRSS"].split()[0]) * 1024, rel=0.1)
