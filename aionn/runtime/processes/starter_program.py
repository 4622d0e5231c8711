"""The process that starts drivers for a confined service (`starter`). It is run by the path of this file.

It lives as long as the service. So it imports almost nothing, and a copy of it does what is ordered.

Invariants
    A copy is a child of the service, as any driver is a child of the app that starts it.
    A copy becomes `python -m aionn.driver`, or ends. No order changes how Python or the system's loader begins, gives a driver other
    folders, or leaves out the sandbox. So a service that was taken over gets no right back by an order.
    This process ends with its socket, and so with the service.
"""

from __future__ import annotations

import _socket  # `socket` takes 1 MiB of memory
import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

ORDERS_FD = 3
MOST_BYTES = 1 << 17
TRY, CONNECT = b"try", b"connect"

_MOST_FDS = 8
_CLONE_PARENT = 0x8000  # linux/sched.h
_PR_SET_NAME = 15
_BEGINNINGS = ("GCONV_", "GLIBC_", "HOME", "LD_", "LOC", "NIX_LD", "PYTHON")
"""Of variables by which Python or the system's loader could run other code before a driver confines itself."""


def _serve() -> None:
    """Let copies of this process do what is ordered, until the service has gone."""
    orders, libc = _socket.socket(fileno=ORDERS_FD), ctypes.PyDLL(None, use_errno=True)
    os.set_inheritable(ORDERS_FD, False)
    libc.prctl(_PR_SET_NAME, b"aionn-starter", 0, 0, 0)
    clone, *facts = map(os.fsdecode, orders.recv(MOST_BYTES).split(b"\0"))
    while True:
        order, received, _, _ = orders.recvmsg(MOST_BYTES, _socket.CMSG_SPACE(4 * _MOST_FDS), _socket.MSG_CMSG_CLOEXEC)
        if not order:
            return
        numbers = b"".join(data for _, _, data in received)
        given = [int.from_bytes(numbers[at : at + 4], sys.byteorder) for at in range(0, len(numbers), 4)]
        # After a bare system call the C library does not know the number of the copy's thread. So it runs Python, and then a program.
        number = libc.syscall(*map(ctypes.c_long, (int(clone), _CLONE_PARENT, 0, 0, 0, 0)))
        if number == 0:
            _act(order, given, facts)
        if number < 0:
            orders.send(b"0 " + os.strerror(ctypes.get_errno()).encode())
        for fd in given:
            os.close(fd)


def _act(order: bytes, given: Sequence[int], facts: Sequence[str]) -> None:
    """Do in a copy what is ordered, and say so."""
    state_dir, path, base, *sys.path = facts
    import socket

    orders, number, sent = socket.socket(fileno=ORDERS_FD), os.getpid(), list[int]()
    try:
        if order == CONNECT:
            from aionn.remote.attaching import connect

            sent.append(connect(path).detach())
        elif order != TRY:
            driver = _checked(order, given, state_dir, base)
            orders.send(f"{number} ".encode())
            _become(*driver)
        socket.send_fds(orders, [f"{number} ".encode()], sent)
    except Exception as error:  # the service waits for an answer to each order
        orders.send(f"{number} {error or type(error).__name__}".encode())
    finally:
        os._exit(1)


def _checked(order: bytes, given: Sequence[int], state_dir: str, base: str) -> tuple[list[str], dict[str, str], Sequence[int]]:
    """Return the arguments of a driver that is ordered, its environment and its descriptors.

    Raises:
        ValueError: it is refused.
    """
    from aionn.remote.orders import LEAVES_TEMPLATE, decode_order, may_differ, why_refused
    from aionn.runtime.processes.environment import APP_PID, driver_environment

    (threads, *arguments), more = decode_order(order)
    if why := why_refused(arguments, state_dir):
        raise ValueError(why)
    if wrong := [name for name in more if name.startswith(_BEGINNINGS)]:
        raise ValueError(f"the service is confined, so no app gives its drivers {', '.join(wrong)}; set it for the service")
    environment = driver_environment(arguments[4], int(threads), more) | {APP_PID: str(os.getppid())}
    if base:
        environment["PYTHONUSERBASE"] = base
    if arguments[-1].startswith(LEAVES_TEMPLATE) and not all(map(may_differ, more)):
        return arguments[:-1], environment, given[:3]  # a template imports libraries before it is confined, and they may read these
    return arguments, environment, given


def _become(arguments: Sequence[str], environment: Mapping[str, str], given: Sequence[int]) -> NoReturn:
    import fcntl
    import signal

    from aionn.remote.orders import PLACES

    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (os.open(os.devnull, os.O_RDONLY), *given)]
    for fd, place in zip(high, (0, *PLACES), strict=False):
        os.dup2(fd, place)
    os.dup2(1, 2)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execve(sys.executable, [sys.executable, "-P", "-m", "aionn.driver", *arguments], environment)
    except OSError as error:
        os.write(2, f"{sys.executable}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    _serve()
