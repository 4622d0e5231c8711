"""Become a command whose outer seccomp filter answers calls as another kernel or an outer sandbox would.

`python -m tests.sandbox.outer ANSWER... -- COMMAND...`, where ANSWER is CALL=ERROR, or prctl:OPTION=ERROR. CALL is a name of
`aionn.sandbox.filter`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator, Sequence

from aionn.sandbox.confining import no_new_privileges
from aionn.sandbox.filter import ALLOW, ALLOWED, CHECKED, DENIED, EQUAL, LOAD, MACHINES, RETURN

_PR_SET_SECCOMP, _FILTER = 22, 2
_NUMBER, _FIRST_ARGUMENT = 0, 16
_ERROR = 0x0005_0000


def _instructions(answers: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    for answer in answers:
        what, _, error = answer.partition("=")
        call, _, option = what.partition(":")
        number = {**ALLOWED, **CHECKED, **DENIED}[call][MACHINES[os.uname().machine][0]]
        yield LOAD, 0, 0, _NUMBER
        yield EQUAL, 0, 3 if option else 1, number
        if option:
            yield LOAD, 0, 0, _FIRST_ARGUMENT
            yield EQUAL, 0, 1, int(option)
        yield RETURN, 0, 0, _ERROR | getattr(errno, error)
    yield RETURN, 0, 0, ALLOW


def answer(answers: Sequence[str]) -> None:
    """Answer calls so from now on, in this process and in those that it starts."""
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(answers))
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    no_new_privileges()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), head, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "this system takes no seccomp filter")


if __name__ == "__main__":
    at = sys.argv.index("--")
    answer(sys.argv[1:at])
    os.execv(sys.argv[at + 1], sys.argv[at + 1 :])
