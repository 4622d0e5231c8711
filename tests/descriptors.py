"""A process that has only so many free descriptors."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leave so many descriptors to this process for the `with` body."""
    gc.collect()  # or garbage with descriptors could give them back during the body
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    fillers: list[int] = []
    try:
        try:
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(count):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
