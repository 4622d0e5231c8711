"""Round trip of one 64-byte element between two pinned processes: `python -m tests.bench fmq [--rounds N] [--trips N]`.

Lanes, all in one run, one after the other within each round so that drift of the machine hits all alike:
    aionn asleep      both ends await on an event loop: armed words and eventfds
    aionn spinning    the client spins up to SPIN_NS before it sleeps; the worker is a thread that does the same
    python            the rival: the same memory and eventfds, written in Python; always an eventfd write, always a sleep
    to_thread         asyncio.to_thread in one process: no isolation at all, what most programs do today
Each on asyncio and on uvloop (the client's loop; a worker loop is the same kind). Unit: microseconds per round trip, and
CPU seconds of both processes per 10,000 round trips. Shown is the median over the rounds of each round's p50 and p99.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from aionn.cli.bench import machine, machine_line
from aionn.fmq import MessageQueue, MQDescriptor, MQFlavor
from aionn.hal.queues import GrantorDescriptor
from aionn.hal.types import MemoryDescription, MemoryKind
from aionn.memory.region import Region

ELEMENT_BYTES = 64
SPIN_NS = 50_000
WARM_UP = 300
STOP = b"\xff" * ELEMENT_BYTES
PAYLOAD = bytes(range(ELEMENT_BYTES))
ROOT = Path(__file__).parents[2]
LOOPS: dict[str, Callable[[Any], Any]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}
_COUNTER = struct.Struct("<Q")

Trip = Callable[[bytes], Awaitable[bytes]]


# ---- the rival: shared memory and eventfds in Python ------------------------------------------------------------------


class PythonChannel:
    """One direction: a counter at 0, the element at 64, an eventfd. One element at a time."""

    BYTES = 128

    def __init__(self, memory: memoryview, event_fd: int) -> None:
        self._memory = memory
        self._fd = event_fd
        self._seen = 0
        self._waiter: asyncio.Future[None] | None = None

    def send(self, element: bytes) -> None:
        self._memory[64 : 64 + ELEMENT_BYTES] = element
        _COUNTER.pack_into(self._memory, 0, _COUNTER.unpack_from(self._memory, 0)[0] + 1)
        os.eventfd_write(self._fd, 1)

    async def receive(self) -> bytes:
        while _COUNTER.unpack_from(self._memory, 0)[0] == self._seen:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._seen += 1
        return bytes(self._memory[64 : 64 + ELEMENT_BYTES])

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self._on_event)

    def _on_event(self) -> None:
        os.eventfd_read(self._fd)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# ---- the worker process -----------------------------------------------------------------------------------------------


def received(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    packet, fds, _, _ = socket.recv_fds(sock, 1 << 16, 8)
    return json.loads(packet), list(fds)


def described(queue: MessageQueue) -> dict[str, Any]:
    descriptor = queue.descriptor()
    return {"grantors": [[p.fd_index, p.offset, p.extent] for p in descriptor.grantors], "quantum": descriptor.quantum}


def attached(order: dict[str, Any], fds: list[int]) -> MessageQueue:
    grantors = tuple(GrantorDescriptor(*part) for part in order["grantors"])
    return MessageQueue.attach(MQDescriptor(grantors, order["quantum"], MQFlavor.SYNCHRONIZED, tuple(fds)))


async def serve_asleep(requests: MessageQueue, answers: MessageQueue) -> None:
    while (element := await requests.read_blocking(1)) != STOP:
        await answers.write_blocking(element)


def serve_spinning(requests: MessageQueue, answers: MessageQueue) -> None:
    """A plain thread: spin, then arm, look again, and sleep on the eventfd."""
    poll = select.poll()
    poll.register(requests.reader_fd, select.POLLIN)
    while True:
        element = requests.read(1)
        if element is None:
            if not requests.spin_until_readable(SPIN_NS) and requests.arm_reader():
                poll.poll()
                requests.clear_reader_event()
            continue
        if element == STOP:
            return
        answers.write(element)


async def serve_in_python(requests: PythonChannel, answers: PythonChannel) -> None:
    requests.listen()
    while (element := await requests.receive()) != STOP:
        answers.send(element)


def worker(kind: str, loop: str, fd: int) -> None:
    with socket.socket(fileno=fd) as sock:
        if kind == "python":
            _, fds = received(sock)
            memory = Region.attach(fds[0], MemoryDescription(MemoryKind.ASHMEM, 2 * PythonChannel.BYTES)).view()
            one, other = PythonChannel(memory[: PythonChannel.BYTES], fds[1]), PythonChannel(memory[PythonChannel.BYTES :], fds[2])
        else:
            requests, answers = attached(*received(sock)), attached(*received(sock))
        sock.send(b"ready")
        before = time.process_time()
        if kind == "python":
            LOOPS[loop](serve_in_python(one, other))
        elif kind == "spinning":
            serve_spinning(requests, answers)
        else:
            LOOPS[loop](serve_asleep(requests, answers))
        sock.send(json.dumps(time.process_time() - before).encode())


# ---- the client -------------------------------------------------------------------------------------------------------


async def measure(trip: Trip, trips: int) -> tuple[list[int], float]:
    """Nanoseconds of each round trip, and CPU seconds of this process."""
    for _ in range(WARM_UP):
        await trip(PAYLOAD)
    taken = []
    before = time.process_time()
    for _ in range(trips):
        started = time.perf_counter_ns()
        answer = await trip(PAYLOAD)
        taken.append(time.perf_counter_ns() - started)
        assert answer == PAYLOAD
    return taken, time.process_time() - before


async def through_queues(kind: str, requests: MessageQueue, answers: MessageQueue, trips: int) -> tuple[list[int], float]:
    async def asleep(element: bytes) -> bytes:
        await requests.write_blocking(element)
        return await answers.read_blocking(1)

    async def spinning(element: bytes) -> bytes:
        requests.write(element)
        answers.spin_until_readable(SPIN_NS)
        return await answers.read_blocking(1)

    measured = await measure(spinning if kind == "spinning" else asleep, trips)
    await requests.write_blocking(STOP)
    return measured


async def through_python(memory: memoryview, event_fds: list[int], trips: int) -> tuple[list[int], float]:
    requests = PythonChannel(memory[: PythonChannel.BYTES], event_fds[0])
    answers = PythonChannel(memory[PythonChannel.BYTES :], event_fds[1])
    answers.listen()

    async def trip(element: bytes) -> bytes:
        requests.send(element)
        return await answers.receive()

    measured = await measure(trip, trips)
    requests.send(STOP)
    asyncio.get_running_loop().remove_reader(event_fds[1])
    return measured


async def through_a_thread(trips: int) -> tuple[list[int], float]:
    return await measure(lambda element: asyncio.to_thread(bytes, element), trips)


def run_lane(kind: str, loop: str, cores: list[int], trips: int) -> tuple[list[int], float]:
    """One round of one lane: times, and CPU seconds of both processes."""
    if kind == "to_thread":
        pinned = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))  # its two threads as the scheduler likes them
        try:
            return LOOPS[loop](through_a_thread(trips))  # type: ignore[no-any-return]
        finally:
            os.sched_setaffinity(0, pinned)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    with ours:
        with theirs:
            command = [sys.executable, "-m", "tests.bench.fmq", "--worker", kind, loop, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        os.sched_setaffinity(process.pid, {cores[1]})
        if kind == "python":
            region = Region.allocate(2 * PythonChannel.BYTES)
            events = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
            socket.send_fds(ours, [b"{}"], [region.fileno(), *events])
            assert ours.recv(64) == b"ready"
            taken, cpu = LOOPS[loop](through_python(region.view(), events, trips))
            for fd in events:
                os.close(fd)
            region.close()
        else:
            queues = [MessageQueue.create(ELEMENT_BYTES, 8) for _ in range(2)]
            for queue in queues:
                socket.send_fds(ours, [json.dumps(described(queue)).encode()], list(queue.descriptor().fds))
            assert ours.recv(64) == b"ready"
            taken, cpu = LOOPS[loop](through_queues(kind, queues[0], queues[1], trips))
            for queue in queues:
                queue.close()
        cpu += json.loads(ours.recv(64))
        process.wait(30)
    return taken, cpu


LANES = [("asleep", "aionn asleep"), ("spinning", "aionn spinning"), ("python", "python"), ("to_thread", "to_thread")]


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench fmq")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trips", type=int, default=2000, help="round trips per lane and round")
    parser.add_argument("--same-core", action="store_true", help="pin both processes to one core")
    options = parser.parse_args(argv)
    usable = sorted(os.sched_getaffinity(0))
    cores = [usable[0], usable[0] if options.same_core or len(usable) == 1 else usable[1]]
    print(machine_line(machine()))
    os.sched_setaffinity(0, {cores[0]})
    print(f"client on CPU {cores[0]}, worker on CPU {cores[1]}, to_thread on all of them")
    print(f"{options.rounds} rounds of {options.trips} round trips of {ELEMENT_BYTES} bytes, one in flight")
    results: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for _ in range(options.rounds):
        for kind, _ in LANES:
            for loop in LOOPS:
                taken, cpu = run_lane(kind, loop, cores, options.trips)
                cuts = statistics.quantiles(taken, n=100)
                results.setdefault((kind, loop), []).append((cuts[49] / 1e3, cuts[98] / 1e3, cpu * 1e4 / options.trips))
    os.sched_setaffinity(0, set(usable))
    medians = {lane: [statistics.median(column) for column in zip(*rounds, strict=True)] for lane, rounds in results.items()}
    print(f"{'':16}{'loop':10}{'p50 us':>10}{'p99 us':>10}{'CPU s/10k':>12}{'p50 / asleep':>14}{'p50 / spinning':>16}")
    for kind, name in LANES:
        for loop in LOOPS:
            p50, p99, cpu = medians[kind, loop]
            ratios = [p50 / medians[base, loop][0] for base in ("asleep", "spinning")]
            print(f"{name:16}{loop:10}{p50:10.1f}{p99:10.1f}{cpu:12.3f}{ratios[0]:14.2f}{ratios[1]:16.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(sys.argv[1:])
