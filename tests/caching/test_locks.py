"""The entry lock: readers together, a writer alone, a waiting writer before new readers, and nothing left of the dead."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from aionn.caching.store.locks import CompileQueues, EntryHold, hold_now, sole_holder, wait_to_hold
from tests.apps import App

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "key.entry")


def held(hold: EntryHold | None) -> EntryHold:
    assert hold is not None
    return hold


async def test_readers_hold_together_and_a_writer_alone(path: str) -> None:
    first, second = held(hold_now(path, "read")), held(hold_now(path, "read"))
    assert hold_now(path, "write") is None
    first.release()
    assert hold_now(path, "write") is None
    second.release()
    writer = held(hold_now(path, "write"))
    assert hold_now(path, "read") is None
    assert hold_now(path, "write") is None
    writer.release()
    held(hold_now(path, "read")).release()


async def test_a_hold_is_released_once_however_often_that_is_asked(path: str) -> None:
    hold = held(hold_now(path, "write"))
    hold.release()
    reader = held(hold_now(path, "read"))  # has the number of the descriptor now
    hold.release()
    assert hold_now(path, "write") is None
    reader.release()


async def test_a_waiting_writer_comes_before_new_readers(path: str) -> None:
    reader = held(hold_now(path, "read"))
    written: list[EntryHold | None] = []

    async def write() -> None:
        written.append(await wait_to_hold(path, "write", 30.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        with anyio.fail_after(20):
            while (late := hold_now(path, "read")) is not None:  # until the writer has its turn
                late.release()
                await anyio.lowlevel.checkpoint()
        assert written == []
        assert await wait_to_hold(path, "read", 0.02) is None
        reader.release()
    held(written[0]).release()
    held(hold_now(path, "read")).release()


async def test_a_writer_that_gives_up_lets_readers_in_again(path: str) -> None:
    reader = held(hold_now(path, "read"))
    assert await wait_to_hold(path, "write", 0.01) is None
    with anyio.move_on_after(0.01):
        await wait_to_hold(path, "write", 30.0)  # cancelled
    held(hold_now(path, "read")).release()
    reader.release()
    held(hold_now(path, "write")).release()


async def test_a_released_lock_is_free_though_a_child_has_its_descriptor(path: str) -> None:
    hold = held(hold_now(path, "write"))
    childs = os.dup(hold._fd)  # as fork leaves it: the same open file description
    hold.release()
    held(hold_now(path, "write")).release()
    os.close(childs)


@pytest.mark.parametrize("made_again", [False, True])
@pytest.mark.parametrize("kind", ["read", "write", "compile"])
async def test_a_lock_whose_file_was_removed_or_made_again_meanwhile_is_not_believed(
    path: str, monkeypatch: pytest.MonkeyPatch, kind: Any, made_again: bool
) -> None:
    """An entry's removal unlinks its lock files, and the next one to come makes others, between an `open` and its `flock`."""
    flock, calls = fcntl.flock, list[int]()

    def removed_first(fd: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            os.unlink(path)
            if made_again:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    right = await CompileQueues().acquire(path, 5.0) if kind == "compile" else None
    hold = hold_now(path, kind) if kind != "compile" else None
    assert len(calls) > 1
    monkeypatch.undo()
    assert (hold or right) is not None
    others = os.open(path, os.O_RDWR)  # what everybody else meets
    with pytest.raises(BlockingIOError):
        fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if hold is not None:
        hold.release()
    if right is not None:
        right.release()
    fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(others)


async def test_a_removed_entry_leaves_no_lock_files_that_block(path: str) -> None:
    with sole_holder(path, path + ".compile") as free:
        assert free
        assert hold_now(path, "read") is None
    held(hold_now(path, "read")).release()


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_the_kernel_frees_the_lock_of_a_process_that_is_killed(path: str, mode: str) -> None:
    program = (
        "import sys; from aionn.caching.store.locks import hold_now; hold = hold_now(sys.argv[1], sys.argv[2]);"
        "assert hold is not None; print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, path, mode]
    with App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await anyio.to_thread.run_sync(process.stdout.readline) == b"held\n"
        assert hold_now(path, "write") is None
        process.send_signal(signal.SIGKILL)
    held(await wait_to_hold(path, "write", 5.0)).release()
