"""Random ONNX models that ONNX Runtime runs, with inputs for them and what plain ONNX Runtime makes of these.

`drawn(seed)` gives the same case for the same seed. A case is made of blocks, and each block is one feature of ONNX that a test counts.
Axes are numbers or symbols. The extents of symbols differ between the two sets of inputs that a case has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from aionn.engines.elements import PACKED_BITS, pack
from aionn.hal import OperandType

FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
OPSET, IR_VERSION = 25, 13
NUMBERS: dict[int, OperandType] = {
    int(helper.np_dtype_to_tensor_dtype(kind.dtype)): kind
    for kind in OperandType
    # ONNX Runtime has no kernels for tensors of these.
    if kind.value not in ("string", "complex64", "complex128", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
}
"""Element types of numbers, by ONNX's number."""
IN_NUMPY = {number for number, kind in NUMBERS.items() if kind.in_numpy}
EXTENTS = {"N": (2, 3), "M": (1, 4), "K": (3, 0), "Z": (0, 2)}
"""Symbols of open axes, and their extents in the first and the second set of inputs."""
SETS = 2

Shape = tuple[int | str, ...]
Feed = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph under construction: its name, ONNX's element type, and its shape with symbols."""

    name: str
    element: int
    shape: Shape


@dataclass
class Case:
    """A model with inputs.

    Attributes:
        feeds: sets of inputs. Some leave out inputs that have defaults.
        features: names of what the model has.
        values: whether an input or output is not a tensor of numbers.
        lacking: the same, and an output has a type that NumPy lacks. ONNX Runtime then gives no outputs to Python.
    """

    seed: int
    model: ModelProto
    feeds: list[Feed]
    features: set[str]
    values: bool
    lacking: bool

    def print(self) -> str:
        """Return the model in words."""
        return f"seed {self.seed}:\n{onnx.printer.to_text(self.model)}"

    def save(self, folder: Path) -> Path:
        """Write the model to a file, with its weights beside it if that is one of its features."""
        folder.mkdir(parents=True)
        path = folder / "model.onnx"
        if "external data" in self.features:
            copy = ModelProto.FromString(self.model.SerializeToString())
            onnx.save_model(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
        else:
            path.write_bytes(self.model.SerializeToString())
        return path


class Impossible(Exception):
    """Plain ONNX Runtime refuses what was drawn."""


def drawn(seed: int, wanted: str = "") -> tuple[Case, list[dict[str, Any]]]:
    """Return a case, and for each set of inputs what plain ONNX Runtime makes of it. `wanted`: a block that the case has.

    A draw that plain ONNX Runtime refuses is drawn again.
    """
    for attempt in range(50):
        case = _Drawing(seed, attempt, wanted).case()
        try:
            return case, [plain(case.model, feed) for feed in case.feeds]
        except Impossible:
            continue
    raise AssertionError(f"seed {seed}: plain ONNX Runtime refuses 50 graphs one after the other")


def plain(model: ModelProto, feed: Feed) -> dict[str, Any]:
    """Return what plain ONNX Runtime makes. Tensors of types that NumPy lacks come out as float32."""
    copy = ModelProto.FromString(model.SerializeToString())
    graph, given = copy.graph, dict(feed)
    for value in graph.input:
        if _lacking(value) and value.name in given:
            given[value.name] = _as_value(given[value.name], value.type.tensor_type.elem_type)
    names = [value.name for value in graph.output]
    for index, value in enumerate(graph.output):
        if _lacking(value):
            graph.node.append(helper.make_node("Cast", [value.name], [f"{value.name}!"], to=FLOAT))
            graph.output[index].CopyFrom(helper.make_tensor_value_info(f"{value.name}!", FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = onnxruntime.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
        made = session.run(None, given)
    except Exception as error:  # ONNX Runtime's exceptions have no common base but this
        raise Impossible(str(error)) from error
    return dict(zip(names, made, strict=True))


def _as_value(array: NDArray[Any], element: int) -> Any:
    kind = NUMBERS[element]
    elements = pack(array, PACKED_BITS[kind]) if kind in PACKED_BITS else array.view(f"u{array.itemsize}")
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(elements, element)


def _lacking(value: ValueInfoProto) -> bool:
    """Return whether a tensor at the border has a type that NumPy lacks."""
    return value.type.WhichOneof("value") == "tensor_type" and value.type.tensor_type.elem_type not in (*IN_NUMPY, STRING)


def difference(made: Any, wanted: Any) -> str:
    """Return how a value differs from what plain ONNX Runtime makes, or an empty text."""
    if isinstance(wanted, list):
        if not isinstance(made, list) or len(made) != len(wanted):
            return f"got {made!r:.100} in place of a list of {len(wanted)}"
        return next(filter(None, map(difference, made, wanted)), "")
    made, wanted = np.asarray(made), np.asarray(wanted)
    if made.shape != wanted.shape:
        return f"shape {made.shape} in place of {wanted.shape}"
    if wanted.dtype == object:
        return "" if made.tolist() == wanted.tolist() else f"texts {made.tolist()!r:.100} in place of {wanted.tolist()!r:.100}"
    if made.dtype != wanted.dtype:  # a type that NumPy lacks
        made = made.astype(wanted.dtype)
    exact = wanted.dtype.kind in "biu"
    same = np.array_equal(made, wanted) if exact else np.allclose(made, wanted, rtol=1e-3, atol=1e-4, equal_nan=True)
    return "" if same else f"{made.ravel()[:8]} in place of {wanted.ravel()[:8]}"


class _Drawing:
    """Draws one case."""

    def __init__(self, seed: int, attempt: int, wanted: str) -> None:
        self._seed, self._wanted = seed, wanted
        self._random = random.Random(f"{seed} {attempt} {wanted}")
        self._numpy = np.random.default_rng(self._random.getrandbits(32))
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._between: list[ValueInfoProto] = []
        self._constants: list[TensorProto] = []
        self._functions: list[onnx.FunctionProto] = []
        self._tensors: list[Tensor] = []
        self._feeds: list[Feed] = [{} for _ in range(SETS)]
        self._features: set[str] = set()
        self._count = 0

    # --- parts -------------------------------------------------------------------------------------------------------

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _node(self, operator: str, reads: Sequence[str], made: Sequence[str], **more: Any) -> None:
        """Add a node. The first word of its name says which of two devices runs it, or that both can."""
        side = self._random.choice(["left", "left", "right", "right", "both"])
        self._nodes.append(helper.make_node(operator, list(reads), list(made), name=f"{side} {self._name(operator)}", **more))

    def _shape(self, least: int = 0) -> Shape:
        rank = self._random.choice([rank for rank in (0, 1, 1, 2, 2, 3) if rank >= least])
        anything: Shape = (1, 2, 3, 3, 0, *EXTENTS)
        some: Shape = (2, 3, "N")
        return tuple(self._random.choice(anything if axis or not least else some) for axis in range(rank))

    def _array(self, element: int, shape: Shape, turn: int = 0) -> NDArray[Any]:
        extents = tuple(EXTENTS[axis][turn] if isinstance(axis, str) else axis for axis in shape)
        if element == STRING:
            texts = np.empty(prod(extents), object)
            texts[:] = [self._random.choice(["", "a", "é", "word", "two words", "\N{GRINNING FACE}"]) for _ in texts]
            return texts.reshape(extents)
        dtype = NUMBERS[element].dtype
        if element in (FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16):
            return np.asarray(self._numpy.standard_normal(extents)).astype(dtype)
        return np.asarray(self._numpy.integers(0, 2, extents)).astype(np.float32).astype(dtype)

    def _declared(self, shape: Shape) -> list[int | str | None] | None:
        """Return a shape as a file declares it, which may leave more open."""
        if self._random.random() < 0.15:
            self._features.add("open rank")
            return None
        declared: list[int | str | None] = []
        for axis in shape:
            declared.append(None if self._random.random() < 0.1 else axis)
        if any(not isinstance(axis, int) for axis in declared):
            self._features.add("open dimensions")
        return declared

    def _input(self, element: int, shape: Shape) -> Tensor:
        made = Tensor(self._name("in"), element, shape)
        self._inputs.append(helper.make_tensor_value_info(made.name, element, self._declared(shape)))
        for turn, feed in enumerate(self._feeds):
            feed[made.name] = self._array(element, shape, turn)
            if not feed[made.name].size:
                self._features.add("empty axes")
        if not shape:
            self._features.add("0-d")
        if element in NUMBERS:
            self._features.add(NUMBERS[element].value)
        return made

    def _constant(self, array: NDArray[Any]) -> str:
        name = self._name("constant")
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def _keep(self, made: Tensor) -> Tensor:
        self._tensors.append(made)
        return made

    def _float(self, least: int = 0) -> Tensor:
        """Return a tensor of floats that is there, or a new input. `least`: its rank."""
        there = [it for it in self._tensors if it.element == FLOAT and len(it.shape) >= least and (not least or it.shape[0] in (2, 3, "N"))]
        if there and self._random.random() < 0.7:
            return self._random.choice(there)
        return self._keep(self._input(FLOAT, self._shape(least)))

    def _like(self, other: Tensor) -> str:
        """Return a tensor that may be added to another one: of the same shape, or a scalar."""
        there = [it.name for it in self._tensors if it.element == FLOAT and it.shape in (other.shape, ())]
        return self._random.choice([*there, self._constant(np.float32(self._random.random()) * np.ones((), np.float32))])

    def _result(self, shape: Shape, element: int = FLOAT) -> Tensor:
        return self._keep(Tensor(self._name("t"), element, shape))

    # --- blocks ------------------------------------------------------------------------------------------------------

    def unary(self) -> None:
        source = self._float()
        self._node(self._random.choice(["Neg", "Abs", "Relu", "Identity", "Tanh"]), [source.name], [self._result(source.shape).name])

    def binary(self) -> None:
        source = self._float()
        self._node(self._random.choice(["Add", "Sub", "Mul", "Max"]), [source.name, self._like(source)], [self._result(source.shape).name])

    def weights(self) -> None:
        """Multiply rows by a matrix that is large enough to lie in a pool, or beside the model."""
        source, columns = self._float(), self._random.choice([16, 24])
        row, rows = self._name("t"), self._name("t")
        self._node("ReduceSum", [source.name], [row], keepdims=0)
        self._node("Reshape", [row, self._constant(np.array([1, 1], np.int64))], [rows])
        self._node(
            "MatMul",
            [rows, self._constant(self._numpy.standard_normal((1, columns)).astype(np.float32))],
            [self._result((1, columns)).name],
        )
        self._features.add("weights")

    def shapes(self) -> None:
        source = self._float()
        choice = self._random.randrange(5)
        if choice == 0 and source.shape:
            order = list(range(len(source.shape)))
            self._random.shuffle(order)
            self._node("Transpose", [source.name], [self._result(tuple(source.shape[axis] for axis in order)).name], perm=order)
        elif choice == 1:
            self._node("Unsqueeze", [source.name, self._constant(np.array([0], np.int64))], [self._result((1, *source.shape)).name])
        elif choice == 2:
            self._node("ReduceSum", [source.name], [self._result(()).name], keepdims=0)
        elif choice == 3:  # a shape that is computed
            shape, made = self._name("t"), self._result(source.shape)
            zero = self._name("t")
            self._node("Shape", [source.name], [shape])
            self._node("ConstantOfShape", [shape], [zero])
            self._node("Add", [source.name, zero], [made.name])
        else:  # the rank follows from a value
            flat, back, length = self._name("t"), self._result(source.shape), self._name("t")
            self._node("Shape", [source.name], [length])
            self._node("Reshape", [source.name, self._constant(np.array([-1], np.int64))], [flat])
            self._node("Reshape", [flat, length], [back.name], allowzero=1)

    def foreign(self) -> None:
        """An operator that ONNX does not know, so its result has no shape but where the file declares one."""
        source, made = self._float(), None
        made = self._result(source.shape)
        self._node("QuickGelu", [source.name], [made.name], domain="com.microsoft")
        self._between.append(
            helper.make_tensor_value_info(made.name, FLOAT, None if self._random.random() < 0.7 else self._declared(made.shape))
        )
        self._features.add("foreign operators")

    def element_types(self) -> None:
        """Have an element type in and out. The seed decides which, so that as many seeds as there are types have each of them."""
        element = list(NUMBERS)[self._seed % len(NUMBERS)]
        source = self._input(element, self._shape())
        wide = self._result(source.shape)
        self._node("Cast", [source.name], [wide.name], to=FLOAT)
        if self._random.random() < 0.7:
            self._node("Cast", [wide.name], [self._result(source.shape, element).name], to=element)

    def defaults(self) -> None:
        source = self._default(self._input(self._random.choice(list(NUMBERS)), self._shape()))
        wide = self._result(source.shape)
        self._node("Cast", [source.name], [wide.name], to=FLOAT)

    def _default(self, source: Tensor) -> Tensor:
        """Give an input a default, and leave it out of some sets of inputs."""
        shape = tuple(axis if isinstance(axis, int) else EXTENTS[axis][0] for axis in source.shape)
        self._constants.append(numpy_helper.from_array(self._array(source.element, shape), source.name))
        self._inputs[-1].CopyFrom(helper.make_tensor_value_info(source.name, source.element, shape))
        for feed in self._feeds:
            feed[source.name] = self._array(source.element, shape)
        self._feeds[self._random.randrange(SETS)].pop(source.name)
        self._features.add("defaults")
        return Tensor(source.name, source.element, shape)

    def strings(self) -> None:
        source = self._input(STRING, self._shape())
        self._features.add("strings")
        if self._random.random() < 0.5:
            source = self._default(source)
            self._features.add("string defaults")
        again = self._result(source.shape, STRING)
        self._node("StringConcat", [source.name, source.name], [again.name])
        same, number = self._name("t"), self._result(source.shape)
        self._node("Equal", [again.name, self._constant(np.array("", object))], [same])
        self._node("Cast", [same], [number.name], to=FLOAT)

    def strings_inside(self) -> None:
        source = self._float()
        text, same, made = self._name("t"), self._name("t"), self._result(source.shape)
        self._node("Cast", [source.name], [text], to=STRING)
        self._node("Equal", [text, self._constant(np.array("0", object))], [same])
        self._node("Cast", [same], [made.name], to=FLOAT)
        self._features.add("strings inside")

    def function(self) -> None:
        source, name = self._float(), self._name("Function")
        nodes = [helper.make_node("Abs", ["a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
        imports = [helper.make_opsetid("", OPSET)]
        if self._random.random() < 0.4:
            taken = helper.make_graph([helper.make_node("Neg", ["b"], ["d"])], "taken", [], [_bare("d")])
            other = helper.make_graph([helper.make_node("Add", ["b", "a"], ["e"])], "other", [], [_bare("e")])
            condition = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array(True)))
            nodes = [nodes[0], condition, helper.make_node("If", ["k"], ["c"], then_branch=taken, else_branch=other)]
        self._functions.append(helper.make_function("local", name, ["a"], ["c"], nodes, imports))
        self._node(name, [source.name], [self._result(source.shape).name], domain="local")
        self._features.add("functions")

    def _body(
        self, name: str, nodes: list[NodeProto], inputs: list[ValueInfoProto], outputs: list[str], constant: bool = False
    ) -> GraphProto:
        held = [numpy_helper.from_array(np.array(2, np.float32), "held")] if constant else []
        return helper.make_graph(
            nodes,
            name,
            inputs,
            [_bare(output) if output != "go_on" else helper.make_tensor_value_info(output, BOOL, []) for output in outputs],
            held,
        )

    def if_(self) -> None:
        source = self._float()
        other = self._like(source)
        condition = self._input(BOOL, ()).name
        made = self._result(source.shape)
        then = self._body("then", [helper.make_node("Add", [source.name, other], ["then_out"])], [], ["then_out"])
        otherwise = self._body("else", [helper.make_node("Mul", [source.name, "held"], ["else_out"])], [], ["else_out"], constant=True)
        self._node("If", [condition], [made.name], then_branch=then, else_branch=otherwise)
        self._features.add("If")

    def loop(self) -> None:
        source = self._float()
        outer = self._like(source)
        count = self._random.randrange(4)
        nodes = [
            helper.make_node("Identity", ["condition"], ["go_on"]),
            helper.make_node("Add", ["carried", outer], ["next"]),
            helper.make_node("Neg", ["next"], ["row"]),
        ]
        inputs = [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("condition", BOOL, []), _bare("carried")]
        body = self._body("loop", nodes, inputs, ["go_on", "next", "row"])
        last, rows = self._result(source.shape), self._result((count, *source.shape))
        self._node("Loop", [self._constant(np.array(count, np.int64)), "", source.name], [last.name, rows.name], body=body)
        self._features.add("Loop")

    def scan(self) -> None:
        source = self._float(1)
        row = source.shape[1:]
        state = self._name("t")
        self._node("ReduceSum", [source.name, self._constant(np.array([0], np.int64))], [state], keepdims=0)
        outer = self._like(Tensor("", FLOAT, row))
        nodes = [helper.make_node("Add", ["state", "row"], ["next"]), helper.make_node("Mul", ["row", outer], ["out"])]
        body = self._body("scan", nodes, [_bare("state"), _bare("row")], ["next", "out"])
        last, rows = self._result(row), self._result(source.shape)
        self._node("Scan", [state, source.name], [last.name, rows.name], body=body, num_scan_inputs=1)
        self._features.add("Scan")

    def sequences(self) -> None:
        source = self._float()
        sequence, made = self._name("t"), self._result(source.shape)
        border = self._random.choice(["inside", "input", "output", "input and output"])
        if "input" in border:
            given = self._name("in")
            self._inputs.append(helper.make_tensor_sequence_value_info(given, FLOAT, None))
            for turn, feed in enumerate(self._feeds):
                feed[given] = [self._array(FLOAT, self._shape(), turn) for _ in range(self._random.randrange(3))]
            self._node("SequenceInsert", [given, source.name], [sequence])
            self._features.add("sequence inputs")
        else:
            self._node("SequenceConstruct", [source.name, source.name], [sequence])
        self._node("SequenceAt", [sequence, self._constant(np.array(-1, np.int64))], [made.name])
        if "output" in border:
            self._outputs.append(helper.make_tensor_sequence_value_info(sequence, FLOAT, None))
            self._features.add("sequence outputs")
        self._features.add("sequences")

    # --- all of it ---------------------------------------------------------------------------------------------------

    def case(self) -> Case:
        if self._wanted:
            BLOCKS[self._wanted](self)
        self.element_types()
        plain_blocks = [self.unary, self.binary, self.shapes, self.weights, self.foreign, self.defaults, self.function]
        others = [self.if_, self.loop, self.scan, self.strings_inside]
        for _ in range(self._random.randint(2, 7)):
            self._random.choice([*plain_blocks, *others])()
        if self._random.random() < 0.2:
            self._random.choice([self.strings, self.sequences])()
        if self._random.random() < 0.3 and any(len(tensor.raw_data) >= 16 for tensor in self._constants):
            self._features.add("external data")
        read = {name for node in self._nodes for name in node.input}
        made = {name for node in self._nodes for name in node.output}
        for tensor in self._tensors:
            if tensor.name in made and (tensor.name not in read or self._random.random() < 0.1):
                self._outputs.append(helper.make_tensor_value_info(tensor.name, tensor.element, self._declared(tensor.shape)))
        outputs = {value.name for value in self._outputs}
        graph = helper.make_graph(
            self._nodes,
            "drawn",
            self._inputs,
            self._outputs,
            self._constants,
            value_info=[value for value in self._between if value.name not in outputs],
        )
        domains = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
        model = helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION, functions=self._functions)
        borders = [*self._inputs, *self._outputs]
        values = any(it.type.WhichOneof("value") != "tensor_type" or it.type.tensor_type.elem_type == STRING for it in borders)
        return Case(self._seed, model, self._feeds, self._features, values, values and any(map(_lacking, self._outputs)))


def _bare(name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, None)


BLOCKS: dict[str, Callable[[_Drawing], None]] = {
    "unary": _Drawing.unary,
    "binary": _Drawing.binary,
    "weights": _Drawing.weights,
    "shapes": _Drawing.shapes,
    "foreign": _Drawing.foreign,
    "element types": _Drawing.element_types,
    "defaults": _Drawing.defaults,
    "strings": _Drawing.strings,
    "strings inside": _Drawing.strings_inside,
    "function": _Drawing.function,
    "if": _Drawing.if_,
    "loop": _Drawing.loop,
    "scan": _Drawing.scan,
    "sequences": _Drawing.sequences,
}
