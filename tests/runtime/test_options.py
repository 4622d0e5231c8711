"""`Runtime.compile(options=)` and providers in the names of devices: what is refused, what reaches the engine, what is in the key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.testing import identity_model
from tests.runtime.option_engine import OptionEngine, SecondOptionEngine, UnaskedEngine, WrongOptionsEngine
from tests.runtime.planned_models import ORT, REF, woven

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

SHAPE = (1, 16)
MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
FRAME = {"x": np.zeros(SHAPE, np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def named(engine: type, provider: str = "") -> str:
    return f"{engine.__module__}:{engine.__name__}{provider and ':'}{provider}"


FIRST, SECOND = named(OptionEngine), named(SecondOptionEngine)


async def reached(compilation: aionn.Compilation) -> list[float]:
    """Level, rate, fast, size of the file, provider: as the executable got them that answers now."""
    return [float(value) for value in (await compilation.compute(FRAME))["y"][0, :5]]


def kinds(compilation: aionn.Compilation) -> list[str]:
    return [outcome.kind.value.upper() for outcome in compilation.outcomes]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (3, "options: found 3; give a mapping"),
        ({FIRST: 3}, "options for device '.*OptionEngine': found 3; give a mapping"),
        ({3: {}}, "options for 3: give the name of a device"),
        ({"reference": {}}, "options for device 'reference', but this compile may use '.*OptionEngine'; name the device in devices="),
        ({FIRST: {"level": float("nan")}}, "option 'level' of device '.*' is nan; give a finite number"),
        ({FIRST: {"level": 2**63}}, "is 9223372036854775808; give an integer of at most 64 bits"),
        ({FIRST: {"level": None}}, r"is None \(NoneType\); give a str, int, float, bool or path"),
        ({FIRST: {"level": np.float32(1)}}, "give a str, int, float, bool or path"),
        ({FIRST: {3: 3}}, "option 3 of device '.*': the name of an option is a text"),
        ({FIRST: {"file": Path("/dev/zero")}}, "option 'file': '/dev/zero' is not a regular file; give the path of a file"),
        ({FIRST: {"\udc80": 1}}, r"option '\\udc80' of device '.*' is not Unicode; give text without surrogates"),
        ({FIRST: {"file": Path("/tmp/\udc80")}}, r"option 'file' of device '.*': '/tmp/\\udc80' is not Unicode; give text without"),
        ({FIRST: {"level": "\udc80"}}, r"option 'level' of device '.*': '\\udc80' is not Unicode; give text without surrogates"),
        ({FIRST: {"file": Path("/no such file")}}, "option 'file': the file '/no such file' cannot be read"),
        ({FIRST: {"other": 1}}, "device 'optional' has no option 'other'; its options are 'level', 'rate', 'fast', 'file'"),
        ({FIRST: {"level": "1"}}, r"option 'level' of device 'optional' is '1' \(str\); it must be an integer"),
        ({FIRST: {"level": True}}, r"option 'level' of device 'optional' is True \(bool\); it must be an integer"),
        ({FIRST: {"fast": 1}}, r"option 'fast' of device 'optional' is 1 \(int\); it must be True or False"),
        ({FIRST: {"rate": "x"}}, r"it must be a float or an integer"),
        ({FIRST: {"file": "text"}}, r"option 'file' of device 'optional' is 'text' \(str\); it must be the path of a file"),
        ({FIRST: {"level": Path(__file__)}}, r"option 'level' of device 'optional' is the path of a file; it must be an integer"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
async def test_options_that_are_wrong_are_one_sentence(options: Any, sentence: str, cached: bool, tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CallerError, match=sentence):
            await runtime.compile(MODEL, devices=(FIRST,), options=options, cache_dir=tmp_path / "cache" if cached else None)


async def test_a_pipe_for_a_file_holds_up_neither_the_compile_nor_the_end_of_the_app(tmp_path: Path) -> None:
    """A thread that opened it would wait for a writer, and the interpreter would wait for the thread."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CallerError, match="pipe' is not a regular file; give the path of a file"):
            await runtime.compile(MODEL, devices=(FIRST,), options={FIRST: {"file": pipe}}, timeout_s=20)


@pytest.mark.parametrize("provider", ["\udcff", "a\0b"])
async def test_a_device_whose_name_no_process_can_be_given_is_one_sentence(provider: str) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.DeviceUnavailableError, match="is not installed; the installed devices are"):
            await runtime.compile(MODEL, devices=(f"onnxruntime:{provider}",))


async def test_an_engine_without_options_says_so() -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CallerError, match="device 'reference' has no option 'level'; it has none"):
            await runtime.compile(MODEL, devices=("reference",), options={"reference": {"level": 1}})


async def test_each_device_gets_its_own_options() -> None:
    options: dict[str, dict[str, Any]] = {FIRST: {"level": 3, "rate": 0.5, "fast": True}, SECOND: {"level": 4}}
    async with aionn.Runtime(start=()) as runtime:
        first = await runtime.compile(MODEL, devices=(FIRST, SECOND), options=options)
        second = await runtime.compile(MODEL, devices=(SECOND, FIRST), options=options)
        assert await reached(first) == [3, 0.5, 1, 0, -1]
        assert await reached(second) == [4, 0, 0, 0, -1]


async def test_supported_operations_know_the_options() -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CompilationError, match="cannot run operator"):
            await runtime.compile(MODEL, devices=(FIRST,), options={FIRST: {"level": -1}})
        passed_over = await runtime.compile(MODEL, devices=(FIRST, SECOND), options={FIRST: {"level": -1}})
        assert passed_over.device == SECOND


async def test_options_are_in_the_key_and_their_types_count(tmp_path: Path) -> None:
    """1 == 1.0 in Python, so an encoding by equality would give one of these the other's artifact."""
    async with aionn.Runtime(start=()) as runtime:

        async def outcome(options: Mapping[str, Any] | None) -> list[str]:
            return kinds(await runtime.compile(MODEL, devices=(FIRST,), cache_dir=tmp_path / "cache", options=options))

        asked: list[Any] = [None, {"rate": 1}, {"rate": 1.0}, {"rate": 2}, {"level": 1}, {"fast": True}, {"fast": False}]
        whole = [None if one is None else {FIRST: one} for one in asked]
        assert [await outcome(one) for one in whole] == [["MISS"]] * len(asked)
        assert [await outcome(one) for one in whole] == [["HIT"]] * len(asked)
        assert await outcome({FIRST: {}}) == ["HIT"]  # no options are no options


async def test_a_hit_loads_with_the_options(tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        for kind in ("MISS", "HIT"):
            options = {FIRST: {"level": 7, "rate": 1}}
            compilation = await runtime.compile(MODEL, devices=(FIRST,), cache_dir=tmp_path / "cache", options=options)
            assert kinds(compilation) == [kind]
            assert await reached(compilation) == [7, 1, 0, 0, -1]


async def test_two_preparations_with_equal_values_of_other_types_share_nothing() -> None:
    async with aionn.Runtime(start=()) as runtime:
        one = await runtime.compile(MODEL, devices=(FIRST,), options={FIRST: {"rate": 1}})
        other = await runtime.compile(MODEL, devices=(FIRST,), options={FIRST: {"rate": 2.5}})
        assert (await reached(one))[1] == 1
        assert (await reached(other))[1] == 2.5


async def test_two_files_at_one_path_are_two_keys_and_the_driver_gets_the_bytes_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "library"
    async with aionn.Runtime(start=()) as runtime:

        async def compiled(content: bytes) -> aionn.Compilation:
            path.write_bytes(content)
            return await runtime.compile(MODEL, devices=(FIRST,), cache_dir=tmp_path / "cache", options={FIRST: {"file": path}})

        first, second, again = await compiled(b"1"), await compiled(b"22"), await compiled(b"1")
        assert [kinds(one) for one in (first, second, again)] == [["MISS"], ["MISS"], ["HIT"]]
        assert [(await reached(one))[3] for one in (first, second, again)] == [1, 2, 1]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(b"22")
        moved = await runtime.compile(MODEL, devices=(FIRST,), cache_dir=tmp_path / "cache", options={FIRST: {"file": elsewhere}})
        assert kinds(moved) == ["HIT"]  # the content counts, and the path does not


async def test_a_file_that_changes_before_a_driver_is_started_anew_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(b"1")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(FIRST,), options={FIRST: {"file": path}})
        assert (await reached(compilation))[3] == 1
        path.write_bytes(b"22")
        assert (await reached(compilation))[3] == 1
        device = next(device for device in runtime.devices if device.name == FIRST)
        await device.restart()
        with pytest.raises(aionn.CallerError, match=r"'.*library' has changed since the model was compiled; compile the model again"):
            await compilation.compute(FRAME)


async def test_a_plan_over_several_devices_is_kept_with_the_options_of_each(tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:

        async def compiled(options: Mapping[str, Any]) -> list[str]:
            model = aionn.Model.from_onnx(woven([1, 4]))
            compilation = await runtime.compile(model, devices=(ORT, REF), options={ORT: options}, cache_dir=tmp_path / "cache")
            assert len(compilation.plan) == 4
            return [found for found in kinds(compilation) if found != "NO_CACHE"]  # the reference stores nothing

        with trace.record() as seen:
            assert await compiled({"allow_spinning": False}) == ["MISS", "MISS"]
            assert await compiled({"allow_spinning": False}) == ["HIT", "HIT"]
            assert await compiled({"allow_spinning": True}) == ["MISS", "MISS"]
    assert [event.attributes["found"] for event in seen.counters if event.name == "plan.kept"] == [False, True, False]


async def test_a_model_that_is_prepared_again_keeps_its_options() -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(FIRST,), options={FIRST: {"level": 5}}, mode="jit")
        assert await reached(compilation) == [5, 0, 0, 0, -1]
        await next(device for device in runtime.devices if device.name == FIRST).restart()
        assert await reached(compilation) == [5, 0, 0, 0, -1]


@pytest.mark.parametrize("cached", [False, True])
async def test_a_stage_made_by_a_worker_has_the_options_of_its_device(cached: bool, tmp_path: Path) -> None:
    options = {FIRST: {"level": 1}, SECOND: {"level": 2, "fast": True}}
    async with aionn.Runtime(start=()) as runtime:
        cache = tmp_path / "cache" if cached else None
        compilation = await runtime.compile(
            MODEL,
            mode="staged",
            stages=(FIRST, SECOND),
            options=options,
            cache_dir=cache,
            stage_policy=aionn.StagePolicy(executions=1, min_gain=None, tolerances={"float32": aionn.Tolerance(1e9, 1e9)}),
        )
        assert await reached(compilation) == [1, 0, 0, 0, -1]
        await compilation.wait_for_stage(SECOND, timeout_s=60)
        assert compilation.device == SECOND
        assert await reached(compilation) == [2, 0, 1, 0, -1]


# --- providers -----------------------------------------------------------------------------------------------------------


async def test_a_provider_has_a_driver_process_of_its_own() -> None:
    names = [FIRST, named(OptionEngine, "left"), named(OptionEngine, "right")]
    async with aionn.Runtime(start=()) as runtime:
        compilations = [await runtime.compile(MODEL, devices=(name,)) for name in names]
        assert [(await reached(one))[4] for one in compilations] == [-1, 0, 1]
        devices = {device.name: device for device in runtime.devices if device.name in names}
        assert len({device.pid for device in devices.values()} | {os.getpid()}) == 4
        assert {device.providers for device in devices.values()} == {("left", "right")}
        assert {device.runs_on for device in devices.values()} == {"a fake"}
        assert {one.runs_on for one in compilations} == {"a fake's executable"}


async def test_a_provider_that_is_not_there_is_one_sentence() -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.DeviceUnavailableError, match=r"there is no provider 'middle', only \('left', 'right'\)"):
            await runtime.compile(MODEL, devices=(named(OptionEngine, "middle"),))
        with pytest.raises(
            aionn.DeviceUnavailableError,
            match="'reference:left' is not there, because 'reference' has no providers; use 'reference'",
        ):
            await runtime.compile(MODEL, devices=("reference:left",))


async def test_an_engine_whose_options_are_no_types_is_one_sentence() -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.DeviceUnavailableError, match=r"WrongOptionsEngine\.options is .*; it must be a mapping from names to"):
            await runtime.compile(MODEL, devices=(named(WrongOptionsEngine),))
        with pytest.raises(aionn.DeviceUnavailableError, match="UnaskedEngine has options, but its supported_operations takes none; give"):
            await runtime.compile(MODEL, devices=(named(UnaskedEngine),))


async def test_the_case_of_a_provider_does_not_matter() -> None:
    async with aionn.Runtime(start=()) as runtime:
        one = await runtime.compile(MODEL, devices=("onnxruntime:cpu",))
        other = await runtime.compile(MODEL, devices=("onnxruntime:CPU",), options={"onnxruntime:Cpu": {"allow_spinning": False}})
        assert (one.device, other.device) == ("onnxruntime:cpu", "onnxruntime:cpu")
        assert [device.name for device in runtime.devices if device.pid] == ["onnxruntime:cpu"]
        assert one.runs_on == "CPUExecutionProvider"


async def test_listing_the_devices_starts_no_process() -> None:
    async with aionn.Runtime(start=()) as runtime:
        assert [device.name for device in runtime.devices] == ["onnxruntime", "openvino", "litert", "reference"]
        assert [(device.pid, device.providers, device.runs_on) for device in runtime.devices] == [(None, None, None)] * 4


async def test_a_device_with_a_provider_starts_early() -> None:
    async with aionn.Runtime(start=("onnxruntime:cpu",)) as runtime:
        compilation = await runtime.compile(MODEL, devices=("onnxruntime:CPU",))
        (device,) = [device for device in runtime.devices if device.pid]
        assert (device.name, compilation.device) == ("onnxruntime:cpu", "onnxruntime:cpu")
        assert device.statistics()["starts"] == 1


async def test_an_installed_engine_wins_over_a_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reference.py").write_text("raise RuntimeError('this module must not be imported')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.DeviceUnavailableError, match="'reference' has no providers"):
            await runtime.compile(MODEL, devices=("reference:Engine",))
