"""What the burst benchmark is compared with: each rival echoes bytes from a worker process pinned to another CPU.

A rival that is not installed is told as such and left out. Workers are this module itself: `python -m tests.bench.rivals KIND ADDRESS CPU`.

iceoryx2's listener has no file descriptor and no call that a loop could await: its lane waits in a thread of its own, blocked in
`timed_wait`, that hands each element over with `call_soon_threadsafe`. Its worker is a plain thread that blocks in the same way.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.bench.versus_contenders import Iceoryx2End

ROOT = Path(__file__).parents[2]
Trip = Callable[[bytes], Awaitable[object]]
ELEMENT_BYTES = 64


def cpu_seconds() -> float:
    """CPU time of this process and of its children, of the threads that run now. From schedstat: `times` counts in 10 ms."""
    me = psutil.Process()
    files = [file for process in (me, *me.children()) for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def echo(data: bytes) -> bytes:
    return data


def _pin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})


@asynccontextmanager
async def to_thread(cpu: int) -> AsyncIterator[Trip]:
    """No isolation at all; its thread runs where the scheduler likes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield lambda data: asyncio.to_thread(echo, data)
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def process_pool(cpu: int) -> AsyncIterator[Trip]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_pin, initargs=(cpu,)) as pool:
        loop = asyncio.get_running_loop()
        yield lambda data: loop.run_in_executor(pool, echo, data)


@asynccontextmanager
async def _worker(kind: str, cpu: int) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        address = f"{directory}/socket"
        command = [sys.executable, "-m", "tests.bench.rivals", kind, address, str(cpu)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # noqa: ASYNC220 - nothing else runs on this loop
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
            yield address
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@asynccontextmanager
async def zmq_asyncio(cpu: int) -> AsyncIterator[Trip]:
    import zmq.asyncio

    async with _worker("zmq", cpu) as address:
        with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as peer:
            peer.connect(f"ipc://{address}")

            async def trip(data: bytes) -> object:
                await peer.send(data)
                return await peer.recv()

            yield trip


@asynccontextmanager
async def grpc_aio(cpu: int) -> AsyncIterator[Trip]:
    import grpc

    async with _worker("grpc", cpu) as address:
        options = [("grpc.max_receive_message_length", 2**26), ("grpc.max_send_message_length", 2**26)]
        async with grpc.aio.insecure_channel(f"unix:{address}", options=options) as channel:
            yield channel.unary_unary("/bench/echo")


def _received(end: Iceoryx2End) -> bytes | None:
    """Return the next element, or None if none came for a while."""
    sample = end.receive()
    if sample is None:
        return None
    element = bytes(sample.payload().contents.data)
    sample.delete()
    return element


def _send(end: Iceoryx2End, element: bytes) -> None:
    end.send(lambda memory: ctypes.memmove(memory, element, ELEMENT_BYTES))


@asynccontextmanager
async def iceoryx2_thread(cpu: int) -> AsyncIterator[Trip]:
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[bytes]] = []
    over = threading.Event()

    def settle(element: bytes) -> None:
        waiting.pop().set_result(element)

    def listen(end: Iceoryx2End) -> None:
        while not over.is_set():
            element = _received(end)
            if element is not None:
                loop.call_soon_threadsafe(settle, element)

    async with _worker("iceoryx2", cpu) as address:
        end = Iceoryx2End(address.replace("/", "-"), "there", "back", ELEMENT_BYTES)
        thread = threading.Thread(target=listen, args=(end,))
        thread.start()

        async def trip(data: bytes) -> object:
            answer: asyncio.Future[bytes] = loop.create_future()
            waiting.append(answer)
            _send(end, data)
            return await answer

        try:
            yield trip
        finally:
            over.set()
            thread.join()


def _serve_iceoryx2(address: str) -> None:
    end = Iceoryx2End(address.replace("/", "-"), "back", "there", ELEMENT_BYTES)
    print("ready", flush=True)
    while True:
        element = _received(end)
        if element is not None:
            _send(end, element)


def _serve_zmq(address: str) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.bind(f"ipc://{address}")
        print("ready", flush=True)
        while True:
            peer.send(peer.recv())


async def _serve_grpc(address: str) -> None:
    import grpc

    async def answer(request: bytes, context: object) -> bytes:
        return request

    options = [("grpc.max_receive_message_length", 2**26), ("grpc.max_send_message_length", 2**26)]
    server = grpc.aio.server(options=options)
    handler = grpc.method_handlers_generic_handler("bench", {"echo": grpc.unary_unary_rpc_method_handler(answer)})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{address}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


RIVALS: dict[str, Callable[[int], Any]] = {
    "to_thread": to_thread,
    "ProcessPoolExecutor": process_pool,
    "zmq.asyncio": zmq_asyncio,
    "grpc.aio": grpc_aio,
    "iceoryx2 + thread": iceoryx2_thread,
}

if __name__ == "__main__":
    kind, address, cpu = sys.argv[1:]
    _pin(int(cpu))
    if kind == "zmq":
        _serve_zmq(address)
    elif kind == "iceoryx2":
        _serve_iceoryx2(address)
    else:
        import uvloop

        uvloop.run(_serve_grpc(address))
