"""The seccomp filter of a driver: a program of classic BPF over the number and the arguments of a system call. Source: linux/seccomp.h.

Calls that no table names are denied. So a new kernel gives a driver nothing new. Denied calls fail with EPERM, because an engine that asks
for something that it can do without must go on. In strict mode, which is for tests, they raise SIGSYS.

The program is attached to all threads of the process (TSYNC), and never comes off. The kernel remembers which calls are allowed whatever
their arguments are (Linux 5.11). For those it does not run the program.

The tables say which system calls a driver may make, with their numbers on x86_64 and aarch64 (-1: that architecture has no such call).
Rules of thumb: what only reads facts, waits, or works on what is open already is allowed. What reaches another process, the network, the
owner or mode of a file, or a rarely used part of the kernel is denied. No call about the state of a file (stat) is denied, because C++
libraries abort then. Paths are Landlock's business, because a filter cannot read them.

Source of the numbers: asm/unistd_64.h and asm-generic/unistd.h of Linux. The number of a call does not change.

The calls of `CHECKED` may have some arguments only, as instructions of classic BPF. Source of the constants: Linux's uapi headers.
Arguments that are pointers cannot be followed. Each function returns instructions that allow or deny the call, whatever follows them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

# fmt: off
ALLOWED = {
    # files
    "read": (0, 63), "write": (1, 64), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "creat": (85, -1), "close": (3, 57),
    "close_range": (436, 436), "lseek": (8, 62), "stat": (4, -1), "fstat": (5, 80), "lstat": (6, -1), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, -1),
    "readlinkat": (267, 78), "getdents": (78, -1), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83),
    "sync_file_range": (277, 84), "fallocate": (285, 47), "ftruncate": (77, 46), "fadvise64": (221, 223), "readahead": (187, 213),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "splice": (275, 76), "statfs": (137, 43), "fstatfs": (138, 44), "mkdir": (83, -1),
    "mkdirat": (258, 34), "unlink": (87, -1), "unlinkat": (263, 35), "rmdir": (84, -1), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "pipe": (22, -1), "pipe2": (293, 59), "umask": (95, 166), "memfd_create": (319, 279),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "mincore": (27, 232), "msync": (26, 227),
    "mlock": (149, 228), "mlock2": (325, 284), "munlock": (150, 229), "membarrier": (324, 283), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "get_mempolicy": (239, 236), "pkey_alloc": (330, 289), "pkey_free": (331, 290),
    "set_mempolicy_home_node": (450, 450),
    # waiting
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "eventfd": (284, -1),
    "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "futex": (202, 98), "futex_waitv": (449, 449), "signalfd": (282, -1), "signalfd4": (289, 74),
    "pause": (34, -1),
    # threads
    "exit": (60, 93), "exit_group": (231, 94), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sched_getattr": (315, 275), "sched_rr_get_interval": (148, 127), "gettid": (186, 178), "getpid": (39, 172), "getppid": (110, 173),
    "getcpu": (309, 168), "restart_syscall": (219, 128), "wait4": (61, 260), "waitid": (247, 95), "arch_prctl": (158, -1),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "alarm": (37, -1), "setitimer": (38, 103),
    "getitimer": (36, 102), "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    # facts
    "uname": (63, 160), "sysinfo": (99, 179), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpgid": (121, 155), "getpgrp": (111, -1),
    "getsid": (124, 156), "getrusage": (98, 165), "getrlimit": (97, 163), "times": (100, 153), "time": (201, -1),
    "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114), "getrandom": (318, 278), "getpriority": (140, 141),
    # sockets that exist
    "sendmsg": (46, 211), "recvmsg": (47, 212), "recvfrom": (45, 207), "sendmmsg": (307, 269), "recvmmsg": (299, 243),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
}
"""Calls that a driver may make with any arguments."""

CHECKED = {
    "madvise": (28, 233),
    "open": (2, -1), "openat": (257, 56), "mmap": (9, 222), "mprotect": (10, 226), "pkey_mprotect": (329, 288), "fcntl": (72, 25),
    "sendto": (44, 206), "sched_setaffinity": (203, 122), "utimensat": (280, 88), "ioctl": (16, 29), "prctl": (157, 167),
    "clone": (56, 220), "socketpair": (53, 199), "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261),
}
"""Calls that a driver may make with some arguments."""

ANSWERED = {
    # Not there: as on an older kernel. The C library then uses clone, whose flags can be checked, and openat.
    "clone3": (435, 435), "openat2": (437, 437), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Not permitted: SQLite makes these two calls, and goes on.
    "fchown": (93, 55), "fchmod": (91, 52),
    # Not supported: as on a file system without attributes. `shutil` then copies none.
    "getxattr": (191, 8), "fgetxattr": (193, 10), "lgetxattr": (192, 9), "listxattr": (194, 11), "flistxattr": (196, 13),
    "llistxattr": (195, 12),
}
"""Calls that libraries try and do without. They are answered with an error in strict mode, too."""

ERRORS = {
    "fchown": "EPERM", "fchmod": "EPERM", "getxattr": "EOPNOTSUPP", "fgetxattr": "EOPNOTSUPP", "lgetxattr": "EOPNOTSUPP",
    "listxattr": "EOPNOTSUPP", "flistxattr": "EOPNOTSUPP", "llistxattr": "EOPNOTSUPP",
}
"""The errors of calls in `ANSWERED`. The others fail with ENOSYS."""

DENIED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "kcmp": (312, 272), "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "pivot_root": (155, 41), "chroot": (161, 51), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "vhangup": (153, 58), "nfsservctl": (180, 42),
    "chmod": (90, -1), "fchmodat": (268, 53), "chown": (92, -1), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "link": (86, -1), "linkat": (265, 37),
    "symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1), "mknodat": (259, 33), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "inotify_rm_watch": (255, 28),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "memfd_secret": (447, 447), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446), "seccomp": (317, 277), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "setfsuid": (122, 151), "setfsgid": (123, 152), "setgroups": (116, 159), "capset": (126, 91), "capget": (125, 90),
    "setpgid": (109, 154), "setsid": (112, 157), "setrlimit": (160, 164), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "ioprio_get": (252, 31), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "lookup_dcookie": (212, 18), "personality": (135, 92), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "sysfs": (139, -1), "ustat": (136, -1), "tee": (276, 77),
    "vmsplice": (278, 75), "io_setup": (206, 0), "io_submit": (209, 2), "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    "io_destroy": (207, 1), "io_cancel": (210, 3), "remap_file_pages": (216, 234), "tkill": (200, 130), "setsockopt": (54, 208),
    "truncate": (76, 45), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "mlockall": (151, 230),
    "munlockall": (152, 231), "sync": (162, 81), "syncfs": (306, 267), "_sysctl": (156, -1), "set_thread_area": (205, -1),
    "get_thread_area": (211, -1), "get_robust_list": (274, 100),
}
"""Calls that are known and denied. Any other call up to `LAST_KNOWN` is denied, too; these are here by name for reports."""
# fmt: on

OF_A_SERVICE = ("accept", "accept4", "kill", "pidfd_open", "pidfd_send_signal")
"""Calls of these tables that a service may make with any arguments: it accepts apps, and ends drivers."""

LAST_KNOWN = 450
"""A call with a higher number is newer than these tables. It is answered as an older kernel would, so libraries go on without it."""

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
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_CLOEXEC, _SOCK_NONBLOCK = 1, 1, 5, 0x8_0000, 0x800
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


def checked(name: str, deny: int, pid: int, *, any_ioctl: bool, no_made_code: bool, serves: bool = False) -> list[Instruction]:
    """Return what follows if the call `name` of `calls.CHECKED` is made.

    Args:
        name: of the call.
        deny: what to return for a denied call.
        pid: of this process.
        any_ioctl: whether every ioctl of a device is allowed.
        no_made_code: whether no memory may become executable that is or was writable.
        serves: whether it is for a service, which talks with a template of drivers.
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
            kinds = (*_STREAMS, _SOCK_SEQPACKET | _SOCK_CLOEXEC) if serves else _STREAMS
            return [_low(0), (EQUAL, 0, 1 + len(kinds), _AF_UNIX), _low(1), *_one_of(kinds, deny)]
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


MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""By machine: the column of the tables, and AUDIT_ARCH of linux/audit.h."""

_SET_MODE_FILTER, _GET_ACTION_AVAILABLE, _TSYNC = 1, 2, 1

_ABOVE = 0x25  # BPF_JMP|JGT|K
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ERROR, _TRAP = 0x0005_0000, 0x0003_0000  # SECCOMP_RET_ERRNO, SECCOMP_RET_TRAP


def _instructions(machine: str, *, strict: bool, any_ioctl: bool, no_made_code: bool, serves: bool) -> Iterator[Instruction]:
    column, architecture = MACHINES[machine]
    deny = _TRAP if strict else _ERROR | errno.EPERM
    yield LOAD, 0, 0, _ARCHITECTURE
    yield EQUAL, 1, 0, architecture
    yield RETURN, 0, 0, deny
    yield LOAD, 0, 0, _NUMBER
    yield _ABOVE, 0, 1, LAST_KNOWN  # calls of the x32 ABI, too
    yield RETURN, 0, 0, _ERROR | errno.ENOSYS
    for name in OF_A_SERVICE if serves else ():
        if (number := (CHECKED | DENIED)[name][column]) >= 0:
            yield EQUAL, 0, 1, number
            yield RETURN, 0, 0, ALLOW
    for name, numbers in CHECKED.items():
        if numbers[column] >= 0:
            follows = checked(name, deny, os.getpid(), any_ioctl=any_ioctl, no_made_code=no_made_code, serves=serves)
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


def program(machine: str, *, strict: bool = False, any_ioctl: bool = False, no_made_code: bool = False, serves: bool = False) -> bytes:
    """Return the filter for this process as an array of struct sock_filter.

    Args:
        machine: a key of `MACHINES`.
        strict: whether a denied call raises SIGSYS.
        any_ioctl: whether every ioctl of a device is allowed, for engines with device files.
        no_made_code: whether no memory may become executable that is or was writable, where the kernel has no rule for that.
        serves: whether it is for a service of apps, in place of a driver.
    """
    instructions = _instructions(machine, strict=strict, any_ioctl=any_ioctl, no_made_code=no_made_code, serves=serves)
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
