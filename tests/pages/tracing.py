"""A process that is asked for trace records, for the length of a `with`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aionn.pages.finding import Asking, FoundPage


@contextmanager
def tracing(page: FoundPage, until_ns: int) -> Iterator[None]:
    """Ask a process to write trace records, until the end of the body or until that moment of CLOCK_MONOTONIC.

    Raises:
        LayoutError, OSError: as `FoundPage`.
    """
    asking = Asking(page)
    try:
        asking.until(until_ns)
        yield
    finally:
        asking.close()
