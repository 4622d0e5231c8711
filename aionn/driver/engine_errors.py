"""Errors of an engine: whether one is a bug and where it lies, and which need would have allowed what the sandbox denied.

A bug is an exception of a type that Python itself raises for wrong code (`TypeError`, `KeyError`, `ZeroDivisionError`). Libraries raise
other types for models and inputs that they refuse, and so do engines. The texts of such errors say enough. The traceback of a bug goes to
the app's log. Each place is logged once in a driver process, so an engine that fails in every frame fills no log.

The sandbox shows in errors of an engine's Python code. An error of native code does not say what was denied.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from types import TracebackType

from aionn.errors import text_of

logger = logging.getLogger("aionn.driver")

_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    StopIteration,
    SystemExit,
    TypeError,
)
_MAX_PLACES = 256
_MAX_TEXT = 700
"""So much of an error's text is kept in an answer, so that the place behind the text fits in, too."""
_OURS = ("aionn.driver.", "aionn.burst.", "aionn.remote.", "concurrent.", "threading")

_reported: set[tuple[str, int]] = set()
_lock = threading.Lock()


def report_bug(error: BaseException, device: str, act: str) -> str:
    """Return where a bug lies, as "at FILE:LINE in FUNCTION", and log its traceback once. Return "" if the error is not a bug.

    Args:
        act: what the engine did: "compile", "run".
    """
    if not isinstance(error, _BUGS):
        return ""
    found = _place(error.__traceback__)
    if found is None:
        return ""
    file, line, function = found
    with _lock:
        fresh = (file, line) not in _reported and len(_reported) < _MAX_PLACES
        if fresh:
            _reported.add((file, line))
    if fresh:
        text = "".join(traceback.format_exception(error))
        logger.error("a bug in the engine of device %r, in %s:\n%s", device, act, text.rstrip())
    return f"at {file}:{line} in {function}"


def sentence_of(error: BaseException) -> str:
    """Return what an engine says of a run that failed. The names of its exceptions are not an app's business, except those of bugs."""
    text = " ".join(text_of(error).split())
    if text and not isinstance(error, _BUGS):
        return text
    return f"the engine raised {type(error).__name__}: {text}" if text else f"the engine raised {type(error).__name__}"


def noted(text: str, place: str) -> str:
    """Return the text of an answer with the place of a bug as its last line."""
    return f"{text[:_MAX_TEXT]}\n{place}" if place else text


def _place(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """Return the last line of the engine's package that was being run, or of what else raised."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((str(trace.tb_frame.f_globals.get("__name__", "")), (code.co_filename, trace.tb_lineno, code.co_qualname)))
        trace = trace.tb_next
    outside = [(module, place) for module, place in frames if not f"{module}.".startswith(_OURS)]
    if not outside:
        return None  # the fault is aionn's
    first = outside[0][0]
    package = first.rpartition(".")[0] or first
    return [place for module, place in outside if module == first or module.startswith(f"{package}.")][-1]


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
