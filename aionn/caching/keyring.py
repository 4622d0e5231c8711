"""The keyring: which builders the user of this account trusts. The app's side; drivers get what is read here with each call.

A folder holds one file per key, `NAME.pub` (JSON). It is `$AIONN_TRUSTED_BUILDERS`, else `aionn/trusted_builders` in the user's
configuration folder. Without the folder no builder is trusted, and no key counts as revoked (`Keyring.missing`), because the folder may
lie on a volume that is mounted later. `AIONN_ADOPT=off` empties the keyring, whatever the folder holds.

The keyring is read when an artifact is offered, and when an entry that was adopted is loaded. Other loads need none of this.

A key lets its owner run code in this account's drivers. So the keyring is used only if no other account could have written it: the folder
and its files belong to this account or to root, no other account may write to them, none is a symlink, and no folder above may be written
to by others either. A symlink above must belong to this account or to root. If one thing is wrong, no key is used. The files are read
through the descriptor of the folder that was checked.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from aionn.errors import CallerError
from aionn.hal.trust import KEY_BYTES, MAX_KEYS, Keyring, TrustedKey, encode_keyring
from aionn.tasks import run_in_thread

FOLDER = "AIONN_TRUSTED_BUILDERS"
ADOPT = "AIONN_ADOPT"
ENDING = ".pub"
_log = logging.getLogger("aionn.caching")
_MAX_FILE_BYTES = 4096
_MAX_LINKS = 40  # as in Linux
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_warned: set[str] = set()


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key file, see `TrustedKey`."""

    ed25519: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    devices: tuple[str, ...] = ()
    not_after: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


_decoder = msgspec.json.Decoder(_KeyFile)


def encode_public_key(key: TrustedKey) -> bytes:
    """Return a key as the content of a `.pub` file."""
    from datetime import UTC

    not_after = None if key.not_after_s is None else datetime.fromtimestamp(key.not_after_s, UTC)
    return msgspec.json.format(msgspec.json.encode(_KeyFile(key.public_key.hex(), key.name, key.devices, not_after))) + b"\n"


def decode_public_key(content: bytes) -> TrustedKey:
    """Return the key in a `.pub` file.

    Raises:
        CallerError: the content is not that of a `.pub` file.
    """
    try:
        file = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CallerError(f"a public key file cannot be read: {error}; make one with `aionn fleet keygen`") from error
    not_after_s = None if file.not_after is None else file.not_after.timestamp()
    return TrustedKey(bytes.fromhex(file.ed25519), file.name, file.devices, not_after_s)


def keyring_folder() -> str | None:
    """Return the absolute path of the keyring, or None if adopting is switched off. The folder need not exist."""
    if os.environ.get(ADOPT, "") not in ("", "on"):  # an unknown word is "off", too
        return None
    config = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(config):  # which the XDG Base Directory Specification says to ignore
        config = os.path.expanduser("~/.config")
    return os.path.abspath(os.environ.get(FOLDER) or os.path.join(config, "aionn", "trusted_builders"))


def read_keyring(folder: str | os.PathLike[str] | None = None) -> Keyring:
    """Read the keyring. Without its folder it has no keys. If it cannot be used, it has a fault. Blocking; raises nothing.

    Args:
        folder: None stands for `keyring_folder()`.
    """
    folder = keyring_folder() if folder is None else folder
    if folder is None:
        return Keyring()
    path = Path(os.path.abspath(folder))
    try:
        return _read(path)
    except FileNotFoundError:
        return Keyring(missing=_utf_8(str(path)))
    except (OSError, CallerError) as error:
        return Keyring(fault=_utf_8(f"keyring {path}: {error.strerror if isinstance(error, OSError) and error.strerror else error}"))


def _utf_8(text: str) -> str:
    """Return a text that may hold a path, whose bytes need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def encoded_keyring() -> bytes:
    """Read the keyring, and warn if it cannot be used. Return it as bytes for a driver. Blocking."""
    keyring = read_keyring()
    warn_of_fault(keyring)
    return encode_keyring(keyring)


async def current_keyring() -> bytes:
    """Return which builders the user trusts now, as bytes for a driver. A fault of the keyring is logged once."""
    return await run_in_thread(encoded_keyring)


def warn_of_fault(keyring: Keyring) -> None:
    """Log the fault of a keyring, if it has one. Each fault is logged once per process."""
    if keyring.fault and keyring.fault not in _warned:
        _warned.add(keyring.fault)
        _log.warning("no compiled artifact of another machine is adopted: %s", keyring.fault)


class _Unsafe(CallerError):
    """Another account could have written a part of the keyring."""


def _read(path: Path) -> Keyring:
    path.lstat()  # a keyring that is not there has no fault
    _refuse_unsafe_way(path)
    try:
        fd = os.open(path, _OPEN | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
            raise _Unsafe("it is a symlink; give the folder itself") from error
        raise
    try:
        _refuse_unsafe(os.fstat(fd), "the folder")
        names = sorted(name for name in os.listdir(fd) if name.endswith(ENDING))
        if len(names) > MAX_KEYS:
            raise CallerError(f"it has {len(names)} keys, at most {MAX_KEYS} are read")
        keys = [key for name in names if (key := _key(name, fd)) is not None]
    finally:
        os.close(fd)
    twice = [key.name for key in keys if sum(other.public_key == key.public_key for other in keys) > 1]
    if twice:
        raise CallerError(f"one key is in several files (builders {', '.join(twice)}); keep one of them")
    return Keyring(tuple(keys))


def _refuse_unsafe_way(path: Path) -> None:
    """Refuse a path if another account could lead it elsewhere: by a folder on the way, or by a symlink."""
    at, left, links = "/", list(path.parts[1:-1])[::-1], 0
    _refuse_unsafe(os.lstat(at), "the folder / above it", sticky=True)
    while left:
        name = left.pop()
        if name in (".", ".."):
            at = at if name == "." else os.path.dirname(at)
            continue
        above = os.path.join(at, name)
        status = os.lstat(above)
        if not stat.S_ISLNK(status.st_mode):
            _refuse_unsafe(status, f"the folder {above} above it", sticky=True)
            at = above
            continue
        _refuse_owner(status, f"the symlink {above} above it")
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = Path(os.readlink(above))
        at = "/" if target.is_absolute() else at
        left += target.parts[::-1][: -1 if target.is_absolute() else None]


def _key(name: str, folder: int) -> TrustedKey | None:
    """Return the key in a file, or None if the file has been removed since the folder was listed."""
    try:
        fd = os.open(name, _OPEN, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _Unsafe(f"{name} is a symlink; copy the file itself") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _Unsafe(f"{name} is not a regular file")
        _refuse_unsafe(status, name)
        content = os.read(fd, _MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > _MAX_FILE_BYTES:
        raise CallerError(f"{name} has more than {_MAX_FILE_BYTES} bytes")
    try:
        return decode_public_key(content)
    except CallerError as error:
        raise CallerError(f"{name}: {error}") from error


def _refuse_unsafe(status: os.stat_result, what: str, *, sticky: bool = False) -> None:
    """Refuse what another account owns or may write to.

    Args:
        sticky: allow a folder in which accounts can rename only what is theirs, such as /tmp.
    """
    _refuse_owner(status, what)
    if status.st_mode & 0o022 and not (sticky and status.st_mode & stat.S_ISVTX):
        raise _Unsafe(f"other accounts may write to {what} (mode {stat.S_IMODE(status.st_mode):o}); take that away with chmod go-w")


def _refuse_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _Unsafe(f"{what} belongs to user {status.st_uid}; it must belong to this account or to root")
