"""What prctl and setrlimit take away: new privileges, core files, memory that is writable and executable.

RLIMIT_NPROC is not used, because it counts all threads of the user. RLIMIT_FSIZE is not used, because it counts for memory files, too.
RLIMIT_AS is not used, because each thread's arena reserves 128 MiB.
"""

from __future__ import annotations

import ctypes
import os
import resource

# linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN = 65, 1
# linux/personality.h
_QUERY, _READ_IMPLIES_EXEC = 0xFFFF_FFFF, 0x040_0000


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def no_new_privileges() -> None:
    """Setuid programs give nothing any more. Landlock and seccomp need this.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def no_core_files() -> None:
    """A crash writes no core file, which would hold the app's frames. Programs that collect cores, such as systemd's, respect the limit.

    Raises:
        OSError: the kernel refuses.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def no_made_code() -> None:
    """No mapping is writable and executable, and none that was writable becomes executable (Linux 6.3).

    A file in memory can still be written first and mapped as code then.

    Raises:
        OSError: the kernel has no such rule.
    """
    # A process that was started by `setarch -X` gets no readable memory under this rule.
    libc = ctypes.CDLL(None)
    if libc.personality(ctypes.c_ulong(_QUERY)) & _READ_IMPLIES_EXEC:
        libc.personality(ctypes.c_ulong(libc.personality(ctypes.c_ulong(_QUERY)) & ~_READ_IMPLIES_EXEC))
    _prctl(_PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN)
