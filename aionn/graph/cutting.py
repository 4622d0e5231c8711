"""Cut a model into steps, each of which one device runs. Pure: no device is asked, and nothing is read but the graph.

1. A model that one device can run whole is one step, on the first such device.
2. Otherwise each operation goes to the device that declares the best `Performance` for it. If several do, the first of them gets it.
3. Operations whose inputs are there wait in the queue of their device. The cut takes one queue, opens a step, and drains the queue with all
   that becomes ready in it. Then it takes the next, as NNAPI does. Steps never form a circle, because each reads only what was made before.
4. A step moves to another device while that costs less in all. The cost of a plan is the estimated work of each operation times what its
   device declares, and `HAND_OVER_US` for each step. So two steps of one device with a short step of another between them become one step,
   if that device can run it, too.

Operations stay together where a tensor between them cannot cross between devices: it is not a dense tensor of a type in `OperandType`, or
its type is not known. Control flow is one operation, with all that its bodies read. A `Scan` needs the rank of all that it reads, so it
stays with what makes a tensor of unknown rank. `Constant` nodes belong to no step, and each step that reads one has its value. An operation
whose results nothing reads is in no step.

Each step becomes a model, which a device prepares like any other model (`step_models`). Constants stay where they are: a step's model
refers to the same pools. What crosses between steps has the type and shape that follow from the whole model's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from aionn.errors import CompilationError
from aionn.graph.checking import border, nested_graphs
from aionn.graph.flow import Flow
from aionn.graph.steps import Step, step_token
from aionn.graph.unchanged import contents_of
from aionn.hal.model import Constant, Operation, PooledModel, known_contents, known_token, may_change
from aionn.hal.types import DataLocation, ExecutionPreference, Performance

_NO_DIGESTS: Mapping[str, bytes] = MappingProxyType({})


def step_models(model: PooledModel, steps: Sequence[Step], digests: Mapping[str, bytes] = _NO_DIGESTS) -> tuple[PooledModel, ...]:
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

    def __init__(self, model: PooledModel, flow: Flow, step: Step, digests: Mapping[str, bytes]) -> None:
        self._model, self._flow, self._step, self._digests = model, flow, step, digests
        self._nodes = [flow.whole.graph.node[index] for index in step.operations]
        self._read = {name for index in step.operations for name in flow.reads[index]} | set(step.outputs)

    def model(self) -> PooledModel:
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
        return PooledModel(
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


HAND_OVER_US = 30.0
"""What one more step costs, in microseconds of a CPU: a call to another process, its wake, and its answer."""

_UNDECLARED: Mapping[str, Performance] = MappingProxyType({})
_AS_A_CPU = Performance()

_Plan = list[tuple[int, list[int]]]
"""Steps, in order: the number of the device, and the numbers of the units that it runs."""


def cut(
    model: PooledModel,
    capable: Mapping[str, Sequence[bool]],
    performance: Mapping[str, Performance] = _UNDECLARED,
    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
    *,
    hand_over_us: float = HAND_OVER_US,
) -> tuple[Step, ...]:
    """Cut a model into steps, in the order in which they run. One step means that one device runs the whole model.

    Args:
        model: read, so that its graph is known.
        capable: by device in the app's order: for each of `model.operations` whether the device can run it.
        performance: what devices declare; one that is missing here counts as a CPU.
        preference: LOW_POWER compares power, the others compare time.
        hand_over_us: what one more step costs.

    Raises:
        CompilationError: no device can run an operation, or all operations that must stay together; `.node` is the first of them.
    """
    flow = Flow(model)
    devices = tuple(capable)
    operations = flow.operations(model.outputs)
    _check_capable(model, capable, operations)
    whole = next((name for name in devices if all(capable[name][index] for index in operations)), None)
    if whole is not None:
        return _as_steps(model, flow, [(whole, operations)])
    declared = [performance.get(name, _AS_A_CPU) for name in devices]

    def cost(index: int, number: int) -> float | None:
        if not capable[devices[number]][index]:
            return None
        kind = next((flow.element_type(name) for name in flow.reads[index]), None)
        return flow.work_us(index) * declared[number].cost(kind, preference)

    units = _together(flow, operations)
    costs = []
    for unit in units:
        parts = [[cost(index, number) for index in unit] for number in range(len(devices))]
        costs.append([None if None in part else sum(filter(None, part)) for part in parts])
        if all(total is None for total in costs[-1]):
            raise _apart(model, capable, unit)
    plan = _Cutter(_read_by(flow, units), costs, hand_over_us).plan()
    return _as_steps(model, flow, [(devices[number], sorted(index for unit in taken for index in units[unit])) for number, taken in plan])


class _Cutter:
    """Finds steps for units, which are operations that stay together.

    Args:
        readers: per unit those that read what it makes.
        costs: per unit and device what it costs there, or None if the device cannot run it.
        hand_over: what one more step costs.
    """

    def __init__(self, readers: Sequence[Iterable[int]], costs: Sequence[Sequence[float | None]], hand_over: float) -> None:
        self._readers = [tuple(those) for those in readers]
        self._makers = [0] * len(readers)
        for those in self._readers:
            for reader in those:
                self._makers[reader] += 1
        self._costs = costs
        self._devices = range(len(costs[0]))
        self._hand_over = hand_over

    def plan(self) -> _Plan:
        """Return the steps after all moves that pay."""
        homes = [min(self._devices, key=lambda number: _or_inf(cost[number])) for cost in self._costs]
        plan = self._steps(homes)
        while (better := self._moved(plan, homes)) is not None:
            homes, plan = better
        return plan

    def _moved(self, plan: _Plan, homes: Sequence[int]) -> tuple[list[int], _Plan] | None:
        """Return what one step on another device makes better: the devices of the units, and the steps. None: nothing does."""
        beside = self._beside(plan)
        for step in sorted(range(len(plan)), key=lambda step: self._cost(plan[step][1], plan[step][0])):
            home, units = plan[step]
            for number in self._devices:
                loss = self._cost(units, number) - self._cost(units, home)
                if number == home or loss >= self._hand_over * (1 + len(beside[step])):
                    continue  # a move saves at most the step itself and those beside it
                moved = list(homes)
                for unit in units:
                    moved[unit] = number
                found = self._steps(moved)
                if loss + self._hand_over * (len(found) - len(plan)) < 0:
                    return moved, found
        return None

    def _beside(self, plan: _Plan) -> list[set[int]]:
        """Return for each step the other steps with which it exchanges tensors."""
        step_of = {unit: step for step, (_, units) in enumerate(plan) for unit in units}
        beside: list[set[int]] = [set() for _ in plan]
        for unit, step in step_of.items():
            for reader in self._readers[unit]:
                if step_of[reader] != step:
                    beside[step].add(step_of[reader])
                    beside[step_of[reader]].add(step)
        return beside

    def _cost(self, units: Iterable[int], number: int) -> float:
        return sum(_or_inf(self._costs[unit][number]) for unit in units)

    def _steps(self, homes: Sequence[int]) -> _Plan:
        """Return the steps: those that begin with the last device, or with the first if these are fewer."""
        return min((self._drained(homes, order) for order in (self._devices[::-1], self._devices)), key=len)

    def _drained(self, homes: Sequence[int], order: Iterable[int]) -> _Plan:
        waiting = list(self._makers)
        queues: list[list[int]] = [[] for _ in self._devices]
        for unit, home in enumerate(homes):
            if not waiting[unit]:
                queues[home].append(unit)
        plan: _Plan = []
        while (number := next((number for number in order if queues[number]), None)) is not None:
            queue, taken = queues[number], []
            while queue:
                taken.append(queue.pop())
                for reader in self._readers[taken[-1]]:
                    waiting[reader] -= 1
                    if not waiting[reader]:
                        queues[homes[reader]].append(reader)
            plan.append((number, taken))
        return plan


def _or_inf(cost: float | None) -> float:
    return float("inf") if cost is None else cost


def _check_capable(model: PooledModel, capable: Mapping[str, Sequence[bool]], operations: Iterable[int]) -> None:
    for index in operations:
        if not any(flags[index] for flags in capable.values()):
            it = model.operations[index]
            what = f"operator {it.domain or 'ai.onnx'}.{it.op_type} (node {it.name!r})"
            reason = f"none of the devices {', '.join(capable)} can run {what}"
            raise CompilationError(f"{reason}; name a device that can", node=it.name, reason=reason)


def _apart(model: PooledModel, capable: Mapping[str, Sequence[bool]], unit: Sequence[int]) -> CompilationError:
    """The error for operations that must stay together, and that no device can run together."""
    best = max(capable, key=lambda name: sum(capable[name][index] for index in unit))
    missing = next(index for index in unit if not capable[best][index])
    first, last = (model.operations[index].name for index in (unit[0], unit[-1]))
    name = model.operations[missing].name
    reason = f"nodes {first!r} to {last!r} exchange values that cannot cross between devices, and no device can run all of them"
    way_out = "name a device that can, or declare the types of tensors between them (value_info) if the file does not"
    return CompilationError(f"{reason}; {best!r} cannot run node {name!r}; {way_out}", node=name, reason=reason)


def _together(flow: Flow, operations: Sequence[int]) -> list[list[int]]:
    """Return the operations as units. Two are in one unit if what one makes for the other cannot cross, or if they form a circle."""
    unit_of = {index: index for index in operations}

    def root(index: int) -> int:
        while unit_of[index] != index:
            unit_of[index] = unit_of[unit_of[index]]
            index = unit_of[index]
        return index

    def join(index: int, other: int) -> None:
        unit_of[root(index)] = root(other)

    for index in operations:
        for name in flow.reads[index]:
            if name in flow.maker and flow.element_type(name) is None:
                join(flow.maker[name], index)
        if flow.needs_ranks(index):
            for maker in flow.rank_givers(index):
                join(maker, index)
    _join_circles(flow, operations, root, join)
    units: dict[int, list[int]] = {}
    for index in operations:
        units.setdefault(root(index), []).append(index)
    return list(units.values())


def _join_circles(flow: Flow, operations: Sequence[int], root: Callable[[int], int], join: Callable[[int, int], None]) -> None:
    """Join units until none reads, over others, what it makes itself."""
    while True:
        makers: dict[int, set[int]] = {}
        for index in operations:
            of = {root(flow.maker[name]) for name in flow.reads[index] if name in flow.maker}
            makers.setdefault(root(index), set()).update(of - {root(index)})
        try:
            TopologicalSorter(makers).prepare()
        except CycleError as error:
            circle = error.args[1]
            for index in circle:
                join(index, circle[0])
        else:
            return


def _read_by(flow: Flow, units: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return for each unit the other units that read what it makes."""
    unit_of = {index: number for number, unit in enumerate(units) for index in unit}
    readers: list[set[int]] = [set() for _ in units]
    for number, unit in enumerate(units):
        for index in unit:
            for name in flow.reads[index]:
                maker = unit_of[flow.maker[name]] if name in flow.maker else number
                if maker != number:
                    readers[maker].add(number)
    return readers


def _as_steps(model: PooledModel, flow: Flow, plan: Sequence[tuple[str, Sequence[int]]]) -> tuple[Step, ...]:
    """Return the steps with what they read and make.

    An output of the model that no operation makes is an input or a constant. The first step hands it through.
    """
    step_of = {index: number for number, (_, operations) in enumerate(plan) for index in operations}
    crossing = set(model.outputs)
    for index, number in step_of.items():
        crossing.update(name for name in flow.reads[index] if name in flow.maker and step_of[flow.maker[name]] != number)
    steps = []
    for number, (device, operations) in enumerate(plan):
        through = [name for name in model.outputs if name not in flow.maker] if number == 0 else []
        read = dict.fromkeys([*(name for index in operations for name in flow.reads[index]), *through])
        inputs = [name for name in read if name not in flow.constants and step_of.get(flow.maker.get(name, -1)) != number]
        outputs = [name for index in operations for name in flow.makes[index] if name in crossing]
        names = tuple(model.operations[index].name for index in operations)
        steps.append(Step(device, tuple(operations), names, tuple(inputs), (*outputs, *through)))
    return tuple(steps)
