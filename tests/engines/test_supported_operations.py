"""Which operations an engine knows: answered without the `onnx` package where that can be, and the same with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import onnx
import pytest
from onnx import ModelProto, OperatorSetIdProto, TensorProto, helper

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.onnxruntime_providers import CPU
from aionn.graph.support import WITH_BODIES, supported_operations
from aionn.graph.wire import operator_sets
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import identity, model_of, value
from tests.real_models import carried

NEWEST = onnx.defs.onnx_opset_version()

WITHOUT_ONNX = """
    import sys
    from aionn.engines.onnxruntime import OnnxRuntimeEngine
    from aionn.graph.support import gather_tables
    from aionn.hal import CompileOptions, Model, Operand, OperandType, Operation

    operand = Operand(OperandType.FLOAT32, (2,))
    operations = (Operation("c", "Constant", ""), Operation("a", "Add", ""), Operation("g", "GlobalAveragePool", ""))
    graph = bytes.fromhex(sys.argv[1])
    border = {"inputs": {"x": operand}, "outputs": {"y": operand}}
    model = Model(graph=graph, **border, operations=operations, constants=(), pools=(), token=bytes(32))
    engine = OnnxRuntimeEngine()
    assert engine.supported_operations(model) == (True, True, True)
    engine.compile(model, CompileOptions())
    assert gather_tables(model, 0) == []
    print(*sys.modules)
"""


def schema_versions(engine: OnnxRuntimeEngine, operator: str, opset: int) -> bool:
    """Whether ORT can run the operator, by ONNX's schemas: ORT looks for a kernel by the version in which the operator last changed."""
    try:
        schema: Any = onnx.defs.get_schema(operator, opset, "")
    except onnx.defs.SchemaError:
        return False
    if operator == "Constant" or schema.has_function or schema.has_context_dependent_function:
        return True
    kernels = engine._kernel_versions()[CPU].get(("", operator), ())
    return any(first <= schema.since_version <= last for first, last in kernels)


def test_a_kernel_is_found_for_the_same_operators_as_by_the_schemas_of_onnx() -> None:
    engine = OnnxRuntimeEngine()
    operators = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain}
    operators |= {operator for domain, operator in engine._kernel_versions()[CPU] if not domain}
    wrong = [
        (operator, opset)
        for operator in sorted(operators)
        for opset in range(1, NEWEST + 1)
        if engine._has_kernel({CPU}, False, "", operator, opset) is not schema_versions(engine, operator, opset)
    ]
    assert wrong == []
    assert len(operators) > 200


def test_the_operators_with_bodies_are_those_of_onnx() -> None:
    graphs = {onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS}
    schemas = [schema for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain]
    assert {schema.name for schema in schemas if any(a.type in graphs for a in schema.attributes.values())} == WITH_BODIES


def test_a_driver_of_onnxruntime_that_compiles_a_usual_model_does_not_import_onnx() -> None:
    nodes = [
        helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])),
        helper.make_node("Add", ["x", "one"], ["a"]),
        helper.make_node("GlobalAveragePool", ["a"], ["y"]),
    ]
    made = model_of(nodes, [value("x", [1, 2, 3, 3])], [value("y", [1, 2, 1, 1])])
    command = [sys.executable, "-P", "-c", textwrap.dedent(WITHOUT_ONNX), made.SerializeToString().hex()]
    modules = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert "onnxruntime" in modules
    assert "onnx" not in modules


def asked(model: ModelProto | bytes, known: Iterable[str] = ()) -> tuple[tuple[bool, ...], list[tuple[str, str, int]]]:
    """What `supported_operations` answers about a model, and what it asks an engine that knows these operators."""
    questions: list[tuple[str, str, int]] = []

    def knows(domain: str, operator: str, opset: int) -> bool:
        questions.append((domain, operator, opset))
        return operator in known

    content = model if isinstance(model, bytes) else model.SerializeToString()
    return supported_operations(Model.from_onnx(content), knows), questions


def test_operators_of_onnx_are_asked_for_in_the_models_version_whatever_the_name_of_their_domain() -> None:
    for domain in ("", "ai.onnx"):
        nodes = [helper.make_node("Relu", ["x"], ["a"], domain=domain), helper.make_node("Neg", ["a"], ["y"])]
        model = model_of(nodes, [value("x", [2])], [value("y", [2])])
        del model.opset_import[:]
        model.opset_import.append(OperatorSetIdProto(domain=domain, version=13))
        assert asked(model, ["Neg"]) == ((False, True), [("", "Relu", 13), ("", "Neg", 13)])


def test_of_several_versions_of_the_operators_the_last_in_the_model_counts() -> None:
    model = identity(TensorProto.FLOAT)
    del model.opset_import[:]
    model.opset_import.extend(
        OperatorSetIdProto(domain=domain, version=version) for domain, version in (("", 13), ("ai.onnx", 17), ("", 18))
    )
    assert asked(model)[1] == [("", "Identity", 18)]


@pytest.mark.parametrize("version", [2**63 - 1, 2**31, 2**31 - 1, 0, -1, -(2**31) - 1, -(2**63)])
def test_a_version_that_the_operators_never_had_raises_nothing(version: int) -> None:
    for operator in ("Relu", "Clip", "Frobnicate"):
        model = model_of([helper.make_node(operator, ["x"], ["y"])], [value("x", [2])], [value("y", [2])])
        del model.opset_import[:]
        model.opset_import.append(OperatorSetIdProto(domain="", version=version))
        known = version > 0 and operator != "Frobnicate"
        assert OnnxRuntimeEngine().supported_operations(Model.from_onnx(model.SerializeToString())) == (known,)


def test_a_model_with_a_body_is_judged_by_what_the_body_contains() -> None:
    body = helper.make_graph([helper.make_node("Relu", ["x"], ["inner"])], "body", [], [value("inner", [2])])
    node = helper.make_node("If", ["condition"], ["y"], then_branch=body, else_branch=body)
    model = model_of([node], [value("condition", [], TensorProto.BOOL), value("x", [2])], [value("y", [2])])
    assert asked(model, ["If"])[0] == (False,)
    assert asked(model, ["If", "Relu"])[0] == (True,)


def test_a_function_of_the_model_with_the_name_of_an_operator_is_judged_by_what_it_contains() -> None:
    model = identity(TensorProto.FLOAT)
    inner = helper.make_node("Frobnicate", ["a"], ["b"])
    model.functions.append(helper.make_function("", "Identity", ["a"], ["b"], [inner], [helper.make_opsetid("", 17)]))
    assert asked(model, ["Identity"])[0] == (False,)
    assert asked(model, ["Frobnicate"])[0] == (True,)


@pytest.mark.parametrize("name", ["silero", "detector", "orientation", "magika"])
def test_the_operator_sets_of_a_real_model_are_read_as_onnx_reads_them(name: str) -> None:
    graph = Model.from_onnx(carried(name)).graph
    whole = ModelProto.FromString(graph)
    assert operator_sets(graph) == (None if whole.functions else {entry.domain: entry.version for entry in whole.opset_import})


def test_what_cannot_be_a_model_has_no_operator_sets() -> None:
    for content in (b"\x42\x05\x0a", b"\x42\x02\x0a\x05", b"\x42\x03\x0a\x01\xff"):
        with pytest.raises(ValueError, match=r"only|utf-8"):
            operator_sets(content)
