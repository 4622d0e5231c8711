"""The reference engine with a cache, in a process that writes down every path that Python code opens.

Ask a driver for it as `NAME`. The file that AIONN_TEST_OPENED names gets one line for each path, as the code named it.
"""

from __future__ import annotations

import os
import sys

from aionn.engines.reference import ReferenceExecutable
from aionn.hal import CompileOptions, Model
from tests.conformance.storing_reference import StoringReference

NAME = "tests.conformance.watched_opens:WatchedReference"
WATCHED = "AIONN_TEST_OPENED"


def _write_down(path: str) -> None:
    """Append every path that this process opens from now on to a file."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "sqlite3.connect") and isinstance(arguments[0], str | bytes):
            os.write(log, os.fsencode(arguments[0]) + b"\n")

    sys.addaudithook(note)


class WatchedReference(StoringReference):
    """Opens /dev/null in each compilation and load, so a test sees that the paths are written down."""

    name = "watched-reference"

    def __init__(self) -> None:
        super().__init__()
        _write_down(os.environ[WATCHED])

    def compile(self, model: Model, options: CompileOptions) -> ReferenceExecutable:
        os.close(os.open(os.devnull, os.O_RDONLY))
        return super().compile(model, options)
