"""External data of a model, wherever ONNX lets a tensor stand: refused before a driver sees it, unless the file is inside the directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import aionn
from tests.engines.onnx_graphs import model_of
from tests.leaks import driver_pids
from tests.runtime.test_external_data import ALL_PATHS, border, tensors_of

CONTENT = b"\7" * 4
KINDS = {
    "initializer": ("graph", "initializer"),
    "values of a sparse initializer": ("graph", "sparse_initializer", "values"),
    "indices of a sparse initializer": ("graph", "sparse_initializer", "indices"),
    "attribute t": ("graph", "node", "attribute", "t"),
    "attribute tensors": ("graph", "node", "attribute", "tensors"),
    "attribute sparse_tensor": ("graph", "node", "attribute", "sparse_tensor", "values"),
    "attribute sparse_tensors": ("graph", "node", "attribute", "sparse_tensors", "indices"),
    "nested graph": ("graph", "node", "attribute", "g", "initializer"),
    "function": ("functions", "node", "attribute", "t"),
    "training information": ("training_info", "algorithm", "initializer"),
}
PLACES = pytest.mark.parametrize("place", KINDS.values(), ids=KINDS)


def model_with(place: tuple[str, ...], location: str, directory: Path) -> Path:
    """Write a model with one external tensor into a directory. Return its path."""
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], *border())
    message: Any = model
    for name in place:
        child = getattr(message, name)
        message = child.add() if message.DESCRIPTOR.fields_by_name[name].is_repeated else child
    message.dims.append(len(CONTENT))
    message.data_type = TensorProto.UINT8
    message.data_location = TensorProto.EXTERNAL
    message.external_data.add(key="location", value=location)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory / "model.onnx"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a model, beside a file that is not the model's."""
    (tmp_path / "secret").write_bytes(CONTENT)
    made = tmp_path / "model"
    made.mkdir()
    (made / "out").symlink_to("../secret")
    (made / "up").symlink_to("..")
    (made / "chain").symlink_to("out")
    return made


def test_the_list_names_every_place_of_the_schema() -> None:
    ends = {place[-1] if place[-1] not in ("values", "indices") else place[-2:] for place in ALL_PATHS}
    assert ends == {place[-1] if place[-1] not in ("values", "indices") else place[-2:] for place in KINDS.values()} | {
        ("sparse_initializer", "values"),
        ("sparse_initializer", "indices"),
        ("sparse_tensor", "values"),
        ("sparse_tensor", "indices"),
        ("sparse_tensors", "values"),
        ("sparse_tensors", "indices"),
    }
    assert set(KINDS.values()) <= set(ALL_PATHS)


@PLACES
def test_no_file_outside_of_the_models_directory_is_read(place: tuple[str, ...], directory: Path) -> None:
    absolute = str(directory.parent / "secret")
    for location in ("../secret", absolute, "/etc/passwd", "out", "chain", "up/secret", "down/../../secret", "./../secret"):
        path = model_with(place, location, directory)
        before = driver_pids()
        with pytest.raises(aionn.CallerError, match=r"not inside the model's own directory|cannot be read") as caught:
            aionn.Model.from_onnx(path)
        assert location in str(caught.value)
        with pytest.raises(aionn.CallerError, match="give the model's path instead of its bytes"):
            aionn.Model.from_onnx(path.read_bytes())
        assert driver_pids() == before


@PLACES
def test_a_hard_link_inside_the_directory_is_read(place: tuple[str, ...], directory: Path) -> None:
    """Installers such as pip, uv and Hugging Face's make them."""
    os.link(directory.parent / "secret", directory / "weights.bin")
    read = aionn.Model.from_onnx(model_with(place, "weights.bin", directory))
    (tensor,) = tensors_of(onnx.ModelProto.FromString(read.graph))
    assert tensor.raw_data == CONTENT
    assert tensor.data_location != TensorProto.EXTERNAL
