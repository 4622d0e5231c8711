"""Scores and voice activity are those of the models: beside `pyopen-wakeword`, NumPy and plain ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.adapters.wyoming.models import SoundModel
from aionn.adapters.wyoming.opening import open_models
from aionn.adapters.wyoming.server import Heard
from aionn.adapters.wyoming.voice import VoiceStream
from aionn.adapters.wyoming.wake_words import WakeStream
from tests.adapters.wyoming.satellites import RATE, WORD, Recording
from tests.leaks import leak_check
from tests.real_models import carried

pytestmark = pytest.mark.anyio
FOLDER = carried("wake_word").parent


async def scores_of(heard: Heard, recording: Recording, chunk: int) -> dict[str, np.ndarray]:
    """The scores of each word by window, where the recording comes in chunks."""
    assert heard.features is not None
    stream = WakeStream(heard.features, list(heard.words.values()))
    found: list[Mapping[str, float]] = []
    for start in range(0, len(recording.samples), chunk):
        for at, scores in await stream.scores(recording.samples[start : start + chunk].astype(np.float32)):
            assert at == 480 + 1280 * len(found)
            found.append(scores)
    return {word: np.array([scores[word] for scores in found]) for word in heard.words}


async def in_chunks(recording: Recording, *chunks: int) -> list[dict[str, np.ndarray]]:
    """What streams hear at once of the words that come with the wheel."""
    streams = []
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack() as stack:
        heard = await open_models(runtime, stack, (), None, 0.5)
        assert list(heard.words) == ["alexa", "hey_jarvis", "hey_mycroft", "hey_rhasspy", "okay_nabu"]

        async def listen(chunk: int) -> None:
            streams.append(await scores_of(heard, recording, chunk))

        async with anyio.create_task_group() as tasks:
            for chunk in chunks:
                tasks.start_soon(listen, chunk)
    return streams


async def test_scores_are_those_of_the_package_and_streams_do_not_mix(recording: Recording) -> None:
    async with leak_check():
        streams = await in_chunks(recording, 160, 1000, 1024, len(recording.samples))
    assert len(streams) == 4
    for found in streams:
        for word, scores in found.items():
            np.testing.assert_allclose(scores, recording.scores[word], atol=1e-4, err_msg=word)


async def test_a_word_that_is_said_has_the_score_that_numpy_computes(recording: Recording) -> None:
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack() as stack:
        heard = await open_models(runtime, stack, [str(recording.word)], str(FOLDER), 0.5)
        found = [(await scores_of(heard, recording, 1024))[WORD] for _ in range(2)]
    assert recording.right.max() > 0.9
    assert recording.right.min() < 0.1
    for scores in found:  # the second stream begins with silence, too
        np.testing.assert_allclose(scores, recording.right, atol=1e-4)


def onnx_model(path: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], *nodes: onnx.NodeProto, **constants: Any) -> None:
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()] for side in (inputs, outputs)
    )
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), path.stem, given, made, held)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


async def test_models_may_all_be_onnx_and_their_satellites_share_runs(recording: Recording, tmp_path: Path) -> None:
    """The spectrogram is 256 samples, and an embedding is the mean of the rows, three times over. NumPy computes the same."""
    onnx_model(
        tmp_path / "melspectrogram.onnx",
        {"sound": ["n", 1760]},
        {"rows": ["n", 1, 8, 32]},
        helper.make_node("Slice", ["sound", "begin", "end", "axis"], ["some"]),
        helper.make_node("Reshape", ["some", "shape"], ["rows"]),
        begin=np.array([0]),
        end=np.array([256]),
        axis=np.array([1]),
        shape=np.array([-1, 1, 8, 32]),
    )
    onnx_model(
        tmp_path / "embedding_model.onnx",
        {"window": ["n", 76, 32, 1]},
        {"embedding": ["n", 1, 1, 96]},
        helper.make_node("ReduceMean", ["window"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Concat", ["mean"] * 3, ["thrice"], axis=2),
        helper.make_node("Reshape", ["thrice", "shape"], ["embedding"]),
        shape=np.array([-1, 1, 1, 96]),
    )
    weights = np.random.default_rng(0).normal(size=(4 * 96, 1)).astype(np.float32) / 100
    onnx_model(
        tmp_path / "hello.onnx",
        {"embeddings": ["n", 4, 96]},
        {"score": ["n", 1]},
        helper.make_node("Flatten", ["embeddings"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
        weights=weights,
    )
    found = []
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack() as stack:
        heard = await open_models(runtime, stack, [str(tmp_path)], None, 0.5)

        async def listen() -> None:
            found.append((await scores_of(heard, recording, 1024))["hello"])

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(listen)
    # After 8 s of silence and what of the recording completes a window, as the module wake_words draws it.
    sound: np.ndarray[Any, np.dtype[np.float64]] = np.concatenate((np.zeros(1280), recording.samples))
    windows = [sound[start : start + 256].reshape(8, 32) / 10 + 2 for start in range(0, len(sound) - 1759, 1280)]
    rows = np.concatenate((np.full((72, 32), 2.0), *windows))
    means = np.array([np.tile(rows[8 * number : 8 * number + 76].mean(axis=0), 3) for number in range(len(windows))])
    embeddings = np.concatenate((np.full((3, 96), 2.0), means))
    right = [1 / (1 + np.exp(-(embeddings[number : number + 4].reshape(-1) @ weights)[0])) for number in range(len(windows))]
    assert np.ptp(right) > 0.2
    for scores in found:
        np.testing.assert_allclose(scores, right, atol=1e-4)


@pytest.mark.parametrize("model", ["silero", "silero_batch"])
async def test_voice_begins_and_ends_where_the_model_says_so(recording: Recording, model: str) -> None:
    """Pauses of 1 s stand before and behind the recording. Three streams share the model."""
    pause = np.zeros(RATE, np.int16)
    samples = np.concatenate((pause, recording.samples[: 4 * RATE], pause)).astype(np.float32)
    found = []
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack() as stack:
        served = await (await SoundModel.read(carried(model))).open(runtime, stack)

        async def listen(chunk: int) -> None:
            stream = VoiceStream(served)
            changes = [await stream.changes(samples[start : start + chunk]) for start in range(0, len(samples), chunk)]
            found.append([one for some in changes for one in some])

        async with anyio.create_task_group() as tasks:
            for chunk in (512, 1024, 777):
                tasks.start_soon(listen, chunk)
    right = expected_changes(carried(model), samples)
    assert right[0][1] is True
    assert right[-1][1] is False
    assert found == [right] * 3


def expected_changes(path: Path, samples: np.ndarray) -> list[tuple[int, bool]]:
    """What two thresholds and a pause of 16 steps make of the probabilities of plain ONNX Runtime."""
    session = onnxruntime.InferenceSession(path)
    rate = {"sr": np.array(RATE, np.int64)} if len(session.get_inputs()) == 3 else {}
    sound = np.concatenate((np.zeros(64, np.float32), samples / 32768))
    state, changes, quiet, speaks = np.zeros((2, 1, 128), np.float32), [], 0, False
    for start in range(0, len(sound) - 575, 512):
        probability, state = session.run(None, {"input": sound[np.newaxis, start : start + 576], "state": state, **rate})
        quiet = quiet + 1 if probability < 0.35 else 0
        if (quiet == 16) if speaks else (probability >= 0.5):
            speaks = not speaks
            changes.append((start + 512, speaks))
    return changes
