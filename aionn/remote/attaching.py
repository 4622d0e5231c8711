"""The socket of a service: where it lies, who may be at its other end, and how an app connects. Blocks, but never for long.

The service greets with `Serving`, and both ends go on with the calls of `calls`. The socket lies in a folder that only its user may enter,
and each end looks once more at the user of the other end (SO_PEERCRED).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from typing import Any

from aionn.errors import AionnError, CallerError, DeviceUnavailableError
from aionn.escapes import escaped
from aionn.remote.calls import HalCall
from aionn.remote.connection import Descriptors
from aionn.remote.control import PROTOCOL, ControlError, Ready, Refused, ServiceReady, error_of

SOCKET_NAME = "service.sock"

VARIABLE = "AIONN_SERVICE"
"""The environment variable that decides where an app gives no `Runtime(service=)`: "off", "auto", or the path of a socket."""

_MOST_PATH_BYTES = 107
"""The kernel's limit for the path of a Unix socket."""

CONNECT_S = 1.0
"""A service whose queue of connections stays full for so long hangs."""


def service_path() -> str:
    """Return where this user's service listens.

    Raises:
        CallerError: the system has made no folder for this user's sockets.
    """
    folder = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if not os.path.isabs(folder) or not os.path.isdir(folder):
        unset = "XDG_RUNTIME_DIR is not set, and " * (not os.environ.get("XDG_RUNTIME_DIR"))
        why = f"{unset}{folder!r} is not the absolute path of a folder"
        raise CallerError(f"the service of this user has no place for its socket: {why}; set XDG_RUNTIME_DIR, or give the path of a socket")
    return os.path.join(folder, "aionn", SOCKET_NAME)


def checked_service(service: object) -> tuple[str, bool]:
    """Return the socket's path for `Runtime(service=)`, or an empty text for none, and whether the app may go without a service.

    Raises:
        CallerError: it is not "off", not "auto", and not an absolute path.
    """
    said, what = service, f"service={service!r}"
    if said is None:
        said, what = os.environ.get(VARIABLE) or "off", f"{VARIABLE}={os.environ.get(VARIABLE)!r}"
    if said == "off":
        return "", False
    if said == "auto":
        try:
            return service_path(), True
        except CallerError:
            return "", False  # where no service can be, none serves
    path = os.fspath(said) if isinstance(said, str | os.PathLike) else None
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path or len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise CallerError(f"{what}: expected 'off', 'auto', or the absolute path of a socket of at most {_MOST_PATH_BYTES} bytes")
    return path, False


def connect(path: str) -> socket.socket:
    """Return a socket that is connected to the service at `path`, which must be this user's.

    Raises:
        DeviceUnavailableError: no service listens there, or it belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A timeout of the socket object would not wait at all where the queue of connections is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CONNECT_S), 0))
        sock.connect(path)
        if (uid := peer_of(sock)[1]) not in (os.getuid(), 0):
            raise DeviceUnavailableError(
                "", f"the service at {path} belongs to user {uid}, and this app to user {os.getuid()}; it is not used"
            )
    except OSError as error:
        sock.close()
        why = "no service listens there" if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK) else error.strerror or error
        raise DeviceUnavailableError(
            "",
            f"the service at {path} cannot be reached: {why}; start one with `aionn serve`, or give apps own drivers by service='off'",
        ) from error
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def refusal_in(greeting: Ready | Refused | ServiceReady, path: str) -> AionnError | None:
    """Return why an app cannot use the service that has greeted so, or None if it can.

    Raises:
        ControlError: a driver has greeted.
    """
    if isinstance(greeting, Refused):
        return error_of(greeting.failure)
    if not isinstance(greeting, ServiceReady):
        raise ControlError("a driver greeted where a service was expected")
    if greeting.protocol == PROTOCOL:
        return None
    older, newer = ("the service", "this app") if greeting.protocol < PROTOCOL else ("this app", "the service")
    release = escaped(greeting.release, 40, one_line=True)
    what = f"the service at {path} (aionn {release}) speaks protocol {greeting.protocol}, this app {PROTOCOL}"
    return DeviceUnavailableError("", f"{what}; upgrade {older} to the release of {newer}")


def called_by_service(call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
    """Take a call of the service, which makes none."""
    raise ControlError(f"the service called {type(body).__name__}, which only an app does")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket. The process is 0 if it is in no pid namespace seen from here."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


_SO_PEERPIDFD = 77


def pidfd_of_peer(sock: socket.socket) -> int:
    """Return a pidfd of the process at the other end, or -1 where the kernel (before 6.5) gives none."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1


def is_socket(path: str) -> bool:
    """Return whether a socket lies at that path."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False
