"""Kills a process before its n-th act on the file system, for n = START, START + STEP and so on.

Run as `python -m tests.caching.crash SCENARIO DIRECTORY START STEP`. With START 1 and STEP 1 that is every act.

One process, without threads, imports everything once and then forks: a child does the scenario with a bomb set on act n, another child
looks at what is left. An act is whatever can make the disk differ afterwards: an `os` call that makes, changes, syncs or removes a file,
and an SQLite COMMIT or change of journal (statements within a transaction change nothing before that). It ends when a child comes through.
Prints the number of fault points that were tried; any complaint is an exception.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from aionn.caching import CacheOutcomeKind, MissReason, Refusal
from aionn.caching.integrity import IntegrityStore
from aionn.caching.store import CacheStore, Hit, Miss
from aionn.hal.engine import Artifact
from tests.caching.entries import FILES, generations, wanted

ACTS = ["open", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "link"]
MAX_POINTS = 500


class Bomb:
    """Counts acts, and kills this process before number `at`."""

    def __init__(self, at: int) -> None:
        self._at, self._count, self._lock = at, 0, threading.Lock()

    def tick(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        bomb, opened = self, os.open

        def ticking(original: Callable[..., Any]) -> Callable[..., Any]:
            def act(*arguments: Any, **options: Any) -> Any:
                read_only = original is opened and not arguments[1] & (os.O_CREAT | os.O_TRUNC)
                if not read_only:
                    bomb.tick()
                return original(*arguments, **options)

            return act

        for name in ACTS:
            setattr(os, name, ticking(getattr(os, name)))

        class Ticking(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                if arguments[0].startswith(("COMMIT", "PRAGMA journal_mode")):
                    bomb.tick()
                return super().execute(*arguments)

        connect = sqlite3.connect
        sqlite3.connect = lambda *arguments, **options: connect(*arguments, **{"factory": Ticking, **options})


def artifact(content: bytes) -> Artifact:
    return Artifact((content, content * 2), (content * 3,))


def driver(place: Path) -> IntegrityStore:
    return IntegrityStore("fake", "1.0", FILES, state_directory=place / "state")


async def save(place: Path, content: bytes) -> None:
    """A miss or an upgrade: stage, save with integrity, publish."""
    async with CacheStore(place / "cache") as store:
        found = await store.open(wanted())
        if isinstance(found, Hit):
            found = await found.reopen_as_miss(Refusal(MissReason.WRONG_BYTES))
        async with found:
            assert isinstance(found, Miss), found
            assert found.publisher is not None, found.outcome
            integrity = driver(place)
            assert integrity.save(found.publisher.handles, artifact(content)) is None
            integrity.close()
            refusal = await found.publisher.publish()
            assert refusal is None, refusal


async def evict(place: Path, content: bytes) -> None:
    async with CacheStore(place / "cache") as store:
        await store.prune(0)


async def decline(place: Path, content: bytes) -> None:
    async with CacheStore(place / "cache") as store, await store.open(wanted(1)) as found:
        assert isinstance(found, Miss)
        assert found.publisher is not None
        await found.publisher.decline()


async def look(place: Path, allowed: tuple[bytes | None, ...]) -> None:
    """The entry is one of the allowed whole ones, or absent (None); all is tidy; and it can be compiled again."""
    async with CacheStore(place / "cache") as store:
        found = await store.open(wanted(), wait_s=0.0)
        async with found:
            if isinstance(found, Hit):
                integrity = driver(place)
                loaded = integrity.load(found.handles)
                integrity.close()
                assert isinstance(loaded, Artifact), loaded
                assert loaded in [artifact(content) for content in allowed if content is not None], loaded
            else:
                assert None in allowed, found.outcome
                assert isinstance(found, Miss)
                assert found.publisher is not None, found.outcome  # the dead compiler's lock is free
        assert [bad async for bad in store.verify()] == []
    await save(place, b"third")
    assert len(generations(place / "cache", wanted())) == 1
    async with CacheStore(place / "cache") as store:
        async with await store.open(wanted()) as hit:
            assert hit.outcome.kind is CacheOutcomeKind.HIT, hit.outcome
        report = await store.prune(0)
        assert not isinstance(report, Refusal)
        assert report.left_bytes == 0
    left = [path for path in (place / "cache").rglob("*") if path.is_file() and not path.name.startswith("index.sqlite")]
    assert left == [], left


Scenario = Callable[[Path, bytes], Awaitable[None]]
SCENARIOS: dict[str, tuple[Scenario, bool, tuple[bytes | None, ...]]] = {
    # what is done, whether an old entry is there before, what may be there after
    "first": (save, False, (None, b"new")),
    "upgrade": (save, True, (b"old", b"new")),
    "evict": (evict, True, (b"old", None)),
    "decline": (decline, True, (b"old",)),
}


def in_child(act: Callable[[], Awaitable[None]], bomb: Bomb | None = None) -> int:
    """Exit code of a forked child that runs `act`; negative: killed by that signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if bomb is not None:
                bomb.arm()
            anyio.run(act)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(name: str, directory: str, start: str, step: str) -> None:
    act, has_old, allowed = SCENARIOS[name]
    template = Path(directory) / "template"
    template.mkdir(mode=0o700)
    if has_old:
        assert in_child(lambda: save(template, b"old")) == 0
    for tried, point in enumerate(range(int(start), MAX_POINTS, int(step))):
        place = Path(directory) / f"at{point}"
        shutil.copytree(template, place)
        ended = in_child(lambda place=place: act(place, b"new"), Bomb(point))  # type: ignore[misc]
        assert ended in (0, -signal.SIGKILL), f"{name}: point {point} ended with {ended}"
        assert in_child(lambda place=place: look(place, allowed)) == 0, f"{name}: after a kill at point {point}"  # type: ignore[misc]
        shutil.rmtree(place)
        if ended == 0:
            print(tried)
            return
    raise AssertionError(f"{name}: more than {MAX_POINTS} acts")


if __name__ == "__main__":
    main(*sys.argv[1:])
