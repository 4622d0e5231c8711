"""Folders that belong to this account alone. It imports nothing heavy, because a driver uses it in its first lines.

    STATE/                       state directory, which an app may choose
        onnxruntime/             records of one device. Its driver can write there, and no other confined driver can
            integrity-*.sqlite   digests of what the driver has stored, one per version of the engine
            blobs-*.sqlite       the engine's blob cache, one per version
            blob-cache.key       the key of its digests

A process that uses a folder holds a shared lock on the folder itself, for as long as it lives. So a folder that `free_folder` finds has no
living user, in whatever container.

A driver whose engine writes temporary files by path has a private folder for them. It is the only place beside its records where it may
write. The app names the folder and removes it when the driver has ended. The driver makes the folder, because the driver knows what its
engine needs (`writes_by_path`), and does so before it gives its rights away. The driver holds the folder while it lives (`hold`). So what
an app that was killed has left behind is found by its lock: the next driver of such an engine removes it, and so does `aionn doctor --fix`.

The folder lies in memory if there is room, because artifacts in it are read back at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

_TRIES, _PAUSE_S = 100, 0.01
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_IN_HOME = ".local/state/aionn"

_LONGEST_NAME = 200  # a file name has at most 255 bytes


class UnsafeStateError(OSError):
    """A directory or file that another account made, or could have."""


def user_state_directory() -> str:
    """Return the path of this user's state directory of aionn, as the XDG Base Directory Specification says. It need not exist."""
    home = os.environ.get("XDG_STATE_HOME", "").strip()
    if not os.path.isabs(home):  # which the specification says to ignore
        return os.path.join(os.path.expanduser("~"), _IN_HOME)
    return os.path.join(home, "aionn")


def missing_home(state_directory: str | os.PathLike[str]) -> str:
    """Return why the user's state directory cannot be made, or an empty text. Services name a home that does not exist, and mean none."""
    home, _, rest = os.path.normpath(state_directory).rpartition(f"/{_IN_HOME}")
    if home and not rest and not os.path.isdir(home):
        return f"there is no home directory {home}; set XDG_STATE_HOME, or give Runtime(state_dir=)"
    return ""


def device_folder(state_directory: str | os.PathLike[str], device: str) -> str:
    """Return where the driver of one device keeps its records. No other driver can write there."""
    letters = "".join(letter if (letter.isalnum() and letter.isascii()) or letter in "-_." else f"%{ord(letter):x}%" for letter in device)
    if not letters or len(letters) > _LONGEST_NAME or letters.startswith("."):
        from blake3 import blake3

        letters = f"{letters[:40].lstrip('.')}-{blake3(device.encode()).hexdigest()[:32]}"
    return os.path.join(state_directory, letters)


class RecordsFolder:
    """The folder of one device's records in a state directory. Thread-safe.

    It is made and held at its first use, and by a confined driver before that, because later it can make none. The first attempt
    counts, so a driver that could not use its folder says why for as long as it lives.
    """

    def __init__(self, state_directory: str, device: str) -> None:
        """Name the folder. Makes nothing."""
        self._state_directory = state_directory
        self._path = device_folder(state_directory, device)
        self._lock = threading.Lock()
        self._held_by = -1  # open until the process ends
        self._error: OSError | None = None

    def __str__(self) -> str:
        return self._path

    def made(self) -> str:
        """Return the folder, made and held.

        Raises:
            UnsafeStateError: it or the state directory is a symlink, is not a directory, or belongs to another account.
            OSError: it cannot be made.
        """
        with self._lock:
            if self._held_by < 0 and self._error is None:
                try:
                    private_directory(self._state_directory)
                    self._held_by = hold(self._path)
                except OSError as error:
                    self._error = error
        if self._error is not None:
            raise self._error
        return self._path


def hold(path: str | os.PathLike[str]) -> int:
    """Make a folder if it is missing, and hold it. Returns a descriptor, which holds the folder until it is closed.

    On a file system without locks, and where another process keeps its right to remove the folder for a second, nothing holds it.

    Raises:
        UnsafeStateError: as `private_directory`.
        OSError: it cannot be made.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            fd = os.open(private_directory(path), _FOLDER_FLAGS)
        except FileNotFoundError:
            if not tries_left:
                raise
            continue  # removed by a process that found it free
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            usable = os.fstat(fd).st_nlink > 0
        except BlockingIOError:  # a process removes it just now
            usable = not tries_left
            time.sleep(_PAUSE_S)
        except OSError:
            usable = True
        if usable:
            return fd
        os.close(fd)
    raise OSError(errno.EBUSY, "another process removes it again and again", os.fspath(path))


@contextmanager
def free_folder(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yield a descriptor of a folder of this account that no process holds, or -1. No process takes hold of it meanwhile."""
    try:
        fd = os.open(path, _FOLDER_FLAGS)
    except OSError:
        yield -1
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        usable = os.fstat(fd).st_uid == os.geteuid()
    except OSError:
        usable = False
    try:
        yield fd if usable else -1
    finally:
        os.close(fd)


def private_directory(directory: str | os.PathLike[str]) -> str:
    """Return the path of a folder, made if it is missing. Tighten its mode to 0700 if it belongs to this account.

    Raises:
        UnsafeStateError: it is a symlink, is not a directory, or belongs to another account.
        OSError: it cannot be made.
    """
    path = os.path.normpath(directory)
    if homeless := missing_home(path):
        raise FileNotFoundError(errno.ENOENT, homeless, path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, mode=0o700)
    try:
        fd = os.open(path, _FOLDER_FLAGS)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise UnsafeStateError(f"state directory {path} is a symlink, or not a directory") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise UnsafeStateError(f"state directory {path} belongs to user {status.st_uid}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return path


_PREFIX = "aionn-exports-"
_IN_MEMORY = "/dev/shm"
_ENOUGH_BYTES = 1 << 30
"""Containers have 64 MB there by default, which a model may exceed."""

_MOST_ENTRIES = 10_000
"""A driver that a model file has taken over may leave any number of files. Removing these many takes 20 ms; `clean_up` goes on later."""


def _places() -> tuple[str, ...]:
    return (_IN_MEMORY, *(place for place in (os.environ.get("TMPDIR", ""),) if os.path.isabs(place)), "/tmp", "/var/tmp")


def name_folder() -> str:
    """Return the path of a folder that does not exist yet, or an empty text if no place can be written to. Makes nothing."""
    for place in _places():
        with suppress(OSError):
            free = os.statvfs(place)
            enough = place != _IN_MEMORY or free.f_bavail * free.f_frsize >= _ENOUGH_BYTES
            if enough and os.access(place, os.W_OK | os.X_OK, effective_ids=True):
                return f"{place.rstrip('/')}/{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    return ""


def is_name_of_folder(path: str) -> bool:
    """Return whether that is what `name_folder` may return."""
    place, _, name = path.rpartition("/")
    return not path or (name.startswith(_PREFIX) and place in {each.rstrip("/") for each in _places()})


def make_folder(path: str) -> int:
    """Make the folder and hold it, and remove folders that no process holds. Returns the descriptor that holds it.

    Raises:
        OSError: it cannot be made.
    """
    clean_up()
    return hold(path)


def remove_folder(path: str) -> None:
    """Remove the folder of a driver that has ended, if it was ever made. A folder that resists is left to `clean_up`."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                empty_folder(fd)
                os.rmdir(path)
        finally:
            os.close(fd)


def left_folders() -> list[str]:
    """Return the folders of this account that no process holds."""
    found = []
    for path in _listed():
        with free_folder(path) as fd:
            if fd >= 0:
                found.append(path)
    return found


def clean_up() -> list[str]:
    """Remove the folders that no process holds. Returns those that are gone."""
    gone = []
    for path in _listed():
        with free_folder(path) as fd, suppress(OSError):
            if fd >= 0:
                empty_folder(fd)
                os.rmdir(path)
                gone.append(path)
    return gone


def _listed() -> Iterator[str]:
    for place in dict.fromkeys(_places()):
        with suppress(OSError):
            yield from sorted(os.path.join(place, name) for name in os.listdir(place) if name.startswith(_PREFIX))


def empty_folder(fd: int) -> None:
    """Remove what a folder holds. Folders within are moved up one by one, so that no depth exhausts the stack or the descriptors.

    Raises:
        OSError: something resists, or there are too many entries.
    """
    left = _MOST_ENTRIES
    while names := _names(fd, left + 1):
        for name in names:
            left -= 1
            if left < 0:
                raise OSError("there are too many entries to remove at once")
            if _unlinked(name, fd):
                continue
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                for child in _names(inner, left + 1):  # one too many is seen when the next name is taken, or keeps the folder
                    left -= 1
                    if not _unlinked(child, inner):
                        os.rename(child, os.urandom(8).hex(), src_dir_fd=inner, dst_dir_fd=fd)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=fd)


def _names(fd: int, most: int) -> list[str]:
    """Return at most so many names of a folder. To list a million takes a second."""
    with os.scandir(fd) as entries:
        return [entry.name for entry in islice(entries, most)]


def _unlinked(name: str, parent: int) -> bool:
    """Remove a file, or give a folder the mode that its removal needs. Returns whether it was a file, or is gone already."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            os.chmod(name, 0o700, dir_fd=parent)
            return False
        os.unlink(name, dir_fd=parent)
    return True
