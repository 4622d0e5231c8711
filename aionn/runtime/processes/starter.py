"""The service's side of the process that starts its drivers (`starter_program`), which has all rights of the user.

A process that is confined cannot start processes with more rights, and a driver has other rules than its service. So the service starts
this process before it gives its rights away. From then on it orders here each driver that is not a copy of a template.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from aionn.loopless import is_readable
from aionn.remote.orders import encode_order
from aionn.runtime.processes import starter_program
from aionn.runtime.processes.environment import user_packages
from aionn.runtime.processes.starter_program import CONNECT, MOST_BYTES, ORDERS_FD, TRY
from aionn.sandbox.filter import CHECKED, MACHINES

_ANSWER_S = 5.0


class Starter:
    """The process. It ends with this object, or with this process."""

    def __init__(self, state_dir: str, path: str) -> None:
        """Start it. What is given here is what no later order changes.

        Args:
            state_dir: of all drivers.
            path: of the socket to which `connect` connects.

        Raises:
            OSError: it cannot be started, or this machine or its kernel makes no copies.
        """
        machine = os.uname().machine
        if machine not in MACHINES or not sys.executable or getattr(sys, "frozen", False):
            raise OSError(errno.ENOSYS, f"aionn has no Python to start, or no table of system calls for {machine}")
        clone = CHECKED["clone"][MACHINES[machine][0]]
        base = "".join(user_packages().values())
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 10)  # dup2 to its own number would leave it close-on-exec
            try:
                os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-S", "-P", str(starter_program.__file__)],
                    dict(os.environ),
                    file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, high, ORDERS_FD)],
                    setsigmask=signal.valid_signals(),  # they are for the service, and a driver begins so
                    setsigdef=[signal.SIGCHLD],
                )
            finally:
                os.close(high)
        self._orders.send(b"\0".join(map(os.fsencode, (str(clone), state_dir, path, base, *sys.path))))
        self._ask(TRY)

    def start(self, arguments: Sequence[str], threads: int, more: Mapping[str, str], given: Sequence[int]) -> int:
        """Start a driver. Returns its number.

        Args:
            arguments: of its command line.
            threads, more: for its environment, as for `driver_environment`.
            given: the descriptors that it has at `PLACES`.

        Raises:
            OSError: it is refused, or cannot be started.
        """
        return self._ask(encode_order((str(threads), *arguments), more), given)[0]

    def connect(self) -> socket.socket:
        """Return a connection to the service that listens at the path now, as `remote.attaching.connect`.

        Raises:
            OSError: no service listens there.
        """
        return socket.socket(fileno=self._ask(CONNECT)[1][0])

    def _ask(self, order: bytes, given: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Return the number of the copy that does it, which has ended unless it is a driver, and the descriptor that it has sent."""
        said, fds = b"", list[int]()
        try:
            socket.send_fds(self._orders, [order], given)
            if is_readable(self._orders.fileno(), _ANSWER_S):
                said, fds, _, _ = socket.recv_fds(self._orders, MOST_BYTES, 1)
        except OSError as error:
            if self._orders.fileno() >= 0 and not isinstance(error, ConnectionError):
                raise
        if not said:
            self._orders.close()  # a late answer would be taken for one to the next order
            raise OSError(errno.ECHILD, "the process that starts drivers for this service has ended; restart the service")
        number, _, why = said.decode(errors="replace").partition(" ")
        if number != "0" and (why or order in (TRY, CONNECT)):
            os.waitpid(int(number), 0)
        if why:
            raise OSError(errno.EPERM, why)
        return int(number), fds
