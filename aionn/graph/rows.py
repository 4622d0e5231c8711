"""Which operators of a graph mix the rows of a batch, and which numbers its inputs of integers take. It reads the graph, and runs nothing.

What is found here is refused by name before any run. All else is found by running the model (`driver.probing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import onnx
from onnx import GraphProto, NodeProto, numpy_helper

from aionn.graph.checking import nested_graphs
from aionn.hal.model import PooledModel

_MIXING = {
    "DynamicQuantizeLinear": "it takes one scale for all rows",
    "RandomNormalLike": "it makes random numbers",
    "RandomUniformLike": "it makes random numbers",
    "RandomNormal": "it makes random numbers",
    "RandomUniform": "it makes random numbers",
    "Bernoulli": "it makes random numbers",
    "Multinomial": "it makes random numbers",
    "NonMaxSuppression": "its output has no row for each row of its input",
    "NonZero": "its output has no row for each row of its input",
    "Unique": "its output has no row for each row of its input",
    "SequenceConstruct": "a sequence has no rows",
    "SequenceInsert": "a sequence has no rows",
    "SplitToSequence": "a sequence has no rows",
    "ConcatFromSequence": "a sequence has no rows",
}
_TRAINS = {"Dropout": 2, "BatchNormalization": None}
"""Operators with a mode for training, and the input that selects it; None for the attribute `training_mode`."""
_SHAPES = frozenset({"Shape", "Size"})
"""What these make depends on a tensor's shape and not on its values."""


class RowFacts(msgspec.Struct):
    """What the graph says.

    Attributes:
        mixes: the node that mixes rows, and why, as a sentence. Empty if none is found.
        limits: by input of integers, below which number its elements stay, because they are indices into a table of that size.
        equals: by input, the numbers that the graph compares it with.
    """

    mixes: str = ""
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    equals: dict[str, list[float]] = msgspec.field(default_factory=dict)


def row_facts(model: PooledModel, batched: Iterable[str]) -> RowFacts:
    """Read what the graph of an ONNX model says about its rows. `batched`: the inputs that have rows."""
    facts = RowFacts()
    graph = onnx.ModelProto.FromString(model.graph).graph
    sizes = {constant.name: constant.operand.dimensions or () for constant in model.constants}
    _Reader(facts, model.inputs.keys(), sizes).read(graph, set(batched), {})
    return facts


class _Reader:
    def __init__(self, facts: RowFacts, inputs: Iterable[str], sizes: Mapping[str, tuple[int, ...]]) -> None:
        self._facts = facts
        self._source = {name: name for name in inputs}  # by a tensor that is a cast or another shape of an input, the input's name
        self._sizes = dict(sizes)

    def read(self, graph: GraphProto, rows: set[str], constants: dict[str, NodeProto | onnx.TensorProto]) -> None:
        """Follow the values that depend on rows through a graph and its bodies. `rows` gets their names."""
        known = dict(constants)
        known.update((tensor.name, tensor) for tensor in graph.initializer)
        self._sizes.update((tensor.name, tuple(tensor.dims)) for tensor in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant":
                known[node.output[0]] = node
                continue
            self._note_numbers(node, known)
            if not self._facts.mixes:
                self._facts.mixes = self._mixes(node, rows, known)
            inner = set(rows)
            for body in nested_graphs(node):
                if node.op_type in ("Loop", "Scan"):  # what goes round may depend on anything that goes in
                    carried = any(name in rows for name in node.input)
                    inner.update(value.name for value in body.input if carried)
                self.read(body, inner, known)
            depends = any(name in rows for name in node.input) or any(
                value.name in inner for body in nested_graphs(node) for value in body.output
            )
            if depends and node.op_type not in _SHAPES:
                rows.update(node.output)

    def _mixes(self, node: NodeProto, rows: set[str], known: Mapping[str, NodeProto | onnx.TensorProto]) -> str:
        told = f"operator {node.op_type} ({node.name or node.output[0]!r})"
        if node.domain not in ("", "ai.onnx") or not any(name in rows for name in node.input):
            return ""
        if why := _MIXING.get(node.op_type):
            return f"{told} is in the graph, and {why}"
        if node.op_type in ("If", "Loop"):
            steers = node.input[: 1 if node.op_type == "If" else 2]
            if any(name in rows for name in steers):
                return f"{told} takes another way for other values of a row"
        if node.op_type in _TRAINS and _trains(node, known):
            return f"{told} is in its mode for training"
        return ""

    def _note_numbers(self, node: NodeProto, known: Mapping[str, NodeProto | onnx.TensorProto]) -> None:
        if node.op_type in ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape") and node.input[0] in self._source:
            self._source[node.output[0]] = self._source[node.input[0]]
        elif node.op_type == "Gather" and node.input[1] in self._source:
            axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
            size = self._sizes.get(node.input[0], ())
            if size:
                given = self._source[node.input[1]]
                self._facts.limits[given] = min(size[axis], self._facts.limits.get(given, size[axis]))
        elif node.op_type == "OneHot" and node.input[0] in self._source:
            depth = _number(known.get(node.input[1]))
            if depth is not None:
                self._facts.limits[self._source[node.input[0]]] = int(depth)
        elif node.op_type == "Equal":
            for one, other in (node.input, (node.input[1], node.input[0])):
                value = _number(known.get(other))
                if one in self._source and value is not None:
                    self._facts.equals.setdefault(self._source[one], []).append(value)


def _trains(node: NodeProto, known: Mapping[str, NodeProto | onnx.TensorProto]) -> bool:
    place = _TRAINS[node.op_type]
    if place is None:
        return any(one.name == "training_mode" and one.i for one in node.attribute)
    given = node.input[place] if len(node.input) > place else ""
    return bool(given) and _number(known.get(given)) != 0


def _number(found: NodeProto | onnx.TensorProto | None) -> float | None:
    """Return the value of a constant with one element, or None."""
    tensor = found
    if isinstance(found, NodeProto):
        tensor = next((one.t for one in found.attribute if one.name == "value"), None)
    if not isinstance(tensor, onnx.TensorProto) or np.prod(tensor.dims, initial=1) != 1:
        return None
    try:
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])
    except (TypeError, ValueError):  # a text, or a tensor whose bytes lie in a pool
        return None
