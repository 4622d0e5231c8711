"""Landlock: the kernel's rules about files, TCP ports, signals and abstract sockets for one process. Source: linux/landlock.h.

The rules count for the calling thread and those that it starts. What is open already stays open. A process in such a domain can neither
trace processes outside of it nor read their memory through /proc.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

# Numbers of the calls; the same on x86_64 and aarch64.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15

_FILE_RIGHTS_OF = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1, 9: (1 << 17) - 1}
"""All rights about files, by the first ABI that has them. 9 adds the right to connect to named sockets."""

_TCP_RIGHTS = 0b11  # bind, connect: ABI 4
_SCOPED_SOCKETS, _SCOPED_SIGNALS = 0b01, 0b10  # abstract sockets, signals: ABI 6
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""The rights that a rule about a file may have. The others are for folders."""

READ = _READ_FILE | _READ_DIR
READ_AND_RUN = READ | _EXECUTE
WRITE = READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
DEVICE = READ | _WRITE_FILE | _IOCTL_DEV


_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    given = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return result


def best_abi() -> int:
    """Return the version of Landlock that the kernel has.

    Raises:
        OSError: it has none, or it is switched off, or an outer sandbox denies it.
    """
    return _syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)


def restrict(rules: Iterable[tuple[str, int]], abi: int, *, signals: bool = False) -> None:
    """Confine this thread: files and folders that no rule names can neither be opened nor changed.

    Args:
        rules: path and rights. A path that cannot be opened is skipped. Those below /proc stay open.
        abi: of this kernel.
        signals: whether it may send signals to processes that are not confined with it.

    Raises:
        OSError: the kernel refuses.
    """
    handled = rights_of(abi)
    scopes = _SCOPED_SOCKETS if signals else _SCOPED_SOCKETS | _SCOPED_SIGNALS
    attributes = struct.pack("=QQQ", handled, _TCP_RIGHTS, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path, rights in rules:
            _add(ruleset, path, rights & handled)
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def rights_of(abi: int) -> int:
    """Return all rights about files that a version of Landlock knows, as bits."""
    return max(rights for first, rights in _FILE_RIGHTS_OF.items() if first <= abi)


def _add(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, or not for this user
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_A_FILE
        _syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        # A rule is about an inode. Where memory is short, the kernel drops names of procfs that are not in use, and makes a new inode at
        # the next use, which no rule knows. So these names stay in use. Such a descriptor gives no access.
        if not path.startswith("/proc/"):
            os.close(fd)
