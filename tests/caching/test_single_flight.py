from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from aionn.caching import CacheOutcomeKind
from aionn.caching.store import CacheStore, Hit, Miss
from tests.apps import App
from tests.caching.entries import contents, expected, fill, read, wanted

EXPECTED = b"".join(expected(b"artifact")).hex()


class Fleet:
    """Processes that all want the same entry, and what they tell."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told, self._tell = os.pipe()
        self._lines = os.fdopen(self._told, "r")
        self.members: dict[int, subprocess.Popen[str]] = {}
        self.lines: list[tuple[int, str]] = []

    def start(self, number: int, wait_s: float = 60.0) -> None:
        for _ in range(number):
            command = [sys.executable, "-m", "tests.caching.compiler", str(self._directory), str(wait_s)]
            member = App(command, stdin=subprocess.PIPE, stdout=self._tell, text=True)
            self.members[member.pid] = member

    def next(self, *words: str) -> int:
        """Wait for the next line that begins with one of these words; who told it. All lines are kept."""
        while True:
            pid, _, what = self._lines.readline().strip().partition(" ")
            self.lines.append((int(pid), what))
            if what.split(" ")[0] in words:
                return int(pid)

    def told(self, word: str) -> list[int]:
        return [pid for pid, what in self.lines if what.split(" ")[0] == word]

    def waiting(self, compiler: int, number: int) -> None:
        """Return when so many wait for `compiler`. Nobody else compiles."""
        while len(self.told("waits")) < number:
            self.next("waits", "compiling")
            assert self.told("compiling") == [compiler]

    def go(self, pid: int) -> None:
        stdin = self.members[pid].stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()

    def close(self) -> None:
        for member in self.members.values():
            member.kill()
            member.wait()
            if member.stdin is not None:
                member.stdin.close()
        os.close(self._tell)
        self._lines.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "cache")
    yield fleet
    fleet.close()


def test_eight_processes_compile_once(fleet: Fleet) -> None:
    fleet.start(8)
    compiler = fleet.next("compiling")
    fleet.waiting(compiler, 7)
    fleet.go(compiler)
    for _ in range(8):
        fleet.next("published", "hit")
    assert fleet.told("compiling") == [compiler]
    assert fleet.told("published") == [compiler]
    assert [what for _, what in fleet.lines if what.startswith("hit")] == [f"hit {EXPECTED}"] * 7
    assert all(member.wait() == 0 for member in fleet.members.values())


def test_when_the_compiler_is_killed_half_way_another_takes_over(fleet: Fleet) -> None:
    fleet.start(8)
    first = fleet.next("compiling")
    fleet.waiting(first, 7)
    os.kill(first, signal.SIGKILL)
    second = fleet.next("compiling")
    assert second != first
    fleet.go(second)
    for _ in range(7):
        fleet.next("published", "hit")
    assert fleet.told("compiling") == [first, second]
    assert [what for _, what in fleet.lines if what.startswith("hit")] == [f"hit {EXPECTED}"] * 6


def test_a_waiter_compiles_for_itself_when_its_patience_ends(fleet: Fleet) -> None:
    fleet.start(1)
    compiler = fleet.next("compiling")
    fleet.start(2, wait_s=0.2)
    assert compiler not in (fleet.next("busy"), fleet.next("busy"))
    fleet.go(compiler)
    assert fleet.next("published") == compiler


@pytest.mark.anyio
async def test_many_tasks_of_many_stores_compile_once(tmp_path: Path) -> None:
    compiled, contents_seen, waited = 0, [], []

    async def compile_or_wait(store: CacheStore) -> None:
        nonlocal compiled
        async with await store.open(wanted()) as found:
            if isinstance(found, Miss):
                assert found.publisher is not None
                compiled += 1
                await anyio.wait_all_tasks_blocked()
                fill(found.publisher.handles, b"artifact")
                assert await found.publisher.publish() is None
            else:
                assert isinstance(found, Hit)
                waited.append(found.outcome.kind is CacheOutcomeKind.HIT)
                contents_seen.append(contents(found.handles))

    async with CacheStore(tmp_path / "cache") as one, CacheStore(tmp_path / "cache") as two:
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(compile_or_wait, (one, two)[number % 2])
        assert compiled == 1
        assert contents_seen == [expected(b"artifact")] * 9
        assert waited == [True] * 9


@pytest.mark.anyio
async def test_when_a_compilation_fails_the_next_waiter_compiles(tmp_path: Path) -> None:
    attempts: list[int] = []

    async def attempt(store: CacheStore, number: int) -> None:
        async with await store.open(wanted()) as found:
            if isinstance(found, Miss):
                assert found.publisher is not None
                attempts.append(number)
                fill(found.publisher.handles, b"half")
                if len(attempts) < 3:
                    return  # the compilation raised: the publisher is closed without publishing
                fill(found.publisher.handles, b"artifact")
                assert await found.publisher.publish() is None

    async with CacheStore(tmp_path / "cache") as store:
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(attempt, store, number)
        assert len(attempts) == 3
        assert await read(store, wanted()) == expected(b"artifact")
