"""A real `ExecutionBurstServer` in this process, over real queues, slots and driver code, fed with whatever a client may send.

One server serves all inputs: what one of them leaves behind must not harm the next. After each it must answer a good request.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import anyio

from aionn.burst.packets import DATUM_BYTES, RequestPacket, decode_result, split_requests, split_results
from aionn.hal.types import ErrorStatus
from tests.burst.ends import ELEMENTS, RawClient, packet, raw_client
from tests.burst.whole_packets import encode_request
from tests.fuzz.choices import Choices
from tests.fuzz.wire import fuzz_loop

_CAPACITY = 256


class _Served:
    """The one server: opened by a task that stays, since a cancel scope must be left by the task that entered it."""

    def __init__(self) -> None:
        self.loop = fuzz_loop()
        self.opened: asyncio.Future[RawClient] = self.loop.create_future()
        self.over = asyncio.Event()
        self.identities = itertools.count(2**40)
        self.task = self.loop.create_task(self._stay())
        self.client = self.loop.run_until_complete(self.opened)

    async def _stay(self) -> None:
        async with raw_client(capacity=_CAPACITY) as client:
            self.opened.set_result(client)
            await self.over.wait()

    def close(self) -> None:
        self.over.set()
        self.loop.run_until_complete(self.task)


_served: list[_Served] = []


def let_go_of_server() -> None:
    while _served:
        _served.pop().close()


def server_seeds() -> list[bytes]:
    good, framed = encode_request(packet()), encode_request(packet(identity=7))
    unknown = encode_request(packet(9, identity=8))
    late = encode_request(packet(identity=9, deadline_ns=1))
    return [b"\0" + good, b"\0" + framed + unknown + late, b"\0" + framed + framed + good, b"\1" + framed, b"\1" + bytes(range(128))]


def burst_server(data: bytes) -> None:
    """Each packet costs one answer that can be read, and the next good request is executed."""
    if not _served:
        _served.append(_Served())
    _served[0].loop.run_until_complete(_exchange(_served[0], Choices(data)))


async def _exchange(served: _Served, choices: Choices) -> None:
    client = served.client
    sent = _datums(choices)[: _CAPACITY * DATUM_BYTES]
    sent = sent[: len(sent) - len(sent) % DATUM_BYTES]
    before = client.server.answered
    if sent:
        await client.send(sent)
        for answer in await _answers(client, before + len(split_requests(sent))):
            decode_result(answer)
    array = client.slots.regions[0].view().cast("f")
    array[:ELEMENTS] = memoryview(bytes(4 * ELEMENTS)).cast("f")
    good: RequestPacket = packet(identity=next(served.identities))
    await client.send(good)
    (last,) = await _answers(client, client.server.answered + 1)
    result = decode_result(last)
    assert result.identity == good.identity
    assert result.result.status is ErrorStatus.NONE, result
    assert array[ELEMENTS : 2 * ELEMENTS].tolist() == [1.0] * ELEMENTS


async def _answers(client: RawClient, answered: int) -> list[bytes]:
    """Everything the server says until it has answered so often in all."""
    got: list[bytes] = []
    give_up_ns = time.monotonic_ns() + 20 * 10**9
    while True:
        over = client.server.answered >= answered
        available = client.results.available_to_read()
        if available:
            got += split_results(client.results.read(available) or b"")
        elif over:
            return got
        else:
            with anyio.fail_at(anyio.current_time() + (give_up_ns - time.monotonic_ns()) / 1e9):
                await client.results.wait_readable()


def _datums(choices: Choices) -> bytes:
    """Raw, or good packets with a few bytes changed: those get past the first check."""
    if choices.byte() % 2 == 0:
        return choices.rest()
    sent = bytearray()
    for _ in range(1 + choices.below(4)):
        one = bytearray(encode_request(packet(choices.of((0, 0, 0, 1)), identity=choices.of((None, 5, 6, 7)))))
        for _ in range(choices.below(4)):
            one[choices.below(len(one))] = choices.byte()
        sent += one
    return bytes(sent)
