"""Bursts that are lent to lanes: what a lane takes and what it gives back, the order of answers, closing in each phase, fairness.

tests/driver/test_lanes.py has the lanes without bursts, tests/fmq/lane_model.py searches their wake order.
"""

from __future__ import annotations

import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from aionn.burst.packets import PoolReference, RequestPacket
from aionn.hal.types import BufferDesc, BufferRole, DataLocation, ErrorStatus, Request, RequestArgument
from tests.burst.ends import (
    ARGUMENT_BYTES,
    ELEMENTS,
    Gate,
    RawClient,
    RawModel,
    begin_to_free,
    nothing_computed,
    packet,
    raw_model,
    request,
)
from tests.burst.whole_packets import encode_request
from tests.fmq.queues import open_fds
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

AHEAD = 64  # lanes_object.h
PLACES = 4096 // (2 * ARGUMENT_BYTES)  # for requests, in the memory of one slot


@pytest.fixture(autouse=True)
def with_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about lanes, also in a run without them."""
    monkeypatch.setattr("aionn.driver.prepared_model.LANES", True)


def numbered(place: int, identity: int) -> RequestPacket:
    """A request at a place of its own in slot 0."""
    return RequestPacket(request(place * 2 * ARGUMENT_BYTES), (PoolReference(0),), False, identity)


def mark(client: RawClient, place: int, value: float) -> None:
    """Write the input at that place."""
    memory: NDArray[np.float32] = np.frombuffer(client.slots.regions[0].view(), np.float32)
    memory[2 * place * ELEMENTS : (2 * place + 1) * ELEMENTS] = value


def computed(client: RawClient, place: int) -> float:
    """Read the output at that place."""
    memory: NDArray[np.float32] = np.frombuffer(client.slots.regions[0].view(), np.float32)
    return float(memory[(2 * place + 1) * ELEMENTS])


async def until(happened: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not happened():
            await anyio.lowlevel.checkpoint()


async def warm(client: RawClient, places: int = 1) -> None:
    """Let the listener bind and remember the requests of so many places, and lend the burst."""
    for place in range(places):
        assert (await client.answer_to(numbered(place, 1))).result.status is ErrorStatus.NONE
    await until(lambda: client.server._native.lent)


async def good(client: RawClient, identities: list[int] | range) -> None:
    """Take the answers of those requests: all good, and in this order."""
    for identity in identities:
        answer = await client.receive()
        assert (answer.result.status, answer.identity) == (ErrorStatus.NONE, identity), answer


class Gates:
    """Hold runs by the value of their input. Use it as `engine.see`."""

    def __init__(self, *values: float) -> None:
        self._gates = {value: Gate() for value in values}
        self.seen: list[float] = []
        self.inside = self.most_inside = 0
        self._lock = threading.Lock()

    def __call__(self, array: NDArray[Any]) -> None:
        value = float(array.flat[0])
        with self._lock:
            self.seen.append(value)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        try:
            if value in self._gates:
                self._gates[value]()
        finally:
            with self._lock:
                self.inside -= 1

    def __getitem__(self, value: float) -> Gate:
        return self._gates[value]


# ---- what a lane takes, and what it gives back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2])
async def test_known_requests_are_taken_by_lanes_and_answered_in_order(lanes: int) -> None:
    async with raw_model(lanes=lanes) as raw:
        client = await raw.burst()
        await warm(client, 5)
        assert client.server._native.taken == 5
        for identity in range(1, 201):
            mark(client, identity % 5, identity)
            await client.send(numbered(identity % 5, identity))
            if identity % 7 == 0:
                await good(client, range(identity - 6, identity + 1))
        await good(client, range(197, 201))
        assert computed(client, 0) == 201
        assert client.server._native.taken == client.server.answered == 205


def odd_packets() -> dict[str, tuple[bytes, bool]]:
    """Packets that a lane gives back, and whether another packet may lie behind them."""
    good_one = encode_request(packet(identity=7))
    broken = bytearray(good_one)
    broken[4:8] = (999).to_bytes(4, "little")
    return {
        "of a body that is not known": (encode_request(numbered(9, 7)), True),
        "that comes too late": (encode_request(RequestPacket(request(), (PoolReference(0),), False, 7, 1)), True),
        "over a slot that is not there": (encode_request(packet(5, identity=7)), True),
        "over a buffer that is not there": (encode_request(RequestPacket(request(), (PoolReference(-1, 9),), False, 7)), True),
        "without identity, as NNAPI sends them": (encode_request(packet()), False),
        "whose header is wrong": (bytes(broken), False),
        "of bytes that mean nothing": (bytes(48), False),
    }


@pytest.mark.parametrize("odd", odd_packets())
@pytest.mark.parametrize("lanes", [1, 2])
async def test_between_known_requests_the_listener_answers_a_packet(odd: str, lanes: int) -> None:
    datums, may_be_followed = odd_packets()[odd]
    is_computed = odd.startswith(("of a body", "without"))
    async with raw_model(lanes=lanes) as raw:
        client = await raw.burst()
        await warm(client)
        native = client.server._native
        for turn in range(10):
            if odd.startswith("of a body"):
                datums = encode_request(numbered(10 + turn, 7))  # the last one is known by now
            await until(lambda: native.lent)
            before = native.taken
            await client.send(numbered(0, 2 * turn))
            await client.send(datums)
            if may_be_followed:
                await client.send(numbered(0, 2 * turn + 1))
            await good(client, [2 * turn])
            assert native.taken >= before + 1
            answer = await client.receive()
            assert answer.result.status is ErrorStatus.NONE if is_computed else nothing_computed(answer)
            if not may_be_followed:
                await client.send(numbered(0, 2 * turn + 1))
            await good(client, [2 * turn + 1])
        await until(lambda: native.lent)  # the lanes have it back
        before = native.taken
        assert (await client.answer_to(numbered(0, 99))).identity == 99
        assert native.taken == before + 1


async def test_a_stream_of_all_kinds_of_packets_is_answered_in_order() -> None:
    odd = [datums for datums, may_be_followed in odd_packets().values() if may_be_followed]
    async with raw_model(lanes=2) as raw, anyio.create_task_group() as app:
        client = await raw.burst(capacity=64)
        await warm(client)
        draw = random.Random(12)
        sent: list[int | None] = [draw.choice([None, *range(3)]) for _ in range(400)]

        async def send() -> None:
            for identity, kind in enumerate(sent, 1000):
                await client.send(draw.choice(odd) if kind is None else numbered(0, identity))

        app.start_soon(send)
        for identity, kind in enumerate(sent, 1000):
            answer = await client.receive()
            assert kind is None or (answer.identity, answer.result.status) == (identity, ErrorStatus.NONE)
        assert client.server._native.taken > 20


# ---- overlap and order -------------------------------------------------------------------------------------------------------------


async def test_requests_of_one_burst_overlap_on_two_lanes() -> None:
    async with raw_model(lanes=2) as raw:
        client = await raw.burst()
        await warm(client)
        together = threading.Barrier(2, timeout=30)
        raw.engine.see = lambda _: together.wait()
        for turn in range(50):
            await client.send(numbered(0, 2 * turn))
            await client.send(numbered(0, 2 * turn + 1))
            await good(client, [2 * turn, 2 * turn + 1])
        assert client.server._native.taken == 101


async def test_an_answer_that_comes_early_waits_for_those_before_it() -> None:
    async with raw_model(lanes=3) as raw:
        client = await raw.burst()
        await warm(client, 6)
        for number in range(6):
            mark(client, number, number)
        raw.engine.see = together = Gates(0, 1, 2)  # so the third lane has a thread, and its start delays nothing below
        for number in (0, 1, 2):
            await client.send(numbered(number, number))
        for number in (0, 1, 2):
            await together[number].entered()
        for number in (0, 1, 2):
            together[number].open()
        await good(client, [0, 1, 2])
        gates = Gates(0, 1, 2)
        raw.engine.see = gates
        for number in range(6):
            await client.send(numbered(number, 10 + number))
        for number in (0, 1, 2):
            await gates[number].entered()
        gates[1].open()
        await until(lambda: gates.seen == [0, 1, 2, 3, 4, 5])  # the free lane has run the rest
        await until(lambda: client.server._native.running == 2)
        assert client.results.available_to_read() == 0
        assert client.server._native.answered == 9
        gates[0].open()
        await good(client, [10, 11])
        gates[2].open()
        await good(client, [12, 13, 14, 15])


async def test_no_more_than_a_bounded_number_runs_ahead_of_a_request_that_hangs() -> None:
    async with raw_model(lanes=2) as raw:
        client = await raw.burst(capacity=4096)
        await warm(client, 2)
        gates = Gates(5)
        raw.engine.see = gates
        mark(client, 1, 5)
        await client.send(numbered(1, 0))
        await gates[5].entered()
        for identity in range(1, 201):
            await client.send(numbered(0, identity))
        native = client.server._native
        await until(lambda: native.taken == 2 + AHEAD and native.running == 1)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert (native.taken, native.answered, len(gates.seen)) == (2 + AHEAD, 2, AHEAD)
        gates[5].open()
        await good(client, range(201))
        assert native.taken == 203


async def device_request(raw: RawModel, place: int, identity: int) -> RequestPacket:
    """A request that reads slot 0 and writes to a buffer of the device."""
    prepared = raw.prepared
    buffer = prepared.device.buffers.allocate(BufferDesc(), [prepared.info], [], [BufferRole(0, 0)])
    source = RequestArgument(DataLocation(0, place * 2 * ARGUMENT_BYTES, ARGUMENT_BYTES), (1, ELEMENTS))
    wanted = Request((source,), (RequestArgument(DataLocation(1, 0, 0), ()),))
    return RequestPacket(wanted, (PoolReference(0), PoolReference(-1, buffer.token)), False, identity)


async def test_requests_with_device_memory_run_alone_and_in_order_within_their_burst() -> None:
    async with raw_model(lanes=3) as raw:
        client = await raw.burst()
        await warm(client, 16)
        gates = Gates()
        serial = [await device_request(raw, place, 0) for place in (14, 15)]
        for one in serial:
            assert (await client.answer_to(one)).result.status is ErrorStatus.NONE
        await until(lambda: client.server._native.lent)
        alone: list[tuple[int, float]] = []

        def see(array: NDArray[Any]) -> None:
            gates(array)
            if array.flat[0] >= 100:
                alone.append((gates.inside, float(array.flat[0])))

        for place in range(16):
            mark(client, place, 86 + place if place >= 14 else place)
        raw.engine.see = see
        draw = random.Random(7)
        before = client.server._native.taken
        kinds = [draw.randrange(16) for _ in range(300)]

        async def send() -> None:
            for identity, kind in enumerate(kinds):
                one = serial[kind - 14] if kind >= 14 else numbered(kind, 0)
                await client.send(encode_request(RequestPacket(one.request, one.pools, False, identity)))

        overlaps: list[int] = []
        lock = threading.Lock()
        inside: Counter[bool] = Counter()

        def watch(array: NDArray[Any]) -> None:
            is_serial = array.flat[0] >= 100
            with lock:
                inside[is_serial] += 1
                if (is_serial and inside.total() > 1) or inside[True]:
                    overlaps.append(inside.total())
            see(array)
            with lock:
                inside[is_serial] -= 1

        raw.engine.see = watch
        async with anyio.create_task_group() as app:
            app.start_soon(send)
            await good(client, range(300))
        wanted = [86 + kind for kind in kinds if kind >= 14]
        assert [value for _, value in alone] == wanted
        assert len(wanted) > 20
        assert set(overlaps) == {1}
        assert client.server._native.taken - before == 300


async def test_a_request_with_device_memory_waits_for_those_that_run_and_holds_up_those_behind_it() -> None:
    async with raw_model(lanes=3) as raw:
        client = await raw.burst()
        await warm(client, 2)
        serial = await device_request(raw, 3, 0)
        mark(client, 3, 3)
        assert (await client.answer_to(serial)).result.status is ErrorStatus.NONE
        await until(lambda: client.server._native.lent)
        native = client.server._native
        taken = native.taken
        gates = Gates(1, 3)
        raw.engine.see = gates
        mark(client, 0, 1)
        await client.send(numbered(0, 10))
        await gates[1].entered()
        await client.send(encode_request(RequestPacket(serial.request, serial.pools, False, 11)))
        await client.send(numbered(1, 12))
        for _ in range(100):  # two lanes are free, and take none of them
            await anyio.lowlevel.checkpoint()
        assert (native.lent, native.taken - taken, gates.seen) == (True, 1, [1])
        gates[1].open()
        await gates[3].entered()
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert (native.lent, native.taken - taken, gates.seen) == (True, 2, [1, 3])
        gates[3].open()
        await good(client, [10, 11, 12])


# ---- recall, and the end in each phase ---------------------------------------------------------------------------------------------


async def test_freeing_a_memory_takes_the_burst_back_when_its_run_is_over() -> None:
    gate = Gate()
    async with raw_model() as raw, anyio.create_task_group() as app:
        client = await raw.burst()
        await warm(client)
        raw.engine.act = gate
        for identity in range(5):
            await client.send(numbered(0, identity))
        await gate.entered()
        native = client.server._native
        assert (native.lent, native.running) == (True, 1)
        freed = await begin_to_free(client.server, app)
        assert not native.lent
        raw.engine.act = None
        gate.open()
        with anyio.fail_after(20):
            await freed.wait()
        assert native.taken == 2
        await good(client, range(5))
        assert client.slots.asked == [[0], [0]]


async def test_closing_waits_for_a_hanging_run_for_a_bounded_time_and_the_run_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.burst.server.CLOSE_S", 0.05)
    async with leak_check():
        gates = Gates(3)
        async with raw_model() as raw:
            client = await raw.burst()
            await warm(client, 2)
            before = open_fds()
            raw.engine.see = gates
            mark(client, 1, 3)
            await client.send(numbered(1, 5))
            await gates[3].entered()
            await client.send(numbered(0, 6))
            native = client.server._native
            assert native.running == 1
            with anyio.fail_after(20):
                await client.server.aclose()
            assert native.running == 1  # it still hangs
            assert len(open_fds()) < len(before)  # the driver's queues and memories are closed
            gates[3].open()
            await until(lambda: native.running == 0)
            assert computed(client, 1) == 4  # it wrote into memory that was still mapped
            assert client.results.available_to_read() == 0
            assert (native.taken, native.answered) == (3, 3)
            assert raw.prepared._lanes._native.lent == 0
        assert gates.seen == [3]


@pytest.mark.parametrize("phase", ["idle", "running", "running, and more wait", "an answer waits for room", "fetching", "a held answer"])
@pytest.mark.parametrize("end", ["client closes", "server closes", "requests close"])
async def test_the_end_comes_in_each_phase(phase: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leak_check(), raw_model(lanes=2) as raw:
        client = await raw.burst(result_capacity=6)
        await warm(client, 2)
        native = client.server._native
        gates = Gates(1)
        sent = {"idle": 0, "running": 1, "running, and more wait": 3, "an answer waits for room": 4, "fetching": 1}.get(phase, 2)
        raw.engine.see = gates
        mark(client, 1, 1)
        fetching, release = anyio.Event(), anyio.Event()

        async def wait_here() -> None:
            fetching.set()
            await release.wait()

        if phase == "fetching":
            client.slots.add(1)
            client.slots.before_answer = wait_here
            await client.send(packet(1, identity=1))
            await fetching.wait()
        elif phase == "an answer waits for room":
            for identity in range(4):
                await client.send(numbered(0, identity))
            await until(lambda: client.results.available_to_write() == 0 and not native.lent)
        elif phase != "idle":
            await client.send(numbered(1, 1))
            await gates[1].entered()
            if phase == "running, and more wait":
                await client.send(packet(identity=9, deadline_ns=1))
                await client.send(numbered(0, 2))
            elif phase == "a held answer":
                await client.send(numbered(0, 2))
                await until(lambda: native.taken == 4 and native.running == 1)
            assert native.running == 1
        async with anyio.create_task_group() as app:
            if end == "server closes":
                app.start_soon(client.server.aclose)
            else:
                client.requests.close()
                if end == "client closes":
                    client.results.close()
            await anyio.wait_all_tasks_blocked()
            release.set()
            gates[1].open()
            if end == "requests close":
                for _ in range(sent):
                    await client.receive()  # these answers are still wanted
            with anyio.fail_after(20):
                await client.server._ended.wait()
        assert (native.lent, native.running) == (False, 0)
        assert raw.prepared._lanes._native.lent == 0
        raw.engine.see = None
        other = await raw.burst()  # the model serves on
        await warm(other)
        assert (await other.answer_to(numbered(0, 4))).identity == 4


async def test_answers_that_have_no_room_are_sent_in_order_once_there_is_some() -> None:
    async with raw_model(lanes=2) as raw:
        client = await raw.burst(result_capacity=9)
        await warm(client)
        native = client.server._native
        for turn in range(30):
            for identity in range(10):
                await client.send(numbered(0, 10 * turn + identity))
            await until(lambda: client.results.available_to_write() == 0 and not native.lent)  # the lanes gave it back
            await good(client, range(10 * turn, 10 * turn + 10))
            await until(lambda: native.lent)
        assert native.taken > 60


async def test_an_answer_that_has_no_room_comes_before_that_of_a_late_packet_behind_it() -> None:
    async with raw_model(lanes=2) as raw:
        client = await raw.burst(result_capacity=6)
        await warm(client, 2)
        gates = Gates(1)
        raw.engine.see = gates
        mark(client, 1, 1)
        native = client.server._native
        for identity in range(2):
            await client.send(numbered(0, identity))
        await until(lambda: client.results.available_to_write() == 0)
        await client.send(numbered(1, 2))
        await gates[1].entered()
        await client.send(msgspec.structs.replace(numbered(0, 3), deadline_ns=1))
        await until(lambda: not native.lent)  # a lane has given the late one back while the other one runs
        await anyio.wait_all_tasks_blocked()  # the listener waits for the run
        assert native.running == 1
        gates[1].open()
        await until(lambda: native.running == 0)
        await good(client, range(3))
        answer = await client.receive()
        assert (answer.identity, answer.result.status) == (3, ErrorStatus.MISSED_DEADLINE_TRANSIENT)


async def test_a_free_and_a_late_packet_both_wait_for_the_run_in_flight() -> None:
    async with raw_model(lanes=2) as raw, anyio.create_task_group() as app:
        client = await raw.burst()
        await warm(client, 2)
        gates = Gates(1)
        raw.engine.see = gates
        mark(client, 1, 1)
        native = client.server._native
        await client.send(numbered(1, 1))
        await gates[1].entered()
        await client.send(msgspec.structs.replace(numbered(0, 2), deadline_ns=1))
        await until(lambda: not native.lent)
        await anyio.wait_all_tasks_blocked()
        freed = [await begin_to_free(client.server, app) for _ in range(2)]
        assert native.running == 1
        gates[1].open()
        await good(client, [1])
        assert (await client.receive()).result.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        with anyio.fail_after(20):
            for each in freed:
                await each.wait()


# ---- many bursts --------------------------------------------------------------------------------------------------------------------


@contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


EACH = 12


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("bursts", [1, 2, 17, 200])
async def test_all_bursts_of_a_model_are_served_in_turn(bursts: int, lanes: int) -> None:
    with many_descriptors():
        async with raw_model(lanes=lanes) as raw:
            clients = [await raw.burst(capacity=128) for _ in range(bursts)]
            for number, client in enumerate(clients):
                await warm(client)
                mark(client, 0, number)
            first = await raw.burst(capacity=128)
            await warm(first)
            mark(first, 0, -1)
            gates = Gates(-1)
            raw.engine.see = gates
            for identity in range(lanes):
                await first.send(numbered(0, identity))
            for _ in range(lanes):
                await gates[-1].entered()
            for client in clients:
                for identity in range(EACH):
                    await client.send(numbered(0, identity))
            gates[-1].open(lanes)
            await good(first, range(lanes))
            for client in clients:
                await good(client, range(EACH))
                assert client.server._native.taken == EACH + 1
            served: Counter[float] = Counter()
            for value in gates.seen[lanes:]:
                served[value] += 1
                waiting = min(served[number] for number in range(bursts))
                assert served[value] - waiting <= 4, gates.seen
            assert served.total() == bursts * EACH


async def test_jobs_run_between_the_requests_of_bursts() -> None:
    async with raw_model(lanes=2) as raw:
        client = await raw.burst()
        await warm(client)
        done: list[int] = []

        async def execute() -> None:
            region = client.slots.regions[0]
            for number in range(100):
                assert (await raw.prepared.execute(request(2 * ARGUMENT_BYTES), [region])).status is ErrorStatus.NONE
                done.append(number)

        async with anyio.create_task_group() as app:
            for _ in range(3):
                app.start_soon(execute)
            for identity in range(300):
                assert (await client.answer_to(numbered(0, identity))).identity == identity
        assert len(done) == 300
        assert client.server._native.taken == 301


async def test_jobs_that_never_pause_do_not_keep_a_burst_waiting() -> None:
    async with raw_model() as raw:
        client = await raw.burst()
        await warm(client, 2)
        mark(client, 0, 1)
        mark(client, 1, 2)
        runs: list[float] = []
        over = threading.Event()

        def see(array: NDArray[Any]) -> None:
            runs.append(float(array.flat[0]))
            while runs[-1] == 1 and not raw.prepared._lanes._jobs and not over.is_set():
                time.sleep(0)  # a job ends when the next one waits already

        async def execute() -> None:
            while not over.is_set():
                assert (await raw.prepared.execute(request(), [client.slots.regions[0]])).status is ErrorStatus.NONE

        raw.engine.see = see
        async with anyio.create_task_group() as app:
            for _ in range(3):
                app.start_soon(execute)
            await until(lambda: len(runs) > 20)
            for identity in range(20):
                await client.send(numbered(1, identity))
                before = len(runs)
                await until(lambda: bool(client.results.available_to_read()) or len(runs) > before + 100)  # noqa: B023
                assert runs[before:].count(1) <= 100, "jobs alone are run"
                await good(client, [identity])
            over.set()


async def test_bursts_come_and_go_while_others_are_served() -> None:
    async with raw_model(lanes=2) as raw:
        clients = [await raw.burst() for _ in range(2)]
        over = False
        answered = 0

        async def steady(client: RawClient) -> None:
            nonlocal answered
            await warm(client)
            while not over:
                assert (await client.answer_to(numbered(0, 3))).identity == 3
                answered += 1

        async with anyio.create_task_group() as app:
            for client in clients:
                app.start_soon(steady, client)
            for turn in range(60):
                guest = await raw.burst()
                await warm(guest)
                for identity in range(turn % 5):
                    await guest.send(numbered(0, identity))
                if turn % 3:
                    await guest.server.aclose()
                else:
                    guest.requests.close()
                    guest.results.close()
                    await guest.server._ended.wait()
            over = True
        assert answered > 60
        assert raw.prepared._lanes._native.lent == 2
        assert all(client.server._native.taken > 10 for client in clients)


# ---- a storm ------------------------------------------------------------------------------------------------------------------------


class Storm:
    """Three apps that send, free, close and come back as they like, on one model with two lanes. Every answer must come, in order."""

    def __init__(self, raw: RawModel, seed: int) -> None:
        self.raw = raw
        self.seed = seed
        self.steps: Counter[str] = Counter()
        self.by_lanes = 0

    def see(self, array: NDArray[Any]) -> None:
        if random.random() < 0.2:
            time.sleep(random.choice((0, 0, 1e-5, 1e-4)))  # runs of one burst overlap and overtake each other

    async def app(self, number: int) -> None:
        draw = random.Random(100 * self.seed + number)
        for _ in range(3):
            client = await self.raw.burst(capacity=120, result_capacity=draw.choice([9, 30, 120]))
            await self.life(client, draw)
            self.by_lanes += client.server._native.taken

    async def life(self, client: RawClient, draw: random.Random) -> None:
        sent: list[tuple[int, bool]] = []  # and not answered: the identity, and whether it is computed
        taken = anyio.Semaphore(0)

        async def take() -> None:
            while True:
                await taken.acquire()
                identity, is_good = sent[0]
                answer = await client.receive()
                assert (answer.identity, answer.result.status is ErrorStatus.NONE) == (identity, is_good), (answer, sent)
                del sent[0]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            for identity in range(draw.randrange(10, 60)):
                step = draw.choices(["known", "new", "late", "gone", "free", "job", "wait", "pause"], [30, 3, 2, 1, 2, 2, 5, 2])[0]
                self.steps[step] += 1
                if step in ("known", "new", "late", "gone"):
                    place = 0 if step == "known" else 1 + identity % (PLACES - 1)
                    one = packet(5, identity=identity) if step == "gone" else numbered(place, identity)
                    await client.send(msgspec.structs.replace(one, deadline_ns=1) if step == "late" else one)
                    sent.append((identity, step in ("known", "new")))
                    taken.release()
                elif step == "free":
                    tasks.start_soon(client.server.free_memory, draw.choice([0, 3]))
                elif step == "job":
                    region = client.slots.regions[0]
                    assert (await self.raw.prepared.execute(request(), [region])).status is ErrorStatus.NONE
                elif step == "wait":
                    await until(lambda: not sent)
                else:
                    await anyio.lowlevel.checkpoint()
            end = draw.choice(["server", "app", "both", "all answered"])
            self.steps[f"end: {end}"] += 1
            if end == "all answered":
                await until(lambda: not sent)
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            if end != "app":
                tasks.start_soon(client.server.aclose)
            if end in ("app", "both"):
                client.requests.close()
                client.results.close()
        with anyio.fail_after(30):
            await client.server._ended.wait()


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_of_requests_frees_and_closes_loses_no_answer(seed: int) -> None:
    async with leak_check(), raw_model(lanes=2) as raw:
        storm = Storm(raw, seed)
        raw.engine.see = storm.see
        async with anyio.create_task_group() as apps:
            for number in range(3):
                apps.start_soon(storm.app, number)
        assert storm.by_lanes > 0
        assert raw.prepared._lanes._native.lent == 0
        assert {"known", "new", "late", "gone", "free", "job"} <= storm.steps.keys()
