"""Requests of the Open Inference Protocol that are written by hand, and answers that are read from the socket."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, BinaryIO

from tests.asgi.oip_served import OipServed

LENGTH = "Inference-Header-Content-Length"
INPUT0 = {"name": "input0", "shape": [2, 2], "datatype": "UINT32", "data": [1, 2, 3, 4]}
INPUT1 = {"name": "input1", "shape": [3], "datatype": "BOOL", "data": [True, True, False]}
OUTPUT0 = {"name": "output0", "shape": [3, 2], "datatype": "FP32", "data": [4.0, 6.0, 4.0, 6.0, 0.0, 0.0]}


def tensor(of: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return a tensor of a request with other entries. None takes one away."""
    return {key: value for key, value in {**of, **changed}.items() if value is not None}


def raw(of: dict[str, Any], size: Any) -> dict[str, Any]:
    return tensor(of, data=None, parameters={"binary_data_size": size})


def body(*inputs: Any, tail: bytes = b"", **more: Any) -> tuple[bytes, dict[str, str]]:
    text = json.dumps({"inputs": list(inputs), **more}).encode()
    return text + tail, {LENGTH: str(len(text))} if tail or any("binary_data_size" in str(one) for one in inputs) else {}


def connected(served: OipServed) -> socket.socket:
    host, port = served.address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(model: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def answer(stream: socket.socket) -> tuple[int, bytes, bytes]:
    """Read the one answer of a connection: its status, its head and its body."""
    with stream.makefile("rb") as lines:
        return answer_in(lines)


def answer_in(lines: BinaryIO) -> tuple[int, bytes, bytes]:
    """Read the next answer."""
    first = lines.readline()
    rest = b""
    length = 0
    while (line := lines.readline()) not in (b"\r\n", b""):
        rest += line
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return int(first.split()[1]), rest, lines.read(length)


def until(seen: Any) -> None:
    """Ask until it is so. Each look is a call into the server's loop."""
    began = time.monotonic()
    while not seen():
        assert time.monotonic() - began < 30
