"""Fragments of the pages run as they stand, on real models and real driver processes, and other blocks of README.md and docs/ are true.

A fragment is a block that needs names, such as a `burst` or a `camera`. It gets them from the world that its section has here.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.adapters.livekit import AionnInferenceExecutor, OnnxMethod
from aionn.cli import main
from aionn.runtime.preparing.kept_model import Idling
from aionn.sources.av import Camera
from aionn.testing.models import identity_model
from tests.docs.pages import DOCS, ROOT, Block, blocks, programs, the_block
from tests.engines.provider_shim import install_shim
from tests.leaks import leak_check
from tests.real_models import carried
from tests.runtime.values_models import linear_classifier
from tests.scaled_model import scaled_model
from tests.service.served import Served, serving

FRAMES = 4


async def run_block(section: str, world: dict[str, Any]) -> None:
    """Run the section's Python as the body of an async function whose names are `world`; a fault names the line of the page."""
    block = the_block(section, "python")
    code = compile("\n" * block.line + block.text, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, world)
    if inspect.iscoroutine(running):
        await running


WORLDS = {
    "A frame without a copy",
    "A chain of models",
    "Fences of the app",
    "A cache that can be trusted",
    "State that stays in the driver",
    "Memory between two models",
    "Streams",
    "Cameras",
    "Share a camera",
    "Texts, lists and dicts",
    "First frame at once, faster frames later",
    "A stage that another machine has compiled",
    "When a driver dies",
    "How many threads, and how many runs at once",
    "A bound for the machine",
    "Join requests of several callers",
    "Priority",
    "Providers and options of devices",
    "How long a driver process and its memory live",
    "Checking an engine",
    "Formats other than ONNX",
    "The turn detector's model",
    "The same in `prewarm`",
}


def test_every_fragment_is_run_here() -> None:
    found = [block.section for block in blocks() if block.is_fragment]
    assert len(found) == len(set(found))
    assert set(found) == WORLDS


def test_the_engines_are_extras_and_the_commands_name_the_first() -> None:
    """`onnxruntime` and `onnxruntime-gpu` are one Python module, so aionn must not ask for either by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [one for one in project["dependencies"] if one.startswith(("onnxruntime", "openvino"))]
    extras = project["optional-dependencies"]
    assert {name: [one.partition(">")[0] for one in extras[name]] for name in ("onnxruntime", "onnxruntime-gpu", "openvino")} == {
        name: [name] for name in ("onnxruntime", "onnxruntime-gpu", "openvino")
    }
    commands = [block.text for block in blocks() if block.page.name == "README.md" and "pip install -e" in block.text]
    assert len(commands) == 3
    assert all("pip install -e '.[onnxruntime" in command for command in commands)


def readme() -> Block:
    (found,) = (block for block in programs() if block.page.name == "README.md")
    return found


def test_the_ten_lines_that_matter(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", readme().text]
    with leak_check():
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "{'y': array([0., 2., 4., 6.], dtype=float32)}\n"


def voice(number: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    samples = np.random.default_rng(number).uniform(-0.1, 0.1, (1, 576)).astype(np.float32)
    return {"input": samples, "state": np.zeros((2, 1, 128), np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    """One loop is enough to show that README tells the truth; the journeys have both."""
    return ("asyncio", {"use_uvloop": True})


@pytest.mark.anyio
async def test_a_chain_of_models_and_a_fence_of_the_app() -> None:
    double = aionn.Model.from_onnx(scaled_model(np.full((1, 16), 2, np.float32)))
    x = np.arange(16, dtype=np.float32)[None]
    async with aionn.Runtime() as runtime:
        detector = await runtime.compile(double, devices=("reference",))
        classifier = await runtime.compile(double, devices=("onnxruntime",))
        world: dict[str, Any] = {"aionn": aionn, "detector": detector, "classifier": classifier, "x": x, "os": os}
        await run_block("A chain of models", world)
        np.testing.assert_array_equal(world["outputs"]["y"], x * 4)
        camera = os.eventfd(0)
        frame = aionn.Memory.allocate(x.nbytes)
        frame.array(np.float32, x.shape)[:] = x
        os.eventfd_write(camera, 1)
        world |= {"camera": camera, "frame": frame}
        await run_block("Fences of the app", world)
        np.testing.assert_array_equal(world["outputs"]["y"], x * 2)
        frame.close()
        os.close(camera)


@pytest.mark.anyio
async def test_a_frame_without_a_copy(orientation_path: Path) -> None:
    class Camera:
        picture = np.random.default_rng(0).random((1, 3, 224, 224)).astype(np.float32)

        def read_into(self, frame: np.ndarray[Any, Any]) -> None:
            frame[...] = self.picture

    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(orientation_path), devices=("onnxruntime",))
        async with compilation.burst() as burst:
            world: dict[str, Any] = {"burst": burst, "camera": Camera()}
            await run_block("A frame without a copy", world)
            (found,) = (array.copy() for array in world["outputs"].values())
            assert burst.statistics()["copied_bytes"] == 0
        (expected,) = (await compilation.compute({"x": Camera.picture})).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.anyio
async def test_texts_lists_and_dicts_come_out_as_the_page_says() -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(linear_classifier(["cat", "dog"]), devices=("onnxruntime",))
        world: dict[str, Any] = {"compilation": compilation, "rows": np.array([[1, 0], [0, 1]], np.float32)}
        await run_block("Texts, lists and dicts", world)
    assert world["outputs"]["label"].tolist() == ["cat", "dog"]
    assert [sorted(row) for row in world["outputs"]["probabilities"]] == [["cat", "dog"]] * 2


@pytest.mark.anyio
async def test_a_cache_that_can_be_trusted(tmp_path: Path, silero_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    told: list[Any] = []
    answers = []
    cache_dir = tmp_path / "cache"
    for start in ("cold", "warm", "one bit flipped"):
        if start == "one bit flipped":
            stored = max(cache_dir.glob("entries/*/*/*"), key=lambda path: path.stat().st_size)
            content = bytearray(stored.read_bytes())
            content[len(content) // 2] ^= 1
            stored.write_bytes(content)
        async with aionn.Runtime() as runtime:
            world: dict[str, Any] = {"runtime": runtime, "path": silero_path, "cache_dir": cache_dir}
            world["print"] = lambda found: told.append(found)
            await run_block("A cache that can be trusted", world)
            answers.append(await world["compilation"].compute(voice()))
    outcomes = [outcome for (outcome,) in told]
    assert [outcome.kind.name for outcome in outcomes] == ["MISS", "HIT", "MISS"]
    assert outcomes[2].reason is aionn.MissReason.WRONG_BYTES
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer["output"], answers[0]["output"])
    assert any((tmp_path / "state" / "aionn").iterdir())  # where README says that the digests are


@pytest.mark.anyio
async def test_state_that_stays_in_the_driver_is_saved_restored_and_lost_with_it(silero_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        async with compilation.burst() as burst:
            world: dict[str, Any] = {"compilation": compilation, "burst": burst, "samples": voice()["input"]}
            await run_block("State that stays in the driver", world)
            assert list(world["outputs"]) == ["output"]
            state = world["state"]
            kept = await state.snapshot()
            expected = (await compilation.compute(voice()))["stateN"]
            np.testing.assert_allclose(kept, expected, atol=1e-6)

            async def step() -> float:
                inputs = {"input": world["samples"], "state": state}
                return float((await burst.compute(inputs, outputs={"stateN": state}))["output"].item())

            after = await step()
            kill_driver(runtime)
            with pytest.raises(aionn.DriverDiedError):
                await step()
            with pytest.raises(aionn.DeviceMemoryLostError):
                await step()
            state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
            await state.copy_from(kept)
            assert await step() == pytest.approx(after, abs=1e-6)


@pytest.mark.anyio
async def test_memory_between_two_models_carries_what_one_wrote_to_the_other() -> None:
    text = np.arange(4, dtype=np.float32)
    async with aionn.Runtime() as runtime:
        world: dict[str, Any] = {"runtime": runtime, "text": text}
        for name, source, target in (("encoder", "text", "hidden"), ("decoder", "hidden", "words")):
            model = aionn.Model.from_onnx(identity_model({source: (4,)}, outputs=(target,)))
            world[name] = await runtime.compile(model, devices=("onnxruntime",))
        await run_block("Memory between two models", world)
        np.testing.assert_array_equal(world["outputs"]["words"], text)
        np.testing.assert_array_equal(await world["hidden"].snapshot(), text)


@pytest.mark.anyio
async def test_a_stream_comes_in_order_and_what_was_dropped_is_counted(silero_path: Path) -> None:
    async def camera() -> AsyncIterator[dict[str, Any]]:
        for number in range(FRAMES):
            yield voice(number)

    drawn: list[float] = []

    def draw(inputs: dict[str, Any], outputs: aionn.Outputs) -> None:
        drawn.append(float(inputs["input"][0, 0]))
        assert outputs["output"].shape == (1, 1)

    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        async with compilation.burst() as burst:
            await run_block("Streams", {"burst": burst, "camera": camera, "draw": draw})
            assert len(drawn) + burst.statistics()["dropped"] == FRAMES
    source = [float(voice(number)["input"][0, 0]) for number in range(FRAMES)]
    assert drawn == [value for value in source if value in drawn]


@pytest.mark.anyio
async def test_a_camera_that_blocks_leases_frames_and_its_tags_come_back(orientation_path: Path) -> None:
    class Camera:
        """Each picture is another shade of grey. The next one comes when the one before has been drawn."""

        def __init__(self) -> None:
            self.pictures = [np.full((224, 224, 3), 10 * number, np.uint8) for number in range(FRAMES)]
            self.shot = 0
            self.drawn = threading.Semaphore(1)

        def read(self) -> np.ndarray[Any, Any] | None:
            assert threading.current_thread() is not threading.main_thread()
            assert self.drawn.acquire(timeout=30)
            self.shot += 1
            return self.pictures[self.shot - 1] if self.shot <= FRAMES else None

    camera = Camera()
    drawn = []

    def draw(picture: np.ndarray[Any, Any], outputs: aionn.Outputs) -> None:
        (scores,) = outputs.values()
        drawn.append((picture, scores.copy()))
        camera.drawn.release()

    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(orientation_path), devices=("onnxruntime",))
        async with compilation.burst() as burst:
            await run_block("Cameras", {"burst": burst, "camera": camera, "draw": draw, "np": np, "aionn": aionn})
            assert burst.statistics()["copied_bytes"] == 0
        assert [picture is shot for (picture, _), shot in zip(drawn, camera.pictures, strict=True)] == [True] * FRAMES
        for picture, scores in drawn:
            pixels = (picture.transpose(2, 0, 1)[np.newaxis] / 255).astype(np.float32)
            (expected,) = (await compilation.compute({"x": pixels})).values()
            np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.anyio
async def test_share_a_camera(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "detector.onnx").symlink_to(carried("detector"))
    (tmp_path / "upside_down.onnx").symlink_to(carried("upside_down"))
    page = next(block for block in programs() if "def write_video" in block.text and "detector.onnx" in block.text)
    world: dict[str, Any] = {"__name__": "page"}
    exec(compile(page.text.replace("aionn.run(main)", ""), str(page.page), "exec"), world)
    world["write_video"]("sign.mp4")
    indexes: dict[str, list[int]] = {}

    async def watch(name: str) -> None:
        indexes[name] = [result.tag.index async for result in world[name]]

    async with aionn.Runtime() as runtime:
        detector, classifier = [
            await runtime.compile(await runtime.load(name), devices=("onnxruntime",)) for name in ("detector.onnx", "upside_down.onnx")
        ]
        async with detector.burst() as finding, classifier.burst() as naming:
            world |= {"finding": finding, "naming": naming, "Camera": Camera}
            await run_block("Share a camera", world)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, "found")
                tasks.start_soon(watch, "named")
            world["camera"].close()
    assert indexes["found"][-1] == indexes["named"][-1] == 7, "the last picture has come to both"


@pytest.mark.anyio
async def test_first_frame_at_once(silero_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        world: dict[str, Any] = {"runtime": runtime, "model": aionn.Model.from_onnx(silero_path)}
        await run_block("First frame at once, faster frames later", world)
        outputs = await world["compilation"].compute(voice())
        assert outputs.stage == "onnxruntime"
        assert [(stage.name, stage.reason) for stage in world["compilation"].stages] == [("onnxruntime", ""), ("openvino", "")]


@pytest.mark.anyio
async def test_a_stage_that_another_machine_has_compiled(silero_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        world: dict[str, Any] = {"runtime": runtime, "aionn": aionn, "model": aionn.Model.from_onnx(silero_path)}
        await run_block("A stage that another machine has compiled", world)
        assert world["policy"].backend.wait_s == 60.0
        assert world["compilation"]._parts.staging.policy is world["policy"]


@pytest.mark.anyio
async def test_an_unused_model_gives_its_memory_back_as_the_page_says(
    silero_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Idling.watch
    monkeypatch.setattr(Idling, "watch", lambda self, idle_s: watch(self, idle_s / 1000))
    model = aionn.Model.from_onnx(silero_path)
    async with leak_check(), aionn.Runtime() as runtime:
        world: dict[str, Any] = {"runtime": runtime, "model": model, "cache_dir": tmp_path / "cache"}
        await run_block("How long a driver process and its memory live", world)
        first = await world["compilation"].compute(voice())
        device = next(device for device in runtime.devices if device.name == world["compilation"].device)
        with anyio.fail_after(20):
            while device.pid is not None:  # noqa: ASYNC110  (another process ends)
                await anyio.sleep(0.001)
        again = await world["compilation"].compute(voice())
        np.testing.assert_array_equal(again["output"], first["output"])
        assert [outcome.kind.name for outcome in world["compilation"].outcomes] == ["HIT"]


@pytest.mark.anyio
async def test_threads_instances_and_priority_as_the_page_says(silero_path: Path) -> None:
    model = aionn.Model.from_onnx(silero_path)
    async with aionn.Runtime() as runtime:
        world: dict[str, Any] = {"runtime": runtime, "model": model}
        await run_block("How many threads, and how many runs at once", world)
        await run_block("Priority", world)
        assert [(world[name].threads, world[name].instances) for name in ("alone", "shared")] == [(2, None), (1, 2)]
        answers = [float((await world[name].compute(voice()))["output"].item()) for name in ("alone", "shared", "voice", "archive")]
        np.testing.assert_allclose(answers, answers[0], rtol=1e-4)
        device = next(device for device in runtime.devices if device.name == world["archive"].device)
        assert device.low_priority is not None
        assert device.low_priority.pid not in (None, device.pid)
    world = {"aionn": aionn}
    await run_block("A bound for the machine", world)
    with pytest.raises(aionn.CallerError, match="not open"):
        await world["runtime"].compile(model)


@pytest.mark.anyio
async def test_requests_are_joined_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    async with aionn.Runtime(start=()) as runtime:
        world = {"aionn": aionn, "runtime": runtime, "model": aionn.Model.from_onnx(carried("silero_batch"))}
        await run_block("Join requests of several callers", world)
    printed = capsys.readouterr().out
    assert printed.startswith("BatchingState(allowed=True")
    assert "rows_per_run" in printed


def driver_of(runtime: aionn.Runtime) -> int:
    (pid,) = (device.pid for device in runtime.devices if device.pid is not None)
    return pid


def kill_driver(runtime: aionn.Runtime) -> None:
    os.kill(driver_of(runtime), signal.SIGKILL)


@pytest.mark.anyio
async def test_a_call_on_a_driver_that_dies_is_repeated_as_the_readme_says(silero_path: Path) -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def warning(self, form: str, *values: object) -> None:
            self.lines.append(form % values)

    log = Log()
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(aionn.Runtime())
        compilation = await runtime.compile(aionn.Model.from_onnx(silero_path), devices=("onnxruntime",))
        expected = (await compilation.compute(voice()))["output"]
        world: dict[str, Any] = {"compilation": compilation, "inputs": voice(), "log": log, "aionn": aionn}
        os.kill(driver_of(runtime), signal.SIGSTOP)  # so that the call is there before the death is
        os.waitid(os.P_PID, driver_of(runtime), os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 -- all its threads stand still now, within a moment
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_block, "When a driver dies", world)
            await anyio.wait_all_tasks_blocked()
            kill_driver(runtime)
    np.testing.assert_allclose(world["outputs"]["output"], expected, atol=1e-6)
    assert log.lines == ["the driver process of device 'onnxruntime' ended by signal 9; the next use starts a new one"]


@pytest.mark.anyio
async def test_a_provider_gets_its_options_and_is_shown(
    orientation_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = install_shim(tmp_path / "shim", "part")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shim"))
    async with aionn.Runtime(start=(), sandbox="off") as runtime:  # the shim writes down what it got, which a confined driver may not
        world: dict[str, Any] = {"runtime": runtime, "model": aionn.Model.from_onnx(orientation_path)}
        await run_block("Providers and options of devices", world)
    assert re.fullmatch(r"CUDAExecutionProvider \(1 node\), CPUExecutionProvider \(\d+ nodes\)\n", capsys.readouterr().out)
    assert json.loads(written.read_text()) == {"device_id": "1"}


def test_each_command_at_a_terminal_works(
    tmp_path: Path, silero_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "model.onnx").symlink_to(silero_path)
    for line in the_block("At a terminal", "sh").text.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "aionn"
        assert main(arguments) == 0, (line, capsys.readouterr().err)
        capsys.readouterr()
        assert main([*arguments, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_an_engine_that_a_package_declares_is_a_device(tmp_path: Path, silero_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point of the README, as an installed package of its own has it; the engine is the NumPy reference by another name."""
    declared = the_block("Writing a driver", "toml").text
    group, name, package, engine = re.fullmatch(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(\w+):(\w+)"\n', declared).groups()  # type: ignore[union-attr]
    facts = f"from aionn.engines.reference import ReferenceEngine\nclass {engine}(ReferenceEngine):\n    name = {name!r}\n"
    (tmp_path / f"{package}.py").write_text(facts, encoding="utf-8")
    (tmp_path / "driver-1.0.dist-info").mkdir()
    (tmp_path / "driver-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: driver\nVersion: 1.0\n", encoding="utf-8")
    (tmp_path / "driver-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}:{engine}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))

    async def speech() -> tuple[list[str], list[float]]:
        found = []
        async with aionn.Runtime() as runtime:
            model = aionn.Model.from_onnx(silero_path)
            for device in (name, f"{package}:{engine}"):
                compilation = await runtime.compile(model, devices=(device,))
                found.append(float((await compilation.compute(voice()))["output"].item()))
            return [device.name for device in runtime.devices], found

    names, found = aionn.run(speech)
    assert name in names
    assert found == pytest.approx([found[0]] * 2)
    page = (DOCS / "how-to" / "own-driver.md").read_text(encoding="utf-8")
    needed = re.search(r"An engine is a class with (.+?): the protocol", page, re.DOTALL)
    assert needed is not None
    public = {word for word in vars(aionn.hal.Engine) if not word.startswith("_")} | set(aionn.hal.Engine.__annotations__)
    assert set(re.findall(r"`(\w+)`", needed[1])) == public


def test_the_tree_of_errors_is_the_one_that_is_raised() -> None:
    depth_of: dict[int, str] = {}
    told: dict[str, set[str]] = {}
    for line in the_block("The tree", "").text.splitlines():
        branch, name, builtin, rest = re.fullmatch(r"([│├└─ ]*)(\w+)(?:\((\w+)\))?(.*)", line).groups()  # type: ignore[union-attr]
        depth = len(branch) // 4
        depth_of[depth] = name
        error = getattr(aionn, name)
        if depth:
            assert issubclass(error, getattr(aionn, depth_of[depth - 1])), line
        assert builtin is None or builtin in {base.__name__ for base in error.__mro__}, line
        told[name] = set(re.findall(r"\.(\w+)", rest))
        assert all(re.search(rf"\b{attribute}:", inspect.getdoc(error) or "") for attribute in told[name]), line
    assert told.keys() == {
        name for name in aionn.__all__ if isinstance(getattr(aionn, name), type) and issubclass(getattr(aionn, name), Exception)
    }


@pytest.mark.anyio
async def test_checking_an_engine() -> None:
    from aionn.testing.engine_cases import CASES

    world: dict[str, Any] = {}
    await run_block("Checking an engine", world)
    (mark,) = world["test_my_engine"].pytestmark
    assert mark.kwargs["ids"] == [case.__name__ for case in CASES]
    page = (DOCS / "how-to" / "own-driver.md").read_text(encoding="utf-8")
    assert [name for name in mark.kwargs["ids"] if f"`{name}`" not in page] == []


@pytest.mark.anyio
async def test_formats_other_than_onnx() -> None:
    world: dict[str, Any] = {"aionn": aionn, "content": b"bytes of a model"}
    await run_block("Formats other than ONNX", world)
    model = world["model"]
    assert (model.format, bytes(aionn.hal.model_bytes(model, "tflite"))) == ("tflite", b"bytes of a model")


class WordsAsTokens:
    """Stands for the tokenizer of the turn detector: each word is a token, its length."""

    def apply_chat_template(self, messages: list[dict[str, str]], **how: bool) -> str:
        assert how == {"add_special_tokens": False, "tokenize": False}
        return "".join(f"<|im_start|>{one['role']} {one['content']}<|im_end|>" for one in messages)

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()][-how["max_length"] :]}


@pytest.mark.anyio
async def test_the_turn_detectors_model() -> None:
    class Context:
        _inf_executor: Any = None

    async with aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(identity_model({"input_ids": (1, "tokens")}, dtype=np.dtype(np.int64)))
        compilation = await runtime.compile(model, devices=("reference",))
        names = {"OnnxMethod": OnnxMethod, "AionnInferenceExecutor": AionnInferenceExecutor, "tokenizer": WordsAsTokens(), "ctx": Context}
        await run_block("The turn detector's model", {"np": np, "json": json, "aionn": aionn, "compilation": compilation, **names})
        said = {"chat_ctx": [{"role": "user", "content": "see you"}, {"role": "assistant", "content": ""}]}
        answer = await Context._inf_executor.do_inference("lk_end_of_utterance_en", json.dumps(said).encode())
        assert json.loads(answer) == {"eou_probability": 3.0}


@pytest.mark.own_process("livekit")
def test_livekits_vad_in_prewarm(monkeypatch: pytest.MonkeyPatch) -> None:
    (page,) = (block for block in programs() if block.section == "Voice activity")
    world: dict[str, Any] = {"__name__": "page", "JobProcess": object}
    exec(compile(page.text.replace("aionn.run(main)", ""), str(page.page), "exec"), world)
    block = the_block("The same in `prewarm`", "python")
    exec(compile(block.text, str(block.page), "exec"), world)
    process = SimpleNamespace(userdata={})
    with serving() as folder:
        monkeypatch.setenv("AIONN_SERVICE", str(folder / "service.sock"))
        with pytest.raises(aionn.DeviceUnavailableError):
            world["prewarm"](process)
        served = Served(folder)
        try:
            world["prewarm"](process)
            assert isinstance(process.userdata["vad"], world["silero"].VAD)
            assert len(served.guests()) == 1
        finally:
            served.end()
