"""The template of driver processes: a process that has imported what drivers need, and makes drivers by copying itself.

The first driver of an app imports, copies itself once (`leave_template`), and goes on as a driver. The copy is the template. It waits for
the app's orders, and each order makes one more copy, which goes on as a driver from the same place as the first one did. So a template
shares its memory with all of them, and no start waits for it.

A built-in engine of another device, such as the reference beside ONNX Runtime, is imported after its second order. A device that is
started once, which most are, costs the template nothing. Meanwhile the app starts drivers by exec.

Invariants
    A copy is made while the process has one thread, and before it has seen a model or confined itself.
    No class of a stranger's engine is imported before a copy, because the template is not confined.
    The template holds no descriptor of a driver, so the end of a driver's socket and of its output is seen.
    The template ends with the thread of the app that has started it, and with its own socket.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module

from aionn.driver.beginning import bind_to_parent, close_inherited, name_process
from aionn.engines.installed import BUILT_IN
from aionn.remote.orders import (
    CONTROL_FD,
    COUNTER_FD,
    LEARNS,
    MADE,
    MOST_BYTES,
    NUMBER_OF_LAST,
    OWN_NUMBER,
    PAGE_FD,
    POOL_SIZES,
    READY,
    SOCKET_FD,
    decode_order,
    may_differ,
    why_refused,
)
from aionn.sandbox.confining import SandboxError, threads_here

_ONE_THREAD = ("onnxruntime", "reference", "litert")
"""Engines whose import starts no thread."""


def leave_template(arguments: list[str]) -> list[str]:
    """Import what drivers need, and leave a copy of this process as the template. Call it before `begin`, if the last argument asks for it.

    Returns the arguments of a driver: in this process what is left of `arguments`, and in each copy of the template those of its order.
    In the template it never returns.
    """
    arguments = arguments[:-1]
    why: str | None = _import_needed(arguments[0])
    with socket.socket(fileno=SOCKET_FD) as orders:
        if not why:
            _show(["aionn.driver.template"])  # before the copy, so that a copy which has not run yet is not taken for a driver
            why = _copy(OWN_NUMBER)
        if why is None:
            arguments = _wait_for_orders(orders, arguments)
        elif why:
            with suppress(OSError):  # the app has gone, or wants no template any more
                orders.send(why.encode())
    os.close(PAGE_FD)
    _show(["aionn.driver", *arguments])
    return arguments


def _import_needed(device: str) -> str:
    """Import NumPy with one thread, the driver, and the built-in engine of that device. Returns why no template can be left."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
    import tomllib  # noqa: F401

    import aionn.driver._valve
    import aionn.driver.process  # noqa: F401

    if _may_import(device):
        from aionn.driver.registry import find
        from aionn.errors import DeviceUnavailableError

        name, _, home = device.rpartition("=")
        try:
            find(name, home)
        except DeviceUnavailableError:
            return f"{name} cannot be loaded"  # the driver will say why
    gc.freeze()  # a collection would write to all objects, and memory is shared until it is written to
    try:
        threads = threads_here()
    except SandboxError as error:
        return str(error)
    return "" if threads == "1" else f"{threads} threads run before the first model"


def _may_import(device: str) -> bool:
    """Return whether a template may import the library of that device: NAME=HOME."""
    name, _, home = device.rpartition("=")
    return name in _ONE_THREAD and home == BUILT_IN[name]


def _copy(at: int) -> str | None:
    """Copy this process. In the copy this returns None. Otherwise it returns why no copy was made, or an empty text."""
    from aionn.driver._sibling import make_sibling

    try:
        return "" if make_sibling(PAGE_FD, at) else None
    except OSError as error:
        return f"the process cannot be copied ({error.strerror})"


def _wait_for_orders(orders: socket.socket, first: list[str]) -> list[str]:
    """Be the template. Returns in drivers only. `first`: the arguments of the driver that has left it."""
    confined_service = first[8:] == ["shared"] and first[4] != "off"
    for fd in (1, 2, CONTROL_FD, COUNTER_FD):
        os.dup2(0, fd)  # these belong to the driver; the numbers stay in use
    close_inherited((CONTROL_FD, COUNTER_FD, SOCKET_FD, PAGE_FD))
    bind_to_parent()
    name_process("template")
    made = Counter({first[0]: 2})  # whose library was imported before the copy
    try:
        orders.send(READY)
        while True:
            message, given, _, _ = socket.recv_fds(orders, MOST_BYTES, 3)
            if not message:
                os._exit(0)
            arguments, variables = decode_order(message)
            why = (why_refused(arguments, first[3]) if confined_service else "") or _copy(NUMBER_OF_LAST)
            if why is None:
                _become(variables, given)
                return arguments
            for fd in given:
                os.close(fd)
            if why:
                orders.send(why.encode())
                continue
            made[arguments[0]] += 1
            if made[arguments[0]] != 2 or not _may_import(arguments[0]):
                orders.send(MADE)
                continue
            orders.send(LEARNS)
            why = _import_needed(arguments[0])
            orders.send(why.encode() or READY)
            if why:
                os._exit(0)
    except ConnectionError:
        os._exit(0)  # the app has gone, or wants no template any more


def _become(variables: Mapping[str, str], given: Sequence[int]) -> None:
    """Be as a driver that was just started, with the descriptors and the environment of an order."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    control, printing, counter = given
    for fd, place in ((control, CONTROL_FD), (printing, 1), (printing, 2), (counter, COUNTER_FD)):
        os.dup2(fd, place)  # `begin` closes those that were given
    for name in [name for name in os.environ if may_differ(name)]:
        del os.environ[name]
    os.environ.update(variables)


def _show(words: Sequence[str]) -> None:
    """Let `ps`, `aionn top` and `aionn doctor` read these words in place of the module and the arguments that the process began with.

    They take the place of the first ones in memory, and are cut where those end.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    begin, end = map(int, fields[45:47] or (0, 0))  # arg_start and arg_end, fields 48 and 49 of the line; emulators leave them out
    text = b"\0".join(map(os.fsencode, (*sys.orig_argv[:3], *words)))
    if 0 < begin < end:
        ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def set_blas_threads() -> None:
    """Give NumPy's BLAS the threads that it would have made when it was imported. Call it in a driver that is confined."""
    linked = import_module("numpy._core._multiarray_umath")
    wanted = next((found for name in POOL_SIZES[:2] if (found := os.environ.get(name, "")).isdigit()), "")
    set_threads = getattr(ctypes.CDLL(str(linked.__file__)), "scipy_openblas_set_num_threads64_", None)
    if set_threads is not None:
        set_threads(int(wanted) if wanted else len(os.sched_getaffinity(0)))
