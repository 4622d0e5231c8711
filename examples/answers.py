"""The last line of every example: print what was found, whoever reads it or has stopped reading."""

from __future__ import annotations

import os
import sys

__all__ = ["print_answer"]


def print_answer(program: str, text: str) -> int:
    """Print to stdout; the exit code: 0, or 1 where it cannot be written, which is told unless the reader has just left (`| head`)."""
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in Python's buffer goes nowhere, or it would be tried, and complained of, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"{program}: the answer cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0
