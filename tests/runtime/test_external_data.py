"""Weights outside the model: read wherever ONNX lets a tensor stand, from files beside the model alone, and part of the token."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

import aionn
from aionn.caching.outcomes import CacheOutcomeKind
from aionn.graph.arrays import constant_arrays
from aionn.hal import CONSTANT_COPY_BYTES
from tests.engines.onnx_graphs import body, model_of, value

HIT, MISS = CacheOutcomeKind.HIT, CacheOutcomeKind.MISS
FILE = "weights.bin"
N = 64
"""Floats: more bytes than a constant may have that stays in the graph anyway."""
Tensors = list[TensorProto]


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def tensor(content: NDArray[Any], name: str = "") -> TensorProto:
    return numpy_helper.from_array(content, name)


def floats(seed: int, count: int = N) -> NDArray[np.float32]:
    return np.random.default_rng(seed).integers(1, 100, count).astype(np.float32)


# Each makes y of x and of tensors that are not initializers of the main graph, and says what y - x is.


def in_a_function(seed: int) -> tuple[ModelProto, NDArray[Any]]:
    w = floats(seed)
    inner = [helper.make_node("Constant", [], ["w"], value=tensor(w)), helper.make_node("Add", ["a", "w"], ["b"])]
    function = helper.make_function("local", "AddWeights", ["a"], ["b"], inner, [helper.make_opsetid("", 17)])
    model = model_of([helper.make_node("AddWeights", ["x"], ["y"], domain="local")], *border(), domains=("local",), functions=[function])
    return model, w


def as_the_value_of_constant_of_shape(seed: int) -> tuple[ModelProto, NDArray[Any]]:
    number = floats(seed, 1)
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["c"], name="fill", value=tensor(number)),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    return model_of(nodes, *border(), {"shape": np.array([N])}), np.full(N, number)


def in_nested_branches(seed: int) -> tuple[ModelProto, NDArray[Any]]:
    """A large initializer and a small one, and a large and a small Constant node, all in a branch of a branch."""
    parts = [floats(seed), floats(seed + 1, 1), floats(seed + 2), floats(seed + 3, 1)]
    nodes = [
        helper.make_node("Constant", [], ["c"], value=tensor(parts[2])),
        helper.make_node("Constant", [], ["d"], value=tensor(parts[3])),
        helper.make_node("Sum", ["x", "a", "b", "c", "d"], ["t"]),
    ]
    inner = body("inner", nodes, "t", {"a": parts[0], "b": parts[1]})
    other = body("other", [helper.make_node("Identity", ["x"], ["u"])], "u")
    outer = body("outer", [helper.make_node("If", ["yes"], ["v"], then_branch=inner, else_branch=other)], "v")
    another = body("another", [helper.make_node("Identity", ["x"], ["z"])], "z")
    choose = helper.make_node("If", ["yes"], ["y"], then_branch=outer, else_branch=another)
    return model_of([choose], *border(), {"yes": np.array(True)}), sum(parts[1:], parts[0])


def as_a_sparse_initializer(seed: int) -> tuple[ModelProto, NDArray[Any]]:
    values, indices = floats(seed, 40), np.sort(np.random.default_rng(seed).permutation(N)[:40]).astype(np.int64)
    model = model_of([helper.make_node("Add", ["x", "s"], ["y"])], *border())
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor(values, "s"), tensor(indices), [N]))
    dense = np.zeros(N, np.float32)
    dense[indices] = values
    return model, dense


def as_an_attribute_of_another_operator(seed: int) -> tuple[ModelProto, NDArray[Any]]:
    """A tensor attribute of many bytes, of an operator that is not Constant."""
    keys, values = np.arange(N, dtype=np.int64), floats(seed)
    encoder = helper.make_node("LabelEncoder", ["keys"], ["c"], domain="ai.onnx.ml", name="encoder")
    encoder.attribute.extend([helper.make_attribute("keys_tensor", tensor(keys)), helper.make_attribute("values_tensor", tensor(values))])
    encoder.attribute.append(helper.make_attribute("default_tensor", tensor(np.zeros(1, np.float32))))
    model = model_of([encoder, helper.make_node("Add", ["x", "c"], ["y"])], *border(), {"keys": keys})
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 4))
    return model, values


def border() -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    return [value("x", [N])], [value("y", [N])]


PLACES: list[Callable[[int], tuple[ModelProto, NDArray[Any]]]] = [
    in_a_function,
    as_the_value_of_constant_of_shape,
    in_nested_branches,
    as_a_sparse_initializer,
    as_an_attribute_of_another_operator,
]
EACH_PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


def tensors_of(message: Any) -> Iterator[TensorProto]:
    """Every tensor in a message; here by `ListFields`, so that one walk checks the other."""
    for entry, content in message.ListFields():
        if entry.message_type is not None:
            for inner in content if entry.is_repeated else (content,):
                if isinstance(inner, TensorProto):
                    yield inner
                yield from tensors_of(inner)


def outside(model: ModelProto) -> list[TensorProto]:
    return [found for found in tensors_of(model) if found.data_location == TensorProto.EXTERNAL]


def save(model: ModelProto, directory: Path, location: str = FILE) -> int:
    """Write the model with every tensor's bytes in one file, except the main graph's initializers; return how many went out."""
    kept = {id(found) for found in model.graph.initializer}
    content = b""
    moved = 0
    for found in tensors_of(model):
        if id(found) not in kept and found.raw_data:
            found.data_location = TensorProto.EXTERNAL
            for key, word in (("location", location), ("offset", str(len(content))), ("length", str(len(found.raw_data)))):
                found.external_data.add(key=key, value=word)
            content += found.raw_data
            found.ClearField("raw_data")
            moved += 1
    directory.mkdir(exist_ok=True)
    (directory / location).write_bytes(content)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return moved


@EACH_PLACE
@pytest.mark.anyio
async def test_external_data_is_right_on_a_driver_and_a_changed_file_is_a_miss(
    place: Callable[[int], tuple[ModelProto, NDArray[Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = place(1)
    assert save(model, tmp_path / "model") > 0
    # A file of the same name in the working directory of app and driver, which is not the model's.
    decoy, wrong = place(50)
    save(decoy, tmp_path / "decoy")
    assert not np.array_equal(expected, wrong)
    monkeypatch.chdir(tmp_path / "decoy")
    x = floats(9)
    path = tmp_path / "model" / "model.onnx"
    async with aionn.Runtime() as runtime:

        async def run() -> tuple[CacheOutcomeKind, NDArray[Any]]:
            read = aionn.Model.from_onnx(path)
            compilation = await runtime.compile(read, devices=("onnxruntime",), cache_dir=tmp_path / "cache", token=read.token)
            return compilation.outcomes[0].kind, (await compilation.compute({"x": x}))["y"]

        for kind in (MISS, HIT):
            outcome, y = await run()
            assert outcome is kind
            np.testing.assert_array_equal(y, x + expected)
        changed, expected_now = place(20)
        save(changed, tmp_path / "changed")
        (tmp_path / "changed" / FILE).rename(tmp_path / "model" / FILE)
        outcome, y = await run()
        assert outcome is MISS
        np.testing.assert_array_equal(y, x + expected_now)


@EACH_PLACE
def test_a_model_given_as_bytes_reads_no_file(
    place: Callable[[int], tuple[ModelProto, NDArray[Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place(1)[0], tmp_path)
    monkeypatch.chdir(tmp_path)  # where the file lies
    with pytest.raises(aionn.CallerError, match="give the model's path instead of its bytes"):
        aionn.Model.from_onnx((tmp_path / "model.onnx").read_bytes())
    with open(tmp_path / FILE, "rb") as file:
        size = (tmp_path / FILE).stat().st_size
        memory = aionn.Memory.from_fd(file, size, mmap.PROT_READ)
        given = aionn.Model.from_onnx((tmp_path / "model.onnx").read_bytes(), memories={FILE: memory})
        memory.close()
    assert given.token == aionn.Model.from_onnx(tmp_path / "model.onnx").token


@EACH_PLACE
def test_every_byte_beside_the_model_counts_for_the_token(place: Callable[[int], tuple[ModelProto, NDArray[Any]]], tmp_path: Path) -> None:
    model = place(1)[0]
    save(model, tmp_path)
    assert outside(model)
    apart = aionn.Model.from_onnx(tmp_path / "model.onnx")
    assert apart.token == aionn.Model.from_onnx(tmp_path / "model.onnx").token
    kept = {found.name for found in outside(onnx.ModelProto.FromString(apart.graph))}
    assert kept == {constant.name for constant in apart.constants}
    content = bytearray((tmp_path / FILE).read_bytes())
    for at in range(0, len(content), 61):
        content[at] ^= 1
        (tmp_path / FILE).write_bytes(content)
        assert aionn.Model.from_onnx(tmp_path / "model.onnx").token != apart.token
        content[at] ^= 1


def test_a_large_tensor_attribute_inside_the_model_stays_what_it_is() -> None:
    model = as_an_attribute_of_another_operator(1)[0]
    expected = [found.raw_data for found in tensors_of(model) if found.raw_data]
    read = aionn.Model.from_onnx(model.SerializeToString())
    assert read.token == aionn.Model.from_onnx(model.SerializeToString()).token
    stays = [found.raw_data for found in tensors_of(onnx.ModelProto.FromString(read.graph).graph.node[0])]
    assert len(stays) == 3
    assert max(map(len, stays)) > CONSTANT_COPY_BYTES
    assert {*stays} <= {*expected}


def paths_to_a_tensor(kind: Descriptor, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The names of fields that lead from a kind of message to a tensor; no kind is entered twice on one way but graphs and nodes."""
    for entry in kind.fields:
        inner = entry.message_type
        if inner is None or len(above) > 6:
            continue
        path = (*above, entry.name)
        if inner.full_name == TensorProto.DESCRIPTOR.full_name:
            yield path
        yield from paths_to_a_tensor(inner, path)


ALL_PATHS = list(paths_to_a_tensor(ModelProto.DESCRIPTOR))


def test_a_tensor_is_found_at_every_place_that_the_schema_has(tmp_path: Path) -> None:
    assert {("graph", "initializer"), ("graph", "sparse_initializer", "indices"), ("functions", "node", "attribute", "t")} <= {*ALL_PATHS}
    assert {"training_info", "functions", "graph"} == {path[0] for path in ALL_PATHS}
    assert {"t", "tensors", "values", "indices", "initializer"} == {path[-1] for path in ALL_PATHS}
    (tmp_path / FILE).write_bytes(b"\7" * 4)
    for path in ALL_PATHS:
        model = model_of([helper.make_node("Identity", ["x"], ["y"])], *border())
        message: Any = model
        for name in path:
            child = getattr(message, name)
            message = child.add() if message.DESCRIPTOR.fields_by_name[name].is_repeated else child
        message.dims.append(4)
        message.data_type = TensorProto.UINT8
        message.data_location = TensorProto.EXTERNAL
        message.external_data.add(key="location", value=FILE)
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        read = onnx.ModelProto.FromString(aionn.Model.from_onnx(tmp_path / "model.onnx").graph)
        assert [found.raw_data for found in tensors_of(read)] == [b"\7" * 4], path
        assert not outside(read), path


def test_an_error_names_the_place_of_the_tensor(tmp_path: Path) -> None:
    words = {
        in_a_function: r"tensor of attribute 'value' of node 'Constant' of function 'AddWeights' lies in the file 'weights.bin'",
        as_the_value_of_constant_of_shape: r"tensor of attribute 'value' of node 'fill' of graph 'graph' lies in the file 'weights.bin'",
        as_a_sparse_initializer: r"tensor 's' of sparse tensor of graph 'graph' lies in the file 'weights.bin'",
    }
    for place, expected in words.items():
        save(place(1)[0], tmp_path)
        (tmp_path / FILE).unlink()
        with pytest.raises(aionn.CallerError, match=expected + ", which cannot be read"):
            aionn.Model.from_onnx(tmp_path / "model.onnx")


def test_bytes_of_the_wrong_number_are_refused_wherever_they_are(tmp_path: Path) -> None:
    model = as_the_value_of_constant_of_shape(1)[0]
    save(model, tmp_path)
    (found,) = outside(model)
    found.external_data[2].value = "3"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(aionn.CompilationError, match="node 'fill' of graph 'graph' has 3 bytes; its type float32 and shape"):
        aionn.Model.from_onnx(tmp_path / "model.onnx")


def test_more_than_a_graph_can_hold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    elements = 2**29
    large = TensorProto(data_type=TensorProto.FLOAT, dims=[elements], data_location=TensorProto.EXTERNAL)
    large.external_data.add(key="location", value=FILE)
    inner = [helper.make_node("Constant", [], ["w"], name="weights"), helper.make_node("Add", ["a", "w"], ["b"])]
    inner[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=large)
    function = helper.make_function("local", "AddWeights", ["a"], ["b"], inner, [helper.make_opsetid("", 17)])
    node = helper.make_node("AddWeights", ["x"], ["y"], domain="local")
    model = model_of([node], [value("x", [1])], [value("y", [elements])], domains=("local",), functions=[function])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / FILE, "wb") as file:
        file.truncate(4 * elements)  # a hole: no disk is used
    with pytest.raises(aionn.CompilationError, match="of node 'weights' of function 'AddWeights' has 2147483648 bytes"):
        aionn.Model.from_onnx(tmp_path / "model.onnx")


def test_what_a_tensor_carries_beside_external_data_does_not_count(tmp_path: Path) -> None:
    """`onnx.external_data_helper.convert_model_to_external_data` leaves the bytes in the message too; engines read the file."""
    for count in (4, N):
        model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], *border(), {"w": floats(1, count)})
        (found,) = model.graph.initializer
        if count == 4:
            found.CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [count], floats(1, count)))  # in float_data
        found.data_location = TensorProto.EXTERNAL
        found.external_data.add(key="location", value=FILE)
        (tmp_path / FILE).write_bytes(floats(2, count).tobytes())
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        read = aionn.Model.from_onnx(tmp_path / "model.onnx")
        if count == 4:
            (kept,) = onnx.ModelProto.FromString(read.graph).graph.initializer
            np.testing.assert_array_equal(numpy_helper.to_array(kept), floats(2, count))
        else:
            np.testing.assert_array_equal(constant_arrays(read)["w"], floats(2, count))


# --- which files are beside the model --------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


RIGHT, OTHER = floats(1).tobytes(), floats(2).tobytes()


def model_at(location: str | bytes) -> bytes:
    """A model whose weights lie in a file of that name."""
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], *border(), {"w": floats(1)})
    (found,) = model.graph.initializer
    found.ClearField("raw_data")
    found.data_location = TensorProto.EXTERNAL
    found.external_data.add(key="location", value=location if isinstance(location, str) else "replaced")
    content: bytes = model.SerializeToString()
    return content if isinstance(location, str) else content.replace(b"replaced", location)


def hugging_face(root: Path, folder: str = "") -> Path:
    """What `huggingface_hub` makes: links to files that have their digest for a name."""
    path = root / "snapshots" / "5b1d" / folder / "model.onnx"
    write(root / "blobs" / "aa", model_at("model.onnx_data"))
    write(root / "blobs" / "bb", RIGHT)
    up = "../../../" if folder else "../../"
    link(path, f"{up}blobs/aa")
    link(path.with_name("model.onnx_data"), f"{up}blobs/bb")
    return path


def hugging_face_in_a_folder(root: Path) -> Path:
    return hugging_face(root, "onnx")


def hugging_face_by_a_link_to_the_snapshot(root: Path) -> Path:
    hugging_face(root / "models--some--model")
    link(root / "apps" / "current", "../models--some--model/snapshots/5b1d")
    return root / "apps" / "current" / "model.onnx"


def a_link_to_the_model_alone(root: Path) -> Path:
    write(root / "store" / "model.onnx", model_at("weights/w.bin"))
    write(root / "store" / "weights" / "w.bin", RIGHT)
    link(root / "app" / "model.onnx", "../store/model.onnx")
    return root / "app" / "model.onnx"


def links_to_everything_in_another_tree(root: Path) -> Path:
    path = a_link_to_the_model_alone(root)
    link(root / "app" / "weights" / "w.bin", "../../store/weights/w.bin")
    return path


def a_link_to_the_model_beside_its_weights(root: Path) -> Path:
    path = a_link_to_the_model_alone(root)
    write(root / "store" / "weights" / "w.bin", OTHER)
    write(root / "app" / "weights" / "w.bin", RIGHT)  # an engine reads this one, too
    return path


def a_link_to_weights_in_the_models_directory(root: Path) -> Path:
    write(root / "model.onnx", model_at("w.bin"))
    write(root / "deep" / "down" / "w-2.bin", RIGHT)
    link(root / "w.bin", "w-1.bin")
    link(root / "w-1.bin", "deep/down/w-2.bin")
    return root / "model.onnx"


def links_of_links(root: Path) -> Path:
    """As a volume of Kubernetes has them."""
    write(root / "..2026" / "model.onnx", model_at("w.bin"))
    write(root / "..2026" / "w.bin", RIGHT)
    link(root / "..data", "..2026")
    link(root / "model.onnx", "..data/model.onnx")
    link(root / "w.bin", "..data/w.bin")
    return root / "model.onnx"


BESIDE = [
    hugging_face,
    hugging_face_in_a_folder,
    hugging_face_by_a_link_to_the_snapshot,
    a_link_to_the_model_alone,
    links_to_everything_in_another_tree,
    a_link_to_the_model_beside_its_weights,
    a_link_to_weights_in_the_models_directory,
    links_of_links,
]


@pytest.mark.parametrize("layout", BESIDE, ids=lambda layout: layout.__name__)
def test_weights_beside_the_model_or_beside_its_real_path_are_read(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    path = layout(tmp_path)
    content = aionn.Model.from_onnx(path)
    (place,) = content.constants
    assert content.pools[0].view()[place.location.offset :][: place.location.length] == RIGHT
    write(tmp_path / "plain" / "model.onnx", path.read_bytes())
    location = tensors_of(onnx.ModelProto.FromString(path.read_bytes()))
    write(tmp_path / "plain" / next(location).external_data[0].value, RIGHT)
    assert content.token == aionn.Model.from_onnx(tmp_path / "plain" / "model.onnx").token


@pytest.mark.anyio
async def test_a_model_of_hugging_faces_cache_runs_and_is_cached(tmp_path: Path) -> None:
    path, x = hugging_face(tmp_path / "hub"), floats(9)
    async with aionn.Runtime() as runtime:
        for kind in (MISS, HIT):
            model = aionn.Model.from_onnx(path)
            compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=tmp_path / "cache", token=model.token)
            assert compilation.outcomes[0].kind is kind
            np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], x + floats(1))


def of_a_snapshot(location: str | bytes, **links: str) -> Callable[[Path], Path]:
    """A layout like Hugging Face's whose model names that file, with links of these names and targets beside the model."""

    def layout(root: Path) -> Path:
        path = hugging_face(root)
        write(root / "blobs" / "aa", model_at(location))
        write(root / "blobs" / "deep" / "cc", RIGHT)
        write(root / "secret", RIGHT)
        link(root / "blobs" / "out", "../secret")
        for name, target in links.items():
            link(path.with_name(name), target)
        return path

    return layout


NOT_INSIDE = "not inside the model's own directory"
REFUSED = {
    "the blob by its own name upwards": (of_a_snapshot("../../blobs/bb"), NOT_INSIDE),
    "up and down again": (of_a_snapshot("../5b1d/model.onnx_data"), NOT_INSIDE),
    "down and up again": (of_a_snapshot("down/../model.onnx_data"), NOT_INSIDE),
    "nothing": (of_a_snapshot(""), NOT_INSIDE),
    "the directory": (of_a_snapshot("."), NOT_INSIDE),
    "a link that leaves both": (of_a_snapshot("w", w="../../secret"), NOT_INSIDE),
    "a link that leaves both by way of the blobs": (of_a_snapshot("w", w="../../blobs/out"), NOT_INSIDE),
    "a link to the model's real directory": (of_a_snapshot("w", w="../../blobs"), NOT_INSIDE),
    "a link below the model's real directory": (of_a_snapshot("w", w="../../blobs/deep/cc"), NOT_INSIDE),
    "a file by a link to a directory": (of_a_snapshot("w/secret", w="../.."), NOT_INSIDE),
    "a link that leaves both in the real directory": (of_a_snapshot("out"), NOT_INSIDE),
    "a link that leaves both before a good file": (of_a_snapshot("bb", bb="../../secret"), NOT_INSIDE),
    "a link to nothing before a good file": (of_a_snapshot("bb", bb="../../blobs/dd"), "cannot be read .No such file"),
    "a link in a circle": (of_a_snapshot("w", w="w"), "cannot be read"),
    "a directory": (of_a_snapshot("deep"), "not a file"),
    "a file that is not there": (of_a_snapshot("dd"), "cannot be read .No such file"),
    "a name with a zero in it": (of_a_snapshot("a\0b"), "cannot be read"),
    "a name that is too long": (of_a_snapshot("n" * 5000), "cannot be read"),
    "a name that is not UTF-8": (of_a_snapshot(b"\xff" * 8), "not UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_beside_the_model_is_refused(name: str, tmp_path: Path) -> None:
    layout, words = REFUSED[name]
    with pytest.raises(aionn.CallerError, match=words) as caught:
        aionn.Model.from_onnx(layout(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_absolute_name_is_refused_even_of_a_file_beside_the_model(tmp_path: Path) -> None:
    path = hugging_face(tmp_path)
    for beside in (tmp_path / "blobs" / "bb", path.with_name("model.onnx_data")):
        write(tmp_path / "blobs" / "aa", model_at(str(beside)))
        assert beside.read_bytes() == RIGHT
        with pytest.raises(aionn.CallerError, match=NOT_INSIDE):
            aionn.Model.from_onnx(path)


def test_a_pipe_beside_the_model_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    path = hugging_face(tmp_path)
    write(tmp_path / "blobs" / "aa", model_at("pipe"))
    os.mkfifo(path.with_name("pipe"))
    with pytest.raises(aionn.CallerError, match="not a file"):
        aionn.Model.from_onnx(path)
