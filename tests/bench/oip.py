"""Row F18: a request by the Open Inference Protocol beside a plain POST of the same bytes to the same server, and beside a burst.

    python -m tests.bench oip [--rounds 5] [--frames 200]

The rounds of all ways alternate, so that other work on the machine meets all of them. Each way has one request in flight.

Beside the times it prints the CPU time that the server spends on a request, without the driver's. A server that expects the answer within
0.3 ms stays awake for it, and else sleeps (`aionn.burst.spin_policy`). Whether it does changes from round to round, and so does its CPU
time, by all of the driver's time. So the CPU time is measured twice: with a burst that may stay awake, as the times are, and with one that
always sleeps ("low_power"). The second figure is the work that a request makes.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import aionn
import aionn.asgi
from aionn.cli.serving.http import server_config
from tests.real_models import carried

INPUTS = {"input": (1, 576), "state": (2, 1, 128)}
ANSWER_BYTES = 4 + 1024
LENGTH = "Inference-Header-Content-Length"
AWAKE, ASLEEP = "vad", "vad-asleep"
"""The same model twice: its burst may stay awake while it waits for an answer, or always sleeps."""

Way = Callable[[], object]


async def plain(request: Request) -> Response:
    """Read a body, and answer with as many bytes as the model's outputs have."""
    await request.body()
    return Response(b"\0" * ANSWER_BYTES)


async def with_burst(request: Request) -> Response:
    """The same with the model in between, as a handler of one's own would run it: what a protocol cannot be quicker than."""
    await request.body()
    burst = await aionn.asgi.burst(request.path_params["model"])(request)
    outputs = await burst.compute(ARRAYS)
    return Response(b"".join(outputs[name].tobytes() for name in ("output", "stateN")))


async def by_burst(request: Request) -> Response:
    """Run the model over its burst without HTTP, and answer with the times in ns."""
    burst = await aionn.asgi.burst(AWAKE)(request)
    arrays = made_up()
    took = []
    for _ in range(int(request.query_params["frames"])):
        began = time.perf_counter_ns()
        await burst.compute(arrays)
        took.append(time.perf_counter_ns() - began)
    return JSONResponse(took)


def made_up() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.random(shape, np.float32) for name, shape in INPUTS.items()}


ARRAYS = made_up()


def app() -> Starlette:
    routes = [
        Route("/plain", plain, methods=["POST"]),  # first: routes are tried in order, and a plain POST must not bear the others' cost
        Route("/floor/{model}", with_burst, methods=["POST"]),
        *aionn.asgi.oip(),
        Route("/burst", by_burst),
    ]
    options = {"devices": ("onnxruntime",)}
    models: dict[str, aionn.asgi.ModelSpec] = {
        AWAKE: (carried("silero"), options),
        ASLEEP: (carried("silero"), {**options, "preference": "low_power"}),
    }
    return Starlette(routes=routes, lifespan=aionn.asgi.lifespan(models))


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Run the server for the body. Yields HOST:PORT and its process id."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        fd, address = listening.fileno(), f"127.0.0.1:{listening.getsockname()[1]}"
        process = subprocess.Popen([sys.executable, "-m", "tests.bench.oip", str(fd)], pass_fds=(fd,))
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60) as client:
            while any(client.get(f"/v2/models/{model}/ready").status_code != 200 for model in (AWAKE, ASLEEP)):
                time.sleep(0.05)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def serve(fd: int) -> None:
    """Serve on a socket that listens, as `aionn serve-http` does."""
    uvicorn.Server(server_config(app())).run(sockets=[socket.socket(fileno=fd)])


def request() -> tuple[bytes, dict[str, str]]:
    arrays = made_up()
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
        for name, array in arrays.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return text + b"".join(array.tobytes() for array in arrays.values()), {LENGTH: str(len(text))}


def raw_ways(address: str) -> dict[str, dict[str, Way]]:
    """The same bytes by Python's own HTTP client: as a plain POST, which asks no model, and as a request of the protocol. By model."""
    body, headers = request()
    connection = http.client.HTTPConnection(address)

    def post(path: str) -> Way:
        def ask() -> None:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            if answer.status != 200 or len(answer.read()) < ANSWER_BYTES:
                raise RuntimeError(f"{path}: {answer.status}")

        return ask

    return {
        "http.client, plain POST": {model: post("/plain") for model in (AWAKE, ASLEEP)},
        "http.client, POST to a handler": {model: post(f"/floor/{model}") for model in (AWAKE, ASLEEP)},
        "http.client, protocol": {model: post(f"/v2/models/{model}/infer") for model in (AWAKE, ASLEEP)},
    }


def triton_ways(address: str) -> dict[str, dict[str, Way]]:
    """NVIDIA's client, and a plain POST of the same bytes by the HTTP client that it uses, which asks no model. By model."""
    from geventhttpclient import HTTPClient
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

    client = InferenceServerClient(address)
    body, headers = request()
    transport = HTTPClient.from_url(f"http://{address}")

    def plain_post() -> None:
        if len(transport.post("/plain", body, headers).read()) != ANSWER_BYTES:
            raise RuntimeError("/plain")

    def infer(model: str, binary: bool) -> Way:
        def ask() -> None:
            inputs = []
            for name, array in arrays.items():
                inputs.append(InferInput(name, list(array.shape), "FP32"))
                inputs[-1].set_data_from_numpy(array, binary_data=binary)
            outputs = [InferRequestedOutput(name, binary_data=binary) for name in ("output", "stateN")]
            client.infer(model, inputs, outputs=outputs).as_numpy("stateN")

        return ask

    arrays = made_up()
    return {
        "geventhttpclient, plain POST": {AWAKE: plain_post, ASLEEP: plain_post},
        "tritonclient, raw bytes": {model: infer(model, True) for model in (AWAKE, ASLEEP)},
        "tritonclient, JSON": {model: infer(model, False) for model in (AWAKE, ASLEEP)},
    }


async def aio_times(address: str, frames: int) -> list[int]:
    from tritonclient.http.aio import InferenceServerClient, InferInput

    async with InferenceServerClient(address) as client:

        async def ask() -> None:
            inputs = []
            for name, array in made_up().items():
                inputs.append(InferInput(name, list(array.shape), "FP32"))
                inputs[-1].set_data_from_numpy(array)
            (await client.infer(AWAKE, inputs)).as_numpy("stateN")

        return [await timed_async(ask) for _ in range(frames)]


async def timed_async(ask: Callable[[], Awaitable[object]]) -> int:
    began = time.perf_counter_ns()
    await ask()
    return time.perf_counter_ns() - began


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def timed(way: Way) -> int:
    began = time.perf_counter_ns()
    way()
    return time.perf_counter_ns() - began


@dataclass
class Measured:
    """What was measured of one way.

    Attributes:
        times_ns: of each request. cpu_us: of the server per request, one for each round, by the model asked.
    """

    times_ns: list[int] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {AWAKE: [], ASLEEP: []})

    def take(self, ways: dict[str, Way], pid: int, frames: int) -> None:
        for model, way in ways.items():
            way()
            before = cpu_ns(pid)
            took = [timed(way) for _ in range(frames)]
            self.cpu_us[model].append((cpu_ns(pid) - before) / frames / 1e3)
            if model == AWAKE:
                self.times_ns += took


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench oip")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=200)
    options = parser.parse_args(argv)
    with serving() as (address, pid):
        ways = raw_ways(address)
        try:
            ways |= triton_ways(address)
        except ImportError:
            print("tritonclient is not installed: pip install --no-deps -r tests/asgi/tritonclient.txt")
        burst = Measured()
        found = {"a burst in the server": burst} | {name: Measured() for name in ways}
        for _ in range(options.rounds):
            burst.times_ns += httpx.get(f"http://{address}/burst", params={"frames": options.frames}, timeout=60).json()
            for name, by_model in ways.items():
                found[name].take(by_model, pid, options.frames)
            if len(ways) > 3:
                aio = found.setdefault("tritonclient.aio, raw bytes", Measured())
                aio.times_ns += asyncio.run(aio_times(address, options.frames))
    report(found)


def report(found: dict[str, Measured]) -> None:
    """Print the times, and of the CPU times, of which there is one per round, the median and the least."""
    p50 = {name: statistics.median(one.times_ns) / 1e6 for name, one in found.items()}
    print(f"{'':51} CPU us of the server per request: median, least")
    print(f"{'way':32} {'p50 ms':>8} {'p99 ms':>8}   {'waits asleep':>14}   {'may stay awake':>14}")
    for name, one in found.items():
        p99 = statistics.quantiles(one.times_ns, n=100)[98] / 1e6
        cpu = [f"{statistics.median(us):7.0f}{min(us):7.0f}" if us else "" for us in (one.cpu_us[ASLEEP], one.cpu_us[AWAKE])]
        print(f"{name:32} {p50[name]:8.3f} {p99:8.3f}   {cpu[0]:>14}   {cpu[1]:>14}".rstrip())
    loop_ms = p50["a burst in the server"]
    paced_ms = p50["http.client, POST to a handler"] - p50["http.client, plain POST"]
    print(f"A burst takes {loop_ms:.3f} ms in a loop, and {paced_ms:.3f} ms between requests, when its driver sleeps.")
    for way, floor in (
        ("http.client, protocol", "http.client, plain POST"),
        ("tritonclient, raw bytes", "geventhttpclient, plain POST"),
    ):
        if way in p50:
            ratios = [(p50[way] - burst_ms) / p50[floor] for burst_ms in (loop_ms, paced_ms)]
            print(f"F18: {way} adds to the burst {ratios[0]:.2f} (loop), {ratios[1]:.2f} (between requests) x of {floor}; bound 1.5")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
