"""The command `aionn`: compile and run models, look after a cache, list devices.

    commands     the command line itself: arguments, and nothing else
    compiling    `aionn compile`: with progress, then what was stored
    running      `aionn run`
    caches       `aionn cache ls | verify | prune`
    listing      `aionn devices`
    printing     tables for people, JSON for programs, sizes and times in words

Results go to stdout: a table, or with `--json` one JSON value. Progress, warnings and errors go to stderr. Exit codes: 0 fine, 1
the check or the work failed, 2 wrong usage, 130 interrupted by Ctrl-C. An error is one sentence, never a traceback.

`main` is the console script and `python -m aionn`. Everything it needs is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name. None takes those of this process.

    Returns:
        The exit code.
    """
    from aionn.cli.commands import run_command

    return run_command(arguments)
