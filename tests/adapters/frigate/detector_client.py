"""A client as Frigate's detector type `zmq` is one, written from a description of its protocol. And a running `aionn serve-frigate`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from tests.cli.serving import Serving, serving

TIMEOUT_MS = 200
MODEL_TIMEOUT_MS = 30_000


class DetectorClient:
    """Asks one request at a time. After a timeout it connects anew, and has to ask for its model again."""

    def __init__(self, endpoint: str, timeout_ms: int = TIMEOUT_MS) -> None:
        self.endpoint, self.timeout_ms = endpoint, timeout_ms
        self._context = zmq.Context()
        self._connect()

    def __enter__(self) -> DetectorClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self._context.destroy(linger=0)

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.endpoint)

    def ask(self, frames: Sequence[bytes | memoryview], timeout_ms: int) -> list[bytes] | None:
        """Return the answer's frames, or None after the timeout."""
        self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        self._socket.setsockopt(zmq.SNDTIMEO, timeout_ms)
        try:
            self._socket.send_multipart(frames)
            return list(self._socket.recv_multipart())
        except zmq.Again:
            self._socket.close()
            self._connect()
            return None

    def asks_for(self, name: str) -> dict[str, bool]:
        """Ask whether the server has a model."""
        return self._json({"model_request": True, "model_name": name})

    def sends(self, name: str, content: bytes) -> dict[str, bool]:
        """Send a model."""
        return self._json({"model_data": True, "model_name": name}, content)

    def _json(self, header: dict[str, Any], *more: bytes) -> dict[str, bool]:
        answer = self.ask([json.dumps(header).encode(), *more], MODEL_TIMEOUT_MS)
        assert answer is not None
        (frame,) = answer
        found: dict[str, bool] = json.loads(frame)
        return found

    def detect(self, tensor: NDArray[Any], model_type: str) -> NDArray[np.float32] | None:
        """Return the rows that the server finds in a picture, or None if it does not answer in time."""
        header = {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "model_type": model_type}
        answer = self.ask([json.dumps(header).encode(), np.ascontiguousarray(tensor).data.cast("B")], self.timeout_ms)
        if answer is None:
            return None
        assert [len(frame) for frame in answer] == [20 * 6 * 4]
        return np.frombuffer(answer[0], np.float32).reshape(20, 6)


@contextmanager
def serve_frigate(folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[Serving]:
    """Run the command for the body. Its `address` is the endpoint."""
    endpoint = f"ipc://{folder}/detector"
    own = ("--cache-dir", f"{folder}/cache", "--state-dir", f"{folder}/state")
    with serving(Serving, "serve-frigate", "--endpoint", endpoint, *own, *arguments, prefix=prefix) as server:
        server.address = endpoint
        server.until(rf"ready at {re.escape(endpoint)}")
        yield server
