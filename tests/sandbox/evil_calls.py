"""System calls by number, a register of attacks, and what became of each. For the attacks of the evil engine only.

An attack is a function of a `Target`. It returns if it had success, and raises `OSError` if the kernel refused it. Where success would harm
the machine, the call gets arguments that the kernel refuses later than a sandbox does: `reaches` takes these refusals for success.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from aionn.sandbox.filter import ALLOWED, ANSWERED, CHECKED, DENIED

_COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]
NEWER = {
    "cachestat": 451, "fchmodat2": 452, "futex_wake": 454, "statmount": 457, "listmount": 458, "lsm_get_self_attr": 459,
    "setxattrat": 463, "getxattrat": 464, "listxattrat": 465, "removexattrat": 466, "open_tree_attr": 467, "file_getattr": 468,
    "file_setattr": 469,
}  # fmt: skip
"""Calls that are newer than the sandbox's tables. They have the same number on both architectures."""

NUMBERS = {name: numbers[_COLUMN] for table in (ALLOWED, CHECKED, ANSWERED, DENIED) for name, numbers in table.items()} | NEWER

_MISSING = (errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.ENODEV, errno.EOPNOTSUPP)
"""What a kernel answers that was built without a part. In a sandbox ENOSYS is a denial."""


class Target(msgspec.Struct, frozen=True):
    """What attacks aim at. The test makes all of it.

    Attributes:
        secret: path of a file that its owner alone may read. Its content begins with `word`.
        word: a secret.
        folder: where files may be made and changed.
        tcp, udp: ports of 127.0.0.1 where the test listens.
        stream, datagram: paths of UNIX sockets where the test listens.
        abstract: name of an abstract UNIX socket where the test listens.
        app, sibling, victim: processes of the same user: the app, another driver, and one that may be killed.
        address: of a copy of `word` in the app's memory.
        fd: a descriptor of the app, of the secret file.
    """

    secret: str
    word: str
    folder: str
    tcp: int
    udp: int
    stream: str
    datagram: str
    abstract: str
    app: int
    sibling: int
    victim: int
    address: int
    fd: int


Attack: TypeAlias = Callable[[Target], Any]
ATTACKS: dict[str, Attack] = {}
PRIVILEGED: set[str] = set()
"""Attacks that need root (or its capabilities) without a sandbox."""
OPTIONAL: set[str] = set()
"""Attacks on a part that kernels may lack."""
GIVEN: list[int] = []
"""Descriptors of the model's weights, which the app has given to the driver for reading."""
MADE_CODE: set[str] = set()
"""Attacks that engines with `makes_code` may carry out."""


def attack(function: Attack) -> Attack:
    """Register an attack under the words of its function's name."""
    ATTACKS[function.__name__.replace("_", " ")] = function
    return function


def privileged(function: Attack) -> Attack:
    """Register an attack that without a sandbox needs root."""
    PRIVILEGED.add(function.__name__.replace("_", " "))
    return attack(function)


def optional(function: Attack) -> Attack:
    """Register an attack on a part that this kernel may not have."""
    OPTIONAL.add(function.__name__.replace("_", " "))
    return attack(function)


def call(name: str, *arguments: Any, reaches: tuple[int, ...] = (), copies: bool = False) -> int:
    """Make a system call by its number. Arguments are integers of 64 bits, bytes, buffers or None.

    Args:
        name: of the call.
        arguments: of the call.
        reaches: errors that count as success.
        copies: whether the call returns in a copy of the process too. It then keeps the GIL: another thread might hold it at the
            time of the copy, and in the copy that thread does not exist.

    Raises:
        OSError: it failed, with another error than those of `reaches`.
    """
    return raw(NUMBERS[name], *arguments, reaches=reaches, copies=copies)


def raw(number: int, *arguments: Any, reaches: tuple[int, ...] = (), copies: bool = False) -> int:
    """Make a system call. As `call`."""
    if number < 0:
        raise OSError(errno.ENOSYS, "no such call on this architecture")
    libc = (ctypes.PyDLL if copies else ctypes.CDLL)(None, use_errno=True)
    given = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    ctypes.set_errno(0)
    result: int = libc.syscall(ctypes.c_long(number), *given)
    failed = ctypes.get_errno()
    if result < 0 and failed not in reaches:
        raise OSError(failed, os.strerror(failed))
    return result


def outcome(name: str, target: Target) -> str:
    """Carry one attack out, in its own thread, because some change their thread. Returns "success" or how it failed."""
    found: list[str] = []

    def run() -> None:
        try:
            ATTACKS[name](target)
        except OSError as error:
            word = errno.errorcode.get(error.errno or 0, str(error))
            found.append(f"missing {word}" if error.errno in _MISSING and name in OPTIONAL else f"denied {word}")
        except BaseException as error:
            found.append(f"bug {error!r}")
        else:
            found.append("success")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]
