"""Which arguments the calls of `calls.CHECKED` may have, as instructions of classic BPF. Source of the constants: Linux's uapi headers.

Arguments that are pointers cannot be followed. Each function returns instructions that allow or deny the call, whatever follows them.
"""

from __future__ import annotations

LOAD = 0x20  # BPF_LD|W|ABS
AND = 0x54  # BPF_ALU|AND|K
EQUAL = 0x15  # BPF_JMP|JEQ|K
ANY_BIT = 0x45  # BPF_JMP|JSET|K
RETURN = 0x06  # BPF_RET|K
ALLOW = 0x7FFF_0000  # SECCOMP_RET_ALLOW
_ARGUMENTS = 16  # offset in struct seccomp_data; each argument has 8 bytes, the low half first

Instruction = tuple[int, int, int, int]
"""Operation, how many instructions to skip if the comparison holds, how many otherwise, operand."""

_CLONE_THREAD, _NEW_NAMESPACES = 0x0001_0000, 0x7E02_0080  # linux/sched.h: CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_WRITE_ONLY, _READ_WRITE, _TRUNCATE = 1, 2, 0x200  # asm-generic/fcntl.h: O_*
_PROT_WRITE, _PROT_EXEC = 2, 4
_AF_UNIX, _SOCK_STREAM, _SOCK_CLOEXEC, _SOCK_NONBLOCK = 1, 1, 0x8_0000, 0x800
_STREAMS = tuple(_SOCK_STREAM | flags for flags in (0, _SOCK_CLOEXEC, _SOCK_NONBLOCK, _SOCK_CLOEXEC | _SOCK_NONBLOCK))

_POISON, _OFFLINE = 100, 101
"""MADV_HWPOISON and MADV_SOFT_OFFLINE of asm-generic/mman-common.h. If root gives this advice, the machine loses the memory."""

_FCNTLS = (
    0,  # F_DUPFD
    *(1, 2),  # F_GETFD, F_SETFD
    *(3, 4),  # F_GETFL, F_SETFL
    *(5, 6, 7),  # F_GETLK, F_SETLK, F_SETLKW
    *(36, 37, 38),  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
    1027,  # F_DUPFD_QUERY
    1030,  # F_DUPFD_CLOEXEC
    *(1031, 1032),  # F_SETPIPE_SZ, F_GETPIPE_SZ
    *(1033, 1034),  # F_ADD_SEALS, F_GET_SEALS
)
"""Not here: F_SETOWN and F_SETSIG, which send any signal to any process of the user (before Landlock's ABI 6)."""

_IOCTLS = (
    0x5401,  # TCGETS: is it a terminal?
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
    0x4008_6200,  # DMA_BUF_IOCTL_SYNC
)
_KIND, _OF_TERMINALS, _OF_SOCKETS = 0xFF00, 0x5400, 0x8900
"""The bits of an ioctl's number that name a driver in the kernel. TIOCSTI types into a terminal, FIOSETOWN is as F_SETOWN."""

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
    51,  # PR_SVE_GET_VL: the length of vectors on aarch64
    64,  # PR_SME_GET_VL
    66,  # PR_GET_MDWE
    0x5356_4D41,  # PR_SET_VMA: names of mappings
)


def checked(name: str, deny: int, pid: int, *, any_ioctl: bool, no_made_code: bool) -> list[Instruction]:
    """Return what follows if the call `name` of `calls.CHECKED` is made.

    Args:
        name: of the call.
        deny: what to return for a denied call.
        pid: of this process.
        any_ioctl: whether every ioctl of a device is allowed.
        no_made_code: whether no memory may become executable that is or was writable.
    """
    match name:
        case "open" | "openat":
            return _opened(1 if name == "open" else 2, deny)
        case "mmap" if no_made_code:
            bits = [(ANY_BIT, 0, 1, _PROT_EXEC), (ANY_BIT, 1, 0, _PROT_WRITE), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny)]
            return [_low(2), *bits]
        case "mprotect" | "pkey_mprotect" if no_made_code:
            return [_low(2), (ANY_BIT, 1, 0, _PROT_EXEC), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny)]
        case "mmap" | "mprotect" | "pkey_mprotect":
            return [(RETURN, 0, 0, ALLOW)]
        case "madvise":
            return [_low(2), (EQUAL, 2, 0, _POISON), (EQUAL, 1, 0, _OFFLINE), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny)]
        case "fcntl":
            return [_low(1), *_one_of(_FCNTLS, deny)]
        case "ioctl":
            return _ioctl(deny, any_ioctl)
        case "prctl":
            return [_low(0), *_one_of(_PRCTLS, deny)]
        case "clone":  # threads only, and no namespace
            bits = [(ANY_BIT, 0, 2, _CLONE_THREAD), (ANY_BIT, 1, 0, _NEW_NAMESPACES), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny)]
            return [_low(0), *bits]
        case "socketpair":  # a datagram socket could send to any named socket
            return [_low(0), (EQUAL, 0, 1 + len(_STREAMS), _AF_UNIX), _low(1), *_one_of(_STREAMS, deny)]
        case "sendto":  # without an address
            return _null(4, deny)
        case "kill" | "tgkill":  # signals to itself: abort, faulthandler
            return [_low(0), *_one_of((pid,), deny)]
        case "sched_setaffinity":  # of itself. The number of another thread does not show whose thread it is
            return [_low(0), *_one_of((0, pid), deny)]
        case "prlimit64":  # of itself, and only to read: the new limit is a null pointer
            return [_low(0), (EQUAL, 1, 0, 0), (EQUAL, 0, 5, pid), *_null(2, deny)]
        case "utimensat":  # the times of an open file: the path is a null pointer
            return _null(1, deny)
    raise ValueError(f"no rule for {name}")


def _low(argument: int) -> Instruction:
    """Load the low half of an argument. The kernel ignores the high half of an int."""
    return (LOAD, 0, 0, _ARGUMENTS + 8 * argument)


def _one_of(values: tuple[int, ...], deny: int) -> list[Instruction]:
    """Allow if what is loaded is one of the values, else deny. The instruction before the last one denies."""
    listed = [(EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [*listed, (RETURN, 0, 0, deny), (RETURN, 0, 0, ALLOW)]


def _null(argument: int, deny: int) -> list[Instruction]:
    """Allow if an argument of 64 bits is 0, else deny. The last of the six instructions denies."""
    high = (LOAD, 0, 0, _low(argument)[3] + 4)
    return [_low(argument), (EQUAL, 0, 3, 0), high, (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny)]


def _opened(argument: int, deny: int) -> list[Instruction]:
    """Deny to cut a file without opening it for writing, and access mode 3. Landlock asks for no right then (cutting: before its ABI 3)."""
    return [
        _low(argument),
        (ANY_BIT, 0, 1, _WRITE_ONLY),
        (ANY_BIT, 3, 2, _READ_WRITE),
        (ANY_BIT, 1, 0, _READ_WRITE),
        (ANY_BIT, 1, 0, _TRUNCATE),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, deny),
    ]


def _ioctl(deny: int, any_ioctl: bool) -> list[Instruction]:
    if not any_ioctl:
        return [_low(1), *_one_of(_IOCTLS, deny)]
    listed = [(EQUAL, len(_IOCTLS) + 2 - at, 0, value) for at, value in enumerate(_IOCTLS)]
    kinds = [(AND, 0, 0, _KIND), (EQUAL, 2, 0, _OF_TERMINALS), (EQUAL, 1, 0, _OF_SOCKETS)]
    return [_low(1), *listed, *kinds, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny)]
