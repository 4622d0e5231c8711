"""Strict mode: a denied system call ends the driver by SIGSYS. stderr names it, and the app's error says that the sandbox did it."""

from __future__ import annotations

import os
import re
import signal

import pytest

import aionn
from aionn.testing import identity_model
from tests.sandbox.test_confining import ROOT, python

CONFINED = """
    import ctypes, os, signal, sys, threading
    from aionn.sandbox.confining import confine
    from aionn.needs import Needs
    libc = ctypes.CDLL(None)
    confine("strict", Needs())
    def denied():
        libc.syscall(ctypes.c_long(int(sys.argv[1])), 0, 0, 0)
"""
SOCKET, UNKNOWN, NEWER, PERSONALITY = {"x86_64": ("41", "178", "1000", "135"), "aarch64": ("198", "244", "1000", "92")}[os.uname().machine]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_the_call_and_the_stack_are_named() -> None:
    ran = python(CONFINED + "    denied()", SOCKET)
    assert ran.returncode == -signal.SIGSYS
    assert ran.stderr.startswith(f"aionn: the sandbox denied system call {SOCKET} (socket)\nCurrent thread 0x")
    assert re.search(r'File "<string>", line \d+ in denied', ran.stderr)


def test_a_call_of_another_thread_is_named_with_all_stacks() -> None:
    code = """
    def waits():
        started.set()
        threading.Event().wait()
    started = threading.Event()
    threading.Thread(target=waits, daemon=True).start()
    started.wait()
    thread = threading.Thread(target=denied)
    thread.start()
    thread.join()
    """
    ran = python(CONFINED + code, PERSONALITY)
    assert ran.returncode == -signal.SIGSYS
    assert f"denied system call {PERSONALITY} (personality)\n" in ran.stderr
    assert " in waits" in ran.stderr


def test_a_call_that_no_table_has_is_named_by_its_number() -> None:
    ran = python(CONFINED + "    denied()", UNKNOWN)
    assert ran.returncode == -signal.SIGSYS
    assert f"denied system call {UNKNOWN} (not in aionn's tables)\n" in ran.stderr


def test_a_call_that_is_newer_than_the_tables_is_answered() -> None:
    assert python(CONFINED + "    denied()", NEWER).returncode == 0


def test_a_thread_that_blocks_the_signal_still_ends_the_process() -> None:
    code = "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    denied()"
    ran = python(CONFINED + code, SOCKET)
    assert (ran.returncode, ran.stderr) == (-signal.SIGSYS, "")


def test_a_sigsys_of_another_cause_names_no_call() -> None:
    ran = python(CONFINED + "    os.kill(os.getpid(), signal.SIGSYS)", SOCKET)
    assert ran.returncode == -signal.SIGSYS
    assert "the sandbox denied" not in ran.stderr


def test_the_handler_is_installed_once_and_takes_whole_names() -> None:
    code = """
    from aionn.sandbox import _strict
    for names in (b"x" * 32,):
        try:
            _strict.watch(names)
        except ValueError as error:
            print(error)
    _strict.watch(b"")
    try:
        _strict.watch(b"")
    except RuntimeError as error:
        print(error)
    """
    assert python(code).stdout == "a name is too long\nSIGSYS is watched already\n"


@pytest.mark.anyio
@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("name", ["Curious", "Quiet"])
async def test_the_apps_error_says_that_the_sandbox_ended_the_driver(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIONN_SANDBOX", "strict")
    device = f"tests.sandbox.curious_engine:{name}"
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.DriverDiedError) as caught:
            await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(device,))
    assert caught.value.exit_code == -signal.SIGSYS
    assert f"device '{device}' ended by signal 31 (SIGSYS: its sandbox denied a system call); the next use starts" in str(caught.value)
    if name == "Curious":
        assert f"the sandbox denied system call {SOCKET} (socket)" in capfd.readouterr().err


@pytest.mark.anyio
@pytest.mark.usefixtures("on_path")
async def test_without_strict_mode_the_call_fails_and_the_driver_goes_on() -> None:
    async with aionn.Runtime(sandbox="auto") as runtime:
        for _ in range(2):
            with pytest.raises(aionn.CompilationError, match="Operation not permitted"):
                await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("tests.sandbox.curious_engine:Curious",))
