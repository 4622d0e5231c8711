"""What flows through a graph: what each operation reads and makes, of which type, and about how much work it is.

An operation reads its inputs, and what its bodies take from the graph around them. `Constant` nodes count as
constants here, like initializers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto
from onnx.shape_inference import InferenceError

from aionn.graph.checking import TYPES, nested_graphs
from aionn.hal.model import PooledModel
from aionn.hal.types import OperandType

_OPEN_EXTENT = 32
"""An open extent counts as this many elements in an estimate."""
_MULTIPLY_ADDS_PER_US = 10_000
"""Of one CPU (10 GMAC/s)."""
_ELEMENTS_PER_US = 1_000
"""Elements that one CPU reads or writes (4 GB/s of floats)."""
_LEAST_US = 1.0
"""What an engine needs for any operation."""

_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "DeformConv": 1, "QLinearConv": 3}
"""Operators that make each output element of the weights of one channel, and which input the weights are."""
_PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"})
"""Operators that make each output element of one row of their first input."""
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Operators that use all weights in each step of a sequence: input 1 for the step's input, input 2 for the state."""


_Functions = Mapping[tuple[str, str], FunctionProto]
"""The model's own functions, by domain and name."""


class Flow:
    """What flows through the main graph of a model.

    Attributes:
        whole: the graph, parsed.
        inputs: names of the model's inputs.
        constants: names of initializers and of what `Constant` nodes make, without those that are inputs, too.
        constant_nodes: by the name that it makes, each `Constant` node's index.
        reads: per operation the tensors that it reads, each once, in order; constants are among them.
        makes: per operation the tensors that it makes.
        maker: which operation makes a tensor.
    """

    def __init__(self, model: PooledModel) -> None:
        self.whole: ModelProto = onnx.ModelProto.FromString(model.graph)
        graph = self.whole.graph
        self.inputs = frozenset(model.inputs)
        self.constant_nodes = {
            node.output[0]: index
            for index, node in enumerate(graph.node)
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1
        }
        initializers = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
        self.constants = (initializers | self.constant_nodes.keys()) - self.inputs
        self.reads = [tuple(dict.fromkeys(_reads(node))) for node in graph.node]
        self.makes = [tuple(filter(None, node.output)) for node in graph.node]
        self.maker = {name: index for index, names in enumerate(self.makes) for name in names if name not in self.constant_nodes}
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._functions: _Functions = {(function.domain, function.name): function for function in self.whole.functions}
        self._values: dict[str, ValueInfoProto] | None = None

    def _inferred(self) -> dict[str, ValueInfoProto]:
        """Return what is known of each tensor: what follows from the inputs, else what the file declares. Files do declare wrong shapes."""
        graph = self.whole.graph
        known = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
        bare = onnx.ModelProto()
        bare.CopyFrom(self.whole)
        del bare.graph.value_info[:]
        for value in bare.graph.output:
            value.ClearField("type")
        try:
            inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
        except (InferenceError, RuntimeError, ValueError):  # a shape that contradicts itself: then only what the file declares is known
            return known
        found = {
            value.name: value
            for value in (*inferred.value_info, *inferred.output)
            if value.name not in self.inputs and value.type.WhichOneof("value") is not None
        }
        looped = self._looped(found)
        known.update((name, value) for name, value in found.items() if name in looped or _says_more(value, known.get(name)))
        return known

    def _looped(self, inferred: Mapping[str, ValueInfoProto]) -> set[str]:
        """Return the tensors that follow from a `Loop`, and of which no shape is inferred. A declared shape may not hold for them.

        A `Loop` without an iteration gives outputs of rank 1 in ONNX Runtime (1.32), whatever the rank of a row is.
        """
        looped: set[str] = set()
        for node, reads, makes in zip(self.whole.graph.node, self.reads, self.makes, strict=True):
            if not looped.isdisjoint(reads) or _has("Loop", node, self._functions):
                looped.update(name for name in makes if name in inferred and not inferred[name].type.tensor_type.HasField("shape"))
        return looped

    def operations(self, outputs: Iterable[str]) -> list[int]:
        """Return the operations that these outputs need, in order. An operation whose results nothing reads is not among them."""
        needed: set[int] = set()
        left = [self.maker[name] for name in outputs if name in self.maker]
        while left:
            index = left.pop()
            if index not in needed:
                needed.add(index)
                left += [self.maker[name] for name in self.reads[index] if name in self.maker]
        return sorted(needed)

    def value(self, name: str) -> ValueInfoProto | None:
        """Return the type and shape of a tensor as far as they are known."""
        if self._values is None:
            self._values = self._inferred()
        return self._values.get(name)

    def element_type(self, name: str) -> OperandType | None:
        """Return the element type of a tensor that can cross between devices. None: it is of another type, or not known."""
        value = self.value(name)
        if value is None or value.type.WhichOneof("value") != "tensor_type":
            return None
        found = TYPES.get(value.type.tensor_type.elem_type)
        return None if found is OperandType.STRING else found  # texts travel in calls that carry values

    def needs_ranks(self, index: int) -> bool:
        """Return whether an operation has a `Scan` inside, at any depth. ONNX Runtime needs the ranks of all that it makes."""
        return _has("Scan", self.whole.graph.node[index], self._functions)

    def rank_givers(self, index: int) -> set[int]:
        """Return the operations without which the ranks of what an operation reads are not known.

        These make tensors of unknown rank. What they read as a shape is made by the others, for an engine may compute it at compile.
        """
        givers: set[int] = set()
        left = [name for name in self.reads[index] if not self._has_rank(name)]
        while left:
            maker = self.maker.get(left.pop())
            if maker is not None and maker not in givers:
                givers.add(maker)
                left += [name for name in self.reads[maker] if not self._has_rank(name) or self.element_type(name) is OperandType.INT64]
        return givers

    def _has_rank(self, name: str) -> bool:
        value = self.value(name)
        return name in self._shapes or name in self.constant_nodes or (value is not None and value.type.tensor_type.HasField("shape"))

    def work_us(self, index: int) -> float:
        """Estimate how long a CPU needs for an operation, in microseconds: its multiply-adds, its elements, and the nodes inside."""
        node = self.whole.graph.node[index]
        elements = sum(prod(self._shape(name)) for name in (*self.reads[index], *self.makes[index]))
        nodes = 1 + sum(_size(body) for body in nested_graphs(node))
        return _LEAST_US * nodes + elements / _ELEMENTS_PER_US + self._multiply_adds(node) / _MULTIPLY_ADDS_PER_US

    def _multiply_adds(self, node: NodeProto) -> int:
        shapes = [*(self._shape(name) for name in node.input), (), (), (), ()]  # a broken node may lack inputs
        if node.op_type in _CONVOLUTIONS:
            return prod(self._shape(node.output[0])) * prod(shapes[_CONVOLUTIONS[node.op_type]][1:])
        if node.op_type == "ConvTranspose":
            return prod(shapes[0]) * prod(shapes[1][1:])
        if node.op_type in _PRODUCTS:
            return prod(self._shape(node.output[0])) * prod(shapes[0][-1:])
        if node.op_type in _RECURRENT:
            return prod(shapes[0][:-1]) * (prod(shapes[1]) + prod(shapes[2]))
        return 0

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, with a guess where it is open."""
        if name in self._shapes:
            return self._shapes[name]
        value = self.value(name)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return (_OPEN_EXTENT,)
        return tuple(axis.dim_value if axis.dim_value > 0 else _OPEN_EXTENT for axis in value.type.tensor_type.shape.dim)


def _says_more(inferred: ValueInfoProto, declared: ValueInfoProto | None) -> bool:
    """Return whether what was inferred is to be believed. A tensor without a shape is less than a declared one of the same type."""
    if declared is None or inferred.type.WhichOneof("value") != "tensor_type" or declared.type.WhichOneof("value") != "tensor_type":
        return True
    return inferred.type.tensor_type.HasField("shape") or not declared.type.tensor_type.HasField("shape")


def _has(operator: str, node: NodeProto, functions: _Functions) -> bool:
    """Return whether a node is of an operator of ONNX, or has one in its bodies or in the function that it calls."""
    if node.op_type == operator and node.domain in ("", "ai.onnx"):
        return True
    called = functions.get((node.domain, node.op_type))
    inner = [*(called.node if called is not None else ()), *(it for body in nested_graphs(node) for it in body.node)]
    return any(_has(operator, it, functions) for it in inner)


def _size(graph: GraphProto) -> int:
    """The number of nodes in a body, at every depth."""
    return sum(1 + sum(_size(body) for body in nested_graphs(node)) for node in graph.node)


def _reads(node: NodeProto) -> Iterator[str]:
    yield from filter(None, node.input)
    for body in nested_graphs(node):
        yield from _captured(body)


def _captured(graph: GraphProto) -> Iterator[str]:
    """The names that a body reads of the graphs around it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own.update(tensor.values.name for tensor in graph.sparse_initializer)
    own.update(name for node in graph.node for name in node.output)
    for node in graph.node:
        yield from (name for name in _reads(node) if name not in own)
    yield from (value.name for value in graph.output if value.name not in own)
