"""What commands print: tables for people, JSON for programs, and one sentence for an error. Amounts and addresses that people type, too.

Rich is imported where a table or a console is made. A command that serves needs neither, and stays small without Rich.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aionn.errors import AionnError, CallerError
from aionn.escapes import escaped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDE = 10_000
"""Width of a table that goes into a file or a pipe, where nothing is wrapped or cut."""

_PROSE = {"version", "its version", "reason", "state", "stage", "detail", "found", "confined", "not confined"}
"""Columns that a narrow terminal may wrap. The others hold what people copy or compare, so they are never cut. Where even they do not
fit, the terminal itself wraps the lines."""

_PROSE_LEAST = 12
"""Least width of a column with prose, in characters."""


class UsageError(Exception):
    """The arguments of a command are wrong. Exit code 2."""


class NotDoneError(Exception):
    """The command ran, and its check or its work failed. Exit code 1."""


def address_of(listen: str, option: str = "--listen") -> tuple[str, int]:
    """Return host and port of HOST:PORT, with an IPv6 address in brackets.

    Raises:
        UsageError: it is not an address, or no such host is known.
    """
    parts = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})", listen)
    if parts is None or int(parts["port"]) > 65535:
        raise UsageError(f"{option} {listen!r} is not HOST:PORT; give an address such as 127.0.0.1:9787 or [::1]:9787")
    host = parts["six"] or parts["host"]
    try:
        socket.getaddrinfo(host, int(parts["port"]), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{option} {listen!r}: the host {host!r} is not known; give an address of this machine") from error
    return host, int(parts["port"])


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the address as a URL without a path."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def error_console() -> Console:
    """Return a console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print on stderr what a command that serves does now."""
    print(f"aionn: {escaped(text, one_line=True)}", file=sys.stderr, flush=True)


def run_reported(command: Callable[[], object]) -> int:
    """Run a command and return its exit code. Print warnings, and an error as one sentence."""
    # Python has None where the descriptor was closed.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- until the process ends
    show_warnings()
    try:
        command()
        sys.stdout.flush()
    except (UsageError, CallerError) as error:
        return _failed(str(error), 2)
    except (NotDoneError, AionnError) as error:
        return _failed(str(error), 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader of stdout has closed it. Python would complain about that once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _failed(f"{error.strerror or error}: {error.filename!r}" if error.filename else f"{error.strerror or error}", 1)
    return 0


def _failed(sentence: str, code: int) -> int:
    say(" ".join(sentence.split()))
    return code


def print_json(value: Any) -> None:
    """Print one JSON value, indented."""
    import json

    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a line with the title, and a table. Columns whose name ends with ">" hold numbers and are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    if title:
        print(escaped(title, one_line=True))  # as a title of Rich's table it would be wrapped at the table's width
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name = column.rstrip(">")
        table.add_column(name, justify="right" if column.endswith(">") else "left", overflow="fold", no_wrap=name not in _PROSE)
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    if console.is_terminal:
        least = 0
        for number, column in enumerate(columns):
            widest = max(len(text) for text in (column.rstrip(">"), *(row[number] for row in rows)))
            least += 2 + (min(widest, _PROSE_LEAST) if column in _PROSE else widest)
        console.width = max(console.width, least)
        console.print(table)
        return
    print_plainly(table)


def print_plainly(renderable: RenderableType) -> None:
    """Print what goes into a file or a pipe: unstyled, nothing wrapped or cut, and no blanks at the ends of lines."""
    from rich.console import Console

    console = Console(highlight=False, width=_WIDE)
    with console.capture() as printed:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(escaped(text, one_line=True))  # names of files and nodes may hold brackets, which rich would take for its markup


def size(count: int) -> str:
    """Return a number of bytes for people, as "6.8 MB"."""
    if count < 1000:
        return f"{count} B"
    amount = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.95 or unit == "TB":
            break
    return f"{amount:.1f} {unit}"


def counted(count: int, one: str) -> str:
    """Return a number of things for people, as "1 entry" and "2 entries"."""
    return f"{count} {one if count == 1 else one.removesuffix('y') + 'ies' if one.endswith('y') else one + 's'}"


entries = partial(counted, one="entry")


def duration(seconds: float) -> str:
    """Return a duration for people, with three digits: "12.3 us", "3.21 ms", "1.25 s"."""
    for unit, length in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def ago(at_s: float | None) -> str:
    """Return how long ago a wall-clock time was, as "3 h ago"."""
    if at_s is None:
        return "?"
    passed = max(0.0, time.time() - at_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed / length:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


def digest(content: bytes) -> str:
    """Return the part of a digest that `cache ls` and the logs show: enough to distinguish entries."""
    return content.hex()[:16]


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"aionn: {record.levelname.lower()}: {escaped(record.getMessage())}", file=sys.stderr, flush=True)


def show_warnings(level: int = logging.WARNING) -> None:
    """Print aionn's warnings on stderr from now on, one line each. A lower level prints more."""
    logger = logging.getLogger("aionn")
    logger.handlers = [_Warnings(level)]
    if level < logging.WARNING:
        logger.setLevel(level)
    logger.propagate = False


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}


def bytes_of(text: str, option: str) -> int:
    """Return the number of bytes that a text names, with or without a unit (powers of 1000). `option` is named in an error."""
    parts = re.fullmatch(r"(\d+)\s*([kKMGT]?)B?", text.strip())
    if parts is None:
        raise UsageError(f"{option} {text!r} is not a number of bytes; give one as 500000000, 500M or 2G")
    power: int = " kMGT".index(parts[2].replace("K", "k") or " ")
    return int(parts[1]) * int(1000**power)


def seconds_of(text: str, option: str) -> float:
    """Return the seconds that a text names, as "90s", "15m", "12h" or "30d". `option` is named in an error."""
    parts = re.fullmatch(r"(\d+)\s*([smhd]?)", text.strip())
    if parts is None:
        raise UsageError(f"{option} {text!r} is not a time; give one as 90s, 15m, 12h or 30d")
    return float(int(parts[1]) * _SECONDS[parts[2]])
