"""A worker process of `aionn bench`: `python -m aionn.cli.bench_worker DESCRIPTOR KIND [ARGUMENTS]`, started by `bench_subjects`.

    echo                                  returns each message
    aionn MODEL DEVICE CACHE X NAMES...   runs a model once; CACHE is a folder or an empty text
    session MODEL X NAMES...              the same by onnxruntime.InferenceSession, without aionn

The .npz file X has the inputs in the order of their names.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_HEAD = struct.Struct("=Q")


def main(arguments: Sequence[str]) -> None:
    """Do the work, and write one byte to the socket when there is an answer."""
    fd, kind, *rest = arguments
    os.set_inheritable(int(fd), False)
    os.dup(int(fd))  # stays open, so that the socket ends with this process, after its last message
    with socket.socket(fileno=int(fd)) as sock:
        try:
            _KINDS[kind](sock, *rest)
        except Exception as error:  # this is the end of the process, whatever the engine raised
            sys.exit(f"aionn bench: {' '.join(str(error).split())}")


def _echo(sock: socket.socket) -> None:
    content = bytearray()
    while True:
        head = sock.recv(_HEAD.size, socket.MSG_WAITALL)
        if len(head) < _HEAD.size:
            return
        (size,) = _HEAD.unpack(head)
        if size > len(content):
            content = bytearray(size)
        with memoryview(content)[:size] as room:
            if sock.recv_into(room, size, socket.MSG_WAITALL) < size:
                return
            sock.sendall(room)


def _by_aionn(sock: socket.socket, path: str, device: str, cache_dir: str, inputs: str, *names: str) -> None:
    import aionn

    async def run() -> None:
        async with aionn.Runtime(start=(device,)) as runtime:
            model = await runtime.load(path)
            compilation = await runtime.compile(model, devices=(device,), cache_dir=cache_dir or None)
            await compilation.compute(_inputs(inputs, names))
            sock.send(b"1")

    aionn.run(run)


def _by_session(sock: socket.socket, path: str, inputs: str, *names: str) -> None:
    import onnxruntime

    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, _inputs(inputs, names))
    sock.send(b"1")


def _inputs(path: str, names: Sequence[str]) -> dict[str, Any]:
    import numpy as np

    with np.load(path) as arrays:
        return {name: arrays[f"arr_{number}"] for number, name in enumerate(names)}


_KINDS: Mapping[str, Callable[..., None]] = {"echo": _echo, "aionn": _by_aionn, "session": _by_session}

if __name__ == "__main__":
    main(sys.argv[1:])
