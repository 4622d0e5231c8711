"""What a library says of a run that failed, as one sentence without the places of its source, its signatures and its exceptions' names."""

from __future__ import annotations

import re

from aionn.engines.onnxruntime_errors import without_status
from aionn.errors import ExecutionError
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
