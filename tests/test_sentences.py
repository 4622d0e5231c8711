"""Mistakes that newcomers make first. Each gets one sentence: what was found, what was expected, and the way out."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.cli import main as command
from aionn.testing import identity_model

X = np.ones((1, 4), np.float32)


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.Runtime() as opened:
        yield opened


@pytest.fixture
async def compilation(runtime: aionn.Runtime) -> aionn.Compilation:
    model = aionn.Model.from_onnx(identity_model({"x": (1, 4), "z": (1, 4)}))
    return await runtime.compile(model, devices=("reference",))


# --- the main function --------------------------------------------------------------------------------------------------


def test_run_refuses_a_coroutine_and_says_how_to_call_it() -> None:
    async def main() -> None:
        raise AssertionError("it must not run")

    given: Any = main()
    with pytest.raises(aionn.CallerError, match=r"write aionn.run\(main\) in place of aionn.run\(main\(\)\)"):
        aionn.run(given)  # a coroutine that is left open would fail this test by its warning
    nothing: Any = 5
    with pytest.raises(aionn.CallerError, match="takes an async function and its arguments, got int"):
        aionn.run(nothing)


# --- files of other formats ---------------------------------------------------------------------------------------------


def a_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", b"nothing")


FORMATS: dict[str, tuple[Any, str]] = {
    "html": (b"<!DOCTYPE html><html><body>Not found</body></html>", "a page of HTML or XML"),
    "html after blanks": (b"\xef\xbb\xbf\r\n  <html>", "a page of HTML or XML"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer.*git lfs pull"),
    "tflite": (bytes((28, 0, 0, 0)) + b"TFL3" + bytes(64), "a TensorFlow Lite model.*from_bytes"),
    "another tflite": (b" \0\0\0TFL3" + bytes(64), "a TensorFlow Lite model"),
    "zip": (a_zip, "a ZIP archive.*export the model to ONNX"),
    "onnx text": (b'<ir_version: 10, opset_import: ["" : 21]> f (float[n] x) => (float[n] y) { y = Add(x, x) }', "ONNX's text syntax"),
    "gzip": (gzip.compress(b"a model"), "a gzip archive"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", FORMATS)
async def test_a_file_of_another_format_is_named_when_it_is_loaded(kind: str, tmp_path: Path, runtime: aionn.Runtime) -> None:
    content, sentence = FORMATS[kind]
    path = tmp_path / "model.onnx"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    sentence = f"this is not an ONNX model. It looks like {sentence}"
    with pytest.raises(aionn.CallerError, match=sentence):
        await runtime.load(path)
    with pytest.raises(aionn.CallerError, match=sentence):
        await aionn.Model.load(path)
    with pytest.raises(aionn.CallerError, match=sentence):
        aionn.Model.from_onnx(path)
    with pytest.raises(aionn.CallerError, match=sentence):
        aionn.Model.from_onnx(path.read_bytes())


def test_the_command_names_a_file_of_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"<!DOCTYPE html>")
    for arguments in (["run", str(path)], ["compile", str(path), "--cache-dir", str(tmp_path / "cache")]):
        assert command(arguments) == 2
        assert "It looks like a page of HTML" in " ".join(capsys.readouterr().err.split())


def test_a_model_by_a_producer_with_a_strange_name_is_a_model() -> None:
    """Its bytes hold "TFL3" where a TensorFlow Lite model has it."""
    import onnx

    model = onnx.load_from_string(identity_model({"x": (1, 4)}))
    model.ir_version, model.producer_name = 10, "TFL3"
    content = model.SerializeToString()
    assert content[4:8] == b"TFL3"
    assert list(aionn.Model.from_onnx(content).inputs) == ["x"]


# --- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("onnxruntme", "Did you mean 'onnxruntime'"),
        ("OpenVino", "Did you mean 'openvino'"),
        ("onnxrunime:cpu", "No module named 'onnxrunime'.* Did you mean 'onnxruntime'"),
        ("onnx", "Did you mean 'onnxruntime'"),
        ("cuda", r"'onnxruntime:cuda' may be meant; it needs pip install 'aionn\[onnxruntime-gpu\]'"),
        ("cuda:0", r"'onnxruntime:cuda' may be meant; it needs pip install 'aionn\[onnxruntime-gpu\]'"),
        ("tensorrt", r"'onnxruntime:tensorrt' may be meant; it needs pip install 'aionn\[onnxruntime-gpu\]'"),
        ("GPU", r"'openvino:GPU' may be meant; it needs pip install 'aionn\[openvino\]'"),
        ("onnxruntime:CUDA", r"pip install 'aionn\[onnxruntime-gpu\]' in place of 'aionn\[onnxruntime\]'"),
        ("openvino:GPU", "a GPU or NPU is there once its driver is installed"),
    ],
)
async def test_the_name_of_an_absent_device_leads_to_the_right_one(name: str, sentence: str, runtime: aionn.Runtime) -> None:
    with pytest.raises(aionn.DeviceUnavailableError, match=sentence):
        await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1, 4)})), devices=(name,))


@pytest.mark.anyio
async def test_no_extra_is_promised_for_a_device_that_it_does_not_bring(runtime: aionn.Runtime) -> None:
    with pytest.raises(aionn.DeviceUnavailableError, match="'tflite' is not installed") as caught:
        await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1, 4)})), devices=("tflite",))
    assert "pip install" not in str(caught.value)


def test_the_command_leads_to_the_right_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(identity_model({"x": (1, 4)}))
    assert command(["run", str(path), "--device", "onnxruntme"]) != 0
    assert "Did you mean 'onnxruntime'?" in " ".join(capsys.readouterr().err.split())


def test_the_name_of_an_absent_device_to_start_leads_to_the_right_one() -> None:
    with pytest.raises(aionn.CallerError, match="Did you mean 'onnxruntime'"):
        aionn.Runtime(start=("onnxruntme",))


# --- names, shapes, types -----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_unknown_output_is_answered_with_the_outputs_there_are(compilation: aionn.Compilation) -> None:
    outputs = await compilation.compute({"x": X, "z": X})
    assert_names_the_outputs(outputs)
    async with compilation.burst() as burst:
        assert_names_the_outputs(await burst.compute({"x": X, "z": X}))
        async for result in burst.map([{"x": X, "z": X}]):
            assert_names_the_outputs(result.outputs)


def assert_names_the_outputs(outputs: Mapping[str, Any]) -> None:
    sentence = "the model has no output 'output' here; the outputs are ['x_out', 'z_out']"
    with pytest.raises(aionn.CallerError) as caught:
        outputs["output"]
    assert str(caught.value) == sentence
    with pytest.raises(KeyError):
        outputs["output"]
    assert outputs.get("output") is None
    assert "output" not in outputs


@pytest.mark.anyio
async def test_a_frame_knows_which_inputs_there_are(compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst, burst.frame() as frame:
        assert "input" not in frame
        assert "x" in frame
        assert frame.get("input") is None
        with pytest.raises(aionn.CallerError, match=r"the model has no input 'input'; its inputs are \['x', 'z'\]"):
            frame["input"][:] = 1
        with pytest.raises(aionn.CallerError, match=r"the model has no input 'input'; its inputs are \['x', 'z'\]"):
            frame["input"] = X


@pytest.mark.anyio
async def test_every_wrong_input_is_named(compilation: aionn.Compilation) -> None:
    wrong_x = r"input 'x': dtype float64 .* Also, input 'x': shape \(2, 4\) "
    both: dict[str, Any] = {"x": np.ones((2, 4)), "z": np.ones((1, 5), np.float32)}
    cases: list[tuple[dict[str, Any], str]] = [
        (both, rf"^{wrong_x}.* Also, input 'z': shape \(1, 5\)"),
        ({"x": np.ones((2, 4)), "q": X}, rf"^inputs without \['z'\] and with \['q'\], .* Also, {wrong_x}"),
        ({**both, "q": X}, rf"^inputs with \['q'\], .* Also, {wrong_x}.* Also, input 'z'"),
        ({"x": "hello", "z": [[1.0]]}, "^input 'x': expected a NumPy array, got str; .* Also, input 'z': expected a NumPy array, got list"),
        ({"x": None, "z": np.ones((1, 5))}, r"^input 'x': expected a NumPy array, got NoneType; .* Also, input 'z': dtype"),
        ({"x": None}, r"^inputs without \['z'\]; .* Also, input 'x': expected a NumPy array, got NoneType"),
    ]
    async with compilation.burst() as burst:
        for again in (False, True):  # the second time, the burst knows a frame that fits
            for inputs, sentence in cases:
                for compute in (compilation.compute, burst.compute):
                    with pytest.raises(aionn.CallerError, match=sentence):
                        await compute(inputs)
            assert again or (await burst.compute({"x": X, "z": X}))["x_out"][0, 0] == 1
        with pytest.raises(aionn.CallerError, match=r"^input 'x': shape \(2, 4\) .* Also, input 'z': shape \(1, 5\)"):
            burst.frame(shapes={"x": (2, 4), "z": (1, 5)})


class Odd:
    """An array of another library that cannot be read."""

    @property
    def __array_interface__(self) -> Any:
        raise RuntimeError("it has been freed")


@pytest.mark.anyio
async def test_the_cause_of_a_wrong_input_is_kept(compilation: aionn.Compilation) -> None:
    with pytest.raises(aionn.CallerError, match=r"it has been freed.* Also, input 'z': dtype float64") as caught:
        await compilation.compute({"x": Odd(), "z": np.ones((1, 4))})
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "why"),
    [("a\0b", "holds a NUL byte"), ("/tmp/" + "folder/" * 1000, "has 7005 bytes, and a path has at most 4095")],
    ids=["NUL", "too long"],
)
async def test_a_cache_dir_that_no_system_takes_is_refused(path: str, why: str, runtime: aionn.Runtime) -> None:
    with pytest.raises(aionn.CallerError, match=f"^cache_dir {why}; give a directory, or None for no caching$"):
        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",), cache_dir=path)


@pytest.mark.anyio
async def test_a_reset_of_an_open_shape_names_the_argument(runtime: aionn.Runtime) -> None:
    compiled = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (0, 4)})), devices=("reference",))
    state = await compiled.allocate(inputs=("x",))
    with pytest.raises(aionn.CallerError, match=r"allocate it with shape=\(...\), or fill it once with copy_from"):
        await state.reset()
    state = await compiled.allocate(inputs=("x",), shape=(2, 4))
    await state.reset()
    assert (await state.copy_to()).shape == (2, 4)


# --- async ----------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_plain_with_says_that_it_must_be_async(compilation: aionn.Compilation) -> None:
    burst = compilation.burst()
    memory = await compilation.allocate(inputs=("x",))
    recurrent = compilation.recurrent({"x": "x_out"})
    async with burst:
        for used in (aionn.Runtime(), compilation, burst, burst.frame(), burst.lease(), memory, recurrent):
            anything: Any = used
            with pytest.raises(aionn.CallerError, match="is used in `async with`, and this is a plain `with`"), anything:
                pass


@pytest.mark.anyio
async def test_a_plain_for_over_a_stream_says_that_it_must_be_async(runtime: aionn.Runtime, compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst:
        results: Any = burst.map([{"x": X, "z": X}])
        with pytest.raises(aionn.CallerError, match=r"write `async for result in burst\.map"):
            for _ in results:
                pass
        assert len([result async for result in results]) == 1  # it has begun nothing
    events: Any = runtime.events()
    with pytest.raises(aionn.CallerError, match=r"write `async for event in runtime\.events\(\)`"):
        for _ in events:
            pass


@pytest.mark.anyio
async def test_results_are_an_async_generator(compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst:
        results = burst.map([{"x": X, "z": X}] * 3)
        assert (await anext(results)).seq == 0
        assert (await results.asend(None)).seq == 1
        await results.aclose()
        assert [result async for result in results] == []


@pytest.mark.anyio
async def test_a_forgotten_await_is_named(runtime: aionn.Runtime, compilation: aionn.Compilation, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(identity_model({"x": (1, 4)}))
    good = {"x": X, "z": X}

    def forgotten() -> Any:
        return compilation.compute(good)

    uses: list[Callable[[aionn.Burst], Any]] = [  # a coroutine that is left open would fail this test by its warning
        lambda _: runtime.compile(runtime.load(path)),  # type: ignore[arg-type]
        lambda _: runtime.load(runtime.load(path)),  # type: ignore[arg-type]
        lambda _: compilation.compute(forgotten()),
        lambda _: compilation.compute({"x": forgotten(), "z": forgotten()}),
        lambda _: compilation.compute(good, outputs={"x_out": compilation.allocate(outputs=("x_out",))}),
        lambda _: compilation.start(forgotten()),
        lambda _: compilation.start(good, after=(forgotten(),)),
        lambda _: compilation.start(good, after=forgotten()),
        lambda burst: burst.compute(forgotten()),
        lambda burst: burst.compute({"x": X, "z": forgotten()}),
        lambda burst: burst.map(forgotten()),
        lambda burst: anext(burst.map([forgotten()])),
    ]
    async with compilation.burst() as burst:
        await burst.compute(good)
        for number, use in enumerate(uses):
            with pytest.raises(aionn.CallerError, match="coroutine; write `await` before the call that makes") as caught:
                await use(burst)
            assert (str(caught.value).count("coroutine") == 2) == (number == 3)
        async with burst.frame() as frame:
            with pytest.raises(aionn.CallerError, match="coroutine; write `await` before the call that makes"):
                frame["x"] = forgotten()


@pytest.mark.anyio
async def test_what_is_written_to_a_frame_after_its_end_is_refused(compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst:
        async with burst.frame() as frame:
            view = frame["x"]
            view[:], frame["z"][:] = 1, 2
            outputs = await burst.compute(frame)
            view[:] = 3  # for the next call
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 4
        with pytest.raises(aionn.CallerError, match="this frame's lease has ended"):
            frame["x"] = X
        assert outputs["x_out"][0, 0] == 1
