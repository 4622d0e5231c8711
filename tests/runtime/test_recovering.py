"""Recurrent streams: whatever happens to drivers, callers and snapshots, each frame is in the state once, in order.

Bit equality is asked of the real model. The fake engine adds 1 to all it is given, so its state counts the frames it has heard.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.errors import MemoryAllocationError
from aionn.hal import ErrorStatus
from aionn.runtime.streaming import recovering
from aionn.runtime.streaming.recovering import KeptState
from aionn.testing import FakeDevice, identity_model
from tests.journeys.silero import still, windows
from tests.leaks import driver_pids, ended, leaves_nothing
from tests.stopping import kill_under, stop

pytestmark = pytest.mark.anyio

STATES = {"state": "stateN"}


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """Adds 1 to all it is given."""
    with FakeDevice() as device:
        device.tell(outputs_offset=1.0)
        yield device


def model(shape: tuple[int | str, ...] = (4,)) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (3,), "state": shape}, outputs=["y", "stateN"]))


def x(number: float = 0) -> NDArray[np.float32]:
    return np.full(3, number, np.float32)


def one_driver() -> int:
    (pid,) = driver_pids()
    return pid


async def heard(voice: aionn.RecurrentStream) -> int:
    """How many frames the fake's state has heard, as the driver has it."""
    (memory,) = voice._state.inputs.values()
    return int((await memory.snapshot())[0])


async def undisturbed(compilation: aionn.Compilation, frames: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """The answers of the real model over a burst, the state fed back by the test."""
    state, answers = still(), []
    async with compilation.burst() as burst:
        for frame in frames:
            outputs = await burst.compute({"input": frame, "state": state})
            state = outputs["stateN"].copy()
            answers.append(outputs["output"].copy())
    return answers


@asynccontextmanager
async def counting(fake: FakeDevice, **options: Any) -> AsyncIterator[aionn.RecurrentStream]:
    """A stream on the fake."""
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.recurrent(STATES, **options) as voice:
            yield voice


async def left(voice: aionn.RecurrentStream, inputs: Mapping[str, Any]) -> None:
    """Give a frame whose caller is cancelled while the driver, which stands still, has it."""
    task = asyncio.get_running_loop().create_task(voice.compute(inputs))
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- the real model ----------------------------------------------------------------------------------------------------


@leaves_nothing
async def test_a_driver_killed_under_each_frame_changes_no_bit(silero_path: Path) -> None:
    frames = list(windows(9))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        expected = await undisturbed(compilation, frames)
        assert len({float(answer[0, 0]) for answer in expected}) == len(frames), "each answer depends on what came before"
        async with compilation.recurrent(STATES, snapshot_every=4) as voice:
            found = []
            for number, frame in enumerate(frames):
                pid = one_driver()
                stop(pid)
                task = asyncio.get_running_loop().create_task(voice.compute({"input": frame}))
                await anyio.wait_all_tasks_blocked()
                os.kill(pid, signal.SIGKILL)
                found.append((await task)["output"].copy())
                assert voice.recovered == number + 1
            assert [answer.tobytes() for answer in found] == [answer.tobytes() for answer in expected]
            assert voice.statistics()["answered"] == len(frames)
            assert voice.statistics()["replayed"] > len(frames)


@leaves_nothing
async def test_a_driver_killed_between_frames_changes_no_bit(silero_path: Path) -> None:
    frames = list(windows(6))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        expected = await undisturbed(compilation, frames)
        async with compilation.recurrent(STATES, snapshot_every=2) as voice, compilation.recurrent(STATES, snapshot_every=3) as other:
            for number, frame in enumerate(frames):
                for stream in (voice, other):
                    assert (await stream.compute({"input": frame}))["output"].tobytes() == expected[number].tobytes()
                pid = one_driver()
                os.kill(pid, signal.SIGKILL)
                assert await ended(pid, 30)
            assert (voice.recovered, other.recovered) == (len(frames) - 1, len(frames) - 1)


@leaves_nothing
async def test_a_driver_killed_during_a_snapshot_leaves_the_one_before(silero_path: Path) -> None:
    frames = list(windows(7))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        expected = await undisturbed(compilation, frames)
        async with compilation.recurrent(STATES, snapshot_every=3) as voice:
            found = [(await voice.compute({"input": frame}))["output"].copy() for frame in frames[:6]]
            assert voice._saving is not None, "the second snapshot has begun, and nothing of it was sent"
            assert voice.statistics()["snapshots"] == 1
            pid = one_driver()
            stop(pid)
            await anyio.wait_all_tasks_blocked()
            assert voice._saving is not None, "the driver has the request for it"
            os.kill(pid, signal.SIGKILL)
            found.append((await voice.compute({"input": frames[6]}))["output"].copy())
            assert [answer.tobytes() for answer in found] == [answer.tobytes() for answer in expected]
            assert (voice.recovered, voice.statistics()["replayed"]) == (1, 3)


# --- drivers that end, on the fake ---------------------------------------------------------------------------------------


@leaves_nothing
async def test_a_second_end_in_the_same_call_is_raised_and_the_next_call_recovers(fake: FakeDevice) -> None:
    async with counting(fake, snapshot_every=10) as voice:
        for number in range(3):
            np.testing.assert_array_equal((await voice.compute({"x": x(number)}))["y"], x(number + 1))
        fake.crash(after=3)  # the fourth run of each driver: of this one at once, of the next one after three replays
        with pytest.raises(aionn.DriverDiedError):
            await voice.compute({"x": x(3)})
        fake.crash(after=2)  # in the middle of the replay, and then again
        with pytest.raises(aionn.DriverDiedError):
            await voice.compute({"x": x(4)})
        fake.behave()
        fake.tell(outputs_offset=1.0)
        np.testing.assert_array_equal((await voice.compute({"x": x(5)}))["y"], x(6))
        assert await heard(voice) == 4, "three before, and the last"
        assert voice.statistics()["answered"] == 4


@leaves_nothing
async def test_a_driver_that_hangs_is_replaced(fake: FakeDevice) -> None:
    async with aionn.Runtime(hang_s=0.5) as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.recurrent(STATES, snapshot_every=2) as voice:
            for _ in range(3):
                await voice.compute({"x": x()})
            fake.hang(after=2)  # in this driver the next run, in the next one the third: there are two, one of them a replay
            await voice.compute({"x": x()})
            assert (voice.recovered, voice.statistics()["replayed"], voice.statistics()["answered"]) == (1, 1, 4)


@leaves_nothing
async def test_the_deadline_covers_the_recovery_and_the_frame_stays(fake: FakeDevice) -> None:
    async with counting(fake) as voice:
        await voice.compute({"x": x()})
        fake.hang("start")
        os.kill(one_driver(), signal.SIGKILL)
        with anyio.fail_after(30), pytest.raises(aionn.DeadlineError, match="the frame was not answered by the deadline"):
            await voice.compute({"x": x()}, timeout_s=0.3)
        fake.behave()
        fake.tell(outputs_offset=1.0)
        await voice.compute({"x": x()})
        assert await heard(voice) == 3
        assert voice.recovered == 1


@leaves_nothing
async def test_a_frame_that_two_drivers_died_on_is_left_out(fake: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    async with counting(fake) as voice:
        await voice.compute({"x": x()})
        stop(one_driver())
        await left(voice, {"x": x()})  # nobody waits for it, so only the log can name it
        fake.crash(after=1)
        os.kill(one_driver(), signal.SIGKILL)
        with caplog.at_level(logging.WARNING, "aionn.runtime"), pytest.raises(aionn.DriverDiedError):
            await voice.compute({"x": x()})
        fake.crash(after=1)
        with caplog.at_level(logging.WARNING, "aionn.runtime"), pytest.raises(aionn.DriverDiedError):
            await voice.compute({"x": x()})
        assert "two drivers ended while they computed the same frame" in caplog.text
        fake.behave()
        fake.tell(outputs_offset=1.0)
        await voice.compute({"x": x()})
        assert await heard(voice) == 2


# --- callers that leave --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [False, True], ids=["driver lives", "driver dies"])
@leaves_nothing
async def test_a_frame_whose_caller_left_is_heard_once(fake: FakeDevice, dies: bool) -> None:
    async with counting(fake, snapshot_every=3) as voice:
        await voice.compute({"x": x()})
        await voice.compute({"x": x()})
        pid = one_driver()
        stop(pid)
        await left(voice, {"x": x()})
        os.kill(pid, signal.SIGKILL if dies else signal.SIGCONT)
        np.testing.assert_array_equal((await voice.compute({"x": x(7)}))["y"], x(8))
        assert await heard(voice) == 4
        assert voice.recovered == dies


@leaves_nothing
async def test_frames_whose_callers_left_before_they_were_sent_are_computed_first(fake: FakeDevice) -> None:
    async with counting(fake) as voice:
        await voice.compute({"x": x()})
        pid = one_driver()
        stop(pid)
        for _ in range(3):
            await left(voice, {"x": x()})
        with pytest.raises(aionn.DeadlineError):
            await voice.compute({"x": x()}, timeout_s=0.01)
        os.kill(pid, signal.SIGCONT)
        await voice.compute({"x": x()})
        assert await heard(voice) == 6


@leaves_nothing
async def test_a_frame_that_fails_after_its_caller_left_is_left_out(fake: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    async with counting(fake) as voice:
        await voice.compute({"x": x()})
        fake.fail(after=1)
        stop(one_driver())
        await left(voice, {"x": x()})
        fake.fail("failed twice", after=1)
        os.kill(one_driver(), signal.SIGCONT)
        with caplog.at_level(logging.WARNING, "aionn.runtime"), pytest.raises(aionn.ExecutionError, match="failed twice"):
            await voice.compute({"x": x()})
        assert "whose caller had left could not be computed" in caplog.text
        fake.behave()
        fake.tell(outputs_offset=1.0)
        await voice.compute({"x": x()})
        assert await heard(voice) == 2


@leaves_nothing
async def test_so_many_frames_may_wait_and_no_more(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "MOST_WAITING", 3)
    async with counting(fake) as voice:
        await voice.compute({"x": x()})
        pid = one_driver()
        stop(pid)
        for _ in range(3):
            await left(voice, {"x": x()})
        with pytest.raises(aionn.ExecutionError, match="3 frames of this stream wait for the driver") as refused:
            await voice.compute({"x": x()})
        assert refused.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        os.kill(pid, signal.SIGCONT)
        await voice.reset()
        await voice.compute({"x": x()})
        assert await heard(voice) == 1


# --- answers that are errors ---------------------------------------------------------------------------------------------


@leaves_nothing
async def test_a_frame_that_fails_is_not_in_the_state(fake: FakeDevice) -> None:
    async with counting(fake, snapshot_every=1) as voice:
        await voice.compute({"x": x()})
        fake.fail()
        for _ in range(2):
            with pytest.raises(aionn.ExecutionError, match="failed on demand"):
                await voice.compute({"x": x()})
        with pytest.raises(aionn.CallerError, match="x"):
            await voice.compute({"x": np.zeros(5, np.float32)})
        fake.behave()
        fake.tell(outputs_offset=1.0)
        await kill_and_wait(one_driver())
        await voice.compute({"x": x()})
        assert await heard(voice) == 2


async def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert await ended(pid, 30)


@leaves_nothing
async def test_a_snapshot_that_fails_is_tried_again_and_then_raised(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    save, failures = KeptState.save, [2]

    async def failing(self: KeptState) -> None:
        if failures[0]:
            failures[0] -= 1
            raise MemoryAllocationError("no memory for a snapshot", needed_bytes=16, available_bytes=0)
        await save(self)

    monkeypatch.setattr(KeptState, "save", failing)
    async with counting(fake, snapshot_every=2) as voice:
        await voice.compute({"x": x()})
        await voice.compute({"x": x()})
        with pytest.raises(MemoryAllocationError, match="no memory for a snapshot"):
            await voice.compute({"x": x()})
        assert failures == [0]
        await voice.compute({"x": x()})
        assert voice.statistics()["snapshots"] == 1
        assert await heard(voice) == 3


# --- what an app needs ---------------------------------------------------------------------------------------------------


@leaves_nothing
async def test_a_reset_begins_anew_also_after_the_end_of_a_driver(fake: FakeDevice) -> None:
    initial = {"state": np.full(4, 10, np.float32)}
    async with counting(fake, initial=initial, snapshot_every=2) as voice:
        initial["state"][:] = 99  # the stream has a copy
        for _ in range(3):
            await voice.compute({"x": x()})
        assert await heard(voice) == 13
        await voice.reset()
        assert await heard(voice) == 10
        await voice.compute({"x": x()})
        await kill_and_wait(one_driver())
        await voice.reset()
        assert (voice.recovered, await heard(voice)) == (1, 10)
        await voice.compute({"x": x()})
        await kill_and_wait(one_driver())
        await voice.compute({"x": x()})
        assert (voice.recovered, await heard(voice)) == (2, 12)


@leaves_nothing
async def test_a_reset_whose_caller_left_is_made_good(fake: FakeDevice) -> None:
    async with counting(fake) as voice:
        await voice.compute({"x": x()})
        pid = one_driver()
        stop(pid)
        await left(voice, {"x": x()})
        with pytest.raises(aionn.DeadlineError, match="the stream was not reset by the deadline"):
            await voice.reset(timeout_s=0.01)
        await left(voice, {"x": x()})
        os.kill(pid, signal.SIGCONT)
        await voice.compute({"x": x()})
        assert await heard(voice) == 2, "the two after the reset"


@leaves_nothing
async def test_calls_of_several_tasks_go_in_order(fake: FakeDevice) -> None:
    async with counting(fake, snapshot_every=4) as voice:
        pid = one_driver()
        stop(pid)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(voice.compute({"x": x(number)})) for number in range(20)]
        await anyio.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGKILL)
        for number, task in enumerate(tasks):
            np.testing.assert_array_equal((await task)["y"], x(number + 1))
        assert await heard(voice) == 20
        assert voice.recovered == 1


@leaves_nothing
async def test_the_app_may_change_its_arrays_at_once(fake: FakeDevice) -> None:
    async with counting(fake) as voice:
        frame = x(1)
        stop(one_driver())
        task = asyncio.get_running_loop().create_task(voice.compute({"x": frame}))
        await anyio.wait_all_tasks_blocked()
        frame[:] = 50
        os.kill(one_driver(), signal.SIGKILL)
        np.testing.assert_array_equal((await task)["y"], x(2))


@leaves_nothing
async def test_a_stream_of_frames_runs_through_it(fake: FakeDevice) -> None:
    async with counting(fake, name="voice") as voice:
        seen = []
        async for result in voice.map([aionn.Item({"x": x(number)}, tag=number) for number in range(5)]):
            np.testing.assert_array_equal(result.outputs["y"], x(result.tag + 1))
            seen.append(result.tag)
            if result.tag == 2:
                os.kill(one_driver(), signal.SIGKILL)
            del result
        assert seen == [0, 1, 2, 3, 4]
        assert await heard(voice) == 5
        assert voice.recovered == 1


@leaves_nothing
async def test_statistics_count_what_the_stream_keeps(fake: FakeDevice) -> None:
    async with counting(fake, snapshot_every=3) as voice:
        most = 0
        for _ in range(9):
            await voice.compute({"x": x()})
            most = max(most, voice.statistics()["kept_bytes"])
        await voice.compute({"x": x()}, measure_timing=True)
        found = voice.statistics()
        assert (found["answered"], found["snapshots"], found["recovered"], found["replayed"]) == (10, 3, 0, 0)
        assert (found["computed"], found["failed"]) == (10, 0)
        assert found["kept_bytes"] == 4 * 4 + x().nbytes
        assert most == 4 * 4 + 3 * x().nbytes


@leaves_nothing
async def test_timing_is_that_of_the_frame(fake: FakeDevice) -> None:
    async with counting(fake) as voice:
        outputs = await voice.compute({"x": x()}, measure_timing=True)
        assert outputs.timing is not None
        assert outputs.device == fake.name
        assert (await voice.compute({"x": x()})).timing is None


@leaves_nothing
async def test_several_states_advance_together(fake: FakeDevice) -> None:
    two = aionn.Model.from_onnx(identity_model({"x": (3,), "h": (2,), "c": (5, 1)}, outputs=["y", "hN", "cN"]))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(two, devices=(fake.name,))
        async with compilation.recurrent({"h": "hN", "c": "cN"}, initial={"c": np.ones((5, 1), np.float32)}, snapshot_every=2) as voice:
            for _ in range(5):
                assert list(await voice.compute({"x": x()})) == ["y"]
            await kill_and_wait(one_driver())
            await voice.compute({"x": x()})
            assert [float((await memory.snapshot()).max()) for memory in voice._state.inputs.values()] == [6, 7]


@leaves_nothing
async def test_a_state_with_an_open_shape_begins_with_what_is_given(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(("N",)), devices=(fake.name,))
        with pytest.raises(aionn.CallerError, match=r"the shape of state 'state' is open, \(0,\); give initial=\{'state': array\}"):
            compilation.recurrent(STATES)
        async with compilation.recurrent(STATES, initial={"state": np.zeros(7, np.float32)}) as voice:
            await voice.compute({"x": x()})
            await kill_and_wait(one_driver())
            await voice.compute({"x": x()})
            assert await heard(voice) == 2
            assert [memory.shape for memory in voice._state.inputs.values()] == [(7,)]


@leaves_nothing
async def test_a_new_model_takes_the_state_over_and_recovers(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.recurrent(STATES, snapshot_every=3) as voice:
            await voice.compute({"x": x()})
            await runtime.swap(compilation, model())
            await voice.compute({"x": x()})
            assert await heard(voice) == 2
            await kill_and_wait(one_driver())
            await voice.compute({"x": x()})
            assert await heard(voice) == 3
            assert voice.recovered == 1


# --- opening, closing and wrong calls ------------------------------------------------------------------------------------


@leaves_nothing
async def test_closing_ends_the_calls_that_wait(fake: FakeDevice) -> None:
    async with aionn.Runtime(hang_s=None) as runtime:  # or the end of a hung driver would end them, too
        compilation = await runtime.compile(model(), devices=(fake.name,))
        voice = compilation.recurrent(STATES, snapshot_every=1)
        with pytest.raises(aionn.CallerError, match="this stream is not open"):
            await voice.compute({"x": x()})
        async with voice:
            await voice.compute({"x": x()})
            fake.hang()
            tasks = [asyncio.get_running_loop().create_task(voice.compute({"x": x()})) for _ in range(3)]
            await fake.heard("run")
            with anyio.fail_after(30):
                await voice.aclose()
            fake.behave()
            for task in tasks:
                with pytest.raises(aionn.CallerError, match=r"closed|not open"):
                    await task
        with pytest.raises(aionn.CallerError, match="this stream is not open"):
            await voice.reset()


@pytest.mark.parametrize("what", ["runtime", "compilation"])
@leaves_nothing
async def test_a_stream_may_be_open_when_what_it_belongs_to_closes(fake: FakeDevice, what: str) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        voice = await compilation.recurrent(STATES, snapshot_every=1).__aenter__()
        await voice.compute({"x": x()})
        assert voice._saving is not None
        await (runtime if what == "runtime" else compilation).aclose()
        with pytest.raises(aionn.CallerError):
            await voice.compute({"x": x()})
        await voice.aclose()


@leaves_nothing
async def test_a_stream_that_cannot_be_opened_leaves_nothing(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        voice = compilation.recurrent(STATES)
        error = await kill_under(one_driver(), voice.__aenter__)
        assert isinstance(error, aionn.DriverDiedError)
        async with compilation.recurrent(STATES) as voice:
            await voice.compute({"x": x()})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no states": ({"states": {}}, r"states=\{\}; give the output that follows each state"),
    "a list": ({"states": ["state"]}, "give the output that follows each state"),
    "no such input": ({"states": {"s": "stateN"}}, "give names of the model's inputs"),
    "no such output": ({"states": {"state": "s"}}, "give names of the model's outputs"),
    "an output twice": ({"states": {"state": "stateN", "x": "stateN"}}, "names an output twice"),
    "shapes apart": ({"states": {"x": "stateN"}}, "'stateN'"),
    "snapshots never": ({"states": STATES, "snapshot_every": 0}, "recurrent: snapshot_every=0; give a whole number, at least 1"),
    "not a state": ({"states": STATES, "initial": {"x": x()}}, r"initial\['x'\]: the states are \['state'\]; give arrays for these only"),
    "another shape": (
        {"states": STATES, "initial": {"state": x()}},
        r"initial\['state'\] is float32 \(3,\); give an array of float32 with dimensions \(4,\)",
    ),
    "a list as state": ({"states": STATES, "initial": {"state": [0, 0, 0, 0]}}, r"initial\['state'\] is list; give an array"),
    "a name of two lines": ({"states": STATES, "name": "a\nb"}, "recurrent: name="),
}


@leaves_nothing
async def test_what_is_wrong_is_said_in_one_sentence(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        for what, (options, sentence) in WRONG.items():
            with pytest.raises(aionn.CallerError, match=sentence):
                compilation.recurrent(**options)
                pytest.fail(what)
        async with compilation.recurrent(STATES) as voice:
            with pytest.raises(
                aionn.CallerError, match="input 'state' is a state of this stream, which the stream gives itself; leave it out"
            ):
                await voice.compute({"x": x(), "state": np.zeros(4, np.float32)})
            with pytest.raises(aionn.CallerError, match="input 'x'"):
                await voice.compute({"x": aionn.Memory.allocate(12)})
            with pytest.raises(aionn.CallerError, match="expected inputs as a mapping"):
                await voice.compute([x()])  # type: ignore[arg-type]
            with pytest.raises(aionn.CallerError, match="already"):
                await voice.__aenter__()
            await voice.compute({"x": x()})
            assert await heard(voice) == 1
