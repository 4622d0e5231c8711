"""A folder that belongs to this account alone. It imports nothing heavy, because a driver uses it in its first lines."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["UnsafeStateError", "device_folder", "private_directory", "user_state_directory"]

_LONGEST_NAME = 200  # a file name has at most 255 bytes


class UnsafeStateError(OSError):
    """A directory or file that another account made, or could have."""


def user_state_directory() -> str:
    """Return the path of this user's state directory of aionn, as the XDG Base Directory Specification says. It need not exist."""
    home = os.environ.get("XDG_STATE_HOME", "").strip() or os.path.expanduser("~/.local/state")
    return os.path.join(home, "aionn")


def device_folder(state_directory: str | os.PathLike[str], device: str) -> Path:
    """Return where the driver of one device keeps its records. No other driver can write there."""
    letters = "".join(letter if (letter.isalnum() and letter.isascii()) or letter in "-_." else f"%{ord(letter):x}%" for letter in device)
    if len(letters) > _LONGEST_NAME or letters.startswith("."):
        from blake3 import blake3

        letters = f"{letters[:40].lstrip('.')}-{blake3(device.encode()).hexdigest()[:32]}"
    return Path(state_directory, letters)


def private_directory(directory: str | os.PathLike[str]) -> Path:
    """Return a folder, made if it is missing. Tighten its mode to 0700 if it belongs to this account.

    Raises:
        UnsafeStateError: it is a symlink, is not a directory, or belongs to another account.
        OSError: it cannot be made.
    """
    path = Path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
