"""F6: eight processes push one key, four of them are killed. There is one statement, readers get all or a miss, and a sweep leaves no rest.

`pytest -m soak` runs 50 rounds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil
import pytest

from aionn.caching.outcomes import Refusal
from aionn.fleet.artifact_store import ArtifactStore, statement_at, trusted_files
from aionn.fleet.places import StatementPlace
from aionn.fleet.requests import open_address
from aionn.fleet.sweeping import check_store, sweep
from tests.fleet.entries import KEYRING, artifact
from tests.fleet.fake_s3 import FakeS3

PUSHERS, KILLED = 8, 4
FAULTS = {"error": 0.05, "slow": 0.2, "torn": 0.05}


@dataclass
class Pushers:
    """Processes that push, by number. A killed one is replaced for the next round."""

    address: str
    processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    killed_at_work: int = 0

    def fill(self) -> None:
        fresh = [number for number in range(PUSHERS) if number not in self.processes]
        for number in fresh:
            command = [sys.executable, "-m", "tests.fleet.pusher", self.address, str(number)]
            pipe = subprocess.PIPE
            self.processes[number] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        for number in fresh:
            assert self.said(number) == "ready"

    def said(self, number: int) -> str:
        stdout = self.processes[number].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def push(self, name: str) -> None:
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.write(f"{name}\n")

    def kill(self, number: int) -> None:
        process = self.processes.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        self.killed_at_work += not process.stdout.read()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()

    def close(self) -> None:
        for number in [*self.processes]:
            self.kill(number)


@pytest.fixture
def pushers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def read_once(store: ArtifactStore, place: StatementPlace) -> bool | Refusal:
    """Read an artifact whole: True if it was there, False if there is no statement, or why it could not be read."""
    signed = await store.statement(place)
    if signed is None:
        return False
    statement = statement_at(place, signed, KEYRING)
    assert not isinstance(statement, Refusal)
    with ExitStack() as stack:
        fds = [stack.enter_context(tempfile.TemporaryFile()).fileno() for _ in statement.files]
        return await store.fetch(statement.files, fds) or True


async def one_round(store: ArtifactStore, pushers: Pushers, name: str, chance: random.Random) -> tuple[int, int]:
    """Let all push one key, kill half of them on the way, and read meanwhile. Return how many reads were whole, and how many."""
    place = artifact(name, b"").place
    read: list[bool | Refusal] = []
    async with anyio.create_task_group() as tasks:

        async def keep_reading() -> None:
            while True:
                read.append(await read_once(store, place))

        tasks.start_soon(keep_reading)
        pushers.push(name)
        for number in chance.sample(range(PUSHERS), KILLED):
            await anyio.sleep(chance.random() * 0.05)  # where the kill strikes is left to chance, and nothing depends on it
            pushers.kill(number)
        for number in [*pushers.processes]:
            assert await anyio.to_thread.run_sync(pushers.said, number) in ("added", "present", "repaired")
        tasks.cancel_scope.cancel()
    assert [one for one in read if isinstance(one, Refusal)] == []
    assert await read_once(store, place) is True
    assert [found for found, _ in await store.statements() if found.key == place.key] == [place]
    return read.count(True), len(read)


async def settled(s3: FakeS3) -> None:
    """Return when the server has done all that the killed pushers have asked for."""
    with anyio.fail_after(30):
        while s3.clients - ports_of_this_process(s3.port):  # noqa: ASYNC110  (the server's threads set no event of this loop)
            await anyio.sleep(0.01)


def ports_of_this_process(server: int) -> set[int]:
    return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == server}


async def rounds(address: str, s3: FakeS3, count: int, stack: ExitStack) -> None:
    store = ArtifactStore(open_address(address, patience_s=60.0, make=True))
    pushers = Pushers(address)
    stack.callback(pushers.close)
    chance = random.Random(os.environ.get("AIONN_TEST_SEED", "6"))
    whole = reads = 0
    for number in range(count):
        pushers.fill()
        one_whole, one_all = await one_round(store, pushers, f"model {number}", chance)
        whole, reads = whole + one_whole, reads + one_all
    at_work = pushers.killed_at_work
    pushers.close()
    await settled(s3)
    await sweep(store, trusted_files(KEYRING), grace_s=0.0)
    left = await check_store(store, trusted_files(KEYRING))
    assert (left.statements, left.unnamed, left.bad) == (count, 0, ())
    folder = store.requests.opened.folder
    assert folder is None or not list(folder.rglob("*#*"))
    print(f"{address}: {count} rounds, {at_work} of {count * KILLED} killed at work, {whole} of {reads} reads whole, the others misses")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "count", [pytest.param(2, id="short"), pytest.param(50, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_killed_pushers_leave_one_statement_and_whole_artifacts(
    kind: str, count: int, s3: FakeS3, tmp_path: Path, pushers: ExitStack
) -> None:
    s3.faults = dict(FAULTS)
    await rounds("s3://artifacts/prefix" if kind == "bucket" else os.fspath(tmp_path / "store"), s3, count, pushers)
