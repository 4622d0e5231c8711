"""A bug in an engine, as opposed to an error that it raises on purpose: its traceback for the app's log, its place for the error.

A bug is an exception of a type that Python itself raises for wrong code (`TypeError`, `KeyError`, `ZeroDivisionError`). Libraries raise
other types for models and inputs that they refuse, and so do engines. The texts of such errors say enough.

Each place is logged once in a driver process, so an engine that fails in every frame fills no log.
"""

from __future__ import annotations

import logging
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
