"""The memory of a burst: exact, shared by the sizes that are in use, and given back on both sides."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.errors import MemoryAllocationError
from aionn.hal.types import OutputShape
from aionn.memory import limits
from aionn.memory.region import Region
from aionn.runtime.executing import frames
from aionn.runtime.executing.arguments import Arguments, FrameLayout
from aionn.testing.models import identity_model
from tests.driver.test_shared_driver import until
from tests.leaks import driver_pids, leak_check
from tests.real_models import carried

pytestmark = pytest.mark.anyio

PAGE = mmap.PAGESIZE


DESCRIPTORS = 1
"""Of each region in the app. The driver keeps none."""


@asynccontextmanager
async def compiled(model: bytes, device: str = "reference") -> AsyncIterator[aionn.Compilation]:
    async with leak_check(), aionn.Runtime() as runtime:
        yield await runtime.compile(aionn.Model.from_onnx(model), devices=(device,))


def identity(extent: int | str) -> bytes:
    return identity_model({"x": (extent,)})


def of(elements: int, value: float = 0) -> dict[str, NDArray[np.float32]]:
    return {"x": np.full(elements, value, np.float32)}


async def right(burst: aionn.Burst, number: int, elements: int = 65536) -> None:
    assert ((await burst.compute(of(elements, number)))["x_out"] == number).all()


def shared(burst: aionn.Burst) -> int:
    return burst.statistics()["shared_bytes"]


def trims(burst: aionn.Burst) -> bool:
    return burst._executor.frames._trimming is not None


def mapped() -> int:
    """How many of aionn's memories the driver has mapped."""
    (pid,) = driver_pids()
    return sum("memfd:aionn" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("extent", [65536, "n"])
async def test_a_burst_has_the_frames_that_it_uses_and_no_byte_more(extent: int | str) -> None:
    async with compiled(identity(extent)) as compilation:
        frame = 2 * 65536 * 4
        async with compilation.burst(depth=4) as burst:
            assert shared(burst) == (frame if extent == 65536 else 0)  # the first goes to the driver with the burst
            for _ in range(3):
                await burst.compute(of(65536))
            assert shared(burst) == frame
            outputs = await burst.compute(of(65536))
            for _ in range(3):
                outputs = await burst.compute(of(65536))  # the outputs before are held until these are there
            assert shared(burst) == 2 * frame
            del outputs
            await asyncio.gather(*(right(burst, number) for number in range(50)))
            assert shared(burst) <= 5 * frame  # depth + 1, however many wait
            held = [await burst.compute(of(65536, number)) for number in range(9)]
            assert shared(burst) <= (5 + len(held)) * frame
            for number, found in enumerate(held):
                assert (found["x_out"] == number).all()
            del held, found


async def test_a_burst_of_a_detector_has_frames_of_its_true_size() -> None:
    async with compiled(carried("detector").read_bytes(), "onnxruntime") as compilation:
        (name,) = compilation.model.inputs
        picture = {name: np.zeros((1, 3, 384, 640), np.float32)}
        true = picture[name].nbytes + 384 * 640 * 4
        async with compilation.burst(depth=1) as burst:
            for _ in range(3):
                outputs = await burst.compute(picture)
            assert sum(array.nbytes for array in outputs.values()) == 384 * 640 * 4
            assert shared(burst) == 2 * true
            del outputs
        async with compilation.burst() as burst:
            await burst.compute(picture)
            assert shared(burst) == true  # the size of its outputs is known now
        del burst, compilation  # they hold the model


async def test_frames_of_a_guessed_size_go_although_several_requests_began_with_them() -> None:
    async with compiled(carried("detector").read_bytes(), "onnxruntime") as compilation:
        (name,) = compilation.model.inputs
        picture = {name: np.zeros((1, 3, 384, 640), np.float32)}
        true = picture[name].nbytes + 384 * 640 * 4
        async with compilation.burst(depth=4) as burst:
            for _ in range(2):
                await asyncio.gather(*(burst.compute(picture) for _ in range(4)))
            assert shared(burst) <= 5 * true
        del burst, compilation  # they hold the model


async def test_hundreds_of_held_outputs_of_small_frames_need_few_descriptors() -> None:
    async with compiled(identity(4)) as compilation, compilation.burst() as burst:
        await burst.compute(of(4))
        before = descriptors(), mapped()
        held = [await burst.compute(of(4, number)) for number in range(1000)]
        assert burst.statistics()["frames"] >= 1000
        pages = -(-1001 * 128 // PAGE)
        assert shared(burst) == pages * PAGE
        assert descriptors() - before[0] == DESCRIPTORS * (pages - 1)
        assert mapped() - before[1] == pages - 1
        for number, found in enumerate(held):
            assert (found["x_out"] == number).all()
        del held, found


async def until_unmapped(compilation: aionn.Compilation, elements: int, most: int) -> None:
    """Let the driver work off what it has been sent."""
    for _ in range(100):
        if mapped() <= most:
            return
        await compilation.compute(of(elements))
    assert mapped() <= most


async def test_a_model_that_sees_ever_new_shapes_keeps_few_of_them_in_memory() -> None:
    async with compiled(identity("n")) as compilation:
        sizes = [*range(40_000, 400_000, 7_001), *range(390_000, 40_000, -9_001), *(50_000, 300_000) * 5]
        async with compilation.burst(depth=3) as burst:
            await burst.compute(of(4))
            before = descriptors(), mapped()
            seen = 0
            for elements in sizes:
                outputs = await burst.compute(of(elements, elements))
                assert (outputs["x_out"] == elements).all()
                assert outputs["x_out"].size == elements
                del outputs
                seen = max(seen, elements)
                # One frame more: the size that is used now and the one before it stay, however small.
                assert shared(burst) <= 5 * -(-seen * 8 * 9 // 8 // PAGE) * PAGE
                assert descriptors() - before[0] < 20 * DESCRIPTORS
            assert len(burst._executor.frames._pools) < 20
            await until_unmapped(compilation, 4, before[1] + 20)
            held = await burst.compute(of(100_000, 5))
            pools = set(burst._executor.frames._pools.values())
            for elements in range(110_000, 900_000, 100_003):
                await burst.compute(of(elements))
            assert not pools & set(burst._executor.frames._pools.values())  # the memory of these outputs was released
            assert (held["x_out"] == 5).all()
            del held


async def test_shapes_that_take_turns_allocate_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiled(identity("n")) as compilation, compilation.burst() as burst:
        sizes = [10, 100_000, 400, 101_000, 90_000, 7_000, 3_000, 130_000]
        for elements in sizes * 2:
            await burst.compute(of(elements))
        made = []
        allocate = Region.allocate

        def counted(size_bytes: int) -> Region:
            made.append(size_bytes)
            return allocate(size_bytes)

        monkeypatch.setattr(Region, "allocate", counted)
        for elements in sizes * 3:
            found = await burst.compute(of(elements, elements))
            assert (found["x_out"] == elements).all()
            del found
        assert made == []


async def test_a_frame_in_use_outlives_other_shapes() -> None:
    """A frame that the app has leased is not released, whatever other sizes come."""
    async with compiled(identity("n")) as compilation, compilation.burst(depth=1) as burst, burst.frame({"x": (200_000,)}) as frame:
        frame["x"][...] = 3
        for elements in range(1_000, 1_000_000, 90_000):
            await burst.compute(of(elements))
        outputs = await burst.compute(frame)
        assert (outputs["x_out"] == 3).all()
        del outputs


async def test_memory_of_dropped_outputs_is_given_back_on_both_sides() -> None:
    async with compiled(identity(PAGE)) as compilation:
        frame = 2 * PAGE * 4
        async with compilation.burst(depth=2) as burst:
            await burst.compute(of(PAGE))
            assert not trims(burst)  # there is nothing to look for
            before = descriptors(), mapped()
            held = [await burst.compute(of(PAGE, number)) for number in range(60)]
            assert trims(burst)
            assert mapped() - before[1] > 20
            burst._executor.frames._trim()
            assert shared(burst) >= 60 * frame
            kept = held[30]
            del held
            burst._executor.frames._trim()
            assert shared(burst) <= (2 * 3 + 2) * frame
            assert trims(burst)  # it looks again for what is held still
            assert descriptors() - before[0] < 8 * DESCRIPTORS
            assert (kept["x_out"] == 30).all()
            del kept
            for number in range(40):
                assert ((await burst.compute(of(PAGE, number)))["x_out"] == number).all()
            await until_unmapped(compilation, PAGE, before[1] + 8)
            trimming = burst._executor.frames._trimming
        assert trimming is None or trimming.cancelled()


async def test_an_app_that_holds_all_memory_is_told_so_and_goes_on_when_it_drops_some(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiled(identity(PAGE)) as compilation, compilation.burst(depth=2) as burst:
        held = [await burst.compute(of(PAGE, number)) for number in range(300)]  # no small number is the limit
        room = [20]
        allocate = Region.allocate

        def limited(size_bytes: int) -> Region:
            if room[0] == 0:
                limits.require(2**62)
            room[0] -= 1
            return allocate(size_bytes)

        monkeypatch.setattr(Region, "allocate", limited)
        with pytest.raises(MemoryAllocationError, match=r"^all \d+ frames of this burst are leased, or .* Drop outputs") as caught:
            while True:
                held.append(await burst.compute(of(PAGE, len(held))))
        assert caught.value.needed_bytes == 2**62
        del caught
        assert room == [0]
        assert len(held) > 300
        del held[17]
        found = await burst.compute(of(PAGE, 5))
        assert (found["x_out"] == 5).all()
        del found  # calls at once wait for that frame
        await asyncio.gather(*(right(burst, number, PAGE) for number in range(20)))
        del held


def found_model() -> bytes:
    """y = where x is not 0: how many there are depends on the values."""
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"])],
        "found",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4096])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [1, "n"])],
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


async def test_outputs_whose_size_varies_seldom_need_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiled(found_model(), "onnxruntime") as compilation:
        widened = []
        widen = Arguments.widen

        def counted(self: Arguments, *arguments: Any) -> FrameLayout:
            widened.append(arguments)
            return widen(self, *arguments)

        monkeypatch.setattr(Arguments, "widen", counted)
        async with compilation.burst() as burst:
            for count in (3, *range(1, 4096, 13), *range(4096, 1, -101)):
                x = np.zeros(4096, np.float32)
                x[:count] = 1
                assert (await burst.compute({"x": x}))["y"].shape == (1, count)
        assert 1 <= len(widened) <= 4


def test_room_that_was_guessed_is_replaced_by_what_an_answer_needs() -> None:
    arguments = Arguments(aionn.Model.from_onnx(found_model()))
    guessed = arguments.layout(((4096,),))
    assert not guessed.known
    (_, _, _, _, length) = guessed.outputs[0]
    assert length == 2 * 4096 * 4
    assert arguments.fit(guessed, ()) is guessed  # nothing was learned
    fitted = arguments.fit(guessed, [OutputShape((1, 100))])
    assert fitted.outputs[0][2:] == ((1, 100), 0x4000, PAGE)  # expected in that shape, with room for others
    assert fitted.known
    assert arguments.layout(((4096,),)) is fitted
    assert arguments.fit(guessed, [OutputShape((1, 9))]) is fitted  # also for the other requests that were sent with the guess
    assert arguments.fit(fitted, [OutputShape((1, 9))]) is fitted
    needed = [OutputShape((1, 600), False)]
    wider = arguments.widen(((4096,),), needed)
    assert wider.outputs[0][4] == 2 * 600 * 8
    assert arguments.widen(((4096,),), needed) is wider  # several requests at once find the same
    assert arguments.fit(wider, [OutputShape((1, 1))]) is wider


def unnamed_model() -> bytes:
    """y = x, where the file says nothing about the extents of either."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "unnamed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


@pytest.fixture
def answered_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[OutputShape, ...]]:
    """The shapes in answers of a driver that have some."""
    seen: list[tuple[OutputShape, ...]] = []
    outputs_in = FrameLayout.outputs_in

    def noted(self: FrameLayout, frame: Any, shapes: Any = (), elsewhere: Any = ()) -> Any:
        if shapes:
            seen.append(tuple(shapes))
        return outputs_in(self, frame, shapes, elsewhere)

    monkeypatch.setattr(FrameLayout, "outputs_in", noted)
    return seen


@pytest.mark.parametrize("device", ["onnxruntime", "openvino", "reference"])
async def test_an_open_output_is_expected_in_the_shape_that_it_had(device: str, answered_shapes: list[tuple[OutputShape, ...]]) -> None:
    async with compiled(unnamed_model(), device) as compilation, compilation.burst() as burst:
        for shape, is_new in (((2, 3), True), ((2, 3), False), ((2, 3), False), ((4, 1), True), ((2, 3), False), ((4, 1), False)):
            x = np.random.default_rng(0).random(shape, np.float32)
            np.testing.assert_array_equal((await burst.compute({"x": x}))["y"], x)
            assert answered_shapes == ([(OutputShape(shape),)] if is_new else [])
            answered_shapes.clear()


@pytest.mark.parametrize("device", ["onnxruntime", "openvino", "reference"])
async def test_an_open_output_that_was_expected_in_another_shape_is_right_and_expected_no_more(
    device: str, answered_shapes: list[tuple[OutputShape, ...]]
) -> None:
    async with compiled(found_model(), device) as compilation, compilation.burst() as burst:
        for count, is_told in ((3, True), (3, False), (5, True), (5, True), (0, True), (3, True), (700, True), (3, True)):
            x = np.zeros(4096, np.float32)
            x[:count] = 1
            np.testing.assert_array_equal((await burst.compute({"x": x}))["y"], [np.arange(count)])
            assert answered_shapes == ([(OutputShape((1, count)),)] if is_told else [])
            answered_shapes.clear()


async def test_opening_bursts_reads_the_limits_of_the_container_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiled(identity(4)) as compilation:
        reads = []
        shared_limits = limits._shared_limits

        def counted(root: Path) -> Iterator[limits.Limit]:
            reads.append(root)
            return shared_limits(root)

        monkeypatch.setattr(limits, "_shared_limits", counted)
        monkeypatch.setattr(limits, "REMEMBERED_S", 3600.0)
        for _ in range(10):
            async with compilation.burst() as burst:
                await burst.compute(of(4))
        assert len(reads) <= 1


async def test_the_time_to_look_again_is_stated() -> None:
    assert frames.TRIM_S == 2.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots that drivers have asked for."""
    slots: list[list[int]] = []
    whole = frames.Frames.get_memories

    async def get_memories(self: frames.Frames, wanted: Any) -> Any:
        slots.append(list(wanted))
        return await whole(self, wanted)

    monkeypatch.setattr(frames.Frames, "get_memories", get_memories)
    return slots


async def test_the_first_frames_memory_goes_to_the_driver_with_the_burst(asked: list[list[int]]) -> None:
    async with compiled(identity(1024)) as compilation:
        async with compilation.burst() as burst:
            assert shared(burst) == 2 * 1024 * 4
            await right(burst, 1, 1024)
            await right(burst, 2, 1024)
            assert (asked, shared(burst)) == ([], 2 * 1024 * 4)
            with aionn.Memory.allocate(4096) as memory:
                memory.array(np.float32, (1024,))[...] = 3
                assert (await burst.compute({"x": memory}))["x_out"][0] == 3
            assert len(asked) == 1
            del asked[:]
            os.kill(driver_pids()[0], signal.SIGKILL)
            with pytest.raises(aionn.DriverDiedError):
                while True:
                    await right(burst, 4, 1024)
            await right(burst, 5, 1024)
            assert asked == []

        def in_thread() -> None:
            with compilation.blocking() as blocking:
                assert blocking.compute(of(1024, 6))["x_out"][0] == 6

        await asyncio.to_thread(in_thread)
        assert asked == []


async def test_memory_that_is_released_before_its_link_is_in_use_does_not_stay_with_the_driver() -> None:
    async with compiled(identity(65536)) as compilation, compilation.burst() as burst:
        await right(burst, 1)
        connection: Any = burst._connection
        before = mapped()
        change = await connection.prepare(connection.link.serving)
        own = connection.executor.frames
        (size,) = own._pools
        assert mapped() == before + 3  # two queues, and the memory of the frame for the second link
        assert own._release(size)
        change.commit()
        await change.release_old()
        await until(lambda: mapped() == before - 1)  # two queues for two, and no frame
        await right(burst, 2)


async def test_without_memory_for_the_first_frame_a_burst_opens_and_its_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiled(identity(65536)) as compilation:
        whole = Region.allocate

        def allocate(size_bytes: int, **others: Any) -> Region:
            if size_bytes >= 2 * 65536 * 4:
                raise MemoryAllocationError("no memory", needed_bytes=size_bytes, available_bytes=0)
            return whole(size_bytes, **others)

        monkeypatch.setattr(Region, "allocate", allocate)
        async with compilation.burst() as burst:
            with pytest.raises(MemoryAllocationError):
                await right(burst, 1)
            monkeypatch.undo()
            await right(burst, 2)


async def test_the_first_frame_goes_when_other_memory_is_used_instead() -> None:
    arguments = Arguments(aionn.Model.from_onnx(identity(2**18)))
    usual = arguments.usual_layout()
    assert usual is not None
    own = frames.Frames(2)
    frames.expect(own, usual, 0)
    frames.expect(own, usual, 0)
    assert own.count()["frames"] == own.count()["free_frames"] == len(own.brought) == 1
    smaller = Arguments(aionn.Model.from_onnx(identity(2**16)))
    layout = smaller.usual_layout()
    assert layout is not None
    frame = await own.lease(layout)
    assert own.count()["shared_bytes"] == layout.frame_bytes
    assert own.brought == {}  # it is in use
    frame.pins = 0
    own.close()
    assert Arguments(aionn.Model.from_onnx(identity("n"))).usual_layout() is None
