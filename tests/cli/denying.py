"""A seccomp filter that denies one call with EPERM, in this process and in those that it starts."""

from __future__ import annotations

import ctypes
import os
import struct

NUMBERS = {
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "eventfd2": (290, 19),
    "landlock_create_ruleset": (444, 444),
    "seccomp": (317, 277),
}
"""On x86_64 and aarch64."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def deny(call: str) -> None:
    """Deny a call from now on."""
    number = NUMBERS[call][os.uname().machine == "aarch64"]
    load, equal, answer = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 0),  # the number of the call
            (equal, 0, 1, number),
            (answer, 0, 0, 0x0005_0001),  # SECCOMP_RET_ERRNO, EPERM
            (answer, 0, 0, 0x7FFF_0000),  # SECCOMP_RET_ALLOW
        )
    )
    buffer = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), "this system takes no seccomp filter")
