"""What a library says of a run that failed, as one sentence without the places of its source, its signatures and its exceptions' names.

ONNX Runtime's words about a model that it refuses become a `CompilationError` that names the node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aionn.errors import CompilationError, ExecutionError
from aionn.hal.model import Operation
from aionn.hal.types import ErrorStatus

_ORT_NODE = re.compile(r"Non-zero status code returned while running (\S+) node\. Name:'(.*?)' Status Message: ")
_PLACE = re.compile(r"\S+\.(?:h|hpp|cc|cpp):\d+:?")
_ORT_PLACE = re.compile(_PLACE.pattern + r" (?:[^()]*(?:\([^()]*\)[^()]*)*?\([^()]*\)(?: const)? |\w+ )(?=\S)")
_ORT_CHECK = re.compile(r"\S[^.'\"]*? was false\. (?=\S)")
_ORT_STATUS = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_OV_NOISE = re.compile(r"^(?:Exception from |While validating node |To facilitate )")
_OV_CHECK = re.compile(r"\s*Check '.*?' failed at \S+")
_OV_FUNCTION = re.compile(r"\b\w+(?:::\w+)+ ")
_OV_TAG = re.compile(r"^\[cpu\]\s*", re.IGNORECASE)


def onnxruntime_failure(error: Exception) -> ExecutionError:
    """Return what ONNX Runtime says of a failed run. It names the node."""
    text = without_status(str(error).strip().removeprefix("Error in execution: "))
    node = _ORT_NODE.search(text)
    at = ""
    if node is not None:
        at, text = f"{node.group(1)} node {node.group(2)!r}: ", text[node.end() :]
    placed = _ORT_PLACE.match(text)
    if placed is not None:
        text = _ORT_CHECK.sub("", text[placed.end() :], count=1)
    return _failure(f"{at}{_ORT_STATUS.sub('', text)}", error)


def openvino_failure(error: Exception) -> ExecutionError:
    """Return what OpenVINO says of a failed run. It names the node, as OpenVINO calls it."""
    said = []
    for line in str(error).splitlines():
        if not _OV_NOISE.match(line.strip()):
            said.append(_OV_TAG.sub("", _OV_FUNCTION.sub("", _OV_CHECK.sub("", line)).strip()).rstrip(":"))
    return _failure(": ".join(filter(None, said)), error)


def reference_failure(error: Exception) -> ExecutionError:
    """Return what NumPy, or onnx's own code, says of a failed run."""
    return _failure(_CLASS.sub(r"\1", str(error)), error)


def _failure(sentence: str, error: Exception) -> ExecutionError:
    text = " ".join(_PLACE.sub("", sentence).split()) or "the library gave no reason"
    failure = ExecutionError(text, status=ErrorStatus.GENERAL_FAILURE)
    failure.__cause__ = error
    return failure


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
