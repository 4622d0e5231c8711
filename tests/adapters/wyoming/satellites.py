"""A running `aionn serve-wyoming`, satellites that talk to it by the package `wyoming`, and a wake word that a recording really says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import wave
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.event import Event
from wyoming.wake import Detect, Detection

from tests.adapters.wyoming.rival import SILENT_WINDOWS
from tests.apps import run_app
from tests.cli.serving import Serving, serving
from tests.real_models import carried

RATE = 16_000
WORD = "best_of_times"
SAID_AT = 25
"""The window of the recording in which the word ends."""


def spoken(seconds: int) -> NDArray[np.int16]:
    """The first seconds of a novel that is read, with 16,000 samples each."""
    with wave.open(str(carried("speech"))) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (3 * RATE, 2, 1)
        frames = file.readframes(seconds * 3 * RATE)
    samples: NDArray[np.int16] = np.frombuffer(frames, np.int16).reshape(-1, 3).mean(axis=1).astype(np.int16)
    return samples


class Recording:
    """10 s of a novel, what the rival makes of it, and a wake word that is said in it once.

    Attributes:
        samples: 16-bit, 16 kHz. scores: of the rival, by word and window.
        word: the file of the wake word. right: its score for each window, computed from the rival's embeddings with NumPy.
    """

    def __init__(self, folder: Path) -> None:
        self.samples = spoken(10)
        np.save(folder / "sound.npy", self.samples)
        files = str(folder / "sound.npy"), str(folder / "found.npz")
        run_app([sys.executable, "-m", "tests.adapters.wyoming.rival", *files], check=True, timeout=120)
        found = dict(np.load(folder / "found.npz"))
        embeddings = found.pop("embeddings")
        self.scores: dict[str, NDArray[np.float32]] = found
        windows = np.lib.stride_tricks.sliding_window_view(embeddings, 16, axis=0)[SILENT_WINDOWS:].transpose(0, 2, 1).reshape(-1, 1536)
        wanted = np.full(len(windows), -6.0)
        wanted[SAID_AT : SAID_AT + 3] = 6.0
        weights = np.linalg.lstsq(windows @ windows.T + 1e-3 * np.eye(len(windows)), wanted, rcond=None)[0] @ windows
        self.right = 1 / (1 + np.exp(-(windows @ weights)))
        self.word = folder / f"{WORD}.onnx"
        self.word.write_bytes(_classifier(weights.astype(np.float32)))

    def detected_ms(self) -> int:
        """When the wake word is detected, in ms since the recording began: the end of the first window above the threshold."""
        (first, *_) = np.flatnonzero(self.right > 0.5)
        return int(480 + 1280 * first) // 16


def _classifier(weights: NDArray[np.float32]) -> bytes:
    nodes = [
        helper.make_node("Flatten", ["embeddings"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    graph = helper.make_graph(
        nodes,
        WORD,
        [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["satellites", 16, 96])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["satellites", 1])],
        [numpy_helper.from_array(weights[:, np.newaxis], "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


class Server(Serving):
    """A running server. Attributes: the address that it has printed."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        super().__init__(process, mark)
        self.uri = self.until(r"listening on (\S+) for ")


@contextmanager
def serve_wyoming(*arguments: str, uri: str = "tcp://127.0.0.1:0") -> Iterator[Server]:
    with serving(Server, "serve-wyoming", "--uri", uri, *arguments) as server:
        yield server


def words_of(recording: Recording) -> tuple[str, ...]:
    """The arguments with which the server hears the recording's word, and one that nobody says."""
    folder = carried("wake_word").parent
    return ("--model", str(recording.word), "--model", str(folder / "okay_nabu.tflite"), "--features", str(folder))


class Satellite:
    """A client, its port, and the events that it has received."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        assert client._writer is not None
        name = client._writer.get_extra_info("sockname")
        self.port = name[1] if isinstance(name, tuple) else 0
        self.events: list[Event] = []

    async def begin(self, names: Sequence[str] | None = None) -> None:
        await self.client.write_event(Detect(names=None if names is None else list(names)).event())
        await self.client.write_event(AudioStart(RATE, 2, 1, timestamp=0).event())

    async def say(self, samples: NDArray[np.int16], chunk: int = 1024, from_sample: int = 0) -> None:
        """Send sound as fast as the server takes it."""
        for start in range(0, len(samples), chunk):
            part = AudioChunk(RATE, 2, 1, samples[start : start + chunk].tobytes(), timestamp=(from_sample + start) // 16)
            await self.client.write_event(part.event())

    async def stop(self) -> None:
        await self.client.write_event(AudioStop().event())

    async def until(self, *kinds: str) -> Event:
        """Receive events until one is of these kinds."""
        with anyio.fail_after(60):
            while (event := await self.client.read_event()) is not None:
                self.events.append(event)
                if event.type in kinds:
                    return event
        raise AssertionError(f"the server ended the connection before {kinds}; it has sent {self.events}")

    async def until_end(self) -> list[Event]:
        """Receive events until the server ends the connection."""
        with anyio.fail_after(60), suppress(ConnectionError):
            while (event := await self.client.read_event()) is not None:
                self.events.append(event)
        return self.events


@asynccontextmanager
async def satellite(uri: str) -> AsyncIterator[Satellite]:
    client = AsyncClient.from_uri(uri)
    await client.connect()
    try:
        yield Satellite(client)
    finally:
        with suppress(ConnectionError):  # the server has ended the connection while this satellite was sending
            await client.disconnect()


async def detected_ms(uri: str, recording: Recording, chunk: int = 1024) -> int | None:
    """Send the recording, and return when the word was detected in it. Checks that it was detected once."""
    async with satellite(uri) as one:
        await one.begin([WORD])
        sending = asyncio.create_task(_whole(one, recording, chunk))
        try:
            detection = Detection.from_event(await one.until("detection"))
            await sending
            await one.client.write_event(Event("ping"))
            await one.until("pong")
        finally:
            sending.cancel()
        assert detection.name == WORD
        assert [event.type for event in one.events] == ["detection", "pong"], "one detection, and then not 'not-detected'"
        return detection.timestamp


async def _whole(one: Satellite, recording: Recording, chunk: int) -> None:
    await one.say(recording.samples, chunk)
    await one.stop()


def types(events: Sequence[Any]) -> list[str]:
    return [event.type for event in events]
