"""What the runtime does about a cache, act by act: refusals, deadlines, tokens of other models, what is told afterwards."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import aionn
from aionn import trace
from aionn.caching import CacheOutcomeKind, MissReason, Refusal, Wanted
from aionn.caching.store import CacheStore, Hit, Miss, Publisher
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.locks import CompileQueues, CompileRight
from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeadlineError,
    DriverDiedError,
    DriverHungError,
)
from aionn.hal import CacheFiles, PrepareOptions
from aionn.runtime.preparing.compile_acts import CacheChoice, UnsupportedOperationError, refusal_from
from aionn.testing import FakeDevice, identity_model
from tests.runtime.scripted_devices import ScriptedDevice, scripted, some_model

pytestmark = pytest.mark.anyio
HIT, MISS, DECLINED = CacheOutcomeKind.HIT, CacheOutcomeKind.MISS, CacheOutcomeKind.DECLINED
TOKEN = bytes(32)


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[CacheChoice]:
    async with CacheStore(tmp_path / "cache") as store:
        yield CacheChoice(store, TOKEN)


def with_outputs(name: str) -> aionn.Model:
    """`some_model`, with an output of that name."""
    return aionn.Model.from_onnx(identity_model({"input": (1, 16)}, outputs=[name]))


def within(seconds: float) -> PrepareOptions:
    return PrepareOptions(deadline_ns=time.monotonic_ns() + int(seconds * 1e9))


async def fill(cache: CacheChoice, device: ScriptedDevice | None = None) -> Any:
    """Compile once, so that the entry is there; the model."""
    model = some_model()
    async with scripted(device or ScriptedDevice()) as devices:
        _, outcome = await devices.prepare(model, cache)
    assert (outcome.kind, outcome.save_failure) == (MISS, None)
    return model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- the three workflows, and what is told of them ---------------------------------------------------------------------


async def test_every_outcome_is_a_counter_with_its_reason(cache: CacheChoice) -> None:
    model = some_model()
    device = ScriptedDevice()
    declining = ScriptedDevice(version="declines")
    declining.save_outcome = "declined"
    with trace.record() as recording:
        async with scripted(device) as devices:
            await devices.prepare(model, cache)
            await devices.prepare(model, cache)
            await devices.prepare(model, None)
            device.from_cache = CompilationError("bad", reason="wrong_bytes: a bit")
            device.save_outcome = "no_space: the disk is full"
            _, outcome = await devices.prepare(model, cache)
        async with scripted(declining) as devices:
            await devices.prepare(model, cache)
            await devices.prepare(model, cache)
    told = [(c.attributes["kind"], c.attributes["reason"]) for c in recording.counters if c.name == "compile.cache"]
    assert told == [
        ("miss", "absent"),
        ("hit", ""),
        ("no_cache", ""),
        ("miss", "wrong_bytes"),
        ("miss", "other_driver_version"),
        ("declined", ""),
    ]
    failed = [c.attributes["reason"] for c in recording.counters if c.name == "compile.save_failed"]
    assert failed == ["no_space"]
    assert outcome.save_failure == Refusal(MissReason.NO_SPACE, "the disk is full")


async def test_a_hit_asks_the_device_nothing_and_says_what_it_saved(cache: CacheChoice) -> None:
    model = await fill(cache)
    device = ScriptedDevice()
    device.loaded_model = model
    async with scripted(device) as devices:
        prepared, outcome = await devices.prepare(model, cache)
    assert device.calls == ["from cache"]
    assert outcome.kind is HIT
    assert outcome.saved_s > 0
    assert prepared is device.prepared[0]


async def test_a_declined_model_is_not_offered_a_cache_again(cache: CacheChoice) -> None:
    device = ScriptedDevice()
    device.save_outcome = "declined"
    async with scripted(device) as devices:
        _, first = await devices.prepare(some_model(), cache)
        _, second = await devices.prepare(some_model(), cache)
    assert device.calls == ["supported", "prepare with handles", "supported", "prepare"]
    assert (first.kind, first.reason, first.save_failure) == (MISS, MissReason.ABSENT, None)
    assert second.kind is DECLINED


async def test_what_a_device_cannot_run_is_remembered_and_neither_asked_nor_sent_again(cache: CacheChoice) -> None:
    device = ScriptedDevice()
    device.supports = False
    async with scripted(device) as devices:
        for asked in (["supported"], ["supported"]):
            with pytest.raises(UnsupportedOperationError) as caught:
                await devices.prepare(some_model(), cache)
            assert device.calls == asked
            assert caught.value.node == "identity_input"
            assert "Identity" in caught.value.reason


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CompilationError("no", reason="wrong_bytes: one bit"), MissReason.WRONG_BYTES),
        (CompilationError("no", reason="no_integrity_record: new driver"), MissReason.NO_INTEGRITY_RECORD),
        (CompilationError("no", reason="it is what it is"), MissReason.REFUSED_BY_DEVICE),
        (CallerError("3 files"), MissReason.WRONG_FILES),
        (DriverDiedError("scripted", -11), MissReason.REFUSED_BY_DEVICE),
        (DriverHungError("scripted", 1.0), MissReason.REFUSED_BY_DEVICE),
    ],
    ids=lambda value: value.value if isinstance(value, MissReason) else type(value).__name__,
)
async def test_any_error_over_a_cached_entry_is_a_miss_that_replaces_it(
    cache: CacheChoice, error: AionnError, reason: MissReason, caplog: pytest.LogCaptureFixture
) -> None:
    model = await fill(cache)
    first, second = ScriptedDevice(), ScriptedDevice()
    first.from_cache, second.loaded_model = error, model
    async with scripted(first, second) as devices:
        prepared, outcome = await devices.prepare(model, cache)
        assert (outcome.kind, outcome.reason, outcome.save_failure) == (MISS, reason, None)
        assert first.calls == ["from cache"]
        assert second.calls == ["supported", "prepare with handles"]  # by whatever driver is there now
        assert prepared is second.prepared[0]
        _, again = await devices.prepare(model, cache)
        assert again.kind is HIT
    assert len(warnings(caplog)) == 1


async def test_a_driver_of_another_version_after_a_crash_stores_under_its_own(cache: CacheChoice) -> None:
    model = await fill(cache)
    old, new = ScriptedDevice(version="1"), ScriptedDevice(version="2", files=CacheFiles(2, 0))
    old.from_cache = DriverDiedError("scripted", -11)
    async with scripted(old, new) as devices:
        _, outcome = await devices.prepare(model, cache)
    assert (outcome.kind, outcome.reason) == (MISS, MissReason.OTHER_DRIVER_VERSION)
    assert new.counts == (2, 0)
    entries = await cache.store.entries()
    assert not isinstance(entries, Refusal)
    assert sorted(entry.device_version for entry in entries) == ["1", "2"]


@pytest.mark.parametrize("other", [some_model(width=8), with_outputs("other")], ids=["inputs", "outputs"])
async def test_a_device_that_loads_another_model_is_not_believed(cache: CacheChoice, other: aionn.Model) -> None:
    model = await fill(cache)
    device = ScriptedDevice()
    device.loaded_model = other
    async with scripted(device) as devices:
        prepared, outcome = await devices.prepare(model, cache)
    assert (outcome.kind, outcome.reason) == (MISS, MissReason.OTHER_MODEL)
    assert device.prepared[0].released
    assert prepared is device.prepared[1]


async def test_one_token_for_two_models_gives_each_its_own_compilation(cache: CacheChoice) -> None:
    device = ScriptedDevice()
    one, other = some_model(16), some_model(8)
    async with scripted(device) as devices:
        for model in (one, other, one):
            prepared, outcome = await devices.prepare(model, cache)
            assert prepared.inputs == model.inputs
            assert outcome.kind is MISS
        assert outcome.reason is MissReason.OTHER_MODEL
    # The driver keeps them apart too: a directory in which they changed places would be refused.
    assert device.tokens[0] == device.tokens[2] != device.tokens[1]


@pytest.mark.parametrize(
    ("told", "reason", "detail"),
    [
        ("wrong_bytes: a: b", MissReason.WRONG_BYTES, "a: b"),
        ("busy", MissReason.BUSY, ""),
        ("boom", MissReason.IO_ERROR, "boom"),
        ("", MissReason.IO_ERROR, ""),
    ],
)
def test_a_drivers_word_becomes_a_value(told: str, reason: MissReason, detail: str) -> None:
    assert refusal_from(told, MissReason.IO_ERROR) == Refusal(reason, detail)


async def test_a_failed_compilation_leaves_no_entry_and_the_next_may_compile(cache: CacheChoice) -> None:
    async def fails() -> None:
        raise CompilationError("failed on demand")

    device = ScriptedDevice()
    device.while_compiling = fails
    async with scripted(device) as devices:
        with pytest.raises(CompilationError, match="failed on demand"):
            await devices.prepare(some_model(), cache)
        device.while_compiling = None
        _, outcome = await devices.prepare(some_model(), cache)
        assert (outcome.kind, outcome.save_failure) == (MISS, None)


@pytest.mark.parametrize("act", ["publish", "decline", "aclose after a failed save"])
async def test_a_model_whose_caller_is_cancelled_while_the_entry_is_closed_is_released(
    cache: CacheChoice, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    device, entered = ScriptedDevice(), anyio.Event()

    async def hangs(*arguments: object, **options: object) -> None:
        entered.set()
        await anyio.sleep_forever()

    if act == "decline":
        device.save_outcome = "declined"
        monkeypatch.setattr(Publisher, "decline", hangs)
    elif act == "publish":
        monkeypatch.setattr(Publisher, "publish", hangs)
    else:
        device.save_outcome = "no_space: the disk is full"
        monkeypatch.setattr(Miss, "aclose", hangs)
    async with scripted(device) as devices, anyio.create_task_group() as app:
        app.start_soon(devices.prepare, some_model(), cache)
        await entered.wait()
        assert [prepared.released for prepared in device.prepared] == [False]
        app.cancel_scope.cancel()
    assert [prepared.released for prepared in device.prepared] == [True]


async def test_a_cancelled_compilation_leaves_no_entry_and_the_next_may_compile(cache: CacheChoice) -> None:
    compiling = anyio.Event()

    async def forever() -> None:
        compiling.set()
        await anyio.sleep_forever()

    device = ScriptedDevice()
    device.while_compiling = forever
    async with scripted(device) as devices:
        async with anyio.create_task_group() as app:
            app.start_soon(devices.prepare, some_model(), cache)
            await compiling.wait()
            app.cancel_scope.cancel()
        device.while_compiling = None
        _, outcome = await devices.prepare(some_model(), cache)
        assert (outcome.kind, outcome.save_failure) == (MISS, None)


async def test_ten_tasks_compile_one_model_once(cache: CacheChoice) -> None:
    device = ScriptedDevice()
    outcomes: list[CacheOutcomeKind] = []

    async def twice() -> None:
        for _ in range(2):
            _, outcome = await devices.prepare(model, cache)
            outcomes.append(outcome.kind)

    model = some_model()
    async with scripted(device) as devices, anyio.create_task_group() as apps:
        for _ in range(10):
            apps.start_soon(twice)
    assert outcomes.count(MISS) == 1
    assert outcomes.count(HIT) == 19
    assert device.calls.count("prepare with handles") == 1


async def test_a_save_that_keeps_failing_is_warned_of_once(cache: CacheChoice, caplog: pytest.LogCaptureFixture) -> None:
    device = ScriptedDevice()
    device.save_outcome = "no_space: the disk is full"
    async with scripted(device) as devices:
        for _ in range(3):
            _, outcome = await devices.prepare(some_model(), cache)
            assert outcome.save_failure is not None
    assert len(warnings(caplog)) == 1


# --- deadlines ---------------------------------------------------------------------------------------------------------


async def test_loading_gets_half_of_the_time_and_compiling_the_rest(cache: CacheChoice) -> None:
    model = await fill(cache)
    device = ScriptedDevice()
    device.from_cache = DeadlineError("not loaded in time")
    options = within(60)
    async with scripted(device) as devices:
        _, outcome = await devices.prepare(model, cache, options)
    assert (outcome.kind, outcome.reason) == (MISS, MissReason.TOO_SLOW)
    load_by_ns, compile_by_ns = device.deadlines_ns
    assert options.deadline_ns is not None
    assert load_by_ns is not None
    assert compile_by_ns == options.deadline_ns
    assert 25 < (options.deadline_ns - load_by_ns) / 1e9 < 35


async def test_loading_gets_all_of_the_time_where_compiling_would_not_make_it(cache: CacheChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Publisher.publish

    async def dear(self: Publisher, *, compile_ns: int | None = None) -> Refusal | None:
        return await publish(self, compile_ns=3600 * 10**9)

    monkeypatch.setattr(Publisher, "publish", dear)
    model = await fill(cache)
    device = ScriptedDevice()
    device.loaded_model = model
    options = within(60)
    async with scripted(device) as devices:
        _, outcome = await devices.prepare(model, cache, options)
    assert outcome.kind is HIT
    assert device.deadlines_ns == [options.deadline_ns]


class SlowDisk:
    """Look-ups in any cache directory hang, as on a network that does not answer, until `answer`. Tells when a late hit was given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked, self.answers, self.given_back = threading.Semaphore(0), threading.Event(), threading.Event()
        find, close = CacheDirectory.find, Hit.close_here

        def slow(directory: CacheDirectory, key: bytes) -> Any:
            self._asked.release()
            assert self.answers.wait(60)
            return find(directory, key)

        def watched(hit: Hit, *, used: bool = True) -> None:
            close(hit, used=used)
            self.given_back.set()

        monkeypatch.setattr(CacheDirectory, "find", slow)
        monkeypatch.setattr(Hit, "close_here", watched)

    async def was_asked(self) -> None:
        """By one caller more than were waited for here before."""
        assert await anyio.to_thread.run_sync(self._asked.acquire, True, 10)

    async def answer(self) -> None:
        self.answers.set()
        assert await anyio.to_thread.run_sync(self.given_back.wait, 5)


@pytest.fixture(params=["at the first look", "when the first look told nothing"])
def slow_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], SlowDisk]:
    """Called, it makes the disk slow."""
    if request.param != "at the first look":

        async def nothing(self: CacheStore, wanted: Wanted) -> None:
            await anyio.lowlevel.checkpoint()

        monkeypatch.setattr(CacheStore, "glance", nothing)
    return lambda: SlowDisk(monkeypatch)


async def test_a_directory_that_does_not_answer_leaves_half_of_the_time(
    cache: CacheChoice, slow_disk: Callable[[], SlowDisk], caplog: pytest.LogCaptureFixture
) -> None:
    model = await fill(cache)
    disk = slow_disk()
    device = ScriptedDevice()
    async with scripted(device) as devices:
        _, outcome = await devices.prepare(model, cache, within(0.4))
        assert (outcome.kind, outcome.reason) == (MISS, MissReason.TOO_SLOW)
        assert outcome.save_failure is not None
        assert device.calls == ["supported", "prepare"]
        await disk.answer()  # what it found too late holds no lock
    assert len(warnings(caplog)) == 1


async def test_an_entry_that_is_being_published_at_the_deadline_is_published_behind_the_callers_back(
    cache: CacheChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing, disk_answers, done = anyio.Event(), anyio.Event(), anyio.Event()
    publish = Publisher.publish

    async def slow(self: Publisher, *, compile_ns: int | None = None) -> Refusal | None:
        publishing.set()
        await disk_answers.wait()
        refusal = await publish(self, compile_ns=compile_ns)
        done.set()
        return refusal

    monkeypatch.setattr(Publisher, "publish", slow)
    model = some_model()
    device = ScriptedDevice()
    async with scripted(device) as devices:
        for seconds in (0.4, 3, 20):  # a busy machine may need most of the time before it publishes anything
            _, outcome = await devices.prepare(model, cache, within(seconds))
            if publishing.is_set():
                break
        assert publishing.is_set()
        assert outcome.save_failure is not None
        assert outcome.save_failure.reason is MissReason.TOO_SLOW
        disk_answers.set()
        with anyio.fail_after(60):
            await done.wait()
        _, outcome = await devices.prepare(model, cache)
        assert outcome.kind is HIT


async def test_waiting_for_another_compiler_leaves_half_of_the_time(cache: CacheChoice) -> None:
    compiling, go = anyio.Event(), anyio.Event()

    async def wait() -> None:
        compiling.set()
        await go.wait()

    slow, quick = ScriptedDevice(), ScriptedDevice()
    slow.while_compiling = wait
    model = some_model()
    async with scripted(slow) as one, scripted(quick) as other, anyio.create_task_group() as apps:
        apps.start_soon(one.prepare, model, cache)
        await compiling.wait()
        for seconds in (0.4, 3, 20):  # on a busy machine a short deadline passes before the directory has answered
            quick.calls.clear()
            _, outcome = await other.prepare(model, cache, within(seconds))
            if outcome.reason is not MissReason.TOO_SLOW:
                break
        assert (outcome.kind, outcome.reason) == (MISS, MissReason.BUSY)
        assert quick.calls == ["supported", "prepare"]
        go.set()


@pytest.mark.parametrize("natively", [False, True], ids=["by its scope", "by its task"])
async def test_a_caller_cancelled_while_the_directory_is_slow_leaves_at_once_and_holds_nothing(
    cache: CacheChoice, slow_disk: Callable[[], SlowDisk], natively: bool
) -> None:
    model = await fill(cache)
    disk = slow_disk()
    async with scripted(ScriptedDevice()) as devices:
        if natively:
            app = asyncio.get_running_loop().create_task(devices.prepare(model, cache))
            await disk.was_asked()
            app.cancel()
            with pytest.raises(asyncio.CancelledError):
                await app
        else:
            async with anyio.create_task_group() as apps:
                apps.start_soon(devices.prepare, model, cache, within(60))
                await disk.was_asked()
                apps.cancel_scope.cancel()
        assert not disk.given_back.is_set()
        await disk.answer()


# --- a runtime that closes -----------------------------------------------------------------------------------------------


async def test_whoever_waits_for_another_compiler_is_told_when_the_runtime_closes(
    cache: CacheChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go, queued = anyio.Event(), anyio.Event(), anyio.Event()
    acquire = CompileQueues.acquire

    async def acquiring(queues: CompileQueues, path: str, wait_s: float, waits: Callable[[], None] | None) -> CompileRight | None:
        if compiling.is_set():
            queued.set()
        return await acquire(queues, path, wait_s, waits)

    monkeypatch.setattr(CompileQueues, "acquire", acquiring)
    told: list[bool] = []

    async def wait() -> None:
        compiling.set()
        await go.wait()

    slow = ScriptedDevice()
    slow.while_compiling = wait
    model = some_model()

    async def waiting() -> None:
        with pytest.raises(CallerError, match="the runtime was closed"):
            await other.prepare(model, cache)
        told.append(True)

    async with anyio.create_task_group() as apps, scripted(slow) as one:
        apps.start_soon(one.prepare, model, cache)
        await compiling.wait()
        async with scripted(ScriptedDevice()) as other:
            apps.start_soon(waiting)
            await queued.wait()
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        assert told == [True]
        go.set()
        await anyio.wait_all_tasks_blocked()


async def test_whoever_looks_into_a_directory_that_hangs_is_told_when_its_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CacheStore(tmp_path / "cache") as store:
        model = await fill(CacheChoice(store, TOKEN))
    store = CacheStore(tmp_path / "cache")
    disk = SlowDisk(monkeypatch)
    told = anyio.Event()

    async def waiting() -> None:
        with pytest.raises(CallerError, match="the cache store was closed"):
            await devices.prepare(model, CacheChoice(store, TOKEN))
        told.set()

    async with anyio.create_task_group() as apps, scripted(ScriptedDevice()) as devices:
        apps.start_soon(waiting)
        await disk.was_asked()
        with anyio.move_on_after(0.05) as patience:
            await store.aclose()
        assert patience.cancelled_caught
        with anyio.fail_after(30):
            await told.wait()
        await disk.answer()
        await store.aclose()


async def test_all_who_look_into_directories_that_hang_are_told_when_the_runtime_closes(
    tmp_path: Path, fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.runtime.open_runtime.CLOSE_STORES_S", 0.05)
    disk = SlowDisk(monkeypatch)
    model = aionn.Model.from_onnx(identity_model())
    told: list[str] = []

    async def compile_in(cache_dir: Path) -> None:
        with pytest.raises(CallerError, match="was closed"):
            await runtime.compile(model, devices=(fake_device.name,), cache_dir=cache_dir, token=model.token)
        told.append(cache_dir.name)

    try:
        async with anyio.create_task_group() as apps:
            async with aionn.Runtime() as runtime:
                for name in ("one", "other"):
                    apps.start_soon(compile_in, tmp_path / name)
                for _ in range(2):
                    await disk.was_asked()
                stores = list(runtime._opened.stores.values())
            with anyio.fail_after(30):
                while len(told) < 2:
                    await anyio.lowlevel.checkpoint()
        assert len(stores) == 2
    finally:
        disk.answers.set()
    # What hung closes what it worked with once the disk has answered.
    with anyio.fail_after(30):
        while any(store.running or store._house.directory is not None for store in stores):
            await anyio.lowlevel.checkpoint()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_store_is_closed_only_when_nobody_works_in_its_directory(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "cache")
    closed = anyio.Event()

    async def close() -> None:
        await store.aclose()
        closed.set()

    async with anyio.create_task_group() as tasks:
        with store.in_use():
            with store.in_use():
                tasks.start_soon(close)
                await anyio.wait_all_tasks_blocked()
            await anyio.wait_all_tasks_blocked()
            assert not closed.is_set()
        with anyio.fail_after(30):
            await closed.wait()
