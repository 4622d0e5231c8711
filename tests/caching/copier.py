"""Somebody who replaces cache files while a driver saves or loads them."""

from __future__ import annotations

import itertools
import os
import random
import threading
from pathlib import Path


class Copier(threading.Thread):
    """Gives files one of two contents in turn as long as the block lasts, each for a random while, in small pieces.

    Args:
        files: each path with both of its contents.
        longest_s: a content stays for at most that long. About the time of what is raced with, so that both outcomes occur.
        piece_bytes: one write; in between a file is a mix of both contents.
    """

    def __init__(self, files: list[tuple[Path, bytes, bytes]], longest_s: float, piece_bytes: int = 4096) -> None:
        super().__init__()
        self._files, self._longest_s, self._piece_bytes = files, longest_s, piece_bytes
        self._ended, self._running = threading.Event(), threading.Event()

    def run(self) -> None:
        for turn in itertools.count():
            for path, *contents in self._files:
                content = contents[turn % 2]
                fd = os.open(path, os.O_WRONLY)
                for at in range(0, len(content), self._piece_bytes):
                    os.pwrite(fd, content[at : at + self._piece_bytes], at)
                os.ftruncate(fd, len(content))
                os.close(fd)
            self._running.set()
            if self._ended.wait(random.uniform(0, self._longest_s)):
                return

    def __enter__(self) -> Copier:
        self.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
