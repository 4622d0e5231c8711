"""A cached compilation, through the public face and real driver processes: every way it can go, and every way it is spoilt.

Whatever happens to the directory, to the files in it or to a driver: the run succeeds, its outputs are right, and
`compilation.outcomes` says what the cache did.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from blake3 import blake3

import aionn
from aionn import trace
from aionn.caching.manifest import decode_manifest, encode_manifest
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store import CacheStore
from aionn.caching.store.locks import hold_now
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.journeys.silero import Arrays, Directly
from tests.leaks import ended, leak_check
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio
HIT, MISS, DECLINED, NO_CACHE = CacheOutcomeKind.HIT, CacheOutcomeKind.MISS, CacheOutcomeKind.DECLINED, CacheOutcomeKind.NO_CACHE
ROOT = Path(__file__).parents[2]
ENGINES = pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
UVLOOP = pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
"""For tests whose length is in the engine: the loop makes no difference there."""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Drivers keep their records in the test's own directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "aionn"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def picture() -> Arrays:
    return {"x": np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype(np.float32)}


class Bench:
    """Compiles one model on one device with one cache directory, in a runtime that stays open, and checks each time that it computes
    what ONNX Runtime does without aionn."""

    def __init__(self, runtime: aionn.Runtime, model: aionn.Model, device: str, cache_dir: Path, inputs: Arrays, expected: Arrays) -> None:
        self.runtime, self.model, self.device, self.cache_dir = runtime, model, device, cache_dir
        self.inputs, self.expected = inputs, expected

    async def compile(self, **options: Any) -> CacheOutcome:
        chosen = {"cache_dir": self.cache_dir, "token": self.model.token, **options}
        async with await self.runtime.compile(self.model, devices=(self.device,), **chosen) as compilation:
            await self.check(compilation)
            (outcome,) = compilation.outcomes
        assert outcome.device == self.device
        return outcome

    async def check(self, compilation: aionn.Compilation) -> None:
        outputs = await compilation.compute(self.inputs)
        assert set(outputs) == set(self.expected)
        for name, array in self.expected.items():
            np.testing.assert_allclose(outputs[name], array, rtol=0, atol=1e-5)

    async def hits(self) -> None:
        outcome = await self.compile()
        assert outcome.kind is HIT, outcome

    async def misses(self, *reasons: MissReason, saved: bool = True) -> CacheOutcome:
        outcome = await self.compile()
        assert outcome.kind is MISS, outcome
        assert outcome.reason in reasons, outcome
        assert (outcome.save_failure is None) is saved, outcome
        return outcome


@pytest.fixture
async def bench(engine: str, orientation: aionn.Model, orientation_path: Path, cache_dir: Path) -> Any:
    inputs = picture()
    expected = Directly(orientation_path).run(inputs)
    async with aionn.Runtime() as runtime:
        yield Bench(runtime, orientation, engine, cache_dir, inputs, expected)


def artifacts(cache_dir: Path) -> list[Path]:
    """The stored files of all entries, manifests left out."""
    return sorted(path for path in (cache_dir / "entries").glob("*/*/*") if path.is_file())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def is_there(path: Path) -> bool:
    return path.exists()


def calls(recording: trace.Recording) -> list[str]:
    return [counter.attributes["call"] for counter in recording.counters if counter.name == "control.call" and counter.pid == os.getpid()]


# --- the workflows ----------------------------------------------------------------------------------------------------


@ENGINES
async def test_a_miss_then_hits_and_a_hit_does_not_send_the_model(
    engine: str, orientation: aionn.Model, orientation_path: Path, cache_dir: Path
) -> None:
    inputs = picture()
    expected = Directly(orientation_path).run(inputs)
    async with leak_check():
        for started in range(3):
            with trace.record() as recording:
                async with aionn.Runtime() as runtime:
                    bench = Bench(runtime, orientation, engine, cache_dir, inputs, expected)
                    if started == 0:
                        await bench.misses(MissReason.ABSENT)
                    else:
                        await bench.hits()
            preparing = [call for call in calls(recording) if call not in ("ConfigureExecutionBurst", "CloseBurst", "ReleasePreparedModel")]
            # These two carry a ModelMessage; nothing else does.
            assert preparing == (["GetSupportedOperations", "PrepareModel"] if started == 0 else ["PrepareModelFromCache"])
            assert recording.total("compile.cache") == 1


async def test_without_a_directory_nothing_about_caching_reaches_the_driver(fake: FakeDevice, own_state: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,))
        assert compilation.outcomes[0].kind is NO_CACHE
    assert not is_there(own_state)


async def test_a_declined_model_is_declined_from_then_on(fake: FakeDevice, cache_dir: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    fake.tell(decline=True)
    async with aionn.Runtime() as runtime:
        kinds = []
        for _ in range(3):
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
            kinds.append(compilation.outcomes[0].kind)
    assert kinds == [MISS, DECLINED, DECLINED]


async def test_a_new_driver_after_a_death_prepares_from_the_cache(fake: FakeDevice, cache_dir: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    x = np.arange(16, dtype=np.float32).reshape(1, 16)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        assert compilation.outcomes[0].kind is MISS
        (device,) = [device for device in runtime.devices if device.name == fake.name]
        assert device.pid is not None
        os.kill(device.pid, signal.SIGKILL)
        assert await ended(device.pid, 30)
        await anyio.wait_all_tasks_blocked()  # the runtime has seen it
        with trace.record() as recording:
            outputs = await compilation.compute({"input": x})
        np.testing.assert_array_equal(outputs["input_out"], x)
        assert compilation.outcomes[0].kind is HIT
        assert calls(recording) == ["PrepareModelFromCache", "ConfigureExecutionBurst"]


async def test_ten_tasks_compile_twice_on_the_same_files(fake: FakeDevice, cache_dir: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    kinds: list[CacheOutcomeKind] = []

    async def twice() -> None:
        for _ in range(2):
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
            kinds.append(compilation.outcomes[0].kind)
            x = np.full((1, 16), len(kinds), np.float32)
            np.testing.assert_array_equal((await compilation.compute({"input": x}))["input_out"], x)

    async with aionn.Runtime() as runtime, anyio.create_task_group() as apps:
        for _ in range(10):
            apps.start_soon(twice)
    assert (kinds.count(MISS), kinds.count(HIT)) == (1, 19)


def test_ten_threads_compile_twice_on_the_same_files(fake: FakeDevice, cache_dir: Path) -> None:
    """AOSP's only concurrency test: ten threads, each its own runtime, loop and driver."""
    model = aionn.Model.from_onnx(identity_model())
    kinds: list[CacheOutcomeKind] = []
    failures: list[BaseException] = []

    async def twice() -> None:
        async with aionn.Runtime() as runtime:
            for _ in range(2):
                compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
                kinds.append(compilation.outcomes[0].kind)
                x = np.full((1, 16), len(kinds), np.float32)
                np.testing.assert_array_equal((await compilation.compute({"input": x}))["input_out"], x)

    def run() -> None:
        try:
            aionn.run(twice)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (kinds.count(MISS), kinds.count(HIT)) == (1, 19)


# --- what is spoilt is noticed -----------------------------------------------------------------------------------------


@UVLOOP
@ENGINES
async def test_flipped_bits_are_refusals_rebuilds_and_right_outputs(bench: Bench) -> None:
    """A few, since each costs a compilation. `tests/caching/test_integrity.py` and `tests/conformance/test_caching.py` flip hundreds."""
    dice = random.Random(40)
    await bench.misses(MissReason.ABSENT)
    for _ in range(3):
        path = dice.choices(artifacts(bench.cache_dir), [path.stat().st_size for path in artifacts(bench.cache_dir)])[0]
        with path.open("r+b") as file:
            at = dice.randrange(path.stat().st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << dice.randrange(8)]))
        await bench.misses(MissReason.WRONG_BYTES)
    await bench.hits()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def delete(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def hard_link(path: Path) -> None:
    os.link(path, path.parents[3] / "another name")


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def delete_generation(path: Path) -> None:
    shutil.rmtree(path.parent)


def delete_entry(path: Path) -> None:
    shutil.rmtree(path.parents[1])


def cut_manifest(path: Path) -> None:
    os.truncate(path.parents[1] / "manifest", 100)


SPOILS: list[tuple[Callable[[Path], None], MissReason]] = [
    (truncate, MissReason.WRONG_LENGTH),
    (empty, MissReason.WRONG_LENGTH),
    (append, MissReason.WRONG_LENGTH),
    (delete, MissReason.PARTIAL),
    (link, MissReason.UNSAFE),
    (hard_link, MissReason.UNSAFE),
    (directory_instead, MissReason.IO_ERROR),
    (fifo_instead, MissReason.UNSAFE),
    (delete_generation, MissReason.PARTIAL),
    (delete_entry, MissReason.ABSENT),
    (cut_manifest, MissReason.UNREADABLE),
]


@UVLOOP
async def test_whatever_is_done_to_an_entry_it_is_rebuilt(cache_dir: Path) -> None:
    x = np.ones(64, np.float32)
    async with aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(scaled_model(np.full(64, 2, np.float32)))
        bench = Bench(runtime, model, "onnxruntime", cache_dir, {"x": x}, {"y": 2 * x})
        await bench.misses(MissReason.ABSENT)
        for spoil, reason in SPOILS:
            for which in (0, 1):
                spoil(artifacts(cache_dir)[which])
                await bench.misses(reason)
                (cache_dir / "another name").unlink(missing_ok=True)
                await bench.hits()


@UVLOOP
@pytest.mark.parametrize("engine", ["onnxruntime"])
async def test_a_directory_deleted_while_the_runtime_is_open_is_made_again(bench: Bench) -> None:
    await bench.misses(MissReason.ABSENT)
    shutil.rmtree(bench.cache_dir)
    await bench.misses(MissReason.ABSENT)
    await bench.hits()


@UVLOOP
@pytest.mark.parametrize("engine", ["onnxruntime"])
async def test_records_that_are_lost_cost_a_compilation(
    engine: str, orientation: aionn.Model, orientation_path: Path, cache_dir: Path, own_state: Path
) -> None:
    """A cache directory copied to another machine, or a new state directory: no driver vouches for it."""
    inputs = picture()
    expected = Directly(orientation_path).run(inputs)
    for reason in (MissReason.ABSENT, MissReason.NO_INTEGRITY_RECORD):
        async with aionn.Runtime() as runtime:
            bench = Bench(runtime, orientation, engine, cache_dir, inputs, expected)
            await bench.misses(reason)
            await bench.hits()
        shutil.rmtree(own_state)


async def test_an_entry_of_another_model_is_never_taken_for_this_ones_even_with_a_forged_manifest(cache_dir: Path, own_state: Path) -> None:
    """One token for two models of the same shape, and another program that may write to the directory puts the first one's files back."""
    x = np.ones(64, np.float32)
    one, other = (aionn.Model.from_onnx(scaled_model(np.full(64, factor, np.float32))) for factor in (2, 3))
    token = bytes(32)
    async with aionn.Runtime() as runtime:

        async def factor_of(model: aionn.Model) -> tuple[float, CacheOutcome]:
            async with await runtime.compile(model, devices=("onnxruntime",), cache_dir=cache_dir, token=token) as compilation:
                outputs = await compilation.compute({"x": x})
                return float(outputs["y"][0]), compilation.outcomes[0]

        assert (await factor_of(one))[0] == 2
        (first,) = (cache_dir / "entries").iterdir()
        kept = cache_dir.parent / "kept"
        shutil.copytree(first, kept)
        factor, outcome = await factor_of(other)
        assert (factor, outcome.reason) == (3, MissReason.OTHER_MODEL)
        assert (await factor_of(other))[1].kind is HIT

        forged = decode_manifest((kept / "manifest").read_bytes())
        assert not isinstance(forged, Refusal)
        shutil.rmtree(first)
        shutil.copytree(kept, first)
        (first / "manifest").write_bytes(encode_manifest(msgspec.structs.replace(forged, model_digest=other.token)))
        factor, outcome = await factor_of(other)
        assert factor == 3
        assert (outcome.kind, outcome.reason) == (MISS, MissReason.WRONG_BYTES)  # of what it stored for the second model


async def test_a_miss_names_the_part_of_the_key_that_changed(cache_dir: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    told = []
    async with aionn.Runtime() as runtime:
        changes: list[tuple[Literal["low_power", "sustained_speed"], bytes]]
        changes = [("low_power", model.token), ("sustained_speed", model.token), ("low_power", bytes(32))]
        for preference, token in changes:
            compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=cache_dir, token=token, preference=preference)
            told.append(compilation.outcomes[0])
    assert [outcome.reason for outcome in told] == [MissReason.ABSENT] * 3
    assert [outcome.differs for outcome in told] == [(), ("preference",), ("app_token",)]
    assert "preference was LOW_POWER and is SUSTAINED_SPEED" in told[1].detail


# --- drivers that change, and die ---------------------------------------------------------------------------------------


async def test_two_versions_of_an_engine_under_one_user_compile_once_each_and_hit_from_then_on(fake: FakeDevice, cache_dir: Path) -> None:
    """As in two virtual environments. No version believes a record of the other."""
    model = aionn.Model.from_onnx(identity_model())
    told = []
    for version in ("A", "B", "A", "B", "B", "A"):
        fake.tell(version=version)
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
            told.append(compilation.outcomes[0])
    assert [(outcome.kind, outcome.reason) for outcome in told] == [
        (MISS, MissReason.ABSENT),
        (MISS, MissReason.OTHER_DRIVER_VERSION),
        *[(HIT, None)] * 4,
    ]
    assert "'A'" in told[1].detail
    assert "'B'" in told[1].detail


async def test_a_driver_that_crashes_over_a_cached_entry_is_replaced_and_the_model_compiled(
    fake: FakeDevice, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = aionn.Model.from_onnx(identity_model())
    x = np.arange(16, dtype=np.float32).reshape(1, 16)
    async with leak_check(), aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        (device,) = [device for device in runtime.devices if device.name == fake.name]
        before = device.pid
        fake.crash("load", signal.SIGSEGV)
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        (outcome,) = compilation.outcomes
        assert (outcome.kind, outcome.reason, outcome.save_failure) == (MISS, MissReason.REFUSED_BY_DEVICE, None)
        assert "signal 11" in outcome.detail
        assert device.pid not in (None, before)
        np.testing.assert_array_equal((await compilation.compute({"input": x}))["input_out"], x)
        assert ["ended by signal 11" in warning for warning in warnings(caplog)] == [True, True, False]  # the death, the refusal
        assert "is started again" in warnings(caplog)[2]


async def test_a_driver_that_hangs_over_a_cached_entry_leaves_time_to_compile(fake: FakeDevice, cache_dir: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        fake.hang("load")
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token, timeout_s=2.0)
        (outcome,) = compilation.outcomes
        assert (outcome.kind, outcome.reason) == (MISS, MissReason.TOO_SLOW)
        fake.behave()


# --- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Any]:
    """Mounts a tmpfs of so many megabytes, where that is allowed; `read_only()` afterwards makes it so."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = tmp_path / "disk"
    where.mkdir()

    class Mount:
        path = where

        def size(self, megabytes: int) -> Path:
            if libc.mount(b"tmpfs", bytes(where), b"tmpfs", 0, f"size={megabytes}m,mode=0700".encode()) != 0:
                pytest.skip(f"a tmpfs cannot be mounted here: {os.strerror(ctypes.get_errno())}")
            return where

        def read_only(self) -> None:
            assert libc.mount(b"tmpfs", bytes(where), b"tmpfs", 32 | 1, b"") == 0, os.strerror(ctypes.get_errno())  # MS_REMOUNT | MS_RDONLY

    yield Mount()
    libc.umount2(bytes(where), 2)


@UVLOOP
@ENGINES
async def test_on_a_full_disk_the_run_succeeds_uncached_with_one_warning(
    bench: Bench, mount: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.cache_dir = mount.size(3) / "cache"  # the artifact has 6.8 MB
    for _ in range(2):
        outcome = await bench.misses(MissReason.ABSENT, saved=False)
        assert outcome.save_failure is not None
        assert outcome.save_failure.reason is MissReason.NO_SPACE
    assert artifacts(bench.cache_dir) == []  # what could not be stored takes no space
    assert len(warnings(caplog)) == 1


@UVLOOP
@pytest.mark.parametrize("engine", ["onnxruntime"])
async def test_a_directory_that_becomes_read_only_is_told_and_the_run_succeeds(
    bench: Bench, mount: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.cache_dir = mount.size(40) / "cache"
    mount.read_only()
    outcome = await bench.misses(MissReason.NO_PERMISSION, saved=False)
    assert outcome.save_failure is not None
    assert len(warnings(caplog)) == 1


@UVLOOP
@pytest.mark.parametrize("engine", ["onnxruntime"])
async def test_a_missing_path_is_made_and_an_impossible_one_is_told(bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench.cache_dir = tmp_path / "not" / "there" / "yet"
    await bench.misses(MissReason.ABSENT)
    await bench.hits()
    (tmp_path / "a file").write_bytes(b"")
    bench.cache_dir = tmp_path / "a file" / "cache"
    outcome = await bench.compile()
    assert outcome.kind is MISS
    assert outcome.save_failure is not None
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(tmp_path / "not")
    bench.cache_dir = elsewhere
    await bench.misses(MissReason.UNSAFE, saved=False)
    assert len(warnings(caplog)) == 2  # one for each directory that cannot be used


def spoil_state(own_state: Path, unsafe: str, tmp_path: Path) -> None:
    own_state.parent.mkdir()
    if unsafe == "a symlink":
        (tmp_path / "elsewhere").mkdir()
        own_state.symlink_to(tmp_path / "elsewhere")
    elif unsafe == "no directory":
        own_state.write_bytes(b"")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        own_state.mkdir()
        os.chown(own_state, 12345, -1)


@UVLOOP
@pytest.mark.parametrize("engine", ["onnxruntime"])
@pytest.mark.parametrize("unsafe", ["a symlink", "another account's", "no directory"])
async def test_a_state_directory_that_is_not_the_drivers_own_costs_the_cache_alone(
    bench: Bench, own_state: Path, unsafe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_state(own_state, unsafe, tmp_path)
    for _ in range(2):
        outcome = await bench.misses(MissReason.ABSENT, saved=False)
        assert outcome.save_failure is not None
        assert outcome.save_failure.reason is MissReason.UNSAFE
    assert len(warnings(caplog)) == 1


async def test_a_writer_waits_for_a_reader_and_no_reader_begins_while_it_waits(fake: FakeDevice, cache_dir: Path, tmp_path: Path) -> None:
    """One driver still loads the entry when another app, whose driver has no record of it, has compiled it again and publishes."""
    model = aionn.Model.from_onnx(identity_model())
    x = np.arange(16, dtype=np.float32).reshape(1, 16)
    outcomes: dict[str, CacheOutcome] = {}

    async def compile_in(name: str, runtime: aionn.Runtime) -> None:
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        outcomes[name] = compilation.outcomes[0]
        np.testing.assert_array_equal((await compilation.compute({"input": x}))["input_out"], x)

    async def generation() -> int:
        async with CacheStore(cache_dir) as store:
            entries = await store.entries()
            assert not isinstance(entries, Refusal)
            (entry,) = entries
            return entry.generation

    async with aionn.Runtime(state_dir=tmp_path / "first") as runtime:
        await compile_in("first", runtime)
    entry_lock = f"{cache_dir}/locks/{outcomes['first'].key.hex()}.entry"
    fake.hang("load")
    async with (
        aionn.Runtime(state_dir=tmp_path / "first") as one,
        aionn.Runtime(state_dir=tmp_path / "second") as other,
        anyio.create_task_group() as apps,
    ):
        apps.start_soon(compile_in, "reader", one)
        with anyio.fail_after(20):
            await fake.heard("load")
        apps.start_soon(compile_in, "writer", other)
        with anyio.fail_after(20):
            while (hold := hold_now(entry_lock, "read")) is not None:  # until the writer has its turn
                hold.release()
                await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert outcomes.keys() == {"first"}
        assert await generation() == 1
        fake.behave()
    assert (outcomes["reader"].kind, outcomes["writer"].reason) == (HIT, MissReason.NO_INTEGRITY_RECORD)
    assert outcomes["writer"].save_failure is None
    assert await generation() == 2


@pytest.mark.parametrize("length", [0, 31, 33])
async def test_a_token_of_a_wrong_length_is_the_callers_mistake(fake: FakeDevice, cache_dir: Path, length: int) -> None:
    model = aionn.Model.from_onnx(identity_model())
    async with aionn.Runtime() as runtime:
        modes: list[Literal["eager", "jit"]] = ["eager", "jit"]
        for mode in modes:
            with pytest.raises(aionn.CallerError, match=f"token of {length} bytes: a token has 32"):
                await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=bytes(length), mode=mode)
    assert not is_there(cache_dir)


# --- processes -----------------------------------------------------------------------------------------------------------


class Apps:
    """Processes that compile the same model with the same cache, and what they tell."""

    def __init__(self, model: Path, cache_dir: Path, device: str) -> None:
        self._command = [sys.executable, "-m", "tests.journeys.caching_app", str(model), str(cache_dir), device]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, number: int) -> None:
        for _ in range(number):
            process = App(self._command, cwd=ROOT, stdout=subprocess.PIPE)
            self.processes.append(process)

    def told(self) -> list[dict[str, Any]]:
        """What each that came to its end said."""
        lines = [process.communicate()[0] for process in self.processes]
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def test_processes_started_together_on_a_cold_model_compile_it_once(silero_path: Path, cache_dir: Path) -> None:
    """Whole apps with their drivers. `tests/caching/test_single_flight.py` has eight that certainly wait."""
    apps = Apps(silero_path, cache_dir, "onnxruntime")
    try:
        apps.start(3)
        told = apps.told()
    finally:
        apps.close()
    assert sorted(one["kind"] for one in told) == ["hit"] * 2 + ["miss"]
    assert len({one["outputs"] for one in told}) == 1


async def test_when_the_compiling_app_is_killed_half_way_another_takes_over(fake: FakeDevice, cache_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(identity_model())
    apps = Apps(model, cache_dir, fake.name)
    fake.hang("compile")
    try:
        apps.start(4)
        with anyio.fail_after(60):
            driver = await fake.heard("compile")
            (victim,) = [process for process in apps.processes if process.pid == parent_of(driver)]
            victim.send_signal(signal.SIGKILL)
            await fake.heard("compile")  # another app has begun
            fake.behave()
            told = await anyio.to_thread.run_sync(apps.told)
    finally:
        apps.close()
    assert sorted(one["kind"] for one in told) == ["hit", "hit", "miss"]
    assert len({one["outputs"] for one in told}) == 1


async def test_a_driver_killed_while_it_compiles_lets_the_next_caller_compile(fake: FakeDevice, cache_dir: Path) -> None:
    model = aionn.Model.from_onnx(identity_model())
    fake.crash("export")
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.DriverDiedError):
            await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        fake.behave()
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=cache_dir, token=model.token)
        (outcome,) = compilation.outcomes
        assert (outcome.kind, outcome.reason, outcome.save_failure) == (MISS, MissReason.ABSENT, None)


# --- the loop ------------------------------------------------------------------------------------------------------------


class LagProbe:
    """How late the loop is for a timer, in seconds, at worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        while True:
            due = anyio.current_time() + 0.001
            await anyio.sleep(0.001)
            self.worst_s = max(self.worst_s, anyio.current_time() - due)


async def test_the_loop_goes_on_while_a_hundred_megabytes_are_stored_and_loaded(tmp_path: Path) -> None:
    """The bound is a fraction of what the same bytes cost in one piece on this machine now: writing, syncing and hashing them.

    A machine may not run the loop for longer than that; but not three times in a row, as it would be if the loop did such work itself.
    """
    factor = np.random.default_rng(0).random((25_000_000,)).astype(np.float32)
    model = await anyio.to_thread.run_sync(aionn.Model.from_onnx, scaled_model(factor))
    least_s = math.inf
    began = anyio.current_time()
    content = factor.tobytes()
    with (tmp_path / "plain").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    blake3(content)
    bound_s = max((anyio.current_time() - began) / 2, 0.05)
    async with aionn.Runtime() as runtime:
        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("onnxruntime",))  # the driver is up
        for attempt in range(3):
            probe = LagProbe()
            own = tmp_path / f"cache{attempt}"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(probe.watch)
                for kind in (MISS, HIT):
                    compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=own, token=model.token)
                    assert compilation.outcomes[0].kind is kind, compilation.outcomes
                    await compilation.aclose()
                tasks.cancel_scope.cancel()
            assert sum(path.stat().st_size for path in artifacts(own)) > 100_000_000
            least_s = min(least_s, probe.worst_s)
            if least_s < bound_s:
                break
    print(f"worst lag {least_s * 1e3:.1f} ms; allowed {bound_s * 1e3:.1f} ms")
    assert least_s < bound_s
