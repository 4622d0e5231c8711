"""`threads=`, `instances=` and `Runtime(threads=)`: what is refused, what reaches the driver, and how many threads really compute."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.runtime.staging import stages
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.real_models import carried, some_input
from tests.runtime.asked_engine import AskedEngine, SecondAskedEngine, SecondSingleEngine, SingleEngine
from tests.scaled_model import scaled_model
from tests.stopping import kill_under

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

SHAPE = (1, 16)
MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
FRAME = {"x": np.ones(SHAPE, np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


async def asked(compilation: aionn.Compilation) -> dict[str, int]:
    """What the engine of a compilation was asked for."""
    found = (await compilation.compute(FRAME))["y"][0]
    return dict(zip(("threads", "at_most", "instances", "lanes", "priority"), map(int, found), strict=False))


# --- what is refused, and what is not ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"threads": 0}, "compile: threads=0; give a whole number, from 1 to 1024"),
        ({"threads": -1}, "compile: threads=-1; give a whole number"),
        ({"threads": 10**6}, "compile: threads=1000000; give a whole number"),
        ({"threads": True}, "compile: threads=True; give a whole number"),
        ({"threads": 1.0}, "compile: threads=1.0; give a whole number"),
        ({"threads": "2"}, "compile: threads='2'; give a whole number"),
        ({"instances": 0}, "compile: instances=0; give a whole number, from 1 to 256"),
        ({"instances": 10**6}, "compile: instances=1000000; give a whole number, from 1 to 256"),
        ({"instances": "2"}, "compile: instances='2'; give a whole number"),
        ({"instances": False}, "compile: instances=False; give a whole number"),
        ({"instances": 2.5}, "compile: instances=2.5; give a whole number"),
        ({"threads": 2, "instances": 3}, "threads=2 with instances=3 needs 6 engine threads, but this runtime allows 4; ask for fewer"),
        ({"threads": 5}, "threads=5 with instances=1 needs 5 engine threads, but this runtime allows 4"),
        ({"instances": 5}, "threads=None with instances=5 needs 5 engine threads, but this runtime allows 4"),
    ],
)
async def test_wrong_threads_and_instances_are_one_sentence_and_start_no_driver(arguments: dict[str, Any], sentence: str) -> None:
    async with leak_check(), aionn.Runtime(threads=4) as runtime:
        with pytest.raises(aionn.CallerError) as caught:
            await runtime.compile(MODEL, devices=("reference",), **arguments)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
        assert [device.pid for device in runtime.devices if device.pid] == []


@pytest.mark.parametrize("threads", [0, -3, True, 2.0, "2", 10**6])
def test_wrong_threads_of_a_runtime_are_one_sentence(threads: Any) -> None:
    with pytest.raises(aionn.CallerError, match=r"Runtime: threads=.*; give a whole number, from 1 to 1024"):
        aionn.Runtime(threads=threads)


async def test_numpy_s_integers_are_whole_numbers_everywhere() -> None:
    two: Any = np.int64(2)
    four: Any = np.int32(4)
    three: Any = np.uint8(3)
    half: Any = np.float32(0.5)
    true: Any = np.bool_(True)
    assert aionn.StagePolicy(executions=two, threads=three, timeout_s=two, min_gain=half).threads == 3
    with pytest.raises(aionn.CallerError, match="StagePolicy: executions"):
        aionn.StagePolicy(executions=true)
    with FakeDevice(AskedEngine) as fake:
        async with leak_check(), aionn.Runtime(threads=four) as runtime:
            compilation = await runtime.compile(MODEL, devices=(fake.name,), threads=two, instances=two)
            assert (compilation.threads, compilation.instances) == (2, 2)
            assert (await asked(compilation))["threads"] == 2
            async with compilation.burst(depth=two) as burst:
                assert [result.seq async for result in burst.map([FRAME] * 3, depth=two)] == [0, 1, 2]


# --- what reaches the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "arguments", "expected"),
    [
        (None, {}, {"threads": 0, "at_most": 1, "instances": 1, "lanes": 0}),
        (None, {"threads": 64, "instances": 3}, {"threads": 64, "at_most": 0, "instances": 3, "lanes": 3}),
        (1, {}, {"threads": 1, "at_most": 1, "instances": 1, "lanes": 0}),
        (7, {"instances": 2}, {"threads": 3, "at_most": 1, "instances": 2, "lanes": 2}),
        (6, {"threads": 3, "instances": 2}, {"threads": 3, "at_most": 0, "instances": 2, "lanes": 2}),
        (4, {"threads": 2, "preference": "low_power"}, {"threads": 2, "at_most": 0, "instances": 1, "lanes": 0}),
    ],
)
async def test_the_engine_gets_the_app_s_threads_or_the_runtime_s_bound(
    most: int | None, arguments: dict[str, Any], expected: dict[str, int]
) -> None:
    with FakeDevice(AskedEngine) as fake:
        async with leak_check(), aionn.Runtime(threads=most) as runtime:
            compilation = await runtime.compile(MODEL, devices=(fake.name,), **arguments)
            assert expected.items() <= (await asked(compilation)).items()
            assert (compilation.threads, compilation.instances) == (arguments.get("threads"), arguments.get("instances"))
            another = await runtime.compile(MODEL, devices=(fake.name,), **arguments)  # several compilations add up
            assert expected.items() <= (await asked(another)).items()


@pytest.mark.parametrize("mode", ["eager", "jit"])
async def test_a_hit_a_driver_s_death_and_a_swap_keep_threads_and_instances(mode: Any, tmp_path: Path) -> None:
    wanted = {"threads": 3, "at_most": 0, "instances": 2, "lanes": 2}
    with FakeDevice(AskedEngine) as fake:
        for kind in ("miss", "hit"):
            async with leak_check(), aionn.Runtime(threads=6) as runtime:
                arguments: dict[str, Any] = {"cache_dir": tmp_path / "cache", "token": MODEL.token, "threads": 3, "instances": 2}
                compilation = await runtime.compile(MODEL, devices=(fake.name,), mode=mode, **arguments)
                assert wanted.items() <= (await asked(compilation)).items()
                assert compilation.outcomes[0].kind.value == kind
                (device,) = (device for device in runtime.devices if device.pid)
                pid = device.pid
                assert pid is not None
                await kill_under(pid, partial(compilation.compute, FRAME))
                assert wanted.items() <= (await asked(compilation)).items()
                assert device.pid not in (None, pid)
                other = aionn.Model.from_onnx(scaled_model(np.ones(SHAPE, np.float32)))
                await runtime.swap(compilation, other)
                assert compilation.model is other
                assert wanted.items() <= (await asked(compilation)).items()


async def test_stages_keep_threads_and_instances(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stages, "RUNS", 3)
    with FakeDevice(AskedEngine) as quick, FakeDevice(SecondAskedEngine) as best:
        for made_by in ("worker", "cache"):
            async with leak_check(), aionn.Runtime() as runtime:
                compilation = await runtime.compile(
                    MODEL,
                    mode="staged",
                    stages=(quick.name, best.name),
                    threads=3,
                    instances=2,
                    cache_dir=tmp_path / "cache",
                    token=MODEL.token,
                    stage_policy=aionn.StagePolicy(executions=1, min_gain=None),
                )
                await compilation.compute(FRAME)
                await compilation.wait_for_stage(best.name, timeout_s=30)
                assert compilation.stages[1].made_by == made_by
                outputs = await compilation.compute(FRAME)
                assert outputs.stage == best.name
                assert list(outputs["y"][0, :4]) == [3, 0, 2, 2]


@pytest.mark.timeout(400)  # its worker starts with the highest niceness
@pytest.mark.usefixtures("workers_in_the_background")
async def test_a_worker_for_stages_has_no_more_threads_than_the_runtime_allows(tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    with FakeDevice(AskedEngine) as quick, FakeDevice(SecondAskedEngine) as best:
        async with leak_check(), aionn.Runtime(threads=1) as runtime:
            best.hang("compile")
            compilation = await runtime.compile(
                MODEL, mode="staged", stages=(quick.name, best.name), stage_policy=aionn.StagePolicy(executions=1, threads=cpus)
            )
            await compilation.compute(FRAME)
            assert len(os.sched_getaffinity(await best.heard("compile"))) == 1
            best.behave()


async def test_an_engine_without_lanes_refuses_instances_and_its_cache_entry_stays(tmp_path: Path) -> None:
    with FakeDevice(SingleEngine) as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            arguments: dict[str, Any] = {"devices": (fake.name,), "cache_dir": tmp_path / "cache", "token": MODEL.token}
            for kind in ("miss", "hit"):
                with pytest.raises(aionn.CompilationError, match=r"cannot run 2 instances .*; compile the model with instances=1"):
                    await runtime.compile(MODEL, instances=2, **arguments)
                compilation = await runtime.compile(MODEL, **arguments)
                assert compilation.outcomes[0].kind.value == kind
                assert (await asked(compilation))["instances"] == 1


async def test_a_stage_without_lanes_is_rejected_and_its_cache_entry_stays(tmp_path: Path) -> None:
    with FakeDevice(AskedEngine) as quick, FakeDevice(SecondSingleEngine) as best:
        async with leak_check(), aionn.Runtime() as runtime:
            cached: dict[str, Any] = {"cache_dir": tmp_path / "cache", "token": MODEL.token}
            await runtime.compile(MODEL, devices=(best.name,), **cached)
            compilation = await runtime.compile(MODEL, mode="staged", stages=(quick.name, best.name), instances=2, **cached)
            with pytest.raises(aionn.StageRejected, match="cannot run 2 instances of a model"):
                await compilation.wait_for_stage(best.name, timeout_s=30)
            again = await runtime.compile(MODEL, devices=(best.name,), **cached)
            assert again.outcomes[0].kind.value == "hit"


@pytest.mark.parametrize("way", ["compute", "bursts"])
async def test_instances_execute_beside_each_other(way: str) -> None:
    """All three hang at once: with one lane, the second would begin when the first is over."""
    count = 3
    with FakeDevice(AskedEngine) as fake:
        async with leak_check(), aionn.Runtime() as runtime, AsyncExitStack() as bursts:
            compilation = await runtime.compile(MODEL, devices=(fake.name,), instances=count)
            runners: list[Any] = [compilation] * count
            if way == "bursts":
                runners = [await bursts.enter_async_context(compilation.burst()) for _ in range(count)]
            for runner in runners:
                for _ in range(3):
                    await runner.compute(FRAME)
            fake.hang()
            answered = 0

            async def call(runner: Any) -> None:
                nonlocal answered
                assert (await runner.compute(FRAME))["y"][0, 3] == count
                answered += 1

            async with anyio.create_task_group() as tasks:
                for runner in runners:
                    tasks.start_soon(call, runner)
                with anyio.fail_after(60):
                    for _ in range(count):
                        await fake.heard("run")
                assert answered == 0
                fake.behave()
            assert answered == count


# --- how many threads compute ------------------------------------------------------------------------------------------------


def cpu_ns(pid: int) -> dict[int, int]:
    """The CPU time of each thread of a process."""
    used = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            used[int(thread)] = int(file.read().split()[0])
    return used


async def computing_threads(compilation: aionn.Compilation, pid: int | None, inputs: Mapping[str, NDArray[Any]], expected: int) -> int:
    """How many threads of a driver, beside its event loop's, take a real part in executions. More are executed until so many do."""
    assert pid is not None
    for _ in range(3):
        await compilation.compute(inputs)
    before, found = cpu_ns(pid), 0
    with anyio.fail_after(100):  # on a busy machine one thread may do nearly all work of two
        while found < expected:
            for _ in range(20):
                await compilation.compute(inputs)
            spent = [after - before.get(thread, 0) for thread, after in cpu_ns(pid).items() if thread != pid]
            found = sum(ns > max(spent) / 100 for ns in spent)
    return found


def detector() -> tuple[aionn.Model, dict[str, NDArray[Any]]]:
    """A real model that is worth several threads, and inputs for it."""
    model = aionn.Model.from_onnx(carried("detector"))
    inputs = {key: some_input(operand, 1, 160, 160) for key, operand in model.inputs.items()}
    assert {array.shape for array in inputs.values()} == {(1, 3, 160, 160)}
    return model, inputs


@pytest.mark.parametrize("made_for", [1, 2])
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
async def test_a_driver_computes_on_as_many_threads_as_the_runtime_says_whatever_is_stored(
    name: str, made_for: int, tmp_path: Path
) -> None:
    """What is stored for one thread is used under two and the other way round, and the runs have the threads of their runtime."""
    cpus = len(os.sched_getaffinity(0))
    model, inputs = detector()
    for threads in (made_for, 3 - made_for):
        async with leak_check(), aionn.Runtime(threads=threads) as runtime:
            compilation = await runtime.compile(model, devices=(name,), cache_dir=tmp_path / "cache", token=model.token)
            assert compilation.outcomes[0].kind.value == ("miss" if threads == made_for else "hit")
            (device,) = (device for device in runtime.devices if device.pid)
            expected = min(threads, cpus)
            assert await computing_threads(compilation, device.pid, inputs, expected) == expected


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
async def test_several_bursts_compute_on_the_one_thread_of_their_runtime(name: str) -> None:
    """The lanes belong to the model, not to its bursts. A lane computes in its own thread, without a pool of threads."""
    model, inputs = detector()
    async with leak_check(), aionn.Runtime(threads=1) as runtime, AsyncExitStack() as opened:
        compilation = await runtime.compile(model, devices=(name,))
        bursts = [await opened.enter_async_context(compilation.burst()) for _ in range(3)]
        (device,) = (device for device in runtime.devices if device.pid)
        assert device.pid is not None

        async def run(burst: aionn.Burst, times: int) -> None:
            for _ in range(times):
                await burst.compute(inputs)

        for times in (3, 20):
            before = cpu_ns(device.pid)
            async with anyio.create_task_group() as tasks:
                for burst in bursts:
                    tasks.start_soon(run, burst, times)
        spent = {thread: after - before.get(thread, 0) for thread, after in cpu_ns(device.pid).items() if thread != device.pid}
        assert sum(ns > max(spent.values()) / 100 for ns in spent.values()) == 1


def raw_environment_of(pid: int | None) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def environment_of(pid: int | None) -> dict[bytes, bytes]:
    return dict(entry.partition(b"=")[::2] for entry in raw_environment_of(pid).split(b"\0"))


@pytest.mark.usefixtures("real_starts")
async def test_libraries_beside_the_engine_get_the_runtime_s_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's BLAS makes its threads when it is imported, whatever an engine asks for later."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    async with leak_check(), aionn.Runtime(threads=1) as runtime:
        await runtime.compile(MODEL, devices=("reference",))
        (device,) = (device for device in runtime.devices if device.pid)
        environment = environment_of(device.pid)
        assert {environment[name] for name in (b"OPENBLAS_NUM_THREADS", b"OMP_NUM_THREADS", b"RAYON_NUM_THREADS")} == {b"1"}


@pytest.mark.parametrize("own", [None, "glibc.malloc.hugetlb=1"])
async def test_a_driver_asks_for_huge_pages_only_if_the_app_says_so(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh huge pages of a virtual machine that returns free memory to its host take twice the time of usual ones."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    async with leak_check(), aionn.Runtime() as runtime:
        await runtime.compile(MODEL, devices=("reference",))
        (device,) = (device for device in runtime.devices if device.pid)
        # The C library may have put a zero between name and value while it read them.
        found = re.split(rb"[\0:=]", raw_environment_of(device.pid).partition(b"GLIBC_TUNABLES=")[2])
        assert found[:2] == ([b""] if own is None else [b"glibc.malloc.hugetlb", b"1"])


# --- what the threads' memory costs ----------------------------------------------------------------------------------------

ARENA_BYTES = 64 << 20
"""glibc keeps so much address space for each arena but the first, at a multiple of it."""


def arenas(pid: int) -> int:
    """How many arenas glibc has made in a process."""
    ends: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, end = line.split()[0].split("-")
        ends[int(begin, 16)] = int(end, 16)
    return 1 + sum(begin % ARENA_BYTES == 0 and ends.get(end) == begin + ARENA_BYTES for begin, end in ends.items())


@pytest.mark.parametrize(("environment", "most"), [({}, len(os.sched_getaffinity(0))), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=5"}, 5)])
async def test_a_driver_with_many_threads_has_an_arena_for_each_cpu(environment: dict[str, str], most: int) -> None:
    """Each arena keeps memory, and eight threads at work would have made one each."""
    async with aionn.Runtime(start=(), driver_env=environment) as runtime, AsyncExitStack() as stack:
        model = await runtime.load(carried("silero"))
        compiled = [await runtime.compile(model, devices=("onnxruntime",), threads=1, instances=2) for _ in range(5)]
        bursts = [await stack.enter_async_context(compilation.burst()) for compilation in compiled for _ in range(4)]
        frame = {name: some_input(operand, 1) for name, operand in model.inputs.items()}
        async with anyio.create_task_group() as callers:
            for burst in bursts:
                for _ in range(2):
                    callers.start_soon(burst.compute, frame)
        (device,) = (device for device in runtime.devices if device.name == "onnxruntime")
        assert device.pid is not None
        assert len(os.listdir(f"/proc/{device.pid}/task")) > 8
        assert min(most, 4) - 1 < arenas(device.pid) <= most
