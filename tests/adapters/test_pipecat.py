"""`aionn.adapters.pipecat`: voices have the states that Pipecat's own analyzer gives them, whatever happens to drivers.

Pipecat replaces `asyncio.wait_for` where it is imported. So these tests run in a process of their own, and import it when they run.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
import aionn.blocking
from aionn.testing import FakeDevice
from tests.leaks import leak_check
from tests.service.served import Served, serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.own_process("pipecat"),
    pytest.mark.usefixtures("surroundings"),
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
]

WINDOW = bytes(2 * 512)


@pytest.fixture(autouse=True)
def pipecat() -> None:
    """Import it before a test looks for leaks: the model of all tests comes with it."""
    importlib.import_module("tests.adapters.voices")


async def compiled(runtime: aionn.Runtime, **how: Any) -> aionn.Compilation:
    from tests.adapters import voices

    return await runtime.compile(voices.MODEL, threads=1, **how)


async def faked(runtime: aionn.Runtime, fake: FakeDevice) -> aionn.Compilation:
    return await compiled(runtime, devices=(fake.name,))


def analyzer(compilation: aionn.Compilation, rate: int = 16000, **how: Any) -> Any:
    from tests.adapters import voices

    made = voices.AionnVADAnalyzer(compilation.blocking, **how)
    made.set_sample_rate(rate)
    return made


def next_states(inputs: Any) -> dict[str, Any]:
    """Answer of a fake device, whose state counts the windows since it began."""
    return {"output": np.full((1, 1), 0.75, np.float32), "stateN": inputs["state"] + 1}


@pytest.mark.parametrize("rate", [8000, 16000])
async def test_a_voice_has_the_states_that_pipecat_gives_it(rate: int) -> None:
    from tests.adapters import voices

    sound = voices.said(rate)
    async with leak_check(), aionn.Runtime() as runtime:
        theirs: Any = voices.theirs(rate)
        ours = analyzer(await compiled(runtime), rate)
        expected, found = await voices.states(theirs, sound), await voices.states(ours, sound)
        assert set(expected) == set(voices.VADState)
        assert theirs._windows_since_reset < 0.4 * len(sound) / 2 / theirs.num_frames_required()  # it was reset in the pause
        assert found == expected
        assert (ours._windows, ours._quiet_windows) == (theirs._windows_since_reset, theirs._low_confidence_windows)
        assert (ours._state == theirs._model._state).all()
        await theirs.cleanup()
        await ours.cleanup()


async def test_voices_that_share_runs_keep_their_states() -> None:
    from tests.adapters import voices

    sounds = [voices.speech(16000, begin, begin + 3) for begin in range(6)]
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, batch=aionn.Batching(max_rows=8, max_wait_us=5000))
        ours = [analyzer(compilation) for _ in sounds]
        theirs: list[Any] = [voices.theirs(16000) for _ in sounds]
        found = await asyncio.gather(*map(voices.states, ours, sounds))
        assert found == [await voices.states(one, sound) for one, sound in zip(theirs, sounds, strict=True)]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one._state, other._model._state, atol=1e-3)
        for one in (*ours, *theirs):
            await one.cleanup()


async def test_a_drivers_death_changes_no_state_and_loses_no_window() -> None:
    from tests.adapters import voices

    sound = voices.speech(16000, 0, 6)
    async with leak_check(), aionn.Runtime() as runtime:
        theirs: Any = voices.theirs(16000)
        ours = analyzer(await compiled(runtime), timeout_s=None)
        expected, found = await voices.states(theirs, sound), []
        with voices.warnings() as logged:
            for number, chunk in enumerate(voices.chunks(sound, 16000)):
                if number in (100, 200):
                    (pid,) = (device.pid for device in runtime.devices if device.pid is not None)
                    os.kill(pid, signal.SIGKILL)
                found.append(await ours.analyze_audio(chunk))
        assert found == expected
        assert logged == []
        assert (ours._state == theirs._model._state).all()
        await theirs.cleanup()
        await ours.cleanup()


async def test_a_window_that_gets_no_answer_is_logged_once_and_the_state_begins_anew(fake: FakeDevice) -> None:
    from tests.adapters import voices

    fake.answer(next_states)
    async with leak_check(), aionn.Runtime() as runtime:
        voice = analyzer(await faked(runtime, fake), timeout_s=None)

        async def confidence() -> Any:
            return await asyncio.to_thread(voice.voice_confidence, b"\x01\x00" * 512)

        with voices.warnings() as logged:
            for windows in (1, 2):
                assert await confidence() == 0.75
                assert (voice._state == windows).all()
            fake.crash()  # the first run, and the one on the next driver
            assert await confidence() == 0.0
            assert not voice._input.any()
            fake.behave()
            fake.fail("no power")
            assert await confidence() == 0.0
            assert len(logged) == 1, logged
            assert "its state begins anew" in logged[0]
            fake.behave()
            fake.answer(next_states)
            assert await confidence() == 0.75
            assert (voice._state == 1).all()
            fake.fail("no power")
            assert await confidence() == 0.0
            assert len(logged) == 2, logged
            assert "no power" in logged[1]
        await voice.cleanup()


async def test_a_driver_that_hangs_holds_a_voice_no_longer_than_its_timeout(fake: FakeDevice) -> None:
    from tests.adapters import voices

    fake.answer(next_states)
    async with leak_check(), aionn.Runtime() as runtime:
        voice = analyzer(await faked(runtime, fake), timeout_s=0.5)
        await asyncio.to_thread(voice.voice_confidence, WINDOW)
        fake.hang()
        with voices.warnings() as logged:
            assert await asyncio.to_thread(voice.voice_confidence, WINDOW) == 0.0
        assert len(logged) == 1, logged
        assert "deadline" in logged[0]
        fake.behave()
        fake.answer(next_states)
        voice._timeout_s = None
        assert await asyncio.to_thread(voice.voice_confidence, WINDOW) == 0.75
        assert (voice._state == 1).all()
        await voice.cleanup()


async def test_cleanup_ends_a_window_that_waits(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        voice = analyzer(await faked(runtime, fake))
        fake.hang()
        waiting = asyncio.create_task(voice.analyze_audio(WINDOW))
        await fake.heard("run")
        await voice.cleanup()
        with pytest.raises(aionn.CallerError, match="closed"):
            await waiting
        fake.behave()
        with pytest.raises(aionn.CallerError, match="one for each voice"):
            voice.voice_confidence(WINDOW)
        await analyzer(await faked(runtime, fake)).cleanup()  # one that heard nothing


async def test_a_connection_that_fails_is_made_again() -> None:
    from tests.adapters import voices

    with serving() as folder:
        path = str(folder / "service.sock")
        async with leak_check():
            voice = voices.AionnVADAnalyzer(partial(aionn.blocking.attach, voices.model_path(), service=path), sample_rate=16000)
            voice.set_sample_rate(8000)
            assert voice.sample_rate == 16000
            with voices.warnings() as logged:
                for _ in range(2):
                    assert await asyncio.to_thread(voice.voice_confidence, WINDOW) == 0.0
            assert len(logged) == 1, logged
            service = Served(folder)
            try:
                confidence = await asyncio.to_thread(voice.voice_confidence, WINDOW)
                assert 0 < confidence < 0.5
                (driver,) = service.facts()["drivers"]
                os.kill(driver["pid"], signal.SIGKILL)
                assert await asyncio.to_thread(voice.voice_confidence, WINDOW) > 0
            finally:
                service.end()
            await voice.cleanup()


async def test_mistakes_get_a_sentence(silero_path: Path) -> None:
    from tests.adapters import voices

    with pytest.raises(aionn.CallerError, match="connect is a str; give a function"):
        voices.AionnVADAnalyzer("model.onnx")  # type: ignore[arg-type]
    with pytest.raises(aionn.CallerError, match="sample rate of 44100; Silero VAD takes 8000 or 16000 Hz"):
        voices.AionnVADAnalyzer(lambda: None, sample_rate=44100)  # type: ignore[arg-type, return-value]
    unset = voices.AionnVADAnalyzer(lambda: None)  # type: ignore[arg-type, return-value]
    for ask in (unset.num_frames_required, partial(unset.voice_confidence, WINDOW)):
        with pytest.raises(aionn.CallerError, match="sample rate of 0; Silero VAD takes 8000 or 16000 Hz"):
            ask()
    with pytest.raises(aionn.CallerError, match="timeout_s is 0"):
        voices.AionnVADAnalyzer(lambda: None, timeout_s=0)  # type: ignore[arg-type, return-value]
    model = aionn.Model.from_onnx(silero_path)
    async with leak_check(), aionn.Runtime() as runtime:
        voice = analyzer(await compiled(runtime))
        with pytest.raises(aionn.CallerError, match="44100"):
            voice.set_sample_rate(44100)
        with pytest.raises(aionn.CallerError, match="3 bytes; give one window of 512 samples of 16 bits, 1024 bytes"):
            voice.voice_confidence(b"abc")
        other = await runtime.compile(model)
        with pytest.raises(aionn.CallerError, match="the model has input, state, output, stateN; give Pipecat's Silero VAD"):
            await analyzer(other).analyze_audio(WINDOW)
        nothing = voices.AionnVADAnalyzer(lambda: None)  # type: ignore[arg-type, return-value]
        nothing.set_sample_rate(16000)
        with pytest.raises(aionn.CallerError, match="connect returned a NoneType"):
            nothing.voice_confidence(WINDOW)
