"""Which need would have allowed what a sandbox has denied to an engine's Python code.

An error of native code does not say what was denied.
"""

from __future__ import annotations

import os

_NO_TEMPORARY = "No usable temporary directory"
"""How the error of `tempfile` begins that has tried the usual folders."""


def way_out(error: BaseException) -> str:
    """Return a clause with the need that would allow what has failed, or an empty text if no need would, or the error does not tell."""
    need = _need(error)
    return f"; the sandbox of its driver allows it with {need} in aionn-engine.toml, or in Runtime(engine_needs=)" if need else ""


def _need(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and str(error.strerror).startswith(_NO_TEMPORARY):
        return "writes_by_path = true"
    if not isinstance(error, PermissionError):
        return ""
    if not isinstance(error.filename, str | bytes):
        return "makes_code = true" if _names_executable_memory(error) else ""
    path = os.path.abspath(os.fsdecode(error.filename))
    if not os.path.lexists(path):
        return "writes_by_path = true, and in the folder that TMPDIR names" if os.access(os.path.dirname(path), os.W_OK) else ""
    # `access` asks about the file's mode, and not about Landlock. So the mode is not what has denied it.
    if not os.access(path, os.R_OK) or (not path.startswith("/dev/") and _can_be_read(path)):
        return ""
    return f'{"devices" if path.startswith("/dev/") else "reads"} = ["{path}"]'


def _can_be_read(path: str) -> bool:
    """Return whether this process may read a file, so that it was writing that was denied."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _names_executable_memory(error: BaseException) -> bool:
    """Return whether the function that has failed asks for executable memory. The error of `mmap` does not name what it was asked for."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "PROT_EXEC" in trace.tb_frame.f_code.co_names
