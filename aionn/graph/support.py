"""Which operations of a model an engine knows, asked kind by kind; and who reads its constants.

Both questions are mostly answered without the `onnx` package. Its import would be a fifth of the start of a driver.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from aionn.graph.wire import operator_sets
from aionn.hal.model import PooledModel

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, OperatorSetIdProto

Known = Callable[[str, str, int], bool]
"""Whether an engine has that operator: domain ("" is ONNX's own), operator, version of the operator set."""

WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""ONNX's operators whose nodes have graphs inside."""


def supported_operations(model: PooledModel, known: Known, *, overloads: bool = True) -> tuple[bool, ...]:
    """Per entry of `model.operations`, whether it and all it contains (bodies, the model's own functions) is known.

    Nothing is known of a model of another format than ONNX.

    Args:
        overloads: whether the engine can tell functions of one name apart.
    """
    if model.format != "onnx":
        return (False,)
    asked = functools.cache(known)
    version = _only_version(model)
    if version is not None:
        return tuple(asked("", operation.op_type, version) for operation in model.operations)
    import onnx

    from aionn.graph.checking import nested_graphs

    whole: ModelProto = onnx.ModelProto.FromString(model.graph)
    functions = {(_domain(function.domain), function.name, function.overload): function for function in whole.functions}
    named = Counter(key[:2] for key in functions)

    def supports(node: NodeProto, versions: Mapping[str, int]) -> bool:
        domain = _domain(node.domain)
        function = functions.get((domain, node.op_type, node.overload))
        if function is not None:
            clear = overloads or named[domain, node.op_type] == 1
            return clear and all(supports(inner, _versions(function.opset_import)) for inner in function.node)
        if domain not in versions or not asked(domain, node.op_type, versions[domain]):
            return False
        return all(supports(inner, versions) for body in nested_graphs(node) for inner in body.node)

    versions = _versions(whole.opset_import)
    return tuple(supports(node, versions) for node in whole.graph.node)


def _only_version(model: PooledModel) -> int | None:
    """Return the version of ONNX's operators if `model.operations` says all about them, else None.

    It does for a model of ONNX's own operators alone, without bodies and without functions.
    """
    if any(_domain(operation.domain) or operation.op_type in WITH_BODIES for operation in model.operations):
        return None
    try:
        versions = operator_sets(model.graph)
    except ValueError:
        return None  # the `onnx` package says what is wrong
    found = {version for domain, version in (versions or {}).items() if not _domain(domain)}
    return found.pop() if len(found) == 1 else None  # of several, the last in the model counts


def gather_tables(model: PooledModel, at_least_bytes: int) -> list[str]:
    """External constants of at least that size that are read by Gather alone, as the table: nothing else depends on their layout."""
    if _only_version(model) is not None and not any(operation.op_type == "Gather" for operation in model.operations):
        return []
    import onnx

    from aionn.graph.checking import nested_graphs

    whole: ModelProto = onnx.ModelProto.FromString(model.graph)
    tables = {
        tensor.name
        for tensor in whole.graph.initializer
        for entry in tensor.external_data
        if entry.key == "length" and int(entry.value) >= at_least_bytes
    }

    def strike(nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            gathers = node.op_type == "Gather" and not _domain(node.domain)
            tables.difference_update(node.input[1:] if gathers else node.input)
            for body in nested_graphs(node):
                tables.difference_update(value.name for value in body.output)
                # ONNX Runtime takes what was handed over for a name in every graph, also in one with another constant of that name.
                tables.difference_update(tensor.name for tensor in body.initializer)
                strike(body.node)

    tables.difference_update(value.name for value in whole.graph.output)
    strike(whole.graph.node)
    return sorted(tables)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _versions(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(entry.domain): entry.version for entry in imports}
