"""Which device a model gets when not all are well: real driver processes, the fake device first and the reference behind it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.errors import CompilationError, DriverDiedError
from aionn.runtime.processes.devices import Devices
from aionn.runtime.runtime import Mode
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import SecondFakeEngine

pytestmark = pytest.mark.anyio
REFERENCE = "reference"
TROUBLES: dict[str, tuple[Callable[[FakeDevice], None], type[Exception]]] = {
    "fails": (lambda fake: fake.fail("out of luck", "compile"), CompilationError),
    "dies": (lambda fake: fake.crash("compile"), DriverDiedError),
}


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


@pytest.fixture
def fake(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The best of two installed devices."""
    monkeypatch.setattr(Devices, "installed", property(lambda _: [fake_device.name, REFERENCE]))
    return fake_device


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("mode", ["eager", "jit"])
async def test_without_names_the_next_device_takes_over_and_that_is_told(
    fake: FakeDevice, model: aionn.Model, trouble: str, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    bring, kind = TROUBLES[trouble]
    bring(fake)
    x = np.arange(16, dtype=np.float32).reshape(1, 16)
    async with aionn.Runtime() as runtime:
        with trace.record() as told:
            compilation = await runtime.compile(model, mode=mode)
            outputs = await compilation.compute({"input": x})
        np.testing.assert_array_equal(outputs["input_out"], x)
        assert compilation.device == compilation.outcomes[0].device == REFERENCE
    failed = [
        {name: event.attributes[name] for name in ("device", "error")} for event in told.counters if event.name == "plan.device_failed"
    ]
    assert failed == [{"device": fake.name, "error": kind.__name__}]
    (warned,) = (record.getMessage() for record in caplog.records if record.name == "aionn.runtime")
    assert f"device '{fake.name}' failed to prepare model '{compilation.name}' and is passed over" in warned


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_device_that_was_asked_for_by_name_fails_for_its_caller(fake: FakeDevice, model: aionn.Model, trouble: str) -> None:
    bring, kind = TROUBLES[trouble]
    bring(fake)
    async with aionn.Runtime() as runtime:
        with pytest.raises(kind):
            await runtime.compile(model, devices=(fake.name, REFERENCE))


@pytest.mark.parametrize("named", [False, True])
async def test_a_model_that_could_not_be_prepared_goes_with_its_last_reference(
    fake_device: FakeDevice, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Devices, "installed", property(lambda _: [fake_device.name]))
    fake_device.fail("out of luck", "compile")
    async with aionn.Runtime() as runtime:
        gc.collect()
        gc.disable()
        try:
            bad = aionn.Model.from_onnx(identity_model())
            gone = weakref.ref(bad)
            with pytest.raises(CompilationError):
                await runtime.compile(bad, devices=(fake_device.name,) if named else None)
            del bad
            await anyio.wait_all_tasks_blocked()
            assert gone() is None
        finally:
            gc.enable()


async def test_a_device_whose_start_nobody_waited_for_is_listed_once_it_serves(fake_device: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: runtime.compile(model, devices=(fake_device.name,)))
            with anyio.fail_after(30):
                while (process := runtime._opened.devices.find(fake_device.name)._process) is None:
                    await anyio.lowlevel.checkpoint()
            assert process.serving is None  # a driver does not start in the few turns that went by
            group.cancel_scope.cancel()
        assert process is not None
        await process.ready()
        await runtime.compile(model, devices=(fake_device.name,))
        (device,) = (device for device in runtime.devices if device.name == fake_device.name)
        assert (device.version, device.type, device.cache_files) != (None, None, None)


async def test_where_every_device_fails_the_error_of_the_best_comes_with_notes_of_the_others(
    fake_device: FakeDevice, model: aionn.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeDevice(SecondFakeEngine) as second:
        monkeypatch.setattr(Devices, "installed", property(lambda _: [fake_device.name, second.name]))
        fake_device.fail("out of luck", "compile")
        second.fail("out of order", "compile")
        async with aionn.Runtime() as runtime:
            with pytest.raises(CompilationError, match="out of luck") as caught:
                await runtime.compile(model)
            assert ["out of order" in note for note in caught.value.__notes__] == [True]
            fake_device.behave()
            assert (await runtime.compile(model)).device == fake_device.name
