"""What ONNX Runtime says when it refuses a model, as a `CompilationError` that names the node."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aionn.errors import CompilationError
from aionn.hal.model import Operation

_NAMES_A_NODE = (
    re.compile(r"node with name '([^']+)'"),  # no kernel for it
    re.compile(r'In Node, \("([^"]+)"'),  # no such operator, or a bad attribute
    re.compile(r"Node ?\((.+?)\) Op"),  # shape inference
    re.compile(r"in node \((.+?)\)"),  # element types
    re.compile(r"Name: ?'?(.+?)'? OpType"),
)
_SOURCE_PLACE = re.compile(r"^(?:Exception during initialization: )?/\S+:\d+ .*?\) (?=[A-Z])")  # a file and signature of ORT's own
_UNREGISTERED = re.compile(r"Fatal error: ([^ ]*):([^ :(]+)\(-?\d+\) is not a registered")


def without_status(message: str) -> str:
    """Return a message of ONNX Runtime in one line, without the name of its status."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", " ".join(message.split()))


def compilation_error(message: str, operations: Sequence[Operation]) -> CompilationError:
    reason = _SOURCE_PLACE.sub("", without_status(message))
    node = next((found.group(1) for pattern in _NAMES_A_NODE if (found := pattern.search(reason))), None)
    unregistered = _UNREGISTERED.search(reason)
    if node is None and unregistered is not None:
        kind = unregistered.groups()
        node = next((operation.name for operation in operations if (operation.domain, operation.op_type) == kind), None)
    at = "" if node is None else f" at node {node!r}"
    return CompilationError(f"onnxruntime cannot prepare the model{at}: {reason}", node=node, reason=reason)
