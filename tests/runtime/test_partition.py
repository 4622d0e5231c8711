"""Models that several devices run in steps: chosen, cached, prepared again. Real driver processes, with engines for some operators."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from blake3 import blake3

import aionn
from aionn import trace
from aionn.caching import CacheOutcomeKind
from aionn.caching.manifest import decode_manifest
from aionn.caching.token import decode_parts
from aionn.errors import CallerError, CompilationError, DeadlineError, DriverDiedError
from aionn.graph.steps import Step
from aionn.hal import EngineOptions, ExecutionPreference, PrepareOptions
from aionn.runtime.model import is_read
from aionn.runtime.preparing.partition import KeptPlan, decoded, encoded, scope_of
from aionn.runtime.processes.devices import Devices
from aionn.testing import FakeDevice
from tests.runtime.operator_engines import AddEngine, MulEngine, WholeEngine, drivers, expected, three_step_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]
HIT, MISS, NO_CACHE = CacheOutcomeKind.HIT, CacheOutcomeKind.MISS, CacheOutcomeKind.NO_CACHE
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)


@pytest.fixture
def anyio_backend() -> str:
    """One loop is enough: what these tests are about does not depend on it."""
    return "asyncio"


@pytest.fixture
def both() -> Iterator[list[FakeDevice]]:
    with drivers(AddEngine, MulEngine) as found:
        yield found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "three.onnx"
    found.write_bytes(three_step_model())
    return found


def names(devices: list[FakeDevice]) -> tuple[str, ...]:
    return tuple(device.name for device in devices)


def kinds(compilation: aionn.Compilation) -> list[CacheOutcomeKind]:
    return [outcome.kind for outcome in compilation.outcomes]


async def check(compilation: aionn.Compilation, x: np.ndarray = X) -> None:
    np.testing.assert_allclose((await compilation.compute({"x": x}))["y"], expected(x), rtol=1e-6)


async def test_a_model_that_no_device_runs_whole_is_cut_and_the_plan_and_outcomes_show_it(both: list[FakeDevice], tmp_path: Path) -> None:
    adds, muls = names(both)
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model())
        compilation = await runtime.compile(model, devices=(adds, muls), cache_dir=tmp_path / "cache")
        await check(compilation)
        assert [step.device for step in compilation.plan] == [outcome.device for outcome in compilation.outcomes] == [adds, muls, adds]
        assert [step.nodes for step in compilation.plan] == [("add_0",), ("mul_1",), ("sub_2",)]
        assert [(step.inputs, step.outputs) for step in compilation.plan] == [(("x",), ("t0",)), (("t0",), ("t1",)), (("t1",), ("y",))]
        assert kinds(compilation) == [MISS] * 3
        assert compilation.device == f"{adds}+{muls}" == (await compilation.compute({"x": X})).device


async def test_a_device_that_runs_the_model_whole_gets_it_whole_also_behind_others(both: list[FakeDevice]) -> None:
    """PartitioningTest.SimpleModel: all operations on one device give the model as it is."""
    with drivers(WholeEngine) as (whole,):
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(*names(both), whole.name))
            await check(compilation)
            (step,) = compilation.plan
            assert (step.device, step.nodes, step.operations) == (whole.name, ("add_0", "mul_1", "sub_2"), (0, 1, 2))
            assert (step.inputs, step.outputs) == (("x",), ("y",))


@pytest.mark.parametrize("token", [None, b"t" * 32], ids=["own digest", "token of the app"])
async def test_a_hit_of_a_plan_reads_no_graph(both: list[FakeDevice], tmp_path: Path, path: Path, token: bytes | None) -> None:
    for kind in (MISS, HIT, HIT):
        async with aionn.Runtime(start=()) as runtime:
            model = await aionn.Model.load(path)
            with trace.record() as seen:
                compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache", token=token)
            assert kinds(compilation) == [kind] * 3
            assert is_read(model) is (kind is MISS)
            assert [span.name for span in seen.spans].count("graph.read") == (kind is MISS)
            assert list(model.inputs) == ["x"], list(model.outputs) == ["y"]
            assert [step.nodes for step in compilation.plan] == [("add_0",), ("mul_1",), ("sub_2",)]
            assert is_read(model) is (kind is MISS), "the plan shows its nodes without the graph"
            await check(compilation)


async def test_a_whole_models_plan_reads_the_graph_when_it_is_asked_for(tmp_path: Path, path: Path) -> None:
    with drivers(WholeEngine) as (whole,):
        for _ in range(2):
            async with aionn.Runtime(start=()) as runtime:
                model = await aionn.Model.load(path)
                compilation = await runtime.compile(model, devices=(whole.name,), cache_dir=tmp_path / "cache")
        assert kinds(compilation) == [HIT]
        assert not is_read(model)
        assert compilation.plan[0].nodes == ("add_0", "mul_1", "sub_2")


async def test_the_key_of_a_step_has_its_operations_and_its_token_is_bound_to_them(both: list[FakeDevice], tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model())
        compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache")
        keys = {outcome.key for outcome in compilation.outcomes}
        assert len(keys) == 3
    manifests = [decode_manifest(file.read_bytes()) for file in (tmp_path / "cache").rglob("*manifest*") if file.is_file()]
    stored = [manifest for manifest in manifests if manifest.key in keys]  # type: ignore[union-attr]
    assert len(stored) == 3
    assert sorted(decode_parts(one.parts).operations or () for one in stored) == [((0, 0),), ((0, 1),), ((0, 2),)]  # type: ignore[union-attr]
    assert len({one.model_digest for one in stored} | {model.token}) == 4  # type: ignore[union-attr]


async def test_plans_of_other_preferences_and_devices_are_kept_apart(both: list[FakeDevice], tmp_path: Path) -> None:
    versions = {"a": "1", "b": "2"}
    options = PrepareOptions()
    scopes = {
        scope_of(bytes(32), versions, options),
        scope_of(b"1" * 32, versions, options),
        scope_of(bytes(32), {"b": "2", "a": "1"}, options),
        scope_of(bytes(32), {"a": "1", "b": "3"}, options),
        scope_of(bytes(32), {**versions, "c": "1"}, options),
        scope_of(bytes(32), versions, PrepareOptions(ExecutionPreference.LOW_POWER)),
        *(scope_of(bytes(32), versions, PrepareOptions(options=(("a", EngineOptions({"level": level}, {})),))) for level in (1, 1.0, True)),
    }
    assert len(scopes) == 9


SCOPE = b"s" * 32
STEPS = (Step("a", (0,), ("n0",), ("x",), ("t",)), Step("b", (1,), ("n1",), ("t",), ("y",)))
OPERAND = aionn.Model.from_onnx(three_step_model()).inputs["x"]
PLAN = KeptPlan(model_digest=b"m" * 32, inputs=(("x", OPERAND),), outputs=(("y", OPERAND),), operations=2, steps=STEPS)
FORGED: dict[str, Callable[[], KeptPlan]] = {
    "an input from nowhere": lambda: changed(0, inputs=("z",)),
    "an input of a later step": lambda: changed(0, inputs=("x", "y")),
    "an operation twice": lambda: changed(1, operations=(0,)),
    "an operation that the model has not": lambda: changed(1, operations=(2,)),
    "a negative operation": lambda: changed(1, operations=(-1,)),
    "operations out of order": lambda: changed(1, operations=(1, 0), nodes=("n1", "n0")),
    "no operation": lambda: changed(1, operations=(), nodes=()),
    "a node too many": lambda: changed(1, nodes=("n1", "n2")),
    "no outputs": lambda: changed(1, outputs=()),
    "an output twice": lambda: changed(1, outputs=("y", "y")),
    "an output that two steps make": lambda: changed(1, outputs=("y", "t")),
    "a step that makes the input": lambda: changed(1, outputs=("y", "x")),
    "an output that no step makes": lambda: changed(1, outputs=("u",)),
    "another device": lambda: changed(1, device="c"),
    "no steps": lambda: msgspec.structs.replace(PLAN, steps=()),
    "no outputs of the model": lambda: msgspec.structs.replace(PLAN, outputs=()),
    "an input of the model twice": lambda: msgspec.structs.replace(PLAN, inputs=PLAN.inputs * 2),
    "another format": lambda: msgspec.structs.replace(PLAN, format=2),
    "another model": lambda: msgspec.structs.replace(PLAN, model_digest=b"n" * 32),
}


def changed(number: int, **changes: object) -> KeptPlan:
    steps = list(STEPS)
    steps[number] = msgspec.structs.replace(steps[number], **changes)
    return msgspec.structs.replace(PLAN, steps=tuple(steps))


def test_a_plan_is_read_as_it_was_kept() -> None:
    assert decoded(encoded(PLAN, SCOPE), SCOPE, ("a", "b"), b"m" * 32) == PLAN
    assert decoded(encoded(PLAN, SCOPE), SCOPE, ("a", "b"), b"") == PLAN


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_plan_is_ignored(name: str) -> None:
    with trace.record() as seen:
        assert decoded(encoded(FORGED[name](), SCOPE), SCOPE, ("a", "b"), b"m" * 32) is None
    assert [event.name for event in seen.counters] == ["plan.refused"]


def test_a_damaged_plan_is_ignored_wherever_the_damage_is() -> None:
    good = encoded(PLAN, SCOPE)
    for at in range(len(good)):
        bad = good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :]
        assert decoded(bad, SCOPE, ("a", "b"), b"m" * 32) is None, at
        assert decoded(good[:at], SCOPE, ("a", "b"), b"m" * 32) is None, at
    assert decoded(good, b"t" * 32, ("a", "b"), b"m" * 32) is None
    rubbish = b"\xc1rubbish"
    assert decoded(blake3(SCOPE + rubbish).digest() + rubbish, SCOPE, ("a", "b"), b"") is None


def rewrite(cache: Path, change: Callable[[bytes, bytes], bytes]) -> int:
    """Change every plan that a cache directory keeps. Returns how many there are."""
    done = 0
    for file in cache.rglob("*"):
        if file.is_file() and file.read_bytes()[:15] == b"SQLite format 3":
            with sqlite3.connect(file) as database:
                for scope, body in database.execute("SELECT scope, body FROM plans").fetchall():
                    database.execute("UPDATE plans SET body = ? WHERE scope = ?", (change(scope, body), scope))
                    done += 1
            database.close()
    return done


def swapped(scope: bytes, body: bytes) -> bytes:
    """A plan whose digest is right and whose first and last step claim each other's operations."""
    plan = msgspec.msgpack.decode(body[32:], type=KeptPlan)
    first, middle, last = plan.steps
    steps: tuple[Step, ...] = (Step(first.device, last.operations, last.nodes, first.inputs, first.outputs), middle)
    steps += (Step(last.device, first.operations, first.nodes, last.inputs, last.outputs),)
    return encoded(msgspec.structs.replace(plan, steps=steps), scope)


def retyped(scope: bytes, body: bytes) -> bytes:
    plan = msgspec.msgpack.decode(body[32:], type=KeptPlan)
    kind = aionn.hal.OperandType.INT32
    return encoded(msgspec.structs.replace(plan, inputs=(("x", aionn.hal.Operand(kind, (1, 64))),)), scope)


REWRITES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "damaged": lambda _, body: body[:40] + b"?" + body[41:],
    "empty": lambda *_: b"",
    "operations exchanged": swapped,
    "input of another type": retyped,
}


@pytest.mark.parametrize(("name", "token"), [*((name, None) for name in REWRITES), ("operations exchanged", b"t" * 32)])
async def test_a_plan_that_was_written_to_in_the_cache_gives_a_miss_or_the_right_result(
    both: list[FakeDevice], tmp_path: Path, path: Path, name: str, token: bytes | None
) -> None:
    for turn in range(2):
        if turn:
            assert rewrite(tmp_path / "cache", REWRITES[name]) == 1
        async with aionn.Runtime(start=()) as runtime:
            model = await aionn.Model.load(path)
            with trace.record() as seen:
                compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache", token=token)
            await check(compilation)
            assert model.inputs["x"].type is aionn.hal.OperandType.FLOAT32
    assert [event.name for event in seen.counters].count("plan.refused") == 1
    assert kinds(compilation) == [HIT] * 3, "the plan was made anew, and its steps are stored"


async def test_a_plan_of_another_model_under_the_same_token_is_not_mixed_with_this_one(
    both: list[FakeDevice], tmp_path: Path, path: Path
) -> None:
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(await aionn.Model.load(path), devices=names(both), cache_dir=tmp_path / "cache", token=bytes(32))
    other = tmp_path / "other.onnx"
    other.write_bytes(three_step_model(("Sub", "Mul", "Add")))
    async with aionn.Runtime(start=()) as runtime:
        model = await aionn.Model.load(other)
        await model.digest()
        compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache", token=bytes(32))
        found = (await compilation.compute({"x": X}))["y"]
        w = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(1, 64)
        np.testing.assert_allclose(found, (X - w) * w + w, rtol=1e-6)
        assert kinds(compilation) == [MISS] * 3


async def test_named_devices_that_do_not_cover_the_model_are_one_sentence_with_node_and_devices(both: list[FakeDevice]) -> None:
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model(("Add", "Pow", "Mul")))
        with pytest.raises(CompilationError) as caught:
            await runtime.compile(model, devices=names(both))
        assert caught.value.node == "pow_1"
        assert all(name in str(caught.value) for name in (*names(both), "pow_1"))


async def test_a_step_that_cannot_be_prepared_leaves_nothing_of_the_others(both: list[FakeDevice]) -> None:
    adds, muls = both
    async with aionn.Runtime(start=()) as runtime:
        muls.fail("out of luck", "compile")
        with pytest.raises(CompilationError, match="out of luck"):
            await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(adds.name, muls.name))
        for device in both:
            remote = await runtime._opened.devices.get(device.name)
            with anyio.fail_after(20):  # a step that was being compiled is released when its driver has answered
                while not remote.unused:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        muls.behave()
        await check(await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(adds.name, muls.name)))


async def test_a_device_that_vanishes_between_plan_and_prepare_is_an_error_and_leaves_nothing(both: list[FakeDevice]) -> None:
    adds, muls = both
    async with aionn.Runtime(start=()) as runtime:
        muls.crash("compile")
        with pytest.raises(aionn.DriverDiedError, match=r"died|ended"):
            await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(adds.name, muls.name))
        assert await muls.heard("compile"), "the driver died before it was asked to compile"
        remote = await runtime._opened.devices.get(adds.name)
        with anyio.fail_after(20):  # a step that was being compiled is released when its driver has answered
            while not remote.unused:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        muls.behave()
        await check(await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(adds.name, muls.name)))


async def test_steps_of_different_devices_are_prepared_side_by_side(both: list[FakeDevice]) -> None:
    adds, muls = both
    adds.hang("compile")
    muls.hang("compile")
    async with aionn.Runtime(start=()) as runtime, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(adds.name, muls.name)))
        with anyio.fail_after(20):
            await adds.heard("compile")
            await muls.heard("compile")
        adds.behave()
        muls.behave()


async def test_without_names_a_device_that_cannot_prepare_its_step_is_passed_over(
    both: list[FakeDevice], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class_names = "tests.runtime.operator_engines:CpuMulEngine"
    monkeypatch.setattr(Devices, "installed", property(lambda _: [*names(both), class_names]))
    both[1].fail("out of luck", "compile")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()))
        await check(compilation)
        assert [step.device for step in compilation.plan] == [both[0].name, class_names, both[0].name]
    assert any("out of luck" in record.getMessage() and "passed over" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
async def test_the_death_of_one_of_several_drivers_has_the_plan_prepared_again(
    both: list[FakeDevice], tmp_path: Path, victim: int, cached: bool
) -> None:
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model())
        compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache" if cached else None)
        await check(compilation)
        plan = compilation.plan
        pids = {device.name: device.pid for device in runtime.devices}
        async with compilation.burst() as burst:
            await burst.compute({"x": X})
            both[victim].hang("run")
            async with anyio.create_task_group() as tasks:

                async def dies() -> None:
                    with pytest.raises(DriverDiedError):
                        await burst.compute({"x": X})

                tasks.start_soon(dies)
                pid = await both[victim].heard("run")
                os.kill(pid, signal.SIGKILL)
            both[victim].behave()
            np.testing.assert_allclose((await burst.compute({"x": X + 1}))["y"], expected(X + 1), rtol=1e-6)
        assert compilation.plan == plan
        assert kinds(compilation) == [HIT if cached else NO_CACHE] * 3
        now = {device.name: device.pid for device in runtime.devices}
        assert (now[both[victim].name], now[both[1 - victim].name]) != (pid, None)
        assert now[both[1 - victim].name] == pids[both[1 - victim].name]


async def test_jit_cuts_at_the_first_execution_and_has_no_plan_before(both: list[FakeDevice], tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model())
        compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache", mode="jit")
        assert (compilation.plan, compilation.outcomes) == ((), ())
        await check(compilation)
        assert len(compilation.plan) == len(compilation.outcomes) == 3


async def test_a_plan_that_was_given_back_for_idleness_is_loaded_again(both: list[FakeDevice], tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model())
        compilation = await runtime.compile(model, devices=names(both), cache_dir=tmp_path / "cache", idle_s=0.02)
        await check(compilation)
        with anyio.fail_after(20):
            while any(device.pid is not None for device in runtime.devices if device.name in names(both)):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await check(compilation)
        assert kinds(compilation) == [HIT] * 3


@pytest.mark.parametrize("priority", ["low", "high"])
async def test_plans_have_the_priority_of_their_compilation(both: list[FakeDevice], priority: str) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=names(both), priority=priority)  # type: ignore[arg-type]
        await check(compilation)
        for device in runtime.devices:
            if device.name in names(both):
                assert device.low_priority is not None
                assert (device.low_priority.pid is not None, device.pid is not None) == (priority == "low", priority == "high")


async def test_a_deadline_ends_the_preparation_of_steps_and_leaves_nothing(both: list[FakeDevice]) -> None:
    muls = both[1]
    async with aionn.Runtime(start=()) as runtime:
        model = aionn.Model.from_onnx(three_step_model())
        await runtime.compile(model, devices=names(both))
        muls.hang("compile")
        with pytest.raises(DeadlineError):
            await runtime.compile(aionn.Model.from_onnx(three_step_model(("Add", "Mul", "Add"))), devices=names(both), timeout_s=0.5)
        muls.behave()
        await check(await runtime.compile(model, devices=names(both)))


async def test_a_changed_file_is_found_when_a_step_of_a_kept_plan_must_be_compiled(
    both: list[FakeDevice], tmp_path: Path, path: Path
) -> None:
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(await aionn.Model.load(path), devices=names(both), cache_dir=tmp_path / "cache", token=bytes(32))
    await anyio.Path(path).unlink()
    await anyio.Path(path).write_bytes(three_step_model(("Sub", "Mul", "Add")))
    both[1].tell(version="2")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            await aionn.Model.load(path), devices=names(both), cache_dir=tmp_path / "cache", token=bytes(32)
        )
        w = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(1, 64)
        np.testing.assert_allclose((await compilation.compute({"x": X}))["y"], (X - w) * w + w, rtol=1e-6)


async def test_a_device_that_is_not_installed_is_an_error_by_name(both: list[FakeDevice]) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises((aionn.DeviceUnavailableError, CallerError)):
            await runtime.compile(aionn.Model.from_onnx(three_step_model()), devices=(both[0].name, "absent"))
