"""What a library says of a run that failed, as one sentence without the places of its source, its signatures and its exceptions' names.

ONNX Runtime's words about a model that it refuses become a `CompilationError` that names the node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aionn.errors import CompilationError, ExecutionError
from aionn.hal.model import Operation
from aionn.hal.types import ErrorStatus

# Texts, which are compiled at their first use: each start of a driver would pay for it.
_ORT_NODE = r"Non-zero status code returned while running (\S+) node\. Name:'(.*?)' Status Message: "
_PLACE = r"\S+\.(?:h|hpp|cc|cpp):\d+:?"
_ORT_PLACE = _PLACE + r" (?:[^()]*(?:\([^()]*\)[^()]*)*?\([^()]*\)(?: const)? |\w+ )(?=\S)"
_ORT_CHECK = r"\S[^.'\"]*? was false\. (?=\S)"
_ORT_STATUS = r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : "
_CLASS = r"<class '(?:\w+\.)*(\w+)'>"
_OV_NOISE = r"^(?:Exception from |While validating node |To facilitate )"
_OV_CHECK = r"\s*Check '.*?' failed at \S+"
_OV_FUNCTION = r"\b\w+(?:::\w+)+ "
_OV_TAG = r"(?i)^\[cpu\]\s*"


def onnxruntime_failure(error: Exception) -> ExecutionError:
    """Return what ONNX Runtime says of a failed run. It names the node."""
    text = without_status(str(error).strip().removeprefix("Error in execution: "))
    node = re.search(_ORT_NODE, text)
    at = ""
    if node is not None:
        at, text = f"{node.group(1)} node {node.group(2)!r}: ", text[node.end() :]
    placed = re.match(_ORT_PLACE, text)
    if placed is not None:
        text = re.sub(_ORT_CHECK, "", text[placed.end() :], count=1)
    return _failure(f"{at}{re.sub(_ORT_STATUS, '', text)}", error)


def openvino_failure(error: Exception) -> ExecutionError:
    """Return what OpenVINO says of a failed run. It names the node, as OpenVINO calls it."""
    said = []
    for line in str(error).splitlines():
        if not re.match(_OV_NOISE, line.strip()):
            said.append(re.sub(_OV_TAG, "", re.sub(_OV_FUNCTION, "", re.sub(_OV_CHECK, "", line)).strip()).rstrip(":"))
    return _failure(": ".join(filter(None, said)), error)


def reference_failure(error: Exception) -> ExecutionError:
    """Return what NumPy, or onnx's own code, says of a failed run."""
    return _failure(re.sub(_CLASS, r"\1", str(error)), error)


def cancelled() -> CompilationError:
    """Return the error of a compilation whose caller has stopped waiting."""
    return CompilationError("the compilation was cancelled because its caller stopped waiting", reason="cancelled")


def _failure(sentence: str, error: Exception) -> ExecutionError:
    text = " ".join(re.sub(_PLACE, "", sentence).split()) or "the library gave no reason"
    failure = ExecutionError(text, status=ErrorStatus.GENERAL_FAILURE)
    failure.__cause__ = error
    return failure


_NAMES_A_NODE = (
    r"node with name '([^']+)'",  # no kernel for it
    r'In Node, \("([^"]+)"',  # no such operator, or a bad attribute
    r"Node ?\((.+?)\) Op",  # shape inference
    r"in node \((.+?)\)",  # element types
    r"Name: ?'?(.+?)'? OpType",
)
_SOURCE_PLACE = r"^(?:Exception during initialization: )?/\S+:\d+ .*?\) (?=[A-Z])"  # a file and signature of ORT's own
_UNREGISTERED = r"Fatal error: ([^ ]*):([^ :(]+)\(-?\d+\) is not a registered"


def without_status(message: str) -> str:
    """Return a message of ONNX Runtime in one line, without the name of its status."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", " ".join(message.split()))


def compilation_error(message: str, operations: Sequence[Operation]) -> CompilationError:
    reason = re.sub(_SOURCE_PLACE, "", without_status(message))
    node = next((found.group(1) for pattern in _NAMES_A_NODE if (found := re.search(pattern, reason))), None)
    unregistered = re.search(_UNREGISTERED, reason)
    if node is None and unregistered is not None:
        kind = unregistered.groups()
        node = next((operation.name for operation in operations if (operation.domain, operation.op_type) == kind), None)
    at = "" if node is None else f" at node {node!r}"
    return CompilationError(f"onnxruntime cannot prepare the model{at}: {reason}", node=node, reason=reason)
