"""A process that was forked becomes as one that Python has just started, apart from the modules that it has imported.

Import this module where the process is as Python started it: it remembers what an app changes later.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14

_path, _finders, _filters, _streams = list(sys.path), list(sys.meta_path), list(warnings.filters), (sys.stdin, sys.stdout, sys.stderr)

_shown: Any = None
"""What /proc shows of this process. The kernel reads it from here."""

READ_AT_LOAD = (
    *("AIONN_LANES", "COV", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "OMP_", "OPENBLAS_", "ORT_"),
    *("PYTHON", "TZ", "UV_"),
)
"""Beginnings of the names of variables that Python or a library reads when it is loaded."""

TAKEN_OVER = "PYTHONWARNINGS", "PYTHONUNBUFFERED"
"""Those that `begin_anew` takes over nevertheless."""


def read_at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process which has imported already cannot take over."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_LOAD) and name not in TAKEN_OVER}


def begin_anew(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Have the environment, the command line, the streams and the warnings of `argv`, a command line of Python.

    Returns the arguments from the code, the module or the script on. Only `-P` and `-W FILTER` may precede it.
    """
    os.environ.clear()
    os.environ.update(environment)
    _show(argv, environment)
    sys.orig_argv[:] = argv
    sys.path[:], sys.meta_path[:] = _path, _finders
    sys.stdin, sys.stdout, sys.stderr = (_fresh(stream, fd) for fd, stream in enumerate(_streams))
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    arguments = list(argv[1:])
    filters = list(filter(None, environment.get("PYTHONWARNINGS", "").split(",")))
    while arguments[0] in ("-P", "-W"):
        filters += arguments[1:2] if arguments[0] == "-W" else []
        del arguments[: 2 if arguments[0] == "-W" else 1]
    sys.warnoptions[:], warnings.filters[:] = filters, _filters  # type: ignore[index]
    warnings._processoptions(filters)  # type: ignore[attr-defined]
    return arguments


def _fresh(stream: TextIO, fd: int) -> TextIO:
    """Return a stream like that one for what the descriptor is now."""
    assert isinstance(stream, io.TextIOWrapper)
    file = io.FileIO(fd, "w" if fd else "r", closefd=False)
    file.name = stream.name
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        io.BufferedReader(file) if not fd else file if through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=not through and (fd == 2 or file.isatty()),
        write_through=through,
    )


def _show(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Let /proc show these words as the command line of this process, and these variables as its environment.

    Raises:
        OSError: a kernel without CONFIG_CHECKPOINT_RESTORE.
    """
    global _shown
    with open("/proc/self/stat", "rb") as stat:
        fields = [b"", b"", b"", *stat.read().rpartition(b")")[2].split()]  # numbered as in proc(5)
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    environment = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    shown = ctypes.create_string_buffer(command + environment)
    begin, libc = ctypes.addressof(shown), ctypes.CDLL(None, use_errno=True)
    between, end = begin + len(command), begin + len(command) + len(environment)
    libc.sbrk.restype = ctypes.c_void_p
    code, data = map(int, fields[26:28]), map(int, fields[45:47])
    # struct prctl_mm_map: addresses of the process as they are, those of both texts, no auxiliary vector, and no other executable
    places = *code, *data, int(fields[47]), libc.sbrk(0), int(fields[28]), begin, between, between, end, 0, 0xFFFFFFFF << 32
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, (ctypes.c_uint64 * len(places))(*places), 8 * len(places), 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP) failed")
    _shown = shown  # the kernel reads from it now, and no more from the one before


def forget_logging() -> None:
    """Leave no logger as an app has set it up."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers[:] = [handler for handler in logger.handlers if isinstance(handler, logging.NullHandler)]
            logger.setLevel(logging.NOTSET if logger is not logging.root else logging.WARNING)
            logger.propagate, logger.disabled = True, False
