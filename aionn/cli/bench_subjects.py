"""What `aionn bench` measures: the kinds of each subject, and their rivals, which do the same work without aionn.

burst    a round trip of 64 B and of 1.2 MB; rivals: a thread, and a worker process behind a socket ("pipe")
cache    a hit, which the driver verifies before it loads; beside it a compile, and a session of ONNX Runtime in a thread
start    from the start of a fresh process to its first answer, with and without a cache; rival: ONNX Runtime alone
stages   from the wish for a better stage to its swap
MODEL    round trips of a model; rival: the same model by ONNX Runtime in a thread

All kinds of one group take turns within each round, so that a change of the machine's pace meets all alike. Worker processes are one
that returns what it gets, and fresh ones that run a model once.

Invariants
    A worker ends when its socket ends. It is killed and waited for when its `with` block ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.cli.printing import NotDoneError
from aionn.testing.models import identity_model

if TYPE_CHECKING:
    from onnx import GraphProto


Arrays = dict[str, NDArray[Any]]

SIZES: Mapping[str, tuple[int, ...]] = {"64 B": (1, 16), "1.2 MB": (1, 3, 320, 320)}


class NotCachedError(NotDoneError):
    """The device stores nothing for the model, so there are no hits to measure."""


_WIDTH, _LAYERS = 320, 3
_ABOUT_S = {"hit": 0.05, "start": 0.7, "stages": 2.0}
"""About how long one repetition takes, so that the number of rounds suits the time."""


def write_model(path: Path) -> Arrays:
    """Write a model of three dense layers with 1.2 MB of weights, which every device can run. Returns inputs for it."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((random.standard_normal((_WIDTH, _WIDTH)) / _WIDTH**0.5).astype(np.float32), f"w{layer}")
        for layer in range(_LAYERS)
    ]
    nodes, last = [], "x"
    for layer in range(_LAYERS):
        answer = "y" if layer == _LAYERS - 1 else f"a{layer}"
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"], name=f"dense{layer}"))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [answer], name=f"relu{layer}"))
        last = answer
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, _WIDTH)) for name in ("x", "y")]
    graph: GraphProto = helper.make_graph(nodes, "dense", values[:1], values[1:], weights)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())
    return {"x": random.random((1, _WIDTH), np.float32)}


async def measure_burst(device: str | None, seconds: float) -> list[Measured]:
    """Measure round trips of arrays that the device only copies. The rivals copy the same arrays."""
    kinds: dict[str, Take] = {}
    rivals: dict[str, Take] = {}
    async with AsyncExitStack() as stack:
        echo = Echo(stack.enter_context(worker("echo")))
        runtime = await stack.enter_async_context(aionn.Runtime(start=()))
        for size, shape in SIZES.items():
            model = aionn.Model.from_onnx(identity_model({"x": shape}))
            # The simplest engine: what is left of a round trip is mostly the way there and back.
            compilation = await runtime.compile(model, devices=(device or "reference",))
            burst = await stack.enter_async_context(compilation.burst())
            array, into = np.random.default_rng(0).random(shape, np.float32), np.empty(shape, np.float32)
            sent, room = array.data.cast("B"), into.data.cast("B")
            kinds[f"burst {size}"] = trips(lambda burst=burst, inputs={"x": array}: burst.compute(inputs))  # type: ignore[misc]
            rivals[f"to_thread {size}"] = trips(lambda array=array, into=into: asyncio.to_thread(np.copyto, into, array))  # type: ignore[misc]
            rivals[f"pipe {size}"] = trips(lambda sent=sent, room=room: echo.trip(sent, room))  # type: ignore[misc]
        return await rounds(kinds, rivals, seconds, 0)


async def measure_cache(device: str, path: Path, cache_dir: Path, seconds: float) -> list[Measured]:
    """Measure how long a model takes from its file to a compilation, in a runtime whose driver runs.

    Raises:
        NotCachedError: the device stores nothing for the model.
    """
    async with aionn.Runtime(start=()) as runtime:

        async def compiled(cache: Path | None) -> aionn.CacheOutcome:
            compilation = await runtime.compile(await runtime.load(path), devices=(device,), cache_dir=cache)
            outcome = compilation.outcomes[0]
            await compilation.aclose()
            return outcome

        first = await compiled(cache_dir)
        if first.kind is aionn.CacheOutcomeKind.DECLINED or (await compiled(cache_dir)).kind is not aionn.CacheOutcomeKind.HIT:
            raise NotCachedError(f"device {device!r} does not cache this model ({first.detail or first.kind.value}); give another --device")
        kinds = {"verified hit": _repeated(lambda: compiled(cache_dir)), "compile, no cache": _repeated(lambda: compiled(None))}
        return await rounds(kinds, _session_rival(device, path), seconds, _ABOUT_S["hit"])


def _session_rival(device: str, path: Path) -> dict[str, Take]:
    if device.partition(":")[0] != "onnxruntime" or find_spec("onnxruntime") is None:
        return {}
    import onnxruntime

    def session() -> object:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    return {"onnxruntime session in to_thread": _repeated(lambda: asyncio.to_thread(session))}


def _repeated(call: Callable[[], Any]) -> Take:
    """Return a `Take` for what takes long: a fixed number of repetitions a round, whatever time they take."""

    async def take(seconds: float) -> Sequence[int]:
        taken = []
        for _ in range(3 if seconds else 1):
            began_ns = time.perf_counter_ns()
            await call()
            taken.append(time.perf_counter_ns() - began_ns)
        return taken

    return take


async def measure_start(device: str, path: Path, inputs: Arrays, directory: Path, seconds: float, *, hits: bool) -> list[Measured]:
    """Measure from the start of a fresh process to its first answer. `hits`: with a cache, too."""
    file, cache = directory / "inputs.npz", directory / "starts"
    np.savez(file, *inputs.values())

    def fresh(*arguments: str) -> Take:
        async def take(seconds: float) -> Sequence[int]:
            return [await first_answer_ns(*arguments, str(file), *inputs)]

        return take

    kinds = {"first answer, hit": fresh("aionn", str(path), device, str(cache))} if hits else {}
    kinds["first answer, no cache"] = fresh("aionn", str(path), device, "")
    rivals = {}
    if device.partition(":")[0] == "onnxruntime" and find_spec("onnxruntime") is not None:
        rivals["first answer, onnxruntime alone"] = fresh("session", str(path))
    return await rounds(kinds, rivals, seconds, _ABOUT_S["start"])


def two_stages() -> tuple[str, str]:
    """Return a quick and a better device that are installed.

    Raises:
        NotDoneError: there are not two.
    """
    found = [name for name in ("reference", "onnxruntime", "openvino") if name == "reference" or find_spec(name) is not None]
    if len(found) < 2:
        raise NotDoneError("stages need two devices, and only 'reference' is installed; pip install 'aionn[onnxruntime]'")
    return found[-2], found[-1]


async def measure_stages(path: Path, inputs: Arrays, seconds: float) -> list[Measured]:
    """Measure how long a better stage takes to serve, and the longest answer meanwhile. Nothing is cached."""
    stages = two_stages()
    longest: list[int] = []
    policy = aionn.StagePolicy(min_gain=None)  # swap in any case: the swap is measured, not the model
    async with aionn.Runtime(start=()) as runtime:

        async def swapped(_: float) -> Sequence[int]:
            model = await runtime.load(path)
            compilation = await runtime.compile(model, mode="staged", stages=stages, stage_policy=policy)
            async with compilation.burst() as burst:
                await burst.compute(inputs)
                began_ns = time.perf_counter_ns()
                waiting = asyncio.ensure_future(compilation.wait_for_stage(stages[1]))
                worst = 0
                try:
                    while not waiting.done():
                        sent_ns = time.perf_counter_ns()
                        await burst.compute(inputs)
                        worst = max(worst, time.perf_counter_ns() - sent_ns)
                        await asyncio.sleep(0.005)
                    took_ns = time.perf_counter_ns() - began_ns
                    await waiting
                finally:
                    waiting.cancel()
            await compilation.aclose()
            longest.append(worst)
            return [took_ns]

        found = await rounds({f"until {stages[1]} serves": swapped}, {}, seconds, _ABOUT_S["stages"])
    # The first round does not count.
    return [*found, Measured("longest answer meanwhile", False, [[ns] for ns in longest[1:]])]


async def measure_model(device: str | None, path: Path, inputs: Arrays, seconds: float) -> list[Measured]:
    """Measure executions of a model by a burst and by single executions, and the same by ONNX Runtime in a thread."""
    async with aionn.Runtime(start=() if device else None) as runtime:
        compilation = await runtime.compile(await runtime.load(path), devices=None if device is None else (device,))
        async with compilation.burst() as burst:
            kinds = {
                f"burst on {compilation.device}": trips(lambda: burst.compute(inputs)),
                f"compute() on {compilation.device}": trips(lambda: compilation.compute(inputs)),
            }
            return await rounds(kinds, _thread_rival(path, inputs), seconds, 0)


def _thread_rival(path: Path, inputs: Arrays) -> dict[str, Take]:
    if find_spec("onnxruntime") is None:
        return {}
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return {"onnxruntime in to_thread": trips(lambda: asyncio.to_thread(session.run, None, inputs))}


_HEAD = struct.Struct("=Q")


@contextmanager
def worker(*arguments: str) -> Iterator[socket.socket]:
    """Run `python -m aionn.cli.bench_worker ARGUMENTS` during the body. Returns this end of its socket, which does not block.

    Raises:
        OSError: the process cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [sys.executable, "-P", "-m", "aionn.cli.bench_worker", str(theirs.fileno()), *arguments]
            actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
            # Ctrl-C goes to the whole process group, and this process ends its workers itself.
            pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsigmask=[signal.SIGINT])
        try:
            ours.setblocking(False)
            yield ours
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it has not been waited for, so the number is still its
            os.waitpid(pid, 0)


class Echo:
    """The other end of a worker that returns each message, as `multiprocessing.Pipe` would carry it: bytes through a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def trip(self, content: memoryview, into: memoryview) -> None:
        """Send bytes and receive them.

        Raises:
            NotDoneError: the worker has ended.
        """
        with suppress(ConnectionError):
            for left in (memoryview(_HEAD.pack(content.nbytes)), content):
                while len(left):  # uvloop's own sock_sendall logs an InvalidStateError when Ctrl-C cancels it
                    try:
                        left = left[self._sock.send(left) :]
                    except BlockingIOError:
                        await anyio.wait_writable(self._sock)
            room = into
            while received := await self._loop.sock_recv_into(self._sock, room):
                room = room[received:]
                if not len(room):
                    return
        raise NotDoneError("the worker process of the rival 'pipe' has ended; run aionn bench again")


async def first_answer_ns(*arguments: str) -> int:
    """Return the nanoseconds from the start of a fresh worker process to its word that it has an answer.

    Raises:
        NotDoneError: the process ended without an answer. Its stderr says why.
    """
    loop = asyncio.get_running_loop()
    began_ns = time.perf_counter_ns()
    with worker(*arguments) as sock:
        said = await loop.sock_recv(sock, 1)
        ended_ns = time.perf_counter_ns()
        if not said:
            raise NotDoneError(f"the fresh process for {arguments[0]!r} ended without an answer; its messages are above")
        while await loop.sock_recv(sock, 1):  # until it has closed its runtime, so that nothing of it runs beside the next one
            pass
    return ended_ns - began_ns


LEAST_ROUNDS = 5
"""Fewer rounds can show no significant difference between two runs."""

MOST_ROUNDS = 20
_LEAST_TRIPS = 20

Take = Callable[[float], Awaitable[Sequence[int]]]
"""Measures one round of one kind for about so many seconds. Returns nanoseconds, one number for each repetition."""


@dataclass
class Measured:
    """What was measured of one kind.

    Attributes:
        name: what was done. rival: whether aionn had no part in it.
        rounds: nanoseconds of all repetitions, by round.
    """

    name: str
    rival: bool = False
    rounds: list[Sequence[int]] = field(default_factory=list)

    @property
    def p50_s(self) -> float:
        return self._percentile_s(0.50)

    @property
    def p99_s(self) -> float:
        return self._percentile_s(0.99)

    def _percentile_s(self, share: float) -> float:
        taken = sorted(ns for one in self.rounds for ns in one)
        return taken[min(len(taken) - 1, int(len(taken) * share))] / 1e9

    def medians_s(self) -> list[float]:
        """Return the median of each round, in seconds."""
        return [statistics.median(one) / 1e9 for one in self.rounds]


def trips(trip: Callable[[], Awaitable[object]]) -> Take:
    """Return a `Take` that repeats one call until the time is over."""

    async def take(seconds: float) -> Sequence[int]:
        taken: list[int] = []
        ends_ns = time.perf_counter_ns() + int(seconds * 1e9)
        now_ns = 0
        while len(taken) < _LEAST_TRIPS or now_ns < ends_ns:
            began_ns = time.perf_counter_ns()
            await trip()
            now_ns = time.perf_counter_ns()
            taken.append(now_ns - began_ns)
        return taken

    return take


async def rounds(kinds: Mapping[str, Take], rivals: Mapping[str, Take], seconds: float, rest_s: float) -> list[Measured]:
    """Measure in rounds, after one short round that does not count.

    Args:
        kinds: what aionn does, by name. rivals: what does without aionn.
        seconds: how long all rounds together are to take. `LEAST_ROUNDS` are run in any case.
        rest_s: how long a kind with a fixed amount of work takes about; 0 for kinds that fill the time they get.
    """
    takes = {**kinds, **rivals}
    found = {name: Measured(name, name in rivals) for name in takes}
    planned = MOST_ROUNDS if not rest_s else max(LEAST_ROUNDS, int(seconds / (rest_s * len(takes))))
    share_s = seconds / (min(planned, MOST_ROUNDS) * len(takes))
    ends_s = time.monotonic() + seconds
    for take in takes.values():
        await take(0.0)
    done = 0
    while done < LEAST_ROUNDS or (done < planned and time.monotonic() < ends_s):
        for name, take in takes.items():
            found[name].rounds.append(await take(share_s))
        done += 1
    return list(found.values())
