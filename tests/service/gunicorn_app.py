"""A WSGI app for gunicorn, whose workers share a driver. `tests.service.gunicorn_hooks` attaches each worker.

With `preload_app`, gunicorn imports this module once in its master. So the model's file is read once for all workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import aionn
import aionn.blocking

MODEL = Path(os.environ["AIONN_TEST_MODEL"]).read_bytes()
READ_BY = os.getpid()
_until_exit = ExitStack()
_bursts: list[aionn.BlockingBurst] = []


def attach() -> None:
    """Attach this process. A burst that was attached before the fork would refuse its calls."""
    _bursts.append(_until_exit.enter_context(aionn.blocking.attach(MODEL, devices=["reference"])))


def app(environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], object]) -> Iterable[bytes]:
    """Answer `?NUMBER` with the worker, the process that read the model's file, and the number as the model returns it."""
    (burst,) = _bursts
    outputs = burst.compute({"input": np.full((1, 16), float(environ["QUERY_STRING"]), np.float32)}, timeout_s=30)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {READ_BY} {outputs['input_out'][0, 0]:.0f}".encode()]
