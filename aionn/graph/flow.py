"""What flows through a graph: what each operation reads and makes, of which type, and about how much work it is.

An operation reads its inputs, and what its bodies take from the graph around them. `Constant` nodes are no operations here: they are
constants like initializers.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto
from onnx.shape_inference import InferenceError

from aionn.graph.checking import TYPES, nested_graphs
from aionn.hal.model import Model
from aionn.hal.types import OperandType

__all__ = ["Flow"]

_OPEN_EXTENT = 32
"""An open extent counts as this many elements in an estimate."""
_MULTIPLY_ADDS_PER_US = 10_000
"""Of one CPU (10 GMAC/s)."""
_ELEMENTS_PER_US = 1_000
"""Elements that a CPU reads or writes (1 GB/s of bytes, 4 GB/s of floats)."""
_LEAST_US = 1.0
"""What an engine needs for any operation."""

_BY_WEIGHTS = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3, "DeformConv": 1}
"""Operators that multiply each output element by a share of their weights, and which input these are. Their output channels are counted."""
_BY_COLUMNS = {"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"}
"""Operators that multiply each output element by a row of their first input."""


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

    def __init__(self, model: Model) -> None:
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
        self._values: dict[str, ValueInfoProto] | None = None

    def is_constant_node(self, index: int) -> bool:
        """Return whether that node is a constant."""
        return any(name in self.constant_nodes for name in self.makes[index])

    def value(self, name: str) -> ValueInfoProto | None:
        """Return the type and shape of a tensor as far as they are known."""
        if self._values is None:
            self._values = _inferred(self.whole)
        return self._values.get(name)

    def element_type(self, name: str) -> OperandType | None:
        """Return the element type of a tensor that can cross between devices. None: it is of another type, or not known."""
        value = self.value(name)
        if value is None or value.type.WhichOneof("value") != "tensor_type":
            return None
        return TYPES.get(value.type.tensor_type.elem_type)


def _inferred(whole: ModelProto) -> dict[str, ValueInfoProto]:
    """Return what is known of each tensor: what follows from the inputs, else what the file declares."""
    graph = whole.graph
    known = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    bare = onnx.ModelProto()
    bare.CopyFrom(whole)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.ClearField("type")
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except (InferenceError, RuntimeError, ValueError):  # a broken shape; what the file declares is left
        inferred = bare.graph
    for value in (*inferred.value_info, *inferred.output):
        if value.type.WhichOneof("value") is not None:
            known[value.name] = value
    return known


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
