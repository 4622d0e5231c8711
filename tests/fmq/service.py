"""The far side of the two-process tests: `python -m tests.fmq.service FD` does with its queue what it is told.

Orders and answers are JSON, one per packet, over the SOCK_SEQPACKET socket FD; descriptors come with `attach`. It plays
the part of libfmq's ITestMsgQ service, and of a peer that dies or goes wrong.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from aionn.fmq import MessageQueue, MQDescriptor, MQFlavor
from aionn.hal.queues import GrantorDescriptor
from tests.apps import App
from tests.fmq.queues import words_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
RUNNERS = {"asyncio": asyncio.run, "uvloop": uvloop.run}


class Peer:
    """A service process, as the test holds it."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self._socket = sock

    def attach(self, queue: MessageQueue, element: str, *, name: str = "queue") -> None:
        """Send the queue's descriptor; the service attaches under `name`."""
        descriptor = queue.descriptor()
        order = {
            "do": "attach",
            "name": name,
            "element": element,
            "grantors": [[part.fd_index, part.offset, part.extent] for part in descriptor.grantors],
            "quantum": descriptor.quantum,
            "flavor": int(descriptor.flavor),
        }
        socket.send_fds(self._socket, [json.dumps(order).encode()], list(descriptor.fds))
        assert self.answer() is True

    def start(self, do: str, **arguments: Any) -> None:
        self._socket.send(json.dumps({"do": do, **arguments}).encode())

    def answer(self) -> Any:
        """What the last order gave; an error over there is one here."""
        packet = json.loads(self._socket.recv(1 << 20))
        if "error" in packet:
            raise PeerError(packet["error"])
        return packet["result"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.start(do, **arguments)
        return self.answer()


class PeerError(Exception):
    """The type name of what the service's call raised."""


@contextmanager
def peer() -> Iterator[Peer]:
    """A service process for the `with` body."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE_S)
    with ours:
        with theirs:
            command = [sys.executable, "-m", "tests.fmq.service", str(theirs.fileno())]
            process = App(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        try:
            yield Peer(process, ours)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
                process.wait()


class _Service:
    def __init__(self) -> None:
        self.queues: dict[str, MessageQueue] = {}

    def attach(self, order: dict[str, Any], fds: list[int]) -> bool:
        grantors = tuple(GrantorDescriptor(*part) for part in order["grantors"])
        descriptor = MQDescriptor(grantors, order["quantum"], MQFlavor(order["flavor"]), tuple(fds))
        old = self.queues.pop(order["name"], None)
        if old is not None:
            old.close()
        self.queues[order["name"]] = MessageQueue.attach(descriptor, order["element"])
        return True

    def do(self, order: dict[str, Any]) -> Any:
        queue = self.queues[order.get("name", "queue")]
        count, times, how = order.get("count", 0), order.get("times", 1), order.get("how", "thread")
        match order["do"]:
            case "write":
                return queue.write(_elements(queue, order["element"], order.get("start", 0), count))
            case "read":
                taken = queue.read(count)
                return None if taken is None else np.frombuffer(taken, order["element"]).tolist()
            case "available":
                return [queue.available_to_read(), queue.available_to_write()]
            case "poke_written":
                with words_of(queue) as words:
                    words.written[0] = order["value"]
                return True
            case "read_blocking":
                return _read_blocking(queue, order["element"], count, times, how, order["written"])
            case "echo":
                return _echo(queue, self.queues["answers"], times, how)
            case "close":
                queue.close()
                return True
            case unknown:
                raise ValueError(unknown)


def _elements(queue: MessageQueue, element: str, start: int, count: int) -> bytes:
    data: bytes = np.arange(start, start + count).astype(element).tobytes()
    assert len(data) == count * queue.quantum
    return data


def _read_blocking(queue: MessageQueue, element: str, count: int, times: int, how: str, written: int) -> int:
    """Read `count` elements so many times; how often they were the next ones of 0 to `written` - 1, again and again."""
    expected = _elements(queue, element, 0, written) * (count * times // written)
    size = count * queue.quantum
    pieces = [expected[at : at + size] for at in range(0, len(expected), size)]
    if how == "thread":
        return sum([queue.read_in_thread(count, PATIENCE_S) == piece for piece in pieces])

    async def in_loop() -> int:
        deadline_ns = time.monotonic_ns() + int(PATIENCE_S * 1e9)
        return sum([await queue.read_blocking(count, deadline_ns) == piece for piece in pieces])

    return RUNNERS[how](in_loop())


def _echo(requests: MessageQueue, answers: MessageQueue, times: int, how: str) -> int:
    """Send back so many elements, one at a time, sleeping in between whenever there is nothing to do."""
    if how == "thread":
        for _ in range(times):
            answers.write_in_thread(requests.read_in_thread(1, PATIENCE_S), PATIENCE_S)
        return times

    async def in_loop() -> int:
        deadline_ns = time.monotonic_ns() + int(PATIENCE_S * 1e9)
        for _ in range(times):
            await answers.write_blocking(await requests.read_blocking(1, deadline_ns), deadline_ns)
        return times

    return RUNNERS[how](in_loop())


def main(fd: int) -> None:
    service = _Service()
    with socket.socket(fileno=fd) as sock:
        while True:
            packet, fds, _, _ = socket.recv_fds(sock, 1 << 16, 8)
            if not packet:
                break
            order = json.loads(packet)
            try:
                result = service.attach(order, fds) if order["do"] == "attach" else service.do(order)
                answer = {"result": result}
            except Exception as error:
                answer = {"error": type(error).__name__}
            sock.send(json.dumps(answer).encode())
    for queue in service.queues.values():
        queue.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
