"""The command `aionn`: compile and run models, look after a cache, list devices, watch what runs, measure, check the machine.

    commands     the command line itself: arguments, and nothing else
    compiling    `aionn compile`: with progress, then what was stored
    running      `aionn run`
    serving      `aionn serve-http`, `aionn serve-frigate`, `aionn serve-wyoming`
    service      `aionn serve` and `aionn ps`
    tracing      `aionn trace`
    caches       `aionn cache ls | verify | prune`
    listing      `aionn devices`
    doctor       `aionn doctor`; its checks are in the package `checks`
    top          `aionn top`: the tables and the screen; top_reading has the figures
    bench        `aionn bench`: bench_subjects, bench_worker
    metrics      `aionn metrics`
    fleet        `aionn fleet`
    ray          `aionn ray`
    printing     tables for people, JSON for programs, sizes and times in words

Results go to stdout: a table, or with `--json` one JSON value. Progress, warnings and errors go to stderr. Exit codes: 0 fine, 1
the check or the work failed, 2 wrong usage, 130 interrupted by Ctrl-C. An error is one sentence, never a traceback.

`main` is the console script and `python -m aionn`. Everything it needs is imported when it runs. Cyclopts and Rich come with the
extra `cli`, which an app that imports aionn does not need. A service outlives all other commands, so it starts without them if its
options are spelled in the plain way.
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
    import sys

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["top"] and _printed_snapshot(given):
            return 0
        if given[:1] == ["serve"]:
            from aionn.cli.printing import run_reported
            from aionn.cli.service import plain_options, serve

            if (options := plain_options(given[1:])) is not None:
                return run_reported(lambda: serve(options))
        try:
            from aionn.cli.commands import run_command
        except ModuleNotFoundError:
            from importlib.util import find_spec

            missing = [package for package in ("cyclopts", "rich") if find_spec(package) is None]
            if not missing:
                raise
            print(f"aionn: the commands need {' and '.join(missing)}, not installed here; run pip install 'aionn[cli]'", file=sys.stderr)
            return 1
        return run_command(arguments)
    except KeyboardInterrupt:
        print("aionn: interrupted", file=sys.stderr)
        return 130


def _printed_snapshot(given: list[str]) -> bool:
    """Print the snapshot that the command line asks for, in a third of the time that the general way takes.

    Returns False, having printed nothing, if it asks for something else or the snapshot fails. The general way then explains why.
    """
    import dataclasses
    import json

    from aionn.cli.top_reading import NotReadableError, is_snapshot, snapshot

    if not is_snapshot(given):
        return False
    try:
        print(json.dumps(dataclasses.asdict(snapshot(None, None)), indent=2), flush=True)
    except (NotReadableError, OSError):
        return False
    return True
