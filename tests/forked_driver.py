"""A driver of a test's app is a fork of the app, where it would be started by exec and import what the app has imported already.

`tests/app_template.py` calls `fork_drivers` in apps that are copies. A fork closes what exec would close, and has the signals, the
environment and the arguments of a driver that was just started. It also has what the app has changed in modules. NumPy's BLAS has one
thread in a driver that leaves no template.

Invariants
    A fork is made while the app has one thread.
    The fork returns to no frame of the app.
    A number of a descriptor that the app holds stays in use in the fork, since an object of the app may still close it.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from aionn.remote.orders import POOL_SIZES
from aionn.sandbox.confining import threads_here
from tests.fresh_start import begin_anew, forget_logging, read_at_load

DRIVER = ["-P", "-m", "aionn.driver"]


def at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries of a driver have read when they were loaded. Sizes of pools do not count."""
    return {name: value for name, value in read_at_load(environment).items() if name not in (*POOL_SIZES, "UV_USE_IO_URING")}


def fork_drivers(environment: Mapping[str, str]) -> None:
    """Let this app fork where it would start a driver by exec. `environment`: what its libraries were loaded with."""
    spawn = os.posix_spawn

    def start(path: str, argv: list[str], variables: Mapping[str, str], **named: Any) -> int:
        is_driver = path == sys.executable and argv[1:4] == DRIVER
        if not is_driver or at_load(variables) != at_load(environment) or threads_here() != "1":
            return spawn(path, argv, variables, **named)
        held = closed_by_exec()
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # no handler of the app runs in the fork
        pid = os.fork()
        if not pid:
            contextvars.Context().run(be_driver, argv, variables, named["file_actions"], held)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid

    os.posix_spawn = start  # type: ignore[assignment]


def closed_by_exec() -> dict[int, str]:
    """Return each descriptor that exec would close, and what it is."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing itself
            if not os.get_inheritable(fd):
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def be_driver(argv: Sequence[str], environment: Mapping[str, str], actions: Sequence[tuple[int, ...]], held: Mapping[int, str]) -> NoReturn:
    """Be the driver. Never returns."""
    try:
        gc.freeze()  # garbage of the app would close descriptors
        asyncio._set_running_loop(None)
        take_signals()
        take_descriptors(actions, held)
        _, _, *sys.argv = begin_anew(argv, environment)
        sys.argv.insert(0, "aionn.driver")
        forget_logging()
        runpy.run_module("aionn.driver", run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def take_signals() -> None:
    """Have the handlers that Python has after exec."""
    signal.set_wakeup_fd(-1, warn_on_full_buffer=False)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def take_descriptors(actions: Sequence[tuple[Any, ...]], held: Mapping[int, str]) -> None:
    """Have the descriptors that `posix_spawn` would give by these actions. What exec would close is /dev/null."""
    nothing = next(fd for fd in iter(lambda: os.open(os.devnull, os.O_RDWR), -1) if fd > 9)  # no place of an action
    placed = set()
    for kind, *rest in actions:
        source, place = (nothing, rest[0]) if kind == os.POSIX_SPAWN_OPEN else rest  # it opens nothing but /dev/null
        os.dup2(source, place)
        placed.add(place)
    for fd in held.keys() - placed:
        with suppress(OSError):  # closed as the process was forked
            if os.readlink(f"/proc/self/fd/{fd}") == held[fd]:  # else a library has opened another one in the fork
                os.dup2(nothing, fd, inheritable=False)
