"""The driver's end of a burst: slots and their freeing, both `create` overloads, ends, and what an executor may not break."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.burst import DefaultBurstExecutorWithCache, ExecutionBurstServer, server
from aionn.burst.packets import DATUM_BYTES, PoolReference, RequestPacket, decode_result, split_results
from aionn.errors import CallerError, ExecutionError
from aionn.fmq import MessageQueue, MQDescriptor
from aionn.hal.queues import MQFlavor
from aionn.hal.types import ErrorStatus, IMemory, Request, Result
from aionn.memory.region import Region
from tests.burst.ends import Gate, RawClient, Slots, attached, begin_to_free, nothing_computed, packet, raw_client, raw_model
from tests.fmq.queues import duplicated, open_fds

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops, pytest.mark.usefixtures("both_ways")]


async def test_memories_are_asked_for_once_and_kept() -> None:
    async with raw_client() as client:
        for identity in range(1, 4):
            assert (await client.answer_to(packet(identity=identity))).result.status is ErrorStatus.NONE
        assert client.slots.asked == [[0]]


async def test_requests_that_come_again_are_taken_by_lanes_or_by_the_listener_alone(both_ways: bool) -> None:
    async with raw_client() as client:
        for identity in range(1, 10):
            assert (await client.answer_to(packet(identity=identity))).identity == identity
        assert client.server.answered == 9
        assert client.server._native.taken == (9 if both_ways else 0)


@pytest.mark.parametrize("often", [False, True])
async def test_a_listener_lets_the_loop_run_once_it_has_answered_for_so_long(often: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = 0

    async def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr("aionn.driver.prepared_model.LANES", False)
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(server, "YIELD_NS", -1 if often else time.monotonic_ns())  # longer than this test has run
    async with raw_client() as client:
        for identity in range(1, 4):
            assert (await client.answer_to(packet(identity=identity))).identity == identity
    assert slept == (3 if often else 0)


async def test_free_memory_before_burst() -> None:
    """The memory goes first, then the burst."""
    async with raw_client() as client:
        await client.answer_to(packet(identity=1))
        await client.server.free_memory(0)
        client.slots.regions[0].close()
        await client.server.aclose()
        assert client.engine.runs == 1


@pytest.mark.parametrize("end", ["free", "close"])
async def test_memories_that_come_with_the_burst_are_not_asked_for_and_are_freed_as_others_are(end: str) -> None:
    class Bringing(Slots):
        brought: dict[int, Region]

    slots = Bringing()
    slots.add(0)
    region = attached(slots.regions[0])
    slots.brought = {0: region}
    async with raw_model() as model:
        client = await model.burst(slots=slots)
        serving = asyncio.ensure_future(client.server.serve())
        assert (await client.answer_to(packet(identity=1))).result.status is ErrorStatus.NONE
        assert slots.asked == []
        assert region.view()[0] == 0
        if end == "free":
            await client.server.free_memory(0)
            assert region.closed
            assert (await client.answer_to(packet(identity=2))).result.status is ErrorStatus.NONE
            assert slots.asked == [[0]]
        await client.server.aclose()
        assert region.closed
        await serving
    slots.close()


async def test_free_burst_before_memory() -> None:
    """The burst goes first; freeing its memory afterwards is not an error."""
    async with raw_client() as client:
        await client.answer_to(packet(identity=1))
        await client.server.aclose()
        await client.server.free_memory(0)
        client.slots.regions[0].close()


async def test_double_and_unknown_frees_are_no_errors() -> None:
    async with raw_client() as client:
        for slot in (5, -1, 2**31 - 1):
            await client.server.free_memory(slot)
        await client.answer_to(packet(identity=1))
        for _ in range(2):
            await client.server.free_memory(0)
        assert (await client.answer_to(packet(identity=2))).result.status is ErrorStatus.NONE
        assert client.slots.asked == [[0], [0]]


async def test_a_reused_slot_never_reaches_the_memory_that_was_there_before() -> None:
    async with raw_client() as client:
        old = client.slots.add(0)
        old[:16] = 1
        await client.answer_to(packet(identity=1))
        await client.server.free_memory(0)
        new = client.slots.add(0)
        new[:16] = 10
        await client.answer_to(packet(identity=2))
        assert (old[16], new[16]) == (2, 11)


async def test_a_slot_freed_while_its_memory_is_being_fetched_does_not_keep_the_old_one() -> None:
    """The answer to get_memories was on its way when the slot was freed and given to another memory."""
    async with raw_client() as client, anyio.create_task_group() as app:
        old = client.slots.add(0)
        fetched = anyio.Event()
        go_on = anyio.Event()

        async def wait_here() -> None:
            fetched.set()
            await go_on.wait()

        client.slots.before_answer = wait_here
        await client.send(packet(identity=1))
        await fetched.wait()
        app.start_soon(client.server.free_memory, 0)
        await anyio.wait_all_tasks_blocked()
        client.slots.before_answer = None
        new = client.slots.add(0)
        new[:16] = 10
        go_on.set()
        await client.receive()
        assert (await client.answer_to(packet(identity=2))).result.status is ErrorStatus.NONE
        assert new[16] == 11
        assert old[16] in (0, 1)  # the first request ran on the memory it had asked for, or not at all


async def test_a_known_slot_freed_while_another_is_fetched_does_not_end_the_driver() -> None:
    async with raw_client() as client, anyio.create_task_group() as app:
        client.slots.add(1)
        await client.answer_to(packet(0, identity=1))
        fetched, go_on = anyio.Event(), anyio.Event()

        async def wait_here() -> None:
            fetched.set()
            await go_on.wait()

        client.slots.before_answer = wait_here
        both = RequestPacket(packet().request, (PoolReference(0), PoolReference(1)), False, 2)
        await client.send(both)
        await fetched.wait()
        app.start_soon(client.server.free_memory, 0)
        await anyio.wait_all_tasks_blocked()
        client.slots.before_answer = None
        go_on.set()
        assert (await client.receive()).identity == 2
        assert (await client.answer_to(packet(0, identity=3))).result.status is ErrorStatus.NONE


async def test_a_free_waits_for_the_execution_in_flight_and_for_no_other() -> None:
    """A stream of requests on a slow model does not keep a free waiting for its end."""
    gate = Gate()
    async with raw_client() as client, anyio.create_task_group() as app:
        client.engine.act = gate
        for identity in range(1, 6):
            await client.send(packet(identity=identity))
        await gate.entered()
        freed = await begin_to_free(client.server, app)
        gate.open()
        with anyio.fail_after(20):
            await freed.wait()
        assert client.engine.runs <= 2
        gate.open(10)
        for _ in range(5):
            assert (await client.receive()).result.status is ErrorStatus.NONE


class _NotAskedFor:
    def __init__(self, slots: Slots, answer: Any) -> None:
        self.slots = slots
        self.answer = answer

    def __call__(self, slots: Sequence[int]) -> Sequence[IMemory]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [Region.allocate(4096) for _ in range(self.answer)]


@pytest.mark.parametrize("answer", [0, 2, CallerError("unknown slot"), ExecutionError("no", status=2), RuntimeError("odd")])
@pytest.mark.parametrize("identity", [None, 1])
async def test_memories_that_cannot_be_had_are_an_error_and_nothing_is_executed(answer: Any, identity: int | None) -> None:
    """NNAPI logs that and executes all the same."""
    async with raw_client() as client:
        client.slots.answer = _NotAskedFor(client.slots, answer)
        assert nothing_computed(await client.answer_to(packet(identity=identity)))
        assert client.engine.runs == 0
        client.slots.answer = None
        assert (await client.answer_to(packet(identity=2))).result.status is ErrorStatus.NONE


async def test_whatever_an_engine_raises_is_that_requests_failure() -> None:
    errors: list[BaseException] = [ValueError("bad"), MemoryError("none left"), ExecutionError("busy", status=7), SystemExit(3)]
    async with raw_client() as client:

        def fail() -> None:
            raise errors[0]

        for error in list(errors):
            errors[0] = error
            client.engine.act = fail
            assert nothing_computed(await client.answer_to(packet(identity=1))), repr(error)
        client.engine.act = None
        assert (await client.answer_to(packet(identity=2))).result.status is ErrorStatus.NONE


async def test_closing_finishes_the_execution_in_flight_first() -> None:
    gate = Gate()
    async with raw_client() as client, anyio.create_task_group() as app:
        client.engine.act = gate
        await client.send(packet(identity=1))
        await gate.entered()
        closed = anyio.Event()

        async def close() -> None:
            await client.server.aclose()
            closed.set()

        app.start_soon(close)
        await anyio.wait_all_tasks_blocked()
        assert not closed.is_set()
        gate.open()
        with anyio.fail_after(20):
            await closed.wait()


@pytest.mark.parametrize("identity", [None, 1])
async def test_closing_does_not_wait_for_room_for_an_answer(identity: int | None) -> None:
    """The client reads nothing, so the result queue is full. What was answered before stays readable."""
    async with raw_client(result_capacity=8) as client:
        datums = 2 if identity is None else 3
        fit = client.results.capacity // datums
        with anyio.fail_after(20):
            for number in range(1, fit + 2):
                await client.send(packet(identity=identity and number))
                while client.engine.runs < number or (number <= fit and client.results.available_to_read() < number * datums):
                    await anyio.lowlevel.checkpoint()
            while client.engine.runs <= fit:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert client.results.available_to_read() == fit * datums  # one more answer waits for room
            await client.server.aclose()
        answers = client.results.read(fit * datums)
        assert answers is not None
        if identity is not None:
            found = [decode_result(one) for one in split_results(answers)]
            assert [answer.identity for answer in found] == list(range(1, fit + 1))


async def test_a_client_that_closes_its_queues_ends_the_listener_and_frees_everything() -> None:
    before = open_fds()
    async with raw_client() as client:
        await client.answer_to(packet(identity=1))
        client.requests.close()
        client.results.close()
        await client.server._ended.wait()
    assert open_fds() <= before


async def test_a_client_that_breaks_its_counters_ends_its_own_burst_only() -> None:
    from tests.fmq.queues import words_of

    async with raw_client() as broken, raw_client() as whole:
        with words_of(broken.requests) as words:
            words.written[0] = 7
            os.eventfd_write(broken.requests.reader_fd, 1)
            await broken.server._ended.wait()
        assert (await whole.answer_to(packet(identity=1))).result.status is ErrorStatus.NONE


async def test_create_takes_queues_over_also_when_it_refuses_them() -> None:
    good = MessageQueue.create(DATUM_BYTES, 64)
    before = open_fds()
    wide = MessageQueue.create(16, 64)
    unsynchronized = MessageQueue.create(DATUM_BYTES, 64, flavor=MQFlavor.UNSYNCHRONIZED)
    broken = MQDescriptor((), DATUM_BYTES, MQFlavor.SYNCHRONIZED)
    for channels in ((wide, good), (good, wide), (unsynchronized, good), (good, unsynchronized)):
        with pytest.raises(CallerError):
            ExecutionBurstServer.create(Slots(), duplicated(channels[0].descriptor()), duplicated(channels[1].descriptor()), _NoModel())
    for requests, results in ((broken, duplicated(good.descriptor())), (duplicated(good.descriptor()), broken)):
        with pytest.raises(CallerError):
            ExecutionBurstServer.create(Slots(), requests, results, _NoModel())
    wide.close()
    unsynchronized.close()
    assert open_fds() <= before
    good.close()


class _NoModel:
    """A prepared model by hand: adds 1 through `IMemory`, as the HAL's own `execute`. Satisfies `IPreparedModel`."""

    save_outcome = ""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.pools: list[Sequence[Any]] = []

    async def execute(self, request: Request, pools: Sequence[Any], measure_timing: bool = False, deadline_ns: int | None = None) -> Result:
        self.pools.append(pools)
        data = np.frombuffer(pools[0].view(), np.float32)
        data[16:32] = data[:16] + 1
        return Result(ErrorStatus.NONE)

    async def execute_fenced(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not asked for")

    async def configure_execution_burst(
        self, callback: Any, request_channel: MQDescriptor, result_channel: MQDescriptor, anticipate: bool = False
    ) -> Any:
        raise AssertionError("not asked for")

    async def aclose(self) -> None:
        return None


@pytest.mark.parametrize("identity", [1, 2])
async def test_the_listener_runs_no_request_whose_deadline_has_passed(identity: int) -> None:
    """Also where the executor asks for no deadline, and where the packet is known already."""
    requests, results = MessageQueue.create(DATUM_BYTES, 64), MessageQueue.create(DATUM_BYTES, 64)
    prepared, slots = _NoModel(), Slots()
    slots.add(0)
    server = ExecutionBurstServer.create(slots, duplicated(requests.descriptor()), duplicated(results.descriptor()), prepared)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        client = RawClient(requests, results, slots, server, None)  # type: ignore[arg-type]
        for known in range(1, identity):
            assert (await client.answer_to(packet(identity=known))).result.status is ErrorStatus.NONE
        runs = len(prepared.pools)
        late = await client.answer_to(packet(identity=identity, deadline_ns=1))
        assert (late.identity, late.result.status) == (identity, ErrorStatus.MISSED_DEADLINE_TRANSIENT)
        assert "before the driver began" in late.result.message
        assert len(prepared.pools) == runs == identity - 1
        await server.aclose()
    requests.close()
    results.close()
    slots.close()


class _ByHand(DefaultBurstExecutorWithCache):
    """An executor with a cache of its own, over the other."""


@pytest.mark.parametrize("form", ["prepared model", "executor with cache"])
async def test_create_in_both_forms_by_hand(form: str) -> None:
    requests, results = MessageQueue.create(DATUM_BYTES, 64), MessageQueue.create(DATUM_BYTES, 64)
    prepared, slots = _NoModel(), Slots()
    memory = slots.add(3)
    memory[:16] = 4
    executor = _ByHand(prepared) if form == "executor with cache" else prepared
    channels = duplicated(requests.descriptor()), duplicated(results.descriptor())
    server = ExecutionBurstServer.create(slots, *channels, executor, low_power=True)
    assert (server._executor is executor) is (form == "executor with cache")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        client = RawClient(requests, results, slots, server, None)  # type: ignore[arg-type]
        for identity in (None, 1, 2):
            assert (await client.answer_to(packet(3, identity=identity))).result.status is ErrorStatus.NONE
        assert memory[16] == 5
        assert slots.asked == [[3]]
        token = RequestPacket(packet().request, (PoolReference(-1, 9),), False, 3)
        assert (await client.answer_to(token)).result.status is ErrorStatus.INVALID_ARGUMENT
        await server.free_memory(3)
        with pytest.raises(CallerError):
            prepared.pools[0][0].view()
        await server.aclose()
    requests.close()
    results.close()
    slots.close()


async def test_closing_a_server_that_was_never_run_frees_its_queues() -> None:
    requests, results = MessageQueue.create(DATUM_BYTES, 64), MessageQueue.create(DATUM_BYTES, 64)
    before = open_fds()
    server = ExecutionBurstServer.create(Slots(), duplicated(requests.descriptor()), duplicated(results.descriptor()), _NoModel())
    await server.aclose()
    await server.aclose()
    assert open_fds() <= before
    await server.serve()  # started after all: there is nothing to listen to
    requests.close()
    results.close()


async def test_an_awake_server_answers_as_an_asleep_one_does() -> None:
    async with raw_client(low_power=False) as client:
        for identity in range(1, 200):
            assert (await client.answer_to(packet(identity=identity, measure_timing=False))).identity == identity
        assert client.engine.runs == 199
