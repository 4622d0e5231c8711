"""`python tests/app_template.py SOCKET PAGE`: the template of the apps that tests start. `tests/apps.py` gives the orders.

It has imported what apps import. Each order makes one copy of it, a child of the process that gave the order. The copy takes over the
order's descriptors, folder, environment and arguments, and then runs as `python` would have run with these arguments.

Invariants
    A copy is made while the process has one thread.
    Signals that end a group are blocked in the template, so a copy misses none that comes before it has its own handlers.
    The template ends with its socket, and so with the process that started it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any, NoReturn

sys.path.pop(0)  # the folder of this file, which no app has on its path

from aionn.driver._sibling import make_sibling
from aionn.driver.beginning import GROUP_SIGNALS
from aionn.remote.orders import MADE, MOST_BYTES, NUMBER_OF_LAST, READY
from aionn.sandbox.confining import threads_here
from tests.forked_driver import fork_drivers
from tests.fresh_start import begin_anew

NEEDED = """
    uvloop anyio._backends._asyncio numpy psutil importlib.metadata
    aionn.runtime.open_runtime aionn.runtime.runtime aionn.runtime.compilation aionn.runtime.session aionn.burst
    aionn.runtime.processes.process aionn.runtime.processes.handed aionn.graph.digest aionn.graph.wire
    aionn.runtime.asked aionn.graph.reading aionn.testing.models aionn.cli.commands aionn.cli.compiling aionn.cli.listing
    aionn.driver._valve aionn.driver.process aionn.driver.template aionn.engines.reference onnx.reference.ops aionn.engines.onnxruntime
"""
"""Modules that apps and their drivers import. None of these imports starts a thread."""

MOST_DESCRIPTORS = 253
"""The kernel passes no more at once."""


def import_needed() -> str:
    """Import what apps need, with one thread. Returns why no copies can be made, or an empty text."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in NEEDED.split():
        with suppress(ImportError):  # a package that is not installed here
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to all objects, and memory is shared until it is written to
    threads = threads_here()
    return "" if threads == "1" else f"{threads} threads run before the first app"


def wait_for_order(orders: socket.socket, page: int) -> tuple[dict[str, Any], list[int]]:
    """Be the template. Returns an order with its descriptors, in copies only."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        orders.send(import_needed().encode() or READY)
        while True:
            message, given, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_DESCRIPTORS)
            if not message:
                os._exit(0)
            why = copied(page)
            if why is None:
                break
            for fd in given:
                os.close(fd)
            orders.send(why.encode() or MADE)
    except ConnectionError:
        os._exit(0)  # pytest's worker has gone
    orders.close()
    os.close(page)
    return json.loads(message.rpartition(b"\0")[2]), given


def copied(page: int) -> str | None:
    """Copy this process. In the copy this returns None. Otherwise it returns why no copy was made, or an empty text."""
    try:
        return "" if make_sibling(page, NUMBER_OF_LAST) else None
    except OSError as error:
        return str(error)


def take_over(order: dict[str, Any], given: Sequence[int]) -> list[str]:
    """Be as a Python that was just started for that order. Returns what it is to run, with arguments."""
    places: list[int] = order["places"]
    copies = [fcntl(fd, F_DUPFD_CLOEXEC, max(*places, *given) + 1) for fd in given]  # a place may be the number of another one
    for fd in given:
        os.close(fd)
    for fd, place in zip(copies, places, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    if order["start_new_session"]:
        os.setsid()
    os.chdir(order["cwd"])
    fork_drivers(dict(os.environ))
    arguments = begin_anew(order["argv"], order["environment"])
    sys.modules["__main__"] = types.ModuleType("__main__")  # `end` clears it, from the first signal on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    return arguments


def execute(arguments: list[str]) -> None:
    """Execute `-c CODE`, `-m MODULE` or a script, with arguments for it, as `__main__`."""
    main = sys.modules["__main__"]
    first, *rest = arguments
    if first == "-m":
        sys.argv, sys.path[:0] = ["-m", *rest[1:]], [os.getcwd()]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[:0] = arguments, [os.path.dirname(os.path.realpath(first))]
        main.__file__ = first
        with open(first, "rb") as script:
            code = compile(script.read(), first, "exec")
        exec(code, vars(main))


def run(arguments: list[str]) -> NoReturn:
    """Run what `execute` takes."""
    code, number = 0, 0
    try:
        execute(arguments)
    except SystemExit as error:
        said = error.code or 0
        if isinstance(said, int):
            code = said
        else:
            print(said, file=sys.stderr)
            code = 1
    except BaseException as error:
        code, number = 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    end(code, number)


def end(code: int, number: int) -> NoReturn:
    """End as the interpreter does: by the exit code, or by the signal if one is given.

    But leave what was imported to the system. The interpreter would free each object of it, and so copy all the shared memory.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if threading.active_count() == 1:
        vars(sys.modules["__main__"]).clear()
        gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # and let the interpreter complain
    ctypes.CDLL(None).fflush(None)
    if number:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    order, given = wait_for_order(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    run(take_over(order, given))
