"""`aionn serve-frigate`: a server for Frigate's detector type `zmq`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aionn
from aionn.cli.printing import NotDoneError, UsageError, say
from aionn.cli.serving.listening import until_sigterm
from aionn.errors import AionnError
from aionn.hal.types import MAX_THREADS
from aionn.loopless import checked_count
from aionn.memory.limits import raise_file_limit
from aionn.service.listening import Listening, listen
from aionn.service.models import cache_folder

try:
    from aionn.adapters.frigate.endpoint import MOST_TENSOR_BYTES, Endpoint
except ImportError as error:
    raise UsageError("aionn serve-frigate needs pyzmq; install it with: pip install 'aionn[frigate]'") from error

from aionn.adapters.frigate.detectors import Detectors

_SCHEME = "ipc://"


@dataclass(frozen=True, slots=True)
class ServeFrigateOptions:
    """How `aionn serve-frigate` serves. The command line describes each option."""

    endpoint: str
    model: str | None
    device: Sequence[str] | None
    threads: int | None
    service: str | None
    timeout_ms: int
    max_model_bytes: int
    cache_dir: str | None
    state_dir: str | None


def serve(options: ServeFrigateOptions) -> None:
    """Serve detectors until SIGINT or SIGTERM.

    Raises:
        UsageError: an option is wrong.
        NotDoneError: the model cannot be prepared.
        AionnError: the endpoint cannot be listened on.
    """
    path = options.endpoint.removeprefix(_SCHEME)
    if path == options.endpoint or not os.path.isabs(path):
        raise UsageError(
            f"--endpoint {options.endpoint!r}: only Unix sockets are served; give an absolute path, as {_SCHEME}/run/aionn/frigate"
        )
    if options.timeout_ms < 1:
        raise UsageError(
            f"--timeout-ms is {options.timeout_ms}; give the request_timeout_ms of Frigate's detector, which is 200 by default"
        )
    if options.threads is not None:
        checked_count("--threads", options.threads, 1, MAX_THREADS)  # a model that a detector sends may come much later
    if options.model is not None and not Path(options.model).is_file():
        raise UsageError(f"there is no file {options.model!r}; give the path of an ONNX file")
    raise_file_limit()  # each client takes a descriptor
    listening = listen(path, "--endpoint", "stop it, or give another path with --endpoint")
    try:
        aionn.run(_serve, listening, options)
    finally:
        listening.end()


async def _serve(listening: Listening, options: ServeFrigateOptions) -> None:
    compile_options: dict[str, Any] = {"threads": options.threads, "cache_dir": options.cache_dir or cache_folder("frigate")}
    if options.device:
        compile_options["devices"] = tuple(options.device)
    with until_sigterm(listening):
        start = options.device or (None if options.model else ())  # a device that is named must be there; else no driver yet
        async with aionn.Runtime(name="frigate", service=options.service, state_dir=options.state_dir, start=start) as runtime:
            detectors = Detectors(runtime, compile_options, options.max_model_bytes, say)
            most_bytes = MOST_TENSOR_BYTES if options.model else max(MOST_TENSOR_BYTES, 2 * options.max_model_bytes)
            endpoint = Endpoint(listening, detectors, options.timeout_ms / 1000, most_bytes)
            try:
                if options.model is None:
                    say(f"ready at {options.endpoint}: models come from the detectors")
                else:
                    say(f"listening at {options.endpoint}, compiling {options.model}")
                    try:
                        await detectors.load(options.model)
                    except AionnError as error:
                        raise NotDoneError(f"the model {options.model!r} does not serve: {error}") from error
                    say(f"ready at {options.endpoint}")
                await endpoint.serve()
            finally:
                endpoint.end()
                detectors.end()
