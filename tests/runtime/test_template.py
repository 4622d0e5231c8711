"""The template of drivers: what comes from it, what must not, and what is left when it dies."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest

import aionn
from aionn.runtime.processes import template as templates
from tests.leaks import driver_pids, ended, leak_check
from tests.real_models import carried

pytestmark = [pytest.mark.anyio, pytest.mark.own_process]

ROOT = Path(__file__).parents[2]
TEMPLATE = "aionn.driver.template"


@pytest.fixture(autouse=True)
def no_template_before() -> Iterator[None]:
    """No template of an earlier test is used, and none is left."""
    templates.end_unused()
    assert not templates._here.users
    yield
    assert not templates._here.users
    assert template_pids() == []


def template_pids() -> list[int]:
    """The templates among this process's children."""
    return [child.pid for child in psutil.Process().children() if TEMPLATE in _words_of(child)]


def _words_of(child: psutil.Process) -> list[str]:
    try:
        words: list[str] = child.cmdline()
    except psutil.NoSuchProcess:  # it has ended meanwhile, and may not have been waited for
        return []
    return words


def device_of(runtime: aionn.Runtime, name: str = "onnxruntime") -> aionn.Device:
    return next(device for device in runtime.devices if device.name == name)


def from_template(pid: int) -> bool:
    """Return whether a driver is a copy: a process that was started by exec began with a stack of its own."""
    own = next(line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith("[stack]"))
    return any(own.split()[0] in Path(f"/proc/{each}/maps").read_text() for each in template_pids())


async def templated(runtime: aionn.Runtime, name: str = "onnxruntime") -> int:
    """Start drivers of a device until one comes from the template. Returns its number.

    The first driver may greet before the template that it has left waits for orders. The next one is then started by itself.
    """
    device = device_of(runtime, name)
    with anyio.fail_after(60):
        await device.restart()
        while not from_template(device.pid or 0):
            await device.restart()
    assert device.pid is not None
    return device.pid


async def seen(template: bool) -> tuple[dict[str, Any], Any]:
    """Return how a driver looks from outside, and what it computes."""
    async with aionn.Runtime(start=(), template=template) as runtime:
        if template:
            await templated(runtime)
        model = await runtime.load(carried("magika"))
        ((name, operand),) = model.inputs.items()
        async with await runtime.compile(model, devices=["onnxruntime"]) as compilation:
            pid = device_of(runtime).pid
            assert pid is not None
            assert from_template(pid) is template
            inputs = {name: np.ones([size or 1 for size in operand.dimensions or ()], operand.type.dtype)}
            return look_of(pid), {name: output.copy() for name, output in (await compilation.compute(inputs)).items()}


async def test_a_driver_of_a_template_computes_and_looks_as_one_that_was_started() -> None:
    async with leak_check():
        (look, answer), (usual_look, usual_answer) = await seen(True), await seen(False)
    assert look == usual_look
    assert all(np.array_equal(answer[name], usual_answer[name]) for name in usual_answer)


def look_of(pid: int) -> dict[str, Any]:
    """What others see of a driver, without the numbers that differ in each process."""
    process = psutil.Process(pid)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    environment = process.environ()
    return {
        "parent": process.ppid() == os.getpid(),
        "arguments": [word for word in process.cmdline() if word.strip()][:6],
        "name": status["Name"],
        "environment": environment,
        "descriptors": sorted(re.sub(r"[0-9]+", "N", link) for link in links_of(pid)),
        "rights": {name: status[name] for name in ("Uid", "Gid", "CapEff", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "SigCgt")},
        "folder": os.readlink(f"/proc/{pid}/cwd"),
        "page of the template": "aionn-template" in Path(f"/proc/{pid}/maps").read_text(),
    }


def links_of(pid: int) -> list[str]:
    """What the descriptors of a process point at."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


async def test_what_an_app_leaves_open_for_its_children_stays_open_neither_in_the_template_nor_in_drivers(tmp_path: Path) -> None:
    with (tmp_path / "left open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with leak_check(), aionn.Runtime(start=()) as runtime:
            pids = [await templated(runtime), *template_pids()]
            assert len(pids) == 2
            assert not [link for pid in pids for link in links_of(pid) if "left open" in link]


COPIES = """
    import ctypes, os, sys, threading
    from aionn.driver._sibling import make_sibling

    page = os.memfd_create("page")
    os.ftruncate(page, 4096)
    between = os.fork()
    if between == 0:
        pid = make_sibling(page, 8)
        if pid == 0:
            lock, kind, libc = (ctypes.c_char * 64)(), (ctypes.c_char * 64)(), ctypes.PyDLL(None)
            libc.pthread_mutexattr_init(kind)
            libc.pthread_mutexattr_settype(kind, 2)  # PTHREAD_MUTEX_ERRORCHECK keeps the number of its owner
            libc.pthread_mutex_init(lock, kind)
            libc.pthread_mutex_lock(lock)
            owner = int.from_bytes(lock.raw[8:12], sys.byteorder)
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()
            print(os.getpid(), threading.get_native_id(), owner, os.getppid(), flush=True)
            os._exit(7)
        os._exit(int(int.from_bytes(os.pread(page, 4, 8), sys.byteorder) != pid))
    ends = dict(os.wait() for _ in range(2))
    print(os.getpid(), ends.pop(between), *(os.waitstatus_to_exitcode(status) for status in ends.values()), *ends)
"""


def test_a_copy_has_fresh_numbers_and_is_a_child_of_the_parent() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(COPIES)], capture_output=True, text=True, timeout=60, check=True)
    copy, parent = (line.split() for line in done.stdout.splitlines())
    assert copy[0] == copy[1] == copy[2] == parent[3]
    assert copy[3] == parent[0]
    assert parent[1:3] == ["0", "7"]


async def test_the_template_ends_with_the_last_runtime_of_its_thread() -> None:
    async with leak_check(), aionn.Runtime(start=()) as first:
        await templated(first)
        (pid,) = template_pids()
        async with aionn.Runtime(start=()) as second:
            await device_of(second).restart()
            assert from_template(device_of(second).pid or 0)
            assert template_pids() == [pid]
        assert template_pids() == [pid]
    assert template_pids() == []


async def test_without_a_template_each_driver_is_started_by_itself() -> None:
    async with aionn.Runtime(start=(), template=False) as runtime:
        await device_of(runtime).restart()
        await device_of(runtime).restart()
        assert template_pids() == []


async def test_a_killed_template_costs_one_start_and_no_call() -> None:
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        await templated(runtime)
        for _ in range(5):
            (pid,) = template_pids()
            os.kill(pid, signal.SIGKILL)
            assert await ended(pid, 10)
            await device_of(runtime).restart()
            await templated(runtime)


async def test_a_template_that_does_not_answer_is_ended_and_the_driver_started_without_it() -> None:
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        await templated(runtime)
        (pid,) = template_pids()
        os.kill(pid, signal.SIGSTOP)
        await device_of(runtime).restart()
        assert not psutil.pid_exists(pid)
        assert len(driver_pids()) == 1
        await templated(runtime)


async def test_a_driver_made_by_a_template_that_died_in_the_act_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is lost, and the number stands in the page."""
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        await templated(runtime)
        (pid,) = template_pids()
        monkeypatch.setattr(socket.socket, "recv", lambda *_: b"")
        monkeypatch.setattr(templates.Template, "look", lambda self: None)
        await device_of(runtime).restart()
        monkeypatch.undo()
        assert not psutil.pid_exists(pid)
        assert len(driver_pids()) == 1
        assert driver_pids() == [device_of(runtime).pid]


async def test_what_has_changed_since_the_template_began_is_the_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime(start=(), sandbox="off") as runtime:
        device = device_of(runtime)
        monkeypatch.setenv("AIONN_TEST_WORD", "first")
        await templated(runtime)
        monkeypatch.setenv("ORT_SOMETHING", "new")
        await device.restart()
        assert not from_template(device.pid or 0)
        assert psutil.Process(device.pid).environ()["ORT_SOMETHING"] == "new"
        monkeypatch.delenv("ORT_SOMETHING")
        monkeypatch.setenv("KMP_SOMETHING", "as scikit-learn sets some")
        await device.restart()
        assert from_template(device.pid or 0)
        before = Path.cwd()
        os.chdir(tmp_path)
        try:
            await device.restart()
            assert os.readlink(f"/proc/{device.pid}/cwd") == str(tmp_path)
        finally:
            os.chdir(before)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        await device.restart()
        assert from_template(device.pid or 0)
        assert os.getpriority(os.PRIO_PROCESS, device.pid or 0) == niceness


async def test_drivers_of_another_thread_outlive_the_thread_of_the_template() -> None:
    """The kernel ends a driver with the thread whose child it is."""
    opened, over = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        async with aionn.Runtime(start=()) as runtime:
            await templated(runtime)
            opened.set()

    def run() -> None:
        aionn.run(elsewhere)
        over.set()

    async with leak_check(), aionn.Runtime(start=()) as runtime:
        thread = threading.Thread(target=run)
        thread.start()
        while not opened.is_set():
            await device_of(runtime).restart()
        pid = device_of(runtime).pid
        thread.join()
        assert over.is_set()
        assert device_of(runtime).pid == pid
        assert pid is not None
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


APP = """
    import asyncio, os, sys
    import aionn

    async def main():
        async with aionn.Runtime(start=()) as runtime:
            device = runtime.devices[0]
            await device.restart()
            await device.restart()
            print(device.pid, flush=True)
            await asyncio.sleep(600)

    aionn.run(main)
"""


@pytest.mark.parametrize("and_template", [False, True])
@pytest.mark.parametrize("times", [1, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
async def test_nothing_is_left_when_the_app_is_killed(times: int, and_template: bool) -> None:
    for _ in range(times):
        app = subprocess.Popen([sys.executable, "-c", textwrap.dedent(APP)], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        assert app.stdout is not None
        with app.stdout:
            driver = int(app.stdout.readline())
            children = [child.pid for child in psutil.Process(app.pid).children()]
            assert driver in children
            assert len(children) == 2
            if and_template:
                children.remove(driver)
                os.kill(children[0], signal.SIGKILL)
                children.append(driver)
            app.kill()
            app.wait()
            for pid in children:
                assert await ended(pid, 5.0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_hundred_killed_templates_cost_no_call(silero_path: Path) -> None:
    async def calls_while_templates_die() -> None:
        async with aionn.Runtime(start=()) as runtime:
            model = await runtime.load(silero_path)
            async with await runtime.compile(model, devices=("onnxruntime",)) as compilation:
                inputs = {name: np.zeros([size or 1 for size in operand.dimensions or ()], "f4") for name, operand in model.inputs.items()}
                expected = {name: output.copy() for name, output in (await compilation.compute(inputs)).items()}
                for _ in range(100):
                    await templated(runtime)
                    (pid,) = template_pids()
                    async with compilation.burst() as burst:
                        for number in range(20):
                            if number == 5:
                                os.kill(pid, signal.SIGKILL)
                            outputs = await burst.compute(inputs)
                            assert all(np.array_equal(outputs[name], expected[name]) for name in expected)
                    assert await ended(pid, 10)

    async with leak_check():
        await calls_while_templates_die()


def test_a_child_of_fork_keeps_nothing_of_the_template() -> None:
    async def main() -> None:
        async with aionn.Runtime(start=()) as runtime:
            await templated(runtime)
            before = template_pids()
            child = os.fork()
            if child == 0:
                os._exit(any("aionn-template" in link for link in links_of(os.getpid())))
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222
            assert template_pids() == before
            await device_of(runtime).restart()
            assert from_template(device_of(runtime).pid or 0)

    aionn.run(main)


async def test_a_device_whose_library_starts_threads_leaves_no_template() -> None:
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        await templated(runtime)
        device = device_of(runtime, "openvino")
        await device.restart()
        assert from_template(device.pid or 0)


async def test_the_library_of_a_further_device_is_the_templates_after_its_second_order() -> None:
    def has_library(pid: int) -> bool:
        return "onnx_cpp2py_export" in Path(f"/proc/{pid}/maps").read_text()

    async with leak_check(), aionn.Runtime(start=()) as runtime:
        await templated(runtime)
        before = template_pids()
        reference = device_of(runtime, "reference")
        await reference.restart()
        assert from_template(reference.pid or 0)
        assert [has_library(pid) for pid in before] == [False]
        # The first of these orders makes the template import. It takes none of the others meanwhile, and nothing waits for it.
        async with AsyncExitStack() as stack, anyio.create_task_group() as group:
            for _ in range(4):
                other = await stack.enter_async_context(aionn.Runtime(start=()))
                group.start_soon(device_of(other, "reference").restart)
        await templated(runtime, "reference")
        assert template_pids() == before
        assert [has_library(pid) for pid in before] == [True]


async def test_a_stop_before_the_template_is_there_leaves_nothing() -> None:
    """The first driver is killed at different moments of its imports, before and after it has left its copy."""
    for wait_s in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3):
        async with leak_check(), aionn.Runtime(start=()) as runtime, anyio.create_task_group() as group:
            device = device_of(runtime)
            group.start_soon(quietly_restarted, device)
            with anyio.move_on_after(wait_s):
                await anyio.sleep_forever()
            for pid in driver_pids():
                os.kill(pid, signal.SIGKILL)
            group.cancel_scope.cancel()
        assert template_pids() == []


async def quietly_restarted(device: aionn.Device) -> None:
    with suppress(aionn.AionnError):
        await device.restart()


async def test_a_template_that_no_driver_needs_ends_and_the_next_driver_leaves_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_IDLE_S", 0.1)
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        await templated(runtime)
        (pid,) = template_pids()
        driver = device_of(runtime).pid
        assert driver is not None
        os.kill(driver, signal.SIGKILL)
        assert await ended(pid, 10)
        await device_of(runtime).restart()
        await templated(runtime)


async def test_why_there_is_no_template_is_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aionn.driver")
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        assert templates.why_none() == "no driver has left one"
        await templated(runtime)
        assert templates.why_none() == ""
        (pid,) = template_pids()
        os.kill(pid, signal.SIGKILL)
        assert await ended(pid, 10)
        assert templates.why_none() == "it has ended"
    assert [record for record in caplog.records if "without a template: it has ended" in record.getMessage()]
