"""The seccomp filter of a driver: a program of classic BPF over the number and the arguments of a system call. Source: linux/seccomp.h.

Calls that no table names are denied. So a new kernel gives a driver nothing new. Denied calls fail with EPERM, because an engine that asks
for something that it can do without must go on. In strict mode, which is for tests, they raise SIGSYS.

Arguments that are pointers cannot be checked. The program is attached to all threads of the process (TSYNC), and never comes off.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from aionn.sandbox.calls import ALLOWED, ANSWERED, CHECKED, LAST_KNOWN

__all__ = ["MACHINES", "install", "program"]

MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""By machine: the column of the tables, and AUDIT_ARCH of linux/audit.h."""

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _TSYNC = 1, 1

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ, JMP|JGT, JMP|JSET, RET (all |K)
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; each argument has 8 bytes
_ALLOW, _ERROR, _TRAP = 0x7FFF_0000, 0x0005_0000, 0x0003_0000

_CLONE_THREAD, _NEW_NAMESPACES = 0x0001_0000, 0x7E02_0080  # linux/sched.h: CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_AF_UNIX = 1
_IOCTLS = (
    0x5401,  # TCGETS: is it a terminal?
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
    0x4008_6200,  # DMA_BUF_IOCTL_SYNC
)
_PRCTLS = (
    2,  # PR_GET_PDEATHSIG
    3,  # PR_GET_DUMPABLE
    15,  # PR_SET_NAME
    16,  # PR_GET_NAME
    21,  # PR_GET_SECCOMP
    23,  # PR_CAPBSET_READ
    29,  # PR_SET_TIMERSLACK
    30,  # PR_GET_TIMERSLACK
    39,  # PR_GET_NO_NEW_PRIVS
    42,  # PR_GET_THP_DISABLE
    66,  # PR_GET_MDWE
    0x5356_4D41,  # PR_SET_VMA: names of mappings
)

_NOT_PERMITTED = ("fchmod", "fchown")
"""Calls of `ANSWERED` that fail with EPERM. SQLite makes them and goes on. The others fail with ENOSYS, as on an older kernel."""

_Instruction = tuple[int, int, int, int]


def _first(argument: int) -> int:
    """Return the offset of the low half of an argument."""
    return _ARGUMENTS + 8 * argument


def _one_of(values: tuple[int, ...], deny: int) -> list[_Instruction]:
    """Allow if what is loaded is one of the values, else deny."""
    listed = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [*listed, (_RETURN, 0, 0, deny), (_RETURN, 0, 0, _ALLOW)]


def _checked(name: str, deny: int, pid: int, any_ioctl: bool) -> list[_Instruction]:
    """Return what follows if a call of `CHECKED` is made."""
    match name:
        case "clone":  # threads only, and no namespace
            flags = (_LOAD, 0, 0, _first(0))
            return [
                flags,
                (_ANY_BIT, 0, 2, _CLONE_THREAD),
                (_ANY_BIT, 1, 0, _NEW_NAMESPACES),
                (_RETURN, 0, 0, _ALLOW),
                (_RETURN, 0, 0, deny),
            ]
        case "ioctl":
            return [(_RETURN, 0, 0, _ALLOW)] if any_ioctl else [(_LOAD, 0, 0, _first(1)), *_one_of(_IOCTLS, deny)]
        case "prctl":
            return [(_LOAD, 0, 0, _first(0)), *_one_of(_PRCTLS, deny)]
        case "socketpair":
            return [(_LOAD, 0, 0, _first(0)), *_one_of((_AF_UNIX,), deny)]
        case "kill" | "tgkill":  # signals to itself: abort, faulthandler
            return [(_LOAD, 0, 0, _first(0)), *_one_of((pid,), deny)]
        case "tkill":  # the number of a thread does not show whose thread it is
            return [(_RETURN, 0, 0, deny)]
        case "prlimit64":  # of itself, and only to read: the new limit is a null pointer
            return [(_LOAD, 0, 0, _first(0)), (_EQUAL, 1, 0, 0), (_EQUAL, 0, 5, pid), *_null(2, deny)]
        case "utimensat":  # the times of an open file: the path is a null pointer
            return _null(1, deny)
    raise ValueError(f"no rule for {name}")


def _null(argument: int, deny: int) -> list[_Instruction]:
    """Allow if an argument of 64 bits is 0, else deny. The last of the six instructions denies."""
    return [
        (_LOAD, 0, 0, _first(argument)),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _first(argument) + 4),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, deny),
    ]


def _instructions(machine: str, strict: bool, any_ioctl: bool) -> Iterator[_Instruction]:
    column, architecture = MACHINES[machine]
    deny = _TRAP if strict else _ERROR | errno.EPERM
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, deny
    yield _LOAD, 0, 0, _NUMBER
    yield _ABOVE, 0, 1, LAST_KNOWN  # calls of the x32 ABI, too
    yield _RETURN, 0, 0, _ERROR | errno.ENOSYS
    for name, numbers in CHECKED.items():
        if numbers[column] >= 0:
            follows = _checked(name, deny, os.getpid(), any_ioctl)
            yield _EQUAL, 0, len(follows), numbers[column]
            yield from follows
    for name, numbers in ANSWERED.items():
        if numbers[column] >= 0:
            yield _EQUAL, 0, 1, numbers[column]
            yield _RETURN, 0, 0, _ERROR | (errno.EPERM if name in _NOT_PERMITTED else errno.ENOSYS)
    for numbers in ALLOWED.values():
        if numbers[column] >= 0:
            yield _EQUAL, 0, 1, numbers[column]
            yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, deny


def program(machine: str, *, strict: bool = False, any_ioctl: bool = False) -> bytes:
    """Return the filter for this process as an array of struct sock_filter.

    Args:
        machine: a key of `MACHINES`.
        strict: whether a denied call raises SIGSYS.
        any_ioctl: whether every ioctl is allowed, for engines with device files.
    """
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine, strict, any_ioctl))


def install(code: bytes, machine: str) -> None:
    """Attach a filter to all threads of this process.

    Raises:
        OSError: the kernel takes no filter.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_SECCOMP[machine]), ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(_TSYNC), head) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
