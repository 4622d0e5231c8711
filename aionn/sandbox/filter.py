"""The seccomp filter of a driver: a program of classic BPF over the number and the arguments of a system call. Source: linux/seccomp.h.

Calls that no table names are denied. So a new kernel gives a driver nothing new. Denied calls fail with EPERM, because an engine that asks
for something that it can do without must go on. In strict mode, which is for tests, they raise SIGSYS.

The program is attached to all threads of the process (TSYNC), and never comes off. The kernel remembers which calls are allowed whatever
their arguments are (Linux 5.11). For those it does not run the program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from aionn.sandbox.arguments import ALLOW, EQUAL, LOAD, RETURN, Instruction, checked
from aionn.sandbox.calls import ALLOWED, ANSWERED, CHECKED, DENIED, ERRORS, LAST_KNOWN

MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""By machine: the column of the tables, and AUDIT_ARCH of linux/audit.h."""

_SET_MODE_FILTER, _GET_ACTION_AVAILABLE, _TSYNC = 1, 2, 1

_ABOVE = 0x25  # BPF_JMP|JGT|K
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ERROR, _TRAP = 0x0005_0000, 0x0003_0000  # SECCOMP_RET_ERRNO, SECCOMP_RET_TRAP


def _instructions(machine: str, *, strict: bool, any_ioctl: bool, no_made_code: bool) -> Iterator[Instruction]:
    column, architecture = MACHINES[machine]
    deny = _TRAP if strict else _ERROR | errno.EPERM
    yield LOAD, 0, 0, _ARCHITECTURE
    yield EQUAL, 1, 0, architecture
    yield RETURN, 0, 0, deny
    yield LOAD, 0, 0, _NUMBER
    yield _ABOVE, 0, 1, LAST_KNOWN  # calls of the x32 ABI, too
    yield RETURN, 0, 0, _ERROR | errno.ENOSYS
    for name, numbers in CHECKED.items():
        if numbers[column] >= 0:
            follows = checked(name, deny, os.getpid(), any_ioctl=any_ioctl, no_made_code=no_made_code)
            yield EQUAL, 0, len(follows), numbers[column]
            yield from follows
    for name, numbers in ANSWERED.items():
        if numbers[column] >= 0:
            yield EQUAL, 0, 1, numbers[column]
            yield RETURN, 0, 0, _ERROR | getattr(errno, ERRORS.get(name, "ENOSYS"))
    for numbers in ALLOWED.values():
        if numbers[column] >= 0:
            yield EQUAL, 0, 1, numbers[column]
            yield RETURN, 0, 0, ALLOW
    yield RETURN, 0, 0, deny


def program(machine: str, *, strict: bool = False, any_ioctl: bool = False, no_made_code: bool = False) -> bytes:
    """Return the filter for this process as an array of struct sock_filter.

    Args:
        machine: a key of `MACHINES`.
        strict: whether a denied call raises SIGSYS.
        any_ioctl: whether every ioctl of a device is allowed, for engines with device files.
        no_made_code: whether no memory may become executable that is or was writable, where the kernel has no rule for that.
    """
    instructions = _instructions(machine, strict=strict, any_ioctl=any_ioctl, no_made_code=no_made_code)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def install(code: bytes, machine: str) -> None:
    """Attach a filter to all threads of this process.

    Raises:
        OSError: the kernel takes no filter.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    _seccomp(machine, _SET_MODE_FILTER, _TSYNC, head)


def check_available(machine: str) -> None:
    """Return if the kernel has filters of system calls. No filter is attached.

    Args:
        machine: a key of `MACHINES`.

    Raises:
        OSError: it has none, or an outer sandbox denies the question.
    """
    _seccomp(machine, _GET_ACTION_AVAILABLE, 0, ctypes.create_string_buffer(struct.pack("=I", _ERROR)))


def _seccomp(machine: str, operation: int, flags: int, argument: ctypes.Array[ctypes.c_char]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = DENIED["seccomp"][MACHINES[machine][0]]
    if libc.syscall(ctypes.c_long(call), ctypes.c_long(operation), ctypes.c_long(flags), argument) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
