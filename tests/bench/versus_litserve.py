"""The server of LitServe that `tests.bench.versus` asks: `python -m tests.bench.versus_litserve JSON`.

It starts a process for the model, and another one in place of one that has died. Bodies of requests are JSON, so arrays come as base64.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import litserve
import numpy as np
from starlette.responses import Response

from tests.bench.real_worker import end_with_parent, session_of


class Served(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given

    def setup(self, device: str) -> None:
        self.session = session_of(self.given["model"], self.given["threads"])

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe reads annotations
        specs = self.given["inputs"].items()
        return {name: np.frombuffer(base64.b64decode(request[name]), dtype).reshape(shape) for name, (dtype, shape) in specs}

    def predict(self, inputs: dict[str, Any]) -> Sequence[Any]:
        return self.session.run(self.given["outputs"], inputs)  # type: ignore[no-any-return]

    def encode_response(self, outputs: Sequence[Any]) -> Any:
        return Response(b"".join(array.tobytes() for array in outputs), headers={"x-pid": str(os.getpid())})


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # so that it ends its process, too
    given = json.loads(sys.argv[1])
    server = litserve.LitServer(Served(given), accelerator="cpu", fast_queue=True, restart_workers=True)
    server.run(host="127.0.0.1", port=given["port"], generate_client_file=False, log_level="error")
