"""Files that options name, opened by the app for a driver process.

A confined driver opens no path of the app's. So each call that brings options brings descriptors of these files, too. A file that was
replaced or changed since the compile has another digest, and the driver refuses it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence

from aionn.errors import CallerError
from aionn.hal.options import EngineOptions
from aionn.tasks import run_in_thread


async def open_files(options: EngineOptions) -> Sequence[int]:
    """Open the files of options, in the order of `options.files`. The caller closes them with `close_files`.

    Raises:
        CallerError: a file cannot be opened any more.
    """
    return await run_in_thread(_open_all, {name: str(options[name]) for name in options.files}, undo=close_files)


def _open_all(paths: Mapping[str, str]) -> list[int]:
    fds: list[int] = []
    try:
        for name, path in paths.items():
            fds.append(open_option(name, path, "compile the model again"))
    except BaseException:
        close_files(fds)
        raise
    return fds


def close_files(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def open_option(option: str, path: str, way_out: str) -> int:
    """Open the file that an option names. Blocks, but never for a writer of a pipe.

    Args:
        way_out: ends the text of the error.

    Raises:
        CallerError: it cannot be opened, or is not a regular file.
    """
    try:
        # Opened without waiting: a pipe without a writer would hold the thread, and the interpreter's end with it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CallerError(f"option {option!r}: the file {path!r} cannot be read ({error.strerror}); {way_out}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CallerError(f"option {option!r}: {path!r} is not a regular file; give the path of a file")
    return fd
