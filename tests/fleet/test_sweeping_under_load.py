"""F8: a store is swept while others push to it and read from it. No artifact whose statement stays fails, and the budget is kept.

All times are scaled down: a grace of a second stands for a day. `pytest -m soak` runs it for 10 minutes.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from aionn.caching.outcomes import MissReason, Refusal
from aionn.fleet.artifact_store import ArtifactStore, claimed_files, statement_at, trusted_files
from aionn.fleet.requests import open_address
from aionn.fleet.sweeping import SweepReport, check_store, sweep
from tests.fleet.entries import KEYRING, Artifact, artifact, some_bytes
from tests.fleet.fake_s3 import FakeS3

GRACE_S, KEEP_S = 1.0, 1.5
REPAIRED_S = 30.0
"""A sweep may take a file between the writer's statement and its last look. The writer then writes the file again."""

MODELS, FILE_BYTES = 30, 20_000
ENTRY_BYTES = 2 * FILE_BYTES + 9
BUDGET_BYTES = 10 * ENTRY_BYTES


@dataclass
class Seen:
    """What happened."""

    pushes: int = 0
    whole: int = 0
    dropped: int = 0
    repaired: int = 0
    failed: list[Refusal] = field(default_factory=list)
    sweeps: list[SweepReport] = field(default_factory=list)

    def enough(self) -> bool:
        """Whether there have been pushes, whole reads, and sweeps that have dropped a statement."""
        return min(self.pushes, self.whole) > 0 < sum(report.statements for report in self.sweeps)


def one_of_them(number: int) -> Artifact:
    """An artifact. All share one small file, and pairs share a large one."""
    return artifact(f"model {number}", some_bytes(number, FILE_BYTES), some_bytes(number // 2 + 1000, FILE_BYTES), b"shared by")


async def keep_pushing(store: ArtifactStore, chance: random.Random, seen: Seen) -> None:
    while True:
        await one_of_them(chance.randrange(MODELS)).push(store)
        seen.pushes += 1


async def keep_reading(store: ArtifactStore, chance: random.Random, seen: Seen) -> None:
    while True:
        await read_one(store, one_of_them(chance.randrange(MODELS)), seen)


async def read_one(store: ArtifactStore, wanted: Artifact, seen: Seen) -> None:
    give_up_at = time.monotonic() + REPAIRED_S
    while True:
        before = await store.requests.find(wanted.place.path)
        signed = await store.statement(wanted.place)
        if before is None or signed is None:
            return
        statement = statement_at(wanted.place, signed, KEYRING)
        assert not isinstance(statement, Refusal)
        with ExitStack() as stack:
            fds = [stack.enter_context(tempfile.TemporaryFile()).fileno() for _ in statement.files]
            refusal = await store.fetch(statement.files, fds)
        if refusal is None:
            seen.whole += 1
            return
        assert refusal.reason is MissReason.PARTIAL
        if await store.requests.find(wanted.place.path) != before:
            seen.dropped += 1  # the statement went first, then its files; it may have been pushed anew since
            return
        seen.repaired += 1
        if time.monotonic() > give_up_at:
            seen.failed.append(refusal)
            return


async def keep_sweeping(store: ArtifactStore, seen: Seen) -> None:
    while True:
        seen.sweeps.append(await sweep(store, claimed_files, keep_s=KEEP_S, max_bytes=BUDGET_BYTES, grace_s=GRACE_S))
        await anyio.sleep(0.05)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("seconds", [2.0, pytest.param(600.0, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_a_sweep_takes_nothing_that_is_in_use(
    kind: str, seconds: float, s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What takes an hour and a day there is a fraction of the grace here, as it must be.
    monkeypatch.setattr("aionn.fleet.artifact_store._FRESH_S", 0.2)
    monkeypatch.setattr("aionn.fleet.artifact_store._REFRESHED_S", 0.6)
    address = "s3://artifacts/prefix" if kind == "bucket" else os.fspath(tmp_path / "store")
    store = ArtifactStore(open_address(address, patience_s=60.0, make=True))
    seen, chance = Seen(), random.Random(8)
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(keep_pushing, store, chance, seen)
            tasks.start_soon(keep_reading, store, chance, seen)
        tasks.start_soon(keep_sweeping, store, seen)
        await anyio.sleep(seconds)
        with anyio.fail_after(60):  # on a busy machine it begins later
            while not seen.enough():  # noqa: ASYNC110
                await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
    assert seen.failed == []
    await anyio.sleep(GRACE_S)  # all that is left is older than the grace then
    last = await sweep(store, claimed_files, keep_s=1000.0, max_bytes=BUDGET_BYTES, grace_s=GRACE_S / 2)
    assert last.kept_bytes <= BUDGET_BYTES
    assert last.over_bytes == 0
    left = await check_store(store, trusted_files(KEYRING))
    assert left.bad == ()
    reads = f"{seen.whole} whole reads, {seen.dropped} of dropped ones, {seen.repaired} before a repair"
    print(f"{kind}: {seen.pushes} pushes, {reads}, {len(seen.sweeps)} sweeps")
