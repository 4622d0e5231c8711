"""Make a model of each step, which a device prepares like any other model.

Constants stay where they are: a step's model refers to the same pools. What crosses between steps has the type and shape that follow from
the whole model's inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from aionn.errors import CompilationError
from aionn.graph.checking import border, nested_graphs
from aionn.graph.flow import Flow
from aionn.graph.steps import Step, step_token
from aionn.graph.unchanged import contents_of
from aionn.hal.model import Constant, Model, Operation, known_contents, known_token, may_change
from aionn.hal.types import DataLocation

_NO_DIGESTS: Mapping[str, bytes] = MappingProxyType({})


def step_models(model: Model, steps: Sequence[Step], digests: Mapping[str, bytes] = _NO_DIGESTS) -> tuple[Model, ...]:
    """Return the model of each step. It has the inputs and outputs of the step, in the same order.

    The token is `step_token`, and is empty where the whole model's is.

    Args:
        digests: of the constants that may change, by name (`ReadGraph.digests`). Without it `contents` is empty, so a driver does not
            compare them, unless a step has all of them.

    Raises:
        CompilationError: a tensor between two steps has a type that cannot cross.
    """
    flow = Flow(model)
    return tuple(_Maker(model, flow, step, digests).model() for step in steps)


class _Maker:
    """Makes the model of one step."""

    def __init__(self, model: Model, flow: Flow, step: Step, digests: Mapping[str, bytes]) -> None:
        self._model, self._flow, self._step, self._digests = model, flow, step, digests
        self._nodes = [flow.whole.graph.node[index] for index in step.operations]
        self._read = {name for index in step.operations for name in flow.reads[index]} | set(step.outputs)

    def model(self) -> Model:
        step, model = self._step, self._model
        constants = [constant for constant in model.constants if constant.name in self._read]
        used = list(dict.fromkeys(constant.location.pool_index for constant in constants))
        places = {old: new for new, old in enumerate(used)}
        moved = tuple(
            Constant(it.name, it.operand, DataLocation(places[it.location.pool_index], it.location.offset, it.location.length))
            for it in constants
        )
        border_of_whole = self._flow.whole.graph
        inputs = [self._value(name, border_of_whole.input) for name in step.inputs]
        outputs = [self._value(name, (*border_of_whole.input, *border_of_whole.output)) for name in step.outputs]
        return Model(
            graph=self._graph(inputs, outputs, places).SerializeToString(deterministic=True),
            inputs=border(inputs, "input"),
            outputs=border(outputs, "output"),
            operations=tuple(Operation(node.name, node.op_type, node.domain) for node in self._nodes),
            constants=moved,
            pools=tuple(model.pools[index] for index in used),
            token=step_token(known_token(model), step),
            _contents=self._contents(constants),
        )

    def _value(self, name: str, declared: Iterable[ValueInfoProto]) -> ValueInfoProto:
        """Return the type of a tensor at the border of the step.

        An input or output of the whole model is as the file declares it. A step that reads an output of the model gets all that is known
        of it: a `Scan` needs shapes.
        """
        found = next((value for value in declared if value.name == name), None) or self._flow.value(name)
        if found is None:
            raise CompilationError(f"the type of {name!r} is not known, so it cannot cross between devices", reason=f"type of {name!r}")
        return found

    def _graph(self, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto], places: Mapping[int, int]) -> ModelProto:
        whole = self._flow.whole
        functions, domains = _needed(whole, self._nodes)
        made = ModelProto(ir_version=whole.ir_version)
        made.opset_import.extend(entry for entry in whole.opset_import if _domain(entry.domain) in domains)
        made.functions.extend(functions)
        graph = made.graph
        graph.name = whole.graph.name or "step"
        graph.node.extend(self._nodes)
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        for tensor in whole.graph.initializer:
            if tensor.name in self._read:
                _refer(graph.initializer.add(), tensor, places)
        graph.sparse_initializer.extend(tensor for tensor in whole.graph.sparse_initializer if tensor.values.name in self._read)
        for name, index in self._flow.constant_nodes.items():
            if name in self._read:
                _add_constant(graph, whole.graph.node[index])
        own = {name for node in self._nodes for name in node.output}.difference(self._step.outputs)
        graph.value_info.extend(value for value in whole.graph.value_info if value.name in own)
        return made

    def _contents(self, constants: Sequence[Constant]) -> bytes:
        def changing(some: Iterable[Constant]) -> list[str]:
            return [it.name for it in some if may_change(self._model.pools[it.location.pool_index])]

        mine = changing(constants)
        if mine == changing(self._model.constants):
            return known_contents(self._model)
        return contents_of(self._digests[name] for name in mine) if all(name in self._digests for name in mine) else b""


def _needed(whole: ModelProto, nodes: Iterable[NodeProto]) -> tuple[list[FunctionProto], set[str]]:
    """Return the functions of the model that nodes call, in the model's order, and the domains of all nodes inside and ONNX's own."""
    known = {(_domain(function.domain), function.name, function.overload): function for function in whole.functions}
    called: set[tuple[str, str, str]] = set()
    domains = {""}
    left = list(nodes)
    while left:
        node = left.pop()
        domain = _domain(node.domain)
        domains.add(domain)
        left.extend(inner for body in nested_graphs(node) for inner in body.node)
        key = (domain, node.op_type, node.overload)
        if key in known and key not in called:
            called.add(key)
            left.extend(known[key].node)
            domains.update(_domain(entry.domain) for entry in known[key].opset_import)
    return [function for key, function in known.items() if key in called], domains


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _refer(tensor: TensorProto, source: TensorProto, places: Mapping[int, int]) -> None:
    """Copy an initializer. One that lies in a pool gets the pool's new number."""
    tensor.CopyFrom(source)
    for entry in tensor.external_data:
        if entry.key == "location" and entry.value.startswith("pool:"):
            entry.value = f"pool:{places[int(entry.value.removeprefix('pool:'))]}"


def _add_constant(graph: GraphProto, node: NodeProto) -> None:
    """Add what a `Constant` node makes as an initializer."""
    name, attribute = node.output[0], node.attribute[0]
    kind = attribute.name
    if kind == "sparse_value":
        graph.sparse_initializer.add().CopyFrom(attribute.sparse_tensor)
        graph.sparse_initializer[-1].values.name = name
        return
    tensor = graph.initializer.add()
    if kind == "value":
        tensor.CopyFrom(attribute.t)
        tensor.name = name
        return
    scalar, several, element = {
        "value_float": (attribute.f, None, TensorProto.FLOAT),
        "value_floats": (None, attribute.floats, TensorProto.FLOAT),
        "value_int": (attribute.i, None, TensorProto.INT64),
        "value_ints": (None, attribute.ints, TensorProto.INT64),
        "value_string": (attribute.s, None, TensorProto.STRING),
        "value_strings": (None, attribute.strings, TensorProto.STRING),
    }[kind]
    values = [scalar] if several is None else list(several)
    tensor.CopyFrom(helper.make_tensor(name, element, [] if several is None else [len(values)], values))
