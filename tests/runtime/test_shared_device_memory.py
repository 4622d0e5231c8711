"""Device memory whose roles lie in several compilations of one driver: what one model writes another one reads, without the app."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import aionn
from aionn.runtime.compilation import parts_of
from aionn.runtime.serving.serving import NotNowError
from aionn.testing.models import identity_model
from tests.engines.onnx_graphs import model_of, value
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: `test_members` and `test_swapping` run on both."""
    return "asyncio", {"use_uvloop": True}


N = 8
X = np.arange(N, dtype=np.float32)
FAKE = "aionn.testing.fake_engine:FakeEngine"


def adding(number: float, *, source: str = "x", target: str = "y", size: int | str = N, kind: int = TensorProto.FLOAT) -> aionn.Model:
    """A model that adds a number: y = x + number."""
    nodes = [helper.make_node("Constant", [], ["c"], value_float=float(number)), helper.make_node("Add", [source, "c"], [target])]
    return aionn.Model.from_onnx(model_of(nodes, [value(source, [size], kind)], [value(target, [size], kind)]).SerializeToString())


async def compiled(runtime: aionn.Runtime, number: float, **names: Any) -> aionn.Compilation:
    return await runtime.compile(adding(number, **names), devices=("onnxruntime",))


async def test_a_decoder_reads_what_an_encoder_wrote() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        encoder = await compiled(runtime, 1, source="text", target="hidden")
        decoder = await compiled(runtime, 10, source="hidden", target="words")
        async with await runtime.allocate(outputs=[(encoder, "hidden")], inputs=[(decoder, "hidden")]) as hidden:
            assert (hidden.inputs, hidden.outputs) == (("hidden",), ("hidden",))
            for way in ("compute", "burst", "again"):
                async with encoder.burst() as first, decoder.burst() as second:
                    one, two = (encoder, decoder) if way == "compute" else (first, second)
                    for step in range(5):
                        await one.compute({"text": X * step}, outputs={"hidden": hidden})
                        np.testing.assert_array_equal((await two.compute({"hidden": hidden}))["words"], X * step + 11)
            np.testing.assert_array_equal(await hidden.snapshot(), X * 4 + 1)


async def test_it_stands_only_for_what_it_was_allocated_for() -> None:
    async with aionn.Runtime() as runtime:
        one, two, three = [await compiled(runtime, number) for number in (1, 2, 3)]
        async with await runtime.allocate(outputs=[(one, "y")], inputs=[(two, "x")]) as memory:
            await memory.reset(1)
            with pytest.raises(aionn.CallerError, match="allocated for that output of another compilation"):
                await two.compute({"x": X}, outputs={"y": memory})
            with pytest.raises(aionn.CallerError, match="allocated for that input of another compilation"):
                await one.compute({"x": memory})
            with pytest.raises(aionn.CallerError, match="belongs to another compilation"):
                await three.compute({"x": memory})
            np.testing.assert_array_equal((await two.compute({"x": memory}))["y"], np.full(N, 3, np.float32))


async def test_one_name_in_two_compilations_is_two_roles() -> None:
    async with aionn.Runtime() as runtime:
        one, two = await compiled(runtime, 1), await compiled(runtime, 2)
        async with await runtime.allocate(inputs=[(one, "x"), (two, "x")], outputs=[(one, "y"), (two, "y")]) as state:
            await state.reset(0)
            for compilation in (one, two, one, two):
                await compilation.compute({"x": state}, outputs={"y": state})
            np.testing.assert_array_equal(await state.snapshot(), np.full(N, 6, np.float32))


async def test_what_does_not_go_together_is_one_sentence() -> None:
    async with leak_check(), aionn.Runtime() as runtime, aionn.Runtime() as other:
        one, short = await compiled(runtime, 1), await compiled(runtime, 1, size=4)
        elsewhere = await runtime.compile(adding(1), devices=(FAKE,))
        foreign = await compiled(other, 1)
        halves = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (N,)}, np.int32)), devices=("onnxruntime",))
        wrong: list[tuple[str, Any]] = [
            ("without a role", {}),
            ("give names of the model's inputs", {"inputs": [(one, "nothing")]}),
            ("a name is given twice", {"inputs": [(one, "x"), (one, "x")]}),
            ("give pairs of a compilation and a name", {"inputs": (one, "x")[1]}),
            ("is not a pair of a compilation and a name", {"inputs": [one]}),
            ("is not a pair of a compilation and a name", {"outputs": [("x", one)]}),
            ("belongs to another runtime", {"inputs": [(foreign, "x")]}),
            (r"these roles lie in several .*FakeEngine.*'onnxruntime'", {"outputs": [(one, "y")], "inputs": [(elsewhere, "x")]}),
            (r"input 'x': .*", {"outputs": [(one, "y")], "inputs": [(one, "x"), (short, "x")]}),
            (r"holds int32, another role float32", {"inputs": [(one, "x"), (halves, "x")]}),
        ]
        for match, roles in wrong:
            with pytest.raises(aionn.CallerError, match=match) as caught:
                await runtime.allocate(**roles)
            assert "\n" not in str(caught.value)
        del caught
        await short.aclose()
        with pytest.raises(aionn.CallerError, match="has been closed"):
            await runtime.allocate(inputs=[(short, "x")])


async def test_a_swap_of_one_model_moves_it_for_both() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        encoder, decoder = await compiled(runtime, 1), await compiled(runtime, 10)
        async with await runtime.allocate(outputs=[(encoder, "y")], inputs=[(decoder, "x")]) as hidden, encoder.burst() as burst:
            await burst.compute({"x": X}, outputs={"y": hidden})
            before = hidden._state.buffers.front.token
            await runtime.swap(encoder, adding(2))
            assert hidden._state.buffers.front.token != before, "it has not moved"
            np.testing.assert_array_equal((await decoder.compute({"x": hidden}))["y"], X + 11)
            await burst.compute({"x": X}, outputs={"y": hidden})
            np.testing.assert_array_equal((await decoder.compute({"x": hidden}))["y"], X + 12)
            await runtime.swap(decoder, adding(20))
            np.testing.assert_array_equal((await decoder.compute({"x": hidden}))["y"], X + 22)


async def test_the_driver_that_dies_takes_it_from_both_and_the_models_come_back() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        encoder, decoder = await compiled(runtime, 1), await compiled(runtime, 10)
        hidden = await runtime.allocate(outputs=[(encoder, "y")], inputs=[(decoder, "x")])
        await encoder.compute({"x": X}, outputs={"y": hidden})
        (device,) = (device for device in runtime.devices if device.pid is not None)
        await device.restart()
        for use in (encoder.compute({"x": X}, outputs={"y": hidden}), decoder.compute({"x": hidden})):
            with pytest.raises(aionn.DeviceMemoryLostError):
                await use
        await hidden.aclose()
        async with await runtime.allocate(outputs=[(encoder, "y")], inputs=[(decoder, "x")]) as hidden:
            await encoder.compute({"x": X}, outputs={"y": hidden})
            np.testing.assert_array_equal((await decoder.compute({"x": hidden}))["y"], X + 11)


async def test_a_compilation_that_closes_leaves_it_to_the_other() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        encoder, decoder = await compiled(runtime, 1), await compiled(runtime, 10)
        async with await runtime.allocate(outputs=[(encoder, "y")], inputs=[(decoder, "x")]) as hidden:
            await encoder.compute({"x": X}, outputs={"y": hidden})
            await encoder.aclose()
            np.testing.assert_array_equal((await decoder.compute({"x": hidden}))["y"], X + 11)


async def test_one_that_is_dropped_is_freed_without_a_collection() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        encoder, decoder = await compiled(runtime, 1), await compiled(runtime, 10)
        gc.collect()
        gc.disable()
        try:
            hidden = await runtime.allocate(outputs=[(encoder, "y")], inputs=[(decoder, "x")])
            state = weakref.ref(hidden._state)
            del hidden
            assert state() is None
        finally:
            gc.enable()


async def test_a_use_by_the_other_compilation_during_a_swap_makes_the_copy_outdated() -> None:
    async with aionn.Runtime() as runtime:
        encoder, decoder = await compiled(runtime, 1), await compiled(runtime, 10)
        async with await runtime.allocate(outputs=[(encoder, "y"), (decoder, "y")], inputs=[(decoder, "x")]) as hidden:
            await hidden.reset(1)
            swapped = parts_of(encoder).compiled
            (member,) = swapped.members
            assert swapped.serving is not None
            change = await member.prepare(swapped.serving)
            assert change is not None
            change.check()
            await decoder.compute({"x": hidden}, outputs={"y": hidden})
            with pytest.raises(NotNowError, match="another compilation used the device memory"):
                change.check()
            change.release_new()
            np.testing.assert_array_equal(await hidden.snapshot(), np.full(N, 11, np.float32))
