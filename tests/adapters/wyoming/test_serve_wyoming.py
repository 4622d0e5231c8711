"""`aionn serve-wyoming` as Home Assistant and a satellite meet it: its answers, many satellites, deaths, and its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
import pytest
from wyoming.audio import AudioStart
from wyoming.event import Event
from wyoming.info import Info
from wyoming.vad import VoiceStarted, VoiceStopped
from wyoming.wake import Detect

from aionn.cli import main
from tests.adapters.wyoming.satellites import RATE, WORD, Recording, Server, detected_ms, satellite, serve_wyoming, types, words_of
from tests.adapters.wyoming.test_scores import expected_changes
from tests.real_models import carried
from tests.service.served import Served

pytestmark = pytest.mark.anyio
HALF_A_CHUNK = b'{"type": "audio-chunk", "data": {"rate": 16000, "width": 2, "channels": 1}, "payload_length": 2048}\nhalf'


@pytest.fixture
def server(recording: Recording) -> Iterator[Server]:
    with serve_wyoming(*words_of(recording)) as served:
        yield served
        if served.process.poll() is None:
            assert served.end() == 0


async def test_home_assistant_finds_the_words_and_a_satellite_is_answered(server: Server, recording: Recording) -> None:
    async with satellite(server.uri) as one:
        await one.client.write_event(Event("describe"))
        info = Info.from_event(await one.until("info"))
        await one.client.write_event(Event("ping", {"text": "here"}))
        assert (await one.until("pong")).data["text"] == "here"
        await one.client.write_event(Event("transcribe", {"language": "en"}))  # not for this server
    (program,) = info.wake
    assert [(word.name, word.description, word.installed) for word in program.models] == [
        (WORD, "best of times", True),
        ("okay_nabu", "okay nabu", True),
    ]
    assert await detected_ms(server.uri, recording) == recording.detected_ms()


async def test_what_is_not_said_is_not_detected_and_the_connection_goes_on(server: Server, recording: Recording) -> None:
    async with satellite(server.uri) as one:
        for names, samples in ((["okay_nabu"], recording.samples[: 3 * RATE]), ([WORD], np.zeros(2 * RATE, np.int16))):
            await one.begin(names)
            await one.say(samples)
            await one.stop()
            await one.until("not-detected")
        assert types(one.events) == ["not-detected"] * 2
        await one.begin()  # any word
        await one.say(recording.samples[: 3 * RATE])
        assert (await one.until("detection")).data["name"] == WORD
        await one.stop()
        await one.client.write_event(Event("ping"))
        await one.until("pong")
        assert types(one.events[2:]) == ["detection", "pong"]


async def test_sound_without_detect_or_start_and_with_a_clock_of_the_satellite(server: Server, recording: Recording) -> None:
    for begins in (False, True):  # with an audio-start at 0 s, and chunks whose time is another
        async with satellite(server.uri) as one:
            if begins:
                await one.begin([WORD])
            await one.say(recording.samples[: 3 * RATE], from_sample=100 * RATE)
            assert (await one.until("detection")).data["timestamp"] == 100_000 + recording.detected_ms()


async def test_a_word_that_the_server_lacks_is_named_and_the_others_are_heard(server: Server, recording: Recording) -> None:
    async with satellite(server.uri) as one:
        await one.client.write_event(Detect(names=["hal", WORD]).event())
        assert (await one.until("error")).data["text"] == f"there is no wake word 'hal'; the server has '{WORD}', 'okay_nabu'"
        await one.say(recording.samples[: 3 * RATE])
        await one.until("detection")


async def test_voice_starts_and_stops(recording: Recording) -> None:
    samples = np.concatenate((np.zeros(RATE, np.int16), recording.samples[: 4 * RATE], np.zeros(RATE, np.int16)))
    with serve_wyoming("--model", str(carried("silero"))) as server:
        async with satellite(server.uri) as one:
            await one.client.write_event(Event("describe"))
            assert Info.from_event(await one.until("info")).wake == []
            await one.begin()
            await one.say(samples)
            await one.stop()
            await one.client.write_event(Event("ping"))
            await one.until("pong")
            right = [
                (VoiceStarted if speaks else VoiceStopped)(at // 16).event()
                for at, speaks in expected_changes(carried("silero"), samples.astype(np.float32))
            ]
            assert one.events[1:-1] == right
        assert server.end() == 0


@pytest.fixture
async def crowd(server: Server) -> AsyncIterator[Server]:
    """A server beside which one satellite has died in the middle of a chunk, and one stalls there."""
    async with AsyncExitStack() as opened:
        for dies in (True, False):
            one = await opened.enter_async_context(satellite(server.uri))
            await one.client.write_event(AudioStart(RATE, 2, 1).event())
            assert one.client._writer is not None
            one.client._writer.write(
                b'{"type": "audio-chunk", "data": {"rate": 16000, "width": 2, "channels": 1}, "payload_length": 2048}\nhalf'
            )
            await one.client._writer.drain()
            if dies:
                one.client._writer.transport.abort()
        yield server


async def test_many_satellites_hear_the_same_beside_one_that_died_and_one_that_stalls(crowd: Server, recording: Recording) -> None:
    found: list[int | None] = []

    async def listen(chunk: int) -> None:
        found.append(await detected_ms(crowd.uri, recording, chunk))

    async with anyio.create_task_group() as tasks:
        for number in range(16):
            tasks.start_soon(listen, 480 + 100 * number)
    assert found == [recording.detected_ms()] * 16


@pytest.mark.parametrize("moment", [0, 12, 22, 24])
async def test_a_killed_driver_costs_time_and_no_answer(server: Server, recording: Recording, moment: int) -> None:
    """The word ends in window 25. Windows before it are heard by another driver than those after it."""
    split = 480 + 1280 * moment
    async with satellite(server.uri) as one:
        await one.begin([WORD])
        await one.say(recording.samples[:split])
        drivers = server.drivers()
        assert drivers
        for driver in drivers:
            os.kill(driver, signal.SIGKILL)
        await one.say(recording.samples[split : 3 * RATE], from_sample=split)
        assert (await one.until("detection")).data["timestamp"] == recording.detected_ms()
        assert types(one.events) == ["detection"]


async def test_satellites_of_a_service_share_its_drivers(recording: Recording, tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        with serve_wyoming(*words_of(recording), "--service", served.path) as server:
            assert await detected_ms(server.uri, recording) == recording.detected_ms()
            assert server.drivers() == []
            assert server.end() == 0
    finally:
        served.end()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_ends_it_in_the_middle_of_streams(crowd: Server, recording: Recording, number: int, code: int) -> None:
    async with satellite(crowd.uri) as one:
        await one.begin([WORD])
        sending = asyncio.create_task(one.say(np.tile(recording.samples, 20)))
        await one.until("detection")
        assert await anyio.to_thread.run_sync(crowd.end, number) == code
        await asyncio.gather(sending, return_exceptions=True)
    assert "Traceback" not in "\n".join(crowd.printed)


async def test_a_unix_socket_belongs_to_one_server_and_a_dead_servers_is_replaced(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "wake.sock"
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 0)):
        with serve_wyoming(*words_of(recording), uri=f"unix://{path}") as server:
            assert server.uri == f"unix://{path}"
            assert await detected_ms(server.uri, recording) == recording.detected_ms()
            second = [sys.executable, "-m", "aionn", "serve-wyoming", "--uri", f"unix://{path}"]
            ran = await anyio.run_process(second, check=False)
            sentence = f"aionn: a service listens at {path} already; give another path with --uri\n"
            assert (ran.returncode, ran.stderr.decode()) == (2, sentence)
            if number == signal.SIGKILL:
                server.process.kill()
                assert server.process.wait() == code
            else:
                assert server.end(number) == code
    assert not path.exists()


def test_a_driver_that_is_stopped_holds_up_the_end_once_and_not_for_each_word() -> None:
    """With five words it took 13 s, and Docker kills after 10."""
    with serve_wyoming() as server:
        for pid in server.drivers():
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began_s < 9


async def test_a_server_whose_socket_is_removed_ends(recording: Recording, tmp_path: Path) -> None:
    """As by what cleans a folder of temporary files. No client finds it any more, and it would keep the next one from the path."""
    path = tmp_path / "wake.sock"
    with serve_wyoming(*words_of(recording), uri=f"unix://{path}") as server:
        path.unlink()
        server.until(f"aionn: the socket {path} has been removed; start this command again")
        assert await anyio.to_thread.run_sync(server.process.wait) == 1
    with serve_wyoming(*words_of(recording), uri=f"unix://{path}") as server:
        assert server.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--uri", "http://x"), 2, "--uri 'http://x' is not an address; give one as tcp://0.0.0.0:10400"),
        (("--uri", "tcp://127.0.0.1"), 2, "--uri '127.0.0.1' is not HOST:PORT"),
        (("--uri", "unix://x/y"), 2, "is not an address"),
        (("--threshold", "1"), 2, "--threshold 1: give a score between 0 and 1"),
        (("--model", "missing.onnx"), 2, "missing.onnx"),
        (("--model", "missing.tflite"), 2, "'missing.tflite' cannot be read (No such file or directory)"),
        (("--model", "{folder}"), 2, "has no wake word; give one with .tflite or .onnx files"),
        (("--model", "{folder}/zeros/zeros.tflite"), 2, "zeros.tflite': these bytes are not a .tflite file"),
        (("--model", "{magika}"), 2, "and Silero VAD takes 'input' and 'state'"),
        (("--model", "{silero}", "--model", "{silero_batch}"), 2, "are both models of voice activity; give one of them"),
        (("--model", "{word}", "--model", "{folder}/twin/{stem}.onnx"), 2, "are both the wake word '{stem}'; give one of them"),
        (("--model", "{word}"), 2, "there is no melspectrogram.tflite or melspectrogram.onnx in"),
        (("--model", "{word}", "--features", "{folder}/other"), 2, "whose spectrogram has 8 rows of 32"),
    ],
)
def test_wrong_usage_is_one_sentence(
    recording: Recording, tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros" / "zeros.tflite").write_bytes(bytes(5000))
    (tmp_path / "other").mkdir()
    for name in ("melspectrogram", "embedding_model"):
        (tmp_path / "other" / f"{name}.onnx").write_bytes(_same())
    (tmp_path / "twin").mkdir()
    shutil.copy(recording.word, tmp_path / "twin" / recording.word.name)
    names = {name: str(carried(name)) for name in ("magika", "silero", "silero_batch")} | {"stem": recording.word.stem}
    given = [one.format(folder=tmp_path, word=recording.word, **names) for one in arguments]
    assert main(["serve-wyoming", *(["--uri", "tcp://127.0.0.1:0"] if "--uri" not in given else []), *given]) == code
    errors = capfd.readouterr().err
    assert sentence.replace("{stem}", recording.word.stem) in errors.splitlines()[-1]
    assert "Traceback" not in errors


def _same() -> bytes:
    """A model that is no spectrogram: it returns what it is given."""
    from onnx import TensorProto, helper

    sound = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, None])
    same = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [sound], [same])
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve-wyoming", "--uri", f"tcp://127.0.0.1:{port}"]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; give another address with --uri" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("wyoming", "aionn: aionn serve-wyoming needs the package wyoming; install it with: pip install 'aionn[wyoming,litert]'\n"),
        ("ai_edge_litert", "pip install 'aionn[litert]'\n"),
    ],
)
def test_without_the_packages_it_names_the_extra(missing: str, sentence: str) -> None:
    arguments = ["serve-wyoming", "--uri", "tcp://127.0.0.1:0"]
    script = f"import sys; sys.modules[{missing!r}] = None; from aionn.cli import main; sys.exit(main({arguments}))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode in (1, 2)
    assert ran.stderr.endswith(sentence)
    assert "Traceback" not in ran.stderr
