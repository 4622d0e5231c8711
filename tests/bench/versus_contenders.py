"""The ways to run a model that `tests.bench.versus` compares. `docs/explanation/benchmarks.md` shows each section as it stands here.

Each way opens for a `Job`, in a fresh process that does nothing else, and yields what its app calls. All of them give the model a session
with the same settings (`tests.bench.real_worker.session_of`). They import what they need when they open, as the process's start counts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY_S = 60.0
Arrays = dict[str, Any]
Call = Callable[[Arrays], Awaitable[Arrays]]
"""Runs the model once: arrays by name, and outputs by name."""

Specs = Mapping[str, tuple[str, Sequence[int]]]
"""Type and shape of arrays, by name."""


@dataclass(frozen=True)
class Job:
    """A model's file, its session's threads, how many streams call it, types and shapes of inputs and outputs, and aionn's cache."""

    path: str
    threads: int
    streams: int
    inputs: Specs
    outputs: Specs
    cache_dir: str


@dataclass(frozen=True)
class Opened:
    """The call of each stream, and what returns the process that runs the model, where that is another one than the app's."""

    calls: Sequence[Call]
    serving: Callable[[], Awaitable[int]] | None = None


# ---- direct ------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def direct(job: Job) -> AsyncIterator[Opened]:
    """The event loop stands still while the model runs."""
    from tests.bench.real_worker import session_of

    session, names = session_of(job.path, job.threads), list(job.outputs)

    async def call(inputs: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, inputs), strict=True))

    yield Opened([call] * job.streams)


# ---- to_thread ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def to_thread(job: Job) -> AsyncIterator[Opened]:
    from tests.bench.real_worker import session_of

    session, names = session_of(job.path, job.threads), list(job.outputs)

    async def call(inputs: Arrays) -> Arrays:
        return dict(zip(names, await asyncio.to_thread(session.run, names, inputs), strict=True))

    yield Opened([call] * job.streams)


# ---- process pool ------------------------------------------------------------------------------------------------------------


class Pooled:
    """What lives in the pool's process."""

    session: Any = None

    @classmethod
    def prepare(cls, path: str, threads: int) -> None:
        from tests.bench.real_worker import session_of

        cls.session = session_of(path, threads)

    @classmethod
    def run(cls, names: Sequence[str], inputs: Arrays) -> Sequence[Any]:
        return cls.session.run(names, inputs)  # type: ignore[no-any-return]


@asynccontextmanager
async def process_pool(job: Job) -> AsyncIterator[Opened]:
    """A pool whose process has died is of no use any more, so the next call makes another one."""
    import multiprocessing

    loop, names = asyncio.get_running_loop(), list(job.outputs)

    def made() -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, initializer=Pooled.prepare, initargs=(job.path, job.threads))

    pool = made()

    async def call(inputs: Arrays) -> Arrays:
        nonlocal pool
        try:
            outputs = await loop.run_in_executor(pool, Pooled.run, names, inputs)
        except BrokenProcessPool:
            pool.shutdown()
            pool = made()
            raise
        return dict(zip(names, outputs, strict=True))

    async def serving() -> int:
        return await loop.run_in_executor(pool, os.getpid)

    try:
        yield Opened([call] * job.streams, serving)
    finally:
        pool.shutdown()


# ---- shared memory -----------------------------------------------------------------------------------------------------------


class SharedMemory:
    """Shared memory and two eventfds. The other process is `tests.bench.real_worker`. Returns views, valid until the next call."""

    def __init__(self, path: str, threads: int, inputs: Specs, outputs: Specs) -> None:
        from tests.bench.real_worker import laid_out, views

        places, end = laid_out(inputs, outputs)
        fd = os.memfd_create("rival")
        os.ftruncate(fd, end)
        self._asked, self._answered = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._descriptors = [fd, self._asked, self._answered]
        memory = mmap.mmap(fd, end)
        self._inputs, self._outputs = views(memory, places["inputs"]), views(memory, places["outputs"])
        given = {"model": path, "threads": threads, "size_bytes": end, **places}
        given |= {"memory": fd, "asked": self._asked, "answered": self._answered}
        command = [sys.executable, "-m", "tests.bench.real_worker", json.dumps(given)]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=self._descriptors)
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._waiting = self._loop.create_future()
        self._loop.add_reader(self._answered, self._settle)

    async def ready(self) -> None:
        await asyncio.wait_for(self._waiting, READY_S)

    def _settle(self) -> None:
        os.eventfd_read(self._answered)
        if not self._waiting.done():
            self._waiting.set_result(None)

    async def call(self, inputs: Arrays) -> Arrays:
        for name, array in inputs.items():
            self._inputs[name][...] = array
        self._waiting = self._loop.create_future()
        os.eventfd_write(self._asked, 1)
        await self._waiting
        return self._outputs

    def close(self) -> None:
        self._loop.remove_reader(self._answered)
        self._process.kill()
        self._process.wait()
        for fd in self._descriptors:
            os.close(fd)


@asynccontextmanager
async def shared_memory(job: Job) -> AsyncIterator[Opened]:
    """One request is in flight. Streams take turns, and copy the outputs before the next one may overwrite them."""
    rival, turn = SharedMemory(job.path, job.threads, job.inputs, job.outputs), asyncio.Lock()

    async def in_turn(inputs: Arrays) -> Arrays:
        async with turn:
            return {name: array.copy() for name, array in (await rival.call(inputs)).items()}

    try:
        await rival.ready()
        yield Opened([rival.call] if job.streams == 1 else [in_turn] * job.streams)
    finally:
        rival.close()


# ---- iceoryx2 ----------------------------------------------------------------------------------------------------------------


class Iceoryx2End:
    """One end of two channels, "KEY-there" and "KEY-back": bytes through publish-subscribe, wake-ups through events."""

    def __init__(self, key: str, sends: str, receives: str, size_bytes: int) -> None:
        import ctypes

        import iceoryx2

        class Element(ctypes.Structure):
            _fields_ = (("data", ctypes.c_uint8 * size_bytes),)

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        self._node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        services = {}
        for way in (sends, receives):
            name = iceoryx2.ServiceName.new(f"aionn-bench-{key}-{way}")
            elements = self._node.service_builder(name).publish_subscribe(Element).open_or_create()
            services[way] = (elements, self._node.service_builder(name).event().open_or_create())
        self._publisher = services[sends][0].publisher_builder().create()
        self._notifier = services[sends][1].notifier_builder().create()
        self._subscriber = services[receives][0].subscriber_builder().create()
        self._listener = services[receives][1].listener_builder().create()
        self._patience = iceoryx2.Duration.from_millis(100)

    def send(self, write: Callable[[Any], object]) -> None:
        """Let `write` fill shared memory, and send what it has written."""
        element = self._publisher.loan_uninit()
        write(element.payload().contents.data)
        element.assume_init().send()
        self._notifier.notify()

    def receive(self) -> Any:
        """Return the next element, whose payload lies in shared memory until it is deleted, or None if none came for a while."""
        sample = self._subscriber.receive()
        if sample is None:
            self._listener.timed_wait(self._patience)
            sample = self._subscriber.receive()
        return sample


@asynccontextmanager
async def iceoryx2_thread(job: Job) -> AsyncIterator[Opened]:
    """A listener has no file descriptor, so a thread waits and hands each answer over to the loop."""
    from tests.bench.real_worker import laid_out, views

    loop, over, turn = asyncio.get_running_loop(), threading.Event(), asyncio.Lock()
    places, size_bytes = laid_out(job.inputs, job.outputs)
    key = str(os.getpid())
    given = {"model": job.path, "threads": job.threads, "places": places, "size_bytes": size_bytes, "key": key}
    command = [sys.executable, "-m", "tests.bench.versus_contenders", json.dumps(given)]
    worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # noqa: ASYNC220 - nothing else runs on this loop yet
    assert worker.stdout is not None
    await asyncio.to_thread(worker.stdout.readline)  # it is ready
    end = Iceoryx2End(key, "there", "back", size_bytes)
    waiting: list[asyncio.Future[Arrays]] = []

    def listen() -> None:
        while not over.is_set():
            if (sample := end.receive()) is not None:
                found = views(sample.payload().contents.data, places["outputs"])
                outputs = {name: array.copy() for name, array in found.items()}
                del found
                sample.delete()
                loop.call_soon_threadsafe(lambda outputs=outputs: waiting.pop().set_result(outputs))  # type: ignore[misc]

    def write(memory: Any, inputs: Arrays) -> None:
        for name, array in views(memory, places["inputs"]).items():
            array[...] = inputs[name]

    async def call(inputs: Arrays) -> Arrays:
        async with turn:
            answer: asyncio.Future[Arrays] = loop.create_future()
            waiting.append(answer)
            end.send(lambda memory: write(memory, inputs))
            return await answer

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield Opened([call] * job.streams)
    finally:
        over.set()
        listener.join()
        worker.kill()
        worker.wait()
        worker.stdout.close()


def serve_iceoryx2(given: Mapping[str, Any]) -> None:
    """The other process."""
    from tests.bench.real_worker import session_of, views

    session = session_of(given["model"], given["threads"])
    end = Iceoryx2End(given["key"], "back", "there", given["size_bytes"])
    places = given["places"]
    names = [name for name, *_ in places["outputs"]]
    print("ready", flush=True)
    while True:
        if (sample := end.receive()) is not None:
            outputs = session.run(names, views(sample.payload().contents.data, places["inputs"]))
            sample.delete()

            def write(memory: Any, outputs: Sequence[Any] = outputs) -> None:
                for array, value in zip(views(memory, places["outputs"]).values(), outputs, strict=True):
                    array[...] = value

            end.send(write)


# ---- Ray Serve ---------------------------------------------------------------------------------------------------------------


class Replica:
    """A deployment. Ray moves arrays of more than 100 kB through its store of objects in shared memory."""

    def __init__(self, path: str, threads: int, names: Sequence[str]) -> None:
        from tests.bench.real_worker import session_of

        self._session, self._names = session_of(path, threads), names

    async def __call__(self, inputs: Arrays) -> Arrays:
        return dict(zip(self._names, self._session.run(self._names, inputs), strict=True))

    async def pid(self) -> int:
        return os.getpid()


@asynccontextmanager
async def ray_serve(job: Job) -> AsyncIterator[Opened]:
    """One node on this machine. The app holds a handle, so no HTTP stands between."""
    from tests.ray.cluster import ENVIRONMENT

    os.environ |= {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}  # before Ray is imported
    import ray
    from ray import serve

    def started() -> Any:
        folder = str(Path(job.cache_dir).with_name("ray"))
        ray.init(num_cpus=4, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        serve.start(proxy_location="Disabled")
        app = serve.deployment(Replica).options(ray_actor_options={"num_cpus": 1}).bind(job.path, job.threads, list(job.outputs))
        return serve.run(app, route_prefix=None)

    handle = await asyncio.to_thread(started)

    async def call(inputs: Arrays) -> Arrays:
        return await handle.remote(inputs)  # type: ignore[no-any-return]

    async def serving() -> int:
        return await handle.pid.remote()  # type: ignore[no-any-return]

    try:
        yield Opened([call] * job.streams, serving)
    finally:
        await asyncio.to_thread(ray.shutdown)


# ---- LitServe ----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def litserve_http(job: Job) -> AsyncIterator[Opened]:
    """A server (`tests.bench.versus_litserve`) with one process for the model, asked over HTTP on connections that stay open."""
    import socket

    import aiohttp
    import numpy as np

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"model": job.path, "threads": job.threads, "inputs": job.inputs, "outputs": list(job.outputs), "port": port}
    command = [sys.executable, "-m", "tests.bench.versus_litserve", json.dumps(given)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **silent)  # type: ignore[call-overload]  # noqa: ASYNC220
    pid = 0

    async def call(inputs: Arrays) -> Arrays:
        nonlocal pid
        body = {name: base64.b64encode(array).decode() for name, array in inputs.items()}
        async with session.post(f"http://127.0.0.1:{port}/predict", json=body) as response:
            response.raise_for_status()
            pid, content = int(response.headers["x-pid"]), await response.read()
        outputs, at = {}, 0
        for name, (dtype, shape) in job.outputs.items():
            count = int(np.prod(shape, dtype=np.int64))
            outputs[name] = np.frombuffer(content, dtype, count, at).reshape(shape)
            at += outputs[name].nbytes
        return outputs

    async def serving() -> int:
        return pid

    async def healthy() -> bool:
        try:
            async with session.get(f"http://127.0.0.1:{port}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    try:
        async with aiohttp.ClientSession() as session:
            while not await healthy():  # noqa: ASYNC110 - the server has no other sign of life
                await asyncio.sleep(0.02)
            yield Opened([call] * job.streams, serving)
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its other processes would outlive a SIGTERM
        server.wait()


# ---- aionn -------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def aionn_burst(job: Job) -> AsyncIterator[Opened]:
    """A burst for each stream. The compilation comes from the cache, which the first run of the bench has filled."""
    import aionn

    async with aionn.Runtime(start=("onnxruntime",)) as runtime, AsyncExitStack() as stack:
        compilation = await runtime.compile(await runtime.load(job.path), devices=("onnxruntime",), cache_dir=job.cache_dir)
        bursts = [await stack.enter_async_context(compilation.burst()) for _ in range(job.streams)]

        async def serving() -> int:
            (pid,) = (device.pid for device in runtime.devices if device.pid is not None)
            return pid

        yield Opened([burst.compute for burst in bursts], serving)


# ---- all of them -------------------------------------------------------------------------------------------------------------

OPEN: dict[str, Callable[[Job], Any]] = {
    "direct": direct,
    "to_thread": to_thread,
    "process pool": process_pool,
    "shared memory": shared_memory,
    "iceoryx2": iceoryx2_thread,
    "Ray Serve": ray_serve,
    "LitServe": litserve_http,
    "aionn": aionn_burst,
}
if __name__ == "__main__":
    from tests.bench.real_worker import end_with_parent

    end_with_parent()
    serve_iceoryx2(json.loads(sys.argv[1]))
