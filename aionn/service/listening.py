"""The socket on which a service listens: made, inherited from systemd, or taken over from the service that listens now.

Invariants
    One service at a time listens at a path: the one that holds the lock beside the socket. The lock ends with the process that holds it,
    however it ends, so a socket that is left over is recognised, and replaced.
    A service that takes over inherits the socket itself, so no app is refused meanwhile.
    A service removes no socket but its own, also where its folder has been removed and another service listens at the same path.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress

from aionn.errors import AionnError, CallerError
from aionn.remote.attaching import is_socket

BACKLOG = 128
_SYSTEMD_FD = 3


class Listening:
    """The listening socket and the lock.

    Attributes:
        sock: the socket, which does not wait.
        path: where it lies. Empty if systemd has made it.
    """

    def __init__(self, sock: socket.socket, lock: int, path: str) -> None:
        self.sock, self.path = sock, path
        self.lock = lock
        self._inode = _inode(path)
        sock.setblocking(False)

    @property
    def reachable(self) -> bool:
        """Whether the socket still lies at its path. The path may have been removed, and may be another service's now."""
        return not self.path or (self._inode is not None and _inode(self.path) == self._inode)

    def leave(self) -> None:
        """Stop listening. The socket lives on with another service that has taken it over."""
        self.sock.close()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def end(self) -> None:
        """Stop listening, and remove the socket."""
        if self.lock >= 0 and self.path and self.reachable:
            # The system removes the folder at the end of the user's last login. A confined service may not write to every folder.
            with suppress(FileNotFoundError, PermissionError):
                os.unlink(self.path)
        self.leave()


def inherited() -> Listening | None:
    """Return the socket that systemd has made for this process, or None if it has made none.

    Raises:
        CallerError: systemd gives more than one socket, or another kind.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):  # not for drivers
        os.environ.pop(name, None)
    if count != "1":
        raise CallerError(f"systemd gives {count or 'no'} sockets; give one ListenStream in the unit of the socket")
    try:
        os.set_inheritable(_SYSTEMD_FD, False)
        sock = socket.socket(fileno=_SYSTEMD_FD)
        fits = (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_STREAM) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise CallerError(f"systemd gives no socket ({error.strerror}); start the service by its socket unit") from error
    if not fits:
        raise CallerError("systemd gives a socket of another kind; the service listens on a Unix stream socket (ListenStream=PATH)")
    return Listening(sock, -1, "")


def listen(path: str, option: str = "--socket", taken: str = "take its place with --replace") -> Listening:
    """Listen at `path`. A socket that a dead service has left is replaced.

    Args:
        option: of the command line, which gives the path. taken: what to do if another service listens there.

    Raises:
        CallerError: another service listens there; or something else lies there, or the folder may be entered by others.
        AionnError: the system refuses the socket.
    """
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        _check_folder(folder, option)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise AionnError(
            f"the service cannot listen at {path}: {error.strerror} ({error.filename}); give another path with {option}"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CallerError(f"a service listens at {path} already; {taken}") from None
        if os.path.lexists(path) and not is_socket(path):
            raise CallerError(f"{path} is not a socket; give another path with {option}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.lexists(path):
                os.unlink(path)  # its service has died, because the lock was free
            before = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(before)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise AionnError(f"the service cannot listen at {path}: {error.strerror or error}; give another path with {option}") from error
    except BaseException:
        os.close(lock)
        raise
    return Listening(sock, lock, path)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _check_folder(folder: str, option: str) -> None:
    found = os.stat(folder)
    if found.st_uid != os.getuid():
        raise CallerError(
            f"the folder {folder} belongs to user {found.st_uid}; the service listens only in a folder of the user that runs it"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        way_out = "" if found.st_mode & stat.S_ISVTX else "remove that right (chmod go-w), or "  # /tmp must stay as it is
        raise CallerError(f"others may write to the folder {folder}; {way_out}give a path in a folder of this user's with {option}")
