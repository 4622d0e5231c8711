"""ONNX in, `Model` out: what is taken out of a graph, what stays, and what is refused with which words."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from aionn.errors import CallerError, CompilationError
from aionn.graph.arrays import constant_arrays
from aionn.graph.constants import embed_constants
from aionn.graph.reading import ReadGraph, read_onnx
from aionn.graph.shapes import resolve_shapes
from aionn.graph.wire import Survey, WireError, survey
from aionn.hal import CONSTANT_COPY_BYTES, IMemory, MemoryDescription, MemoryKind, Model, Operand, OperandType, ValueKind, ValueType
from aionn.testing.models import identity_model
from tests.engines.onnx_graphs import attribute, branching, identity, matmul, model_of, returning_constants, value, weights
from tests.real_models import FILES, carried


class Pool:
    """A pool on the heap."""

    def __init__(self, size_bytes: int) -> None:
        self.content = bytearray(size_bytes)
        self.size_bytes = size_bytes
        self.description = MemoryDescription(MemoryKind.ASHMEM, size_bytes)

    def fileno(self) -> int:
        raise AssertionError("reading a graph needs no descriptor")

    def view(self) -> memoryview:
        return memoryview(self.content)


def read(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> ReadGraph:
    return read_onnx(source.SerializeToString() if isinstance(source, onnx.ModelProto) else source, Pool)


def as_model(graph: ReadGraph) -> Model:
    return Model(
        graph=graph.graph,
        inputs=graph.inputs,
        outputs=graph.outputs,
        operations=graph.operations,
        constants=graph.constants,
        pools=graph.pools,
        token=graph.token,
    )


def test_large_constants_lie_aligned_in_one_pool_and_small_ones_stay() -> None:
    small, large, other = np.arange(32, dtype=np.float32), weights(1, 33), weights(32, 33)
    nodes = [
        helper.make_node("Add", ["x", "small"], ["a"]),
        helper.make_node("MatMul", ["a", "other"], ["b"]),
        helper.make_node("Add", ["b", "large"], ["y"]),
    ]
    constants = {"small": small, "large": large, "other": other}
    graph = read(model_of(nodes, [value("x", [1, 32])], [value("y", [1, 33])], constants))

    assert small.nbytes == CONSTANT_COPY_BYTES
    assert [constant.name for constant in graph.constants] == ["large", "other"]
    assert len(graph.pools) == 1
    assert all(constant.location.offset % 64 == 0 for constant in graph.constants)
    arrays = constant_arrays(as_model(graph))
    np.testing.assert_array_equal(arrays["large"], large)
    np.testing.assert_array_equal(arrays["other"], other)
    kept = {tensor.name: tensor for tensor in onnx.ModelProto.FromString(graph.graph).graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(kept["small"]), small)
    assert kept["other"].data_location == TensorProto.EXTERNAL
    assert {entry.key: entry.value for entry in kept["large"].external_data} == {"location": "pool:0", "offset": "0", "length": "132"}
    assert len(graph.graph) < 1000


def test_a_model_without_large_constants_needs_no_pool() -> None:
    def refuse(size_bytes: int) -> IMemory:
        raise AssertionError(f"{size_bytes} bytes asked for")

    assert read_onnx(identity(TensorProto.FLOAT).SerializeToString(), refuse).pools == ()


@pytest.mark.parametrize("kind", [kind for kind in OperandType if kind.in_numpy])
def test_constants_in_typed_fields_come_out_as_those_in_raw_data(kind: OperandType) -> None:
    array = (np.arange(200) % 2).astype(kind.dtype)
    typed = helper.make_tensor("c", helper.np_dtype_to_tensor_dtype(kind.dtype), [200], array.tolist())
    raw = numpy_helper.from_array(array, "c")
    for tensor in (typed, raw):
        model = model_of([helper.make_node("Identity", ["c"], ["y"])], [], [value("y", [200], tensor.data_type)])
        model.graph.initializer.append(tensor)
        graph = read(model)
        np.testing.assert_array_equal(constant_arrays(as_model(graph))["c"], array)


@pytest.mark.parametrize(("kind", "size_bytes"), [(TensorProto.BFLOAT16, 800), (TensorProto.INT4, 200), (TensorProto.FLOAT8E4M3FN, 400)])
def test_constants_of_types_that_numpy_lacks_stay_inside(kind: int, size_bytes: int) -> None:
    model = model_of([helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT)], [], [value("y", [400])])
    content = random.Random(0).randbytes(size_bytes)
    model.graph.initializer.append(helper.make_tensor("c", kind, [400], content, raw=True))
    original = model.graph.initializer[0].SerializeToString()
    graph = read(model)
    assert graph.constants == ()
    assert onnx.ModelProto.FromString(graph.graph).graph.initializer[0].SerializeToString() == original


def test_strings_stay_inside() -> None:
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], [value("x", [1])], [value("y", [1])])
    model.graph.initializer.append(numpy_helper.from_array(np.array(["long enough"] * 100, object), "words"))
    assert read(model).constants == ()


def test_constant_nodes_become_initializers() -> None:
    w = weights(8, 8)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w)),
        helper.make_node("Constant", [], ["b"], value_floats=[0.5] * 64),
        helper.make_node("Constant", [], ["s"], value_ints=[8, 8]),
        helper.make_node("Reshape", ["b", "s"], ["c"]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "c"], ["y"]),
    ]
    graph = read(model_of(nodes, [value("x", [8, 8])], [value("y", [8, 8])]))
    assert [constant.name for constant in graph.constants] == ["w", "b"]
    assert [operation.op_type for operation in graph.operations] == ["Constant", "Reshape", "MatMul", "Add"]


@pytest.mark.parametrize("condition", [True, False])
def test_constants_of_branches_are_hoisted_and_still_read_by_their_own_branch(condition: bool) -> None:
    model = branching()
    graph = read(model)
    assert len(graph.constants) == len({constant.name for constant in graph.constants}) == 2
    feed = {"x": weights(2, 8, 7), "condition": np.array(condition)}
    assert_same(model, graph, feed)


@pytest.mark.parametrize("condition", [True, False])
def test_a_constant_that_is_an_output_leaves_an_identity_behind(condition: bool) -> None:
    model = returning_constants()
    graph = read(model)
    assert len(graph.constants) == 3
    assert_same(model, graph, {"condition": np.array(condition)})


def test_the_constants_of_a_loop_in_a_loop_are_hoisted() -> None:
    def loop(name: str, carried_in: str, inside: list[onnx.NodeProto], result: str) -> onnx.NodeProto:
        inputs = [value(f"{name}_i", [], TensorProto.INT64), value(f"{name}_c", [], TensorProto.BOOL), value(f"{name}_v", [8, 8])]
        keep = helper.make_node("Identity", [f"{name}_c"], [f"{name}_go"])
        outputs = [value(f"{name}_go", [], TensorProto.BOOL), value(result, [8, 8])]
        graph = helper.make_graph([keep, *inside], name, inputs, outputs, [numpy_helper.from_array(weights(8, 8, len(name)), f"{name}_w")])
        return helper.make_node("Loop", ["times", "", carried_in], [f"{name}_y"], name=name, body=graph)

    inner = loop("in", "outer_v", [helper.make_node("MatMul", ["in_v", "in_w"], ["in_r"])], "in_r")
    outer = loop("outer", "x", [inner, helper.make_node("MatMul", ["in_y", "outer_w"], ["outer_r"])], "outer_r")
    model = model_of([outer], [value("x", [8, 8])], [value("outer_y", [8, 8])], {"times": np.array(2, np.int64)})
    graph = read(model)
    assert sorted(constant.name for constant in graph.constants) == ["in_w", "outer_w"]
    assert_same(model, graph, {"x": weights(8, 8, 9)})


def assert_same(original: onnx.ModelProto, graph: ReadGraph, feed: dict[str, np.ndarray]) -> None:
    """The original and the model with its constants put back compute the same."""
    whole = embed_constants(as_model(graph))
    onnx.checker.check_model(whole)
    want, got = (ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed) for m in (original, whole))
    for expected, found in zip(want, got, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_initializer_is_no_input_and_cannot_be_overridden() -> None:
    model = matmul()
    model.ir_version = 3
    model.graph.input.append(value("w", [8, 8]))
    graph = read(model)
    assert list(graph.inputs) == ["x"]
    skeleton = onnx.ModelProto.FromString(graph.graph)
    assert [i.name for i in skeleton.graph.input] == ["x"]
    assert skeleton.ir_version == 4


def test_a_constant_that_nothing_reads_is_dropped() -> None:
    model = matmul()
    model.graph.initializer.append(numpy_helper.from_array(weights(9, 9), "unread"))
    assert [constant.name for constant in read(model).constants] == ["w"]


def test_borders_tell_type_extents_symbols_and_rank() -> None:
    node = helper.make_node("Identity", ["a"], ["y"])
    open_axis = value("b", [None, 3, "?", "N"], TensorProto.INT64)
    inputs = [value("a", ["N", 3], TensorProto.FLOAT16), open_axis, value("c", None), value("d", [])]
    graph = read(model_of([node], inputs, [value("y", ["N", 3], TensorProto.FLOAT16)]))
    assert list(graph.inputs) == ["a", "b", "c", "d"]
    assert graph.inputs["a"] == Operand(OperandType.FLOAT16, (0, 3), ("N", None))
    assert graph.inputs["b"] == Operand(OperandType.INT64, (0, 3, 0, 0), (None, None, None, "N"))
    assert graph.inputs["c"] == Operand(OperandType.FLOAT32, None)
    assert graph.inputs["d"] == Operand(OperandType.FLOAT32, ())
    assert graph.outputs["y"] == graph.inputs["a"]


def test_every_operation_has_a_name_and_the_skeleton_knows_it() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"], name="mine"),
        helper.make_node("Abs", ["b"], ["y"]),
    ]
    graph = read(model_of(nodes, [value("x", [1])], [value("y", [1])]))
    assert [operation.name for operation in graph.operations] == ["Relu_0", "mine", "Abs_2"]
    assert [node.name for node in onnx.ModelProto.FromString(graph.graph).graph.node] == ["Relu_0", "mine", "Abs_2"]


# --- weights beside the model ----------------------------------------------------------------------------------------


def test_weights_beside_the_model_are_read_and_count_for_the_token(tmp_path: Path) -> None:
    inside = matmul(16, 16)
    path = tmp_path / "model.onnx"
    onnx.save_model(inside, path, save_as_external_data=True, location="model.weights", size_threshold=0)
    graph = read(path)
    np.testing.assert_array_equal(constant_arrays(as_model(graph))["w"], weights(16, 16))
    assert graph.token == read(path).token
    (tmp_path / "model.weights").write_bytes(weights(16, 16)[::-1].tobytes())
    assert graph.token != read(path).token


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(matmul(), path, save_as_external_data=True, location="model.weights", size_threshold=0)
    (tmp_path / "model.weights").unlink()
    with pytest.raises(CallerError, match=r"constant 'w' lies in the file 'model.weights', which cannot be read"):
        read(path)
    with pytest.raises(CallerError, match="give the model's path instead of its bytes"):
        read(path.read_bytes())


def test_a_weights_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(matmul(), path, save_as_external_data=True, location="model.weights", size_threshold=0)
    os.truncate(tmp_path / "model.weights", 100)
    with pytest.raises(CallerError, match="the file has 100"):
        read(path)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "inner/../../secret", "link", ""])
def test_weights_outside_the_models_directory_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(256))
    home = tmp_path / "home"
    home.mkdir()
    (home / "link").symlink_to(tmp_path / "secret")
    model = matmul()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (home / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CallerError, match="not inside the model's own directory"):
        read(home / "model.onnx")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_no_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    os.mkfifo(tmp_path / "fifo.onnx")
    for name, words in [
        ("missing.onnx", "there is no such file"),
        ("", r"': this is not a file; give the path of an ONNX file \(\.onnx\)$"),
        ("fifo.onnx", "this is not a file"),
        ("empty.onnx", "it is empty"),
        ("nul\0", "cannot be read"),
    ]:
        with pytest.raises(CallerError, match=words) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_what_is_neither_a_path_nor_bytes_is_refused() -> None:
    with pytest.raises(CallerError, match="model of type int: give the path of an ONNX file"):
        read(5)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(matmul().SerializeToString())
    path.chmod(0)
    with pytest.raises(CallerError, match="cannot be read"):
        read(path)


@given(st.binary(min_size=1, max_size=300))
def test_random_bytes_are_no_model(content: bytes) -> None:
    with pytest.raises((CallerError, CompilationError)):
        read(content)


@pytest.mark.parametrize("content", [b"#!/bin/sh\necho hello\n" * 20, b"{}", b"\x89PNG\r\n\x1a\n" + bytes(500), b"PK\x03\x04" + bytes(500)])
def test_other_files_are_no_model(content: bytes) -> None:
    with pytest.raises(CallerError, match="not an ONNX model"):
        read(content)


WHOLE = matmul().SerializeToString()


@given(st.integers(1, len(WHOLE) - 1))
def test_a_cut_model_is_refused(cut: int) -> None:
    with pytest.raises((CallerError, CompilationError)):
        read(WHOLE[:cut])


@settings(max_examples=300)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused_but_never_crashes(at: int, byte: int) -> None:
    changed = bytearray(WHOLE)
    changed[at] = byte
    with suppress(CallerError, CompilationError):
        read(bytes(changed))


def test_a_model_without_operator_set_is_refused() -> None:
    model = matmul()
    del model.opset_import[:]
    with pytest.raises(CallerError, match="opset_import"):
        read(model)


def test_a_model_without_graph_is_refused() -> None:
    with pytest.raises(CallerError, match="lacks a graph"):
        read(helper.make_model(onnx.GraphProto(), ir_version=8))


def test_a_message_nested_too_deep_is_refused() -> None:
    content = b""
    for _ in range(3000):  # graph in attribute in node in graph ...
        for tag in (0x32, 0x2A, 0x0A):
            content = bytes([tag]) + varint(len(content)) + content
    with pytest.raises(WireError, match="nested"):
        surveyed_bytes(b"\x3a" + varint(len(content)) + content)


def surveyed_bytes(content: bytes) -> Survey:
    return survey(lambda offset, length: content[offset : offset + length], len(content))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_a_broken_graph_names_the_node() -> None:
    x, y = value("x", [1]), value("y", [1])
    reads = model_of([helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Abs", ["nowhere"], ["y"])], [x], [y])
    doubles = model_of([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"], name="second")], [x], [y])
    inputs = model_of([helper.make_node("Relu", ["x"], ["y"])], [x, x], [y])
    constants = matmul()
    constants.graph.initializer.append(constants.graph.initializer[0])
    unmade = model_of([helper.make_node("Relu", ["x"], ["a"])], [x], [y])
    nested = branching()
    attribute(nested.graph.node[0], "then_branch").g.node[0].input[0] = "nowhere"
    for model, node, words in [
        (reads, "Abs_1", "'nowhere', which nothing makes"),
        (doubles, "second", "'y', which is made elsewhere"),
        (inputs, None, "input 'x' is there twice"),
        (constants, None, "initializer 'w' is there twice"),
        (unmade, None, "output 'y' is made by no node"),
        (nested, None, "'nowhere', which nothing makes"),
    ]:
        with pytest.raises(CompilationError, match=words) as caught:
            read(model)
        if node is not None:
            assert caught.value.node == node
    assert caught.value.node is not None
    assert caught.value.node.startswith("choose/")


def test_a_border_that_cannot_cross_is_named() -> None:
    sparse = identity(TensorProto.FLOAT)
    sparse.graph.input[0].CopyFrom(helper.make_sparse_tensor_value_info("x", TensorProto.FLOAT, [1]))
    deep = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    for _ in range(9):
        deep = helper.make_sequence_type_proto(deep)
    nested = model_of([helper.make_node("Identity", ["x"], ["y"])], [helper.make_value_info("x", deep)], [value("y", [1])])
    keyed = helper.make_map_type_proto(TensorProto.FLOAT, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    floats = model_of([helper.make_node("Identity", ["x"], ["y"])], [helper.make_value_info("x", keyed)], [value("y", [1])])
    untyped = matmul()
    untyped.graph.output[0].ClearField("type")
    for model, words in [
        (sparse, "input 'x' is a sparse tensor"),
        (nested, "at most 8"),
        (floats, "keys of type float32"),
        (untyped, "output 'y' has no type"),
    ]:
        with pytest.raises(CompilationError, match=words):
            read(model)


@pytest.mark.parametrize("kind", list(OperandType), ids=lambda kind: kind.value)
def test_every_element_type_crosses_the_border_with_its_own_dtype(kind: OperandType) -> None:
    graph = read(identity(helper.np_dtype_to_tensor_dtype(kind.dtype)))
    assert graph.inputs["x"].type is graph.outputs["y"].type is kind
    if kind is OperandType.STRING:
        assert (kind.dtype.name, kind.element_bytes, graph.inputs["x"].size_bytes) == ("object", 0, None)
    else:
        assert kind.dtype.name == kind.value
        assert kind.dtype.itemsize == kind.element_bytes


def test_sequences_maps_and_optionals_keep_their_types_at_the_border() -> None:
    """Names of open dimensions inside them say nothing, because the tensors of one sequence may differ."""
    row = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    held = helper.make_optional_type_proto(helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.INT64, ["N", 2])))
    ends = [helper.make_value_info("rows", helper.make_sequence_type_proto(row)), helper.make_value_info("held", held)]
    names = [(end.name, f"{end.name}_out") for end in ends]
    nodes = [helper.make_node("Identity", [name], [out]) for name, out in names]
    graph = read(model_of(nodes, ends, [helper.make_value_info(out, end.type) for (_, out), end in zip(names, ends, strict=True)]))
    of_rows = ValueType(ValueKind.MAP, Operand(OperandType.FLOAT32, None), OperandType.STRING)
    numbers = ValueType(ValueKind.SEQUENCE, Operand(OperandType.INT64, (0, 2)))
    expected = [ValueType(ValueKind.SEQUENCE, of_rows), ValueType(ValueKind.OPTIONAL, numbers)]
    assert [*graph.inputs.values()] == [*graph.outputs.values()] == expected
    assert [str(operand) for operand in expected] == ["sequence(map(string, float32))", "optional(sequence(int64))"]
    assert not any(operand.in_frames for operand in expected)


def test_a_constant_of_the_wrong_length_is_named() -> None:
    model = matmul()
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    with pytest.raises(CompilationError, match="constant 'w' has 252 bytes; its type float32 and shape \\(8, 8\\) need 256"):
        read(model)


# --- token -----------------------------------------------------------------------------------------------------------


def test_the_token_is_the_same_in_every_process_and_at_every_path(tmp_path: Path) -> None:
    one, other = tmp_path / "one.onnx", tmp_path / "other" / "two.onnx"
    other.parent.mkdir()
    one.write_bytes(branching().SerializeToString())
    other.write_bytes(one.read_bytes())
    program = "import sys; from aionn.runtime.model import Model; print(Model.from_onnx(sys.argv[1]).token.hex())"
    tokens = set()
    for path, seed in ((one, "1"), (other, "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True, env=environment)
        tokens.add(ended.stdout)
    assert tokens == {read(one).token.hex() + "\n"}


@given(st.integers(0, 255), st.integers(1, 255))
def test_every_byte_of_a_constant_counts(at: int, change: int) -> None:
    model = matmul()
    content = bytearray(model.graph.initializer[0].raw_data)
    content[at] ^= change
    model.graph.initializer[0].raw_data = bytes(content)
    assert read(model).token != read(matmul()).token


def test_the_graph_counts_and_bytes_cannot_move_between_constants() -> None:
    def two(first: bytes, second: bytes) -> bytes:
        constants = {"a": np.frombuffer(first, np.uint8), "b": np.frombuffer(second, np.uint8)}
        node = helper.make_node("Concat", ["a", "b"], ["y"], axis=0)
        return read(model_of([node], [], [value("y", [None], TensorProto.UINT8)], constants)).token

    content = random.Random(0).randbytes(400)
    renamed = matmul()
    renamed.graph.node[0].name = "another"
    tokens = [two(content[:at], content[at:]) for at in (200, 192, 208)]
    tokens += [two(content[200:], content[:200]), read(renamed).token, read(matmul()).token]
    assert len(set(tokens)) == len(tokens)
    assert {len(token) for token in tokens} == {32}


# --- shapes ----------------------------------------------------------------------------------------------------------

F32 = OperandType.FLOAT32


def test_shapes_resolve_through_symbols() -> None:
    inputs = {"a": Operand(F32, (0, 3, 0), ("N", None, "W")), "b": Operand(F32, (0, 0), ("N", "M")), "c": Operand(F32, None)}
    outputs = {
        "fixed": Operand(F32, (2, 4)),
        "scalar": Operand(F32, ()),
        "batch": Operand(F32, (0, 7), ("N", None)),
        "both": Operand(F32, (0, 0), ("W", "M")),
        "foreign": Operand(F32, (0, 1), ("Q", None)),
        "nameless": Operand(F32, (0, 1)),
        "rankless": Operand(F32, None),
    }
    assert resolve_shapes(outputs, inputs, {"a": (5, 3, 9), "b": (5, 2), "c": (1,)}) == {
        "fixed": (2, 4),
        "scalar": (),
        "batch": (5, 7),
        "both": (9, 2),
        "foreign": None,
        "nameless": None,
        "rankless": None,
    }


def test_a_symbol_about_which_inputs_disagree_is_not_known() -> None:
    inputs = {"a": Operand(F32, (0,), ("N",)), "b": Operand(F32, (0,), ("N",))}
    outputs = {"y": Operand(F32, (0,), ("N",))}
    assert resolve_shapes(outputs, inputs, {"a": (5,), "b": (6,)}) == {"y": None}
    assert resolve_shapes(outputs, inputs, {"a": (5,)}) == {"y": (5,)}


def test_an_empty_axis_is_an_extent() -> None:
    assert resolve_shapes({"y": Operand(F32, (0,), ("N",))}, {"a": Operand(F32, (0,), ("N",))}, {"a": (0,)}) == {"y": (0,)}


# --- real models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FILES if FILES[name][1].endswith(".onnx")])
def test_a_real_model_is_whole_again_with_its_constants_inside(name: str) -> None:
    path = carried(name)
    graph = read(path)
    whole = embed_constants(as_model(graph))
    onnx.checker.check_model(whole)
    assert len(graph.graph) < path.stat().st_size / 4
    again = {tensor.name: tensor for tensor in whole.graph.initializer}
    original = onnx.load(path)
    for tensor in original.graph.initializer:
        if tensor.name in again:
            np.testing.assert_array_equal(numpy_helper.to_array(again[tensor.name]), numpy_helper.to_array(tensor))


def test_reading_a_large_model_needs_its_size_twice_at_most(tmp_path: Path) -> None:
    """100 MB in one weight and 100 MB in four: the peak of the process grows by no more than source and pool, and a little."""
    path = tmp_path / "large.onnx"
    constants = {"w0": np.zeros((25_000_000,), np.float32)}
    path.write_bytes(model_of([helper.make_node("Identity", ["w0"], ["y"])], [], [value("y", [25_000_000])], constants).SerializeToString())
    program = """if True:
        import resource, sys
        from aionn.runtime.model import Model
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = peak(); model = Model.from_onnx(sys.argv[1]); print(peak() - before)
    """
    grown = int(subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True).stdout)
    assert grown < 2.1 * path.stat().st_size


@pytest.mark.parametrize("name", [b"Identity", b"input_out", b"batch", b"identity_input"])
def test_a_name_that_is_no_text_is_refused(name: bytes) -> None:
    content = identity_model({"input": ("batch", 16)})
    assert name in content
    with pytest.raises(CallerError, match="not UTF-8"):
        read(content.replace(name, b"\xff" + name[1:]))
