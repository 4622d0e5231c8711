"""`aionn run --shape`: inputs that are made up get the shapes that the user gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from aionn.cli import main
from aionn.cli.printing import UsageError
from aionn.cli.running import parse_shapes
from aionn.testing import identity_model
from tests.cli.test_commands import aionn_logger  # noqa: F401 -- autouse
from tests.leaks import driver_pids

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "model.onnx"
    path.write_bytes(identity_model({"image": (1, 3, "height", "width"), "a=b": (2,)}))
    yield str(path)
    assert driver_pids() == []


def ran(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command said on stderr."""
    assert main(["run", *arguments, "--device", "reference", "--json"]) == code
    return capsys.readouterr().err


def shapes_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[int]]:
    assert main(["run", *arguments, "--device", "reference", "--json"]) == 0
    outputs: dict[str, Any] = json.loads(capsys.readouterr().out)["outputs"]
    return {name: output["shape"] for name, output in outputs.items()}


def test_open_dimensions_get_the_extents_given(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes_of(capsys, model) == {"image_out": [1, 3, 1, 1], "a=b_out": [2]}
    given = shapes_of(capsys, model, "--shape", "image=1x3x24x32", "--shape", "a=b=2", "--burst", "--repeat", "3")
    assert given == {"image_out": [1, 3, 24, 32], "a=b_out": [2]}


def test_a_detector_whose_dimensions_are_all_open_runs_on_a_picture_of_the_size_given(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.real_models import carried

    path = str(carried("detector"))
    assert main(["run", path, "--device", "onnxruntime", "--shape", "x=1x3x64x96", "--json"]) == 0
    said = capsys.readouterr()
    assert "input 'x': random float32 of shape (1, 3, 64, 96)" in said.err
    assert [output["shape"] for output in json.loads(said.out)["outputs"].values()] == [[1, 1, 64, 96]]


def test_an_input_without_any_shape_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"], name="same")], "shapeless", [value], [answer])
    path = tmp_path / "shapeless.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())
    assert "input 'x' has no shape in the model; give --shape x=1x3x224x224 with its shape" in ran(capsys, str(path), code=2)
    assert shapes_of(capsys, str(path), "--shape", "x=2x5") == {"y": [2, 5]}
    assert shapes_of(capsys, str(path), "--shape", "x=scalar") == {"y": []}


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (["image"], "--shape 'image' does not name an input and a shape; give NAME=1x3x224x224"),
        (["image=1x3xAx4"], "'A' is not an extent; give whole numbers from 1 on"),
        (["image=1x3x0x4"], "'0' is not an extent"),
        (["image=1x3x-2x4"], "'-2' is not an extent"),
        (["image="], "'' is not an extent"),
        (["image=1x3x4x4", "image=1x3x5x5"], "--shape names input 'image' twice"),
        (["picture=1x3x4x4"], "--shape: the model has no input 'picture'; its inputs are image, a=b"),
        (["image=1x3x224"], "input 'image' has shape 1x3x?x? in the model, and --shape gives 1x3x224; give a number for each ?"),
        (["image=1x4x8x8"], "input 'image' has shape 1x3x?x? in the model, and --shape gives 1x4x8x8"),
        (["a=b=scalar"], "input 'a=b' has shape 2 in the model, and --shape gives scalar"),
        (["image=1x3x2000000x2000000"], "needs 96.0 TB, more than this machine's memory"),
    ],
)
def test_a_shape_that_does_not_fit_is_said_in_one_sentence_before_a_driver_starts(
    model: str, capsys: pytest.CaptureFixture[str], shapes: list[str], sentence: str
) -> None:
    err = ran(capsys, model, *(text for shape in shapes for text in ("--shape", shape)), code=2)
    assert len(err.splitlines()) == 1
    assert sentence in err


def test_a_shape_beside_a_file_is_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "image.npy", np.zeros((1, 3, 4, 4), np.float32))
    err = ran(capsys, model, "--input", f"image={tmp_path / 'image.npy'}", "--shape", "image=1x3x4x4", code=2)
    assert "input 'image' has both --input and --shape; a file brings its own shape" in err


def test_a_text_input_has_no_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = helper.make_tensor_value_info("words", TensorProto.STRING, [1])
    answer = helper.make_tensor_value_info("y", TensorProto.STRING, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["words"], ["y"], name="same")], "texts", [value], [answer])
    path = tmp_path / "texts.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())
    assert "input 'words' is of type string, which has no shape to make up" in ran(capsys, str(path), "--shape", "words=1", code=2)


def test_shapes_are_read_from_the_right() -> None:
    assert parse_shapes(["a=b=1x2", "c=scalar"]) == {"a=b": (1, 2), "c": ()}
    with pytest.raises(UsageError, match="is not an extent"):
        parse_shapes([f"x={2**31}"])
    with pytest.raises(UsageError, match="is not an extent"):
        parse_shapes(["x=²"])
