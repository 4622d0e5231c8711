"""Apps that share a driver: quotas, executables that stay while idle, quarantine, and what only the driver's owner may ask."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from onnx import helper

import aionn
from aionn.burst.packets import DATUM_BYTES
from aionn.driver import EngineDevice, sharing
from aionn.driver.service import DeviceService
from aionn.driver.sharing import Quotas
from aionn.errors import CallerError, DriverDiedError, ModelQuarantinedError, QuotaError
from aionn.fmq import MessageQueue
from aionn.hal import PrepareOptions
from aionn.hal.types import BufferDesc, BufferRole
from aionn.loopless import Answer, running_loop
from aionn.memory.region import Region
from aionn.pages import layout
from aionn.pages.page import DriverPage, PageReader
from aionn.remote.calls import Evict, Fd, HasRequest, ListShared, Quarantine
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import PROTOCOL, Attach, Ready, Refused, error_of
from aionn.remote.device import RemoteDevice
from tests.conformance.test_devices import FACTOR, GOOD, channels, request, ways
from tests.driver.test_shared_driver import Counted, N, W, X, product, until
from tests.engines.onnx_graphs import model_of, value
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio


class Driver:
    """A shared driver in this process, as its owner sees it."""

    def __init__(self, engine: Counted, page: DriverPage, tasks: Any, state: Path) -> None:
        self.engine, self.page, self._tasks = engine, page, tasks
        self.device = EngineDevice(engine, tasks, state, page, shared=True)
        ours, theirs = socket.socketpair()
        self.service = DeviceService(self.device, theirs, tasks)
        self.owner = self.connected(ours)[0]

    def connected(self, ours: socket.socket) -> tuple[Connection, Answer[Ready]]:
        greeted: Answer[Ready] = Answer(running_loop())

        def on_greeting(greeting: Any, _: Descriptors) -> None:
            if isinstance(greeting, Refused):
                greeted.fail(error_of(greeting.failure))
            else:
                greeted.set(greeting)

        def on_call(call_id: int, body: Any, descriptors: Descriptors) -> None:
            self._tasks.start_soon(device[0].answer, call_id, body, descriptors)

        device: list[RemoteDevice] = []
        connection = Connection(ours, on_call, lambda error: connection.end(error or DriverDiedError("x", None)), on_greeting)
        connection.tell = device.append  # type: ignore[attr-defined]
        return connection, greeted

    @asynccontextmanager
    async def app(self, number: int) -> AsyncIterator[RemoteDevice]:
        """A connection of the app with that number."""
        ours, theirs = socket.socketpair()
        connection, greeted = self.connected(ours)
        with theirs:
            self.owner._channel.post(Attach(Fd(theirs.fileno()), 0, number))
        try:
            with anyio.fail_after(30):
                device = RemoteDevice(connection, await greeted.wait())
            connection.tell(device)  # type: ignore[attr-defined]
            yield device
        finally:
            connection.end(DriverDiedError("x", None))

    async def ask(self, body: Any) -> Any:
        return (await self.owner.call(body))[0]

    def used(self, number: int) -> Quotas:
        tables = next((tables for tables in self.service.made.of_all if tables.app == number), None)
        return Quotas(*[0] * 10) if tables is None else tables.used()


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Driver]:
    page = DriverPage()
    async with anyio.create_task_group() as tasks:
        driver = Driver(Counted(), page, tasks, tmp_path / "state")
        await driver.service.start()
        yield driver
        driver.owner.end(DriverDiedError("x", None))
        await driver.service.ended.wait()
        await driver.service.aclose()
        driver.device.close()
    os.close(page.fd)
    os.close(page.asked_fd)


@pytest.fixture
def quotas(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda **given: monkeypatch.setattr(sharing, "QUOTAS", Quotas()._replace(**given))


def prepare(device: RemoteDevice, weights: Any = W, threads: int = 0) -> Any:
    return device.prepare_model(product(weights), PrepareOptions(threads=threads))


def check(caught: pytest.ExceptionInfo[QuotaError], what: str, limit: int, used: int) -> None:
    assert (caught.value.what, caught.value.limit, caught.value.used) == (what, limit, used)


async def gone(driver: Driver, number: int) -> None:
    await until(lambda: driver.used(number).clients == 0)


async def test_prepared_models_of_all_connections_of_an_app_count_together(driver: Driver, quotas: Any) -> None:
    quotas(prepared_models=2)
    async with driver.app(7) as one, driver.app(7) as two, driver.app(8) as other:
        first, _ = await prepare(one), await prepare(two)
        for device in (one, two):
            with pytest.raises(QuotaError, match="3 prepared models") as caught:
                await prepare(device)
            check(caught, "prepared models", 2, 2)
        await prepare(other)
        assert driver.used(7).prepared_models == 2
        await first.aclose()
        await prepare(one)
    await gone(driver, 7)
    async with driver.app(7) as again:
        await prepare(again)


async def test_preparations_at_once_are_within_the_quota(driver: Driver, quotas: Any) -> None:
    quotas(prepared_models=2)
    driver.engine.go.clear()
    async with driver.app(7) as app:
        asking = [asyncio.create_task(prepare(app)) for _ in range(4)]
        await until(lambda: sum(task.done() for task in asking) == 2)
        driver.engine.go.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(each) for each in found if isinstance(each, Exception)] == [QuotaError, QuotaError]


async def test_weights(driver: Driver, quotas: Any) -> None:
    quotas(weights_bytes=W.nbytes * 3 // 2)
    async with driver.app(7) as app:
        first = await prepare(app)
        with pytest.raises(QuotaError) as caught:
            await prepare(app, W * 2)
        check(caught, "weights bytes", W.nbytes * 3 // 2, W.nbytes)
        assert driver.engine.compiled == 1
        await first.aclose()
        await prepare(app, W * 2)


async def test_engine_threads(driver: Driver, quotas: Any) -> None:
    quotas(engine_threads=6)
    async with driver.app(7) as app, driver.app(8) as other:
        first = await prepare(app, threads=4)
        with pytest.raises(QuotaError, match="8 engine threads of a shared driver") as caught:
            await prepare(app, threads=4)
        check(caught, "engine threads", 6, 4)
        await prepare(app)
        await prepare(other, threads=4)
        await first.aclose()
        await prepare(app, threads=6)


async def test_device_buffers(driver: Driver, quotas: Any) -> None:
    quotas(buffer_bytes=N * 4)
    async with driver.app(7) as app:
        model = await prepare(app)
        roles = [BufferRole(0, 0, 1.0)]
        first = await app.allocate(BufferDesc((1, N)), [model], roles, [])
        kept = len(driver.device.buffers)
        with pytest.raises(QuotaError) as caught:
            await app.allocate(BufferDesc((1, N)), [model], roles, [])
        check(caught, "buffer bytes", N * 4, N * 4)
        assert len(driver.device.buffers) == kept
        await first.aclose()
        await app.allocate(BufferDesc((1, N)), [model], roles, [])
    await gone(driver, 7)
    assert len(driver.device.buffers) == 0


async def test_device_buffers_that_grow(driver: Driver, quotas: Any) -> None:
    """Their extents are open when they are allocated, so they count nothing then."""
    quotas(buffer_bytes=N * 4 * 5, buffers=2)
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], [value("x", ["n", N])], [value("y", ["n", N])], {})
    roles = [BufferRole(0, 0, 1.0)]

    def rows(count: int) -> Any:
        return contextlib.closing(aionn.Memory.allocate(count * N * 4))

    async with driver.app(7) as app:
        prepared = await app.prepare_model(aionn.Model.from_onnx(model.SerializeToString()), PrepareOptions())
        first, second = [await app.allocate(BufferDesc(), [prepared], roles, []) for _ in range(2)]
        with pytest.raises(QuotaError, match="3 buffers"):
            await app.allocate(BufferDesc(), [prepared], roles, [])
        with rows(2) as two, rows(3) as three:
            await first.copy_from(three, (3, N))
            with pytest.raises(QuotaError) as caught:
                await second.copy_from(three, (3, N))
            check(caught, "buffer bytes", N * 4 * 5, N * 4 * 3)
            await first.copy_from(two, (2, N))
            await second.copy_from(three, (3, N))
        assert driver.used(7).buffer_bytes == N * 4 * 5
        freed = [weakref.ref(buffer) for buffer in driver.device.buffers._buffers.values()]
        gc.disable()
        try:
            await first.aclose()
            await second.aclose()
            await until(lambda: [each() for each in freed] == [None, None])
        finally:
            gc.enable()


async def test_a_client_that_goes_ends_its_preparation(driver: Driver) -> None:
    driver.engine.go.clear()
    async with driver.app(7) as app:
        asking = asyncio.create_task(prepare(app))
        await until(lambda: driver.engine.compiled == 1)
    with pytest.raises(DriverDiedError):
        await asking
    await gone(driver, 7)
    # The engine still compiles, and its thread may hold what the preparation held. But no other one waits for that.
    await until(lambda: not any(flight.locked() for flight in driver.device.sharing._flights.values()))
    driver.engine.go.set()
    async with driver.app(8) as other:
        await prepare(other)
    assert driver.engine.compiled == 2


async def test_what_a_call_makes_after_its_client_has_gone_is_freed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, go, made = driver.device.allocate, asyncio.Event(), asyncio.Event()

    async def late(*given: Any) -> Any:
        await go.wait()
        made.set()
        return await allocate(*given)

    monkeypatch.setattr(driver.device, "allocate", late)
    async with driver.app(7) as app:
        model = await prepare(app)
        asking = asyncio.create_task(app.allocate(BufferDesc((1, N)), [model], [BufferRole(0, 0, 1.0)], []))
        await until(lambda: driver.used(7).requests_in_flight == 1)
    with pytest.raises(DriverDiedError):
        await asking
    await gone(driver, 7)
    go.set()
    await made.wait()
    await until(lambda: len(driver.device.buffers) == 0)


async def test_bursts_and_what_they_map(driver: Driver, quotas: Any) -> None:
    quotas(bursts=1, mapped_bytes=8192)
    model = aionn.Model.from_onnx(scaled_model(FACTOR))
    async with driver.app(7) as app, ways(app, model) as way:
        assert (await way.execute("burst", GOOD)).status.name == "NONE"
        assert driver.used(7).mapped_bytes == 8192
        with pytest.raises(QuotaError) as caught:
            async with ways(app, model):
                pass
        check(caught, "bursts", 1, 1)
        region = Region.allocate(4096)
        refused = await way.prepared.execute(GOOD, [region, region])
        assert refused.status.name == "RESOURCE_EXHAUSTED_PERSISTENT"
        assert "16384 mapped bytes" in refused.message
        region.close()
        assert (await way.execute("burst", GOOD)).status.name == "NONE"
        assert driver.used(7).mapped_bytes == 8192
    await gone(driver, 7)


async def test_mapped_memories(driver: Driver, quotas: Any) -> None:
    """A process has as many mappings as the system allows, however small they are."""
    quotas(mapped_memories=2)
    async with driver.app(7) as app, ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))) as way:
        assert (await way.execute("burst", GOOD)).status.name == "NONE"
        with contextlib.closing(Region.allocate(4096)) as region:
            refused = await way.prepared.execute(GOOD, [region, region])
            assert "4 mapped memories" in refused.message
        assert (await way.execute("burst", GOOD)).status.name == "NONE"


async def test_a_burst_maps_no_more_than_the_quota(driver: Driver, quotas: Any) -> None:
    quotas(mapped_bytes=4096)
    async with driver.app(7) as app, ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))) as way:
        assert (await way.execute("burst", GOOD)).status.name != "NONE"
        assert driver.used(7).mapped_bytes == 0


async def test_memory_that_comes_with_a_burst_is_within_the_quota_too(driver: Driver, quotas: Any) -> None:
    quotas(mapped_bytes=4096)
    async with driver.app(7) as app, AsyncExitStack() as stack:
        way = await stack.enter_async_context(ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))))
        requests, results = MessageQueue.create(DATUM_BYTES, 1024), MessageQueue.create(DATUM_BYTES, 1024)
        stack.callback(requests.close)
        stack.callback(results.close)
        callback: Any = SimpleNamespace(brought={0: way.memories.input, 1: way.memories.output})
        with pytest.raises(QuotaError) as caught:
            await way.prepared.configure_execution_burst(callback, *channels(app, requests, results))
        check(caught, "mapped bytes", 4096, 4096)
        assert (driver.used(7).bursts, driver.used(7).mapped_bytes) == (1, 0)
        del callback.brought[1]
        context = await way.prepared.configure_execution_burst(callback, *channels(app, requests, results))
        assert (driver.used(7).bursts, driver.used(7).mapped_bytes) == (2, 4096)
        await context.aclose()
        assert (driver.used(7).bursts, driver.used(7).mapped_bytes) == (1, 0)


async def test_clients(driver: Driver, quotas: Any) -> None:
    quotas(clients=2)
    async with driver.app(7), driver.app(7), driver.app(8):
        with pytest.raises(QuotaError) as caught:
            async with driver.app(7):
                pass
        assert (caught.value.what, caught.value.limit) == ("clients", 2)
        await until(lambda: driver.used(7).clients == 2)
    await gone(driver, 7)
    async with driver.app(7):
        pass


async def test_requests_in_flight(driver: Driver, quotas: Any) -> None:
    quotas(requests_in_flight=3)
    driver.engine.go.clear()
    async with driver.app(7) as app, driver.app(7) as same:
        asking = [asyncio.create_task(prepare(app)) for _ in range(3)]
        await until(lambda: driver.used(7).requests_in_flight == 3)
        for device in (app, same):
            with pytest.raises(QuotaError) as caught:
                await prepare(device)
            check(caught, "requests in flight", 3, 3)
        driver.engine.go.set()
        await asyncio.gather(*asking)
        await until(lambda: driver.used(7).requests_in_flight == 0)
        await prepare(same)


async def test_a_large_graph_counts_for_many_requests(driver: Driver, quotas: Any) -> None:
    quotas(requests_in_flight=6)
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], [value("x", [1, N])], [value("y", [1, N])], {})
    model.graph.doc_string = "x" * (4 << 20)
    content = model.SerializeToString()
    driver.engine.go.clear()
    async with driver.app(7) as app:
        asking = [asyncio.create_task(app.prepare_model(aionn.Model.from_onnx(content), PrepareOptions())) for _ in range(2)]
        await until(lambda: driver.used(7).requests_in_flight == 5)
        await until(lambda: any(task.done() for task in asking))
        driver.engine.go.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in found if isinstance(each, Exception)] == [QuotaError]
        assert driver.used(7).requests_in_flight == 0


async def test_an_app_that_floods_is_slowed_down(driver: Driver, quotas: Any) -> None:
    quotas(messages_per_second=20)
    async with driver.app(7) as app:
        began = time.monotonic()
        calls = [asyncio.create_task(app.connection.call(HasRequest(99, number))) for number in range(50)]
        await driver.ask(ListShared())  # the owner is not held back
        for call in calls:
            with pytest.raises(CallerError, match="burst 99 does not exist"):
                await call
        assert time.monotonic() - began >= 1.9
        assert app.connection.ended_by is None


async def test_the_owner_has_no_quota(driver: Driver, quotas: Any) -> None:
    quotas(prepared_models=0, weights_bytes=0, clients=1)
    owner = RemoteDevice(driver.owner, await _greeting(driver))
    for _ in range(2):
        await prepare(owner)


async def _greeting(driver: Driver) -> Ready:
    async with driver.app(9) as app:
        return Ready(PROTOCOL, app.name, app.version, app.type, await app.get_number_of_cache_files_needed())


async def test_only_the_owner_administers(driver: Driver) -> None:
    async with driver.app(7) as app:
        bodies: list[Any] = [ListShared(), Evict(""), Quarantine(((1, 2**62),))]
        for body in bodies:
            with pytest.raises(CallerError, match="only the service of all apps may"):
                await app.connection.call(body)
    assert driver.device.sharing.quarantined == {}


async def test_an_executable_stays_while_idle_and_goes_when_it_is_evicted(driver: Driver) -> None:
    async with driver.app(7) as one, driver.app(8) as two:
        model = await prepare(one)
        await prepare(two)
        (facts,) = await driver.ask(ListShared())
        assert (facts.apps, facts.size_bytes, facts.idle_s) == ((7, 8), W.nbytes, 0.0)
        assert facts.label == product().token.hex()[:16]
        memory, output = Region.allocate(4096), Region.allocate(4096)
        np.frombuffer(memory.view(), np.float32, N)[:] = X[0]
        for _ in range(3):
            executed = await model.execute(request((1, N), N * 4, (1, N), N * 4), [memory, output])
            assert executed.status.name == "NONE"
        assert (await driver.ask(ListShared()))[0].executions == 3
        assert await driver.ask(Evict(facts.key)) == 0  # it is in use
        memory.close()
        output.close()
    await gone(driver, 8)
    await gone(driver, 7)
    (facts,) = await driver.ask(ListShared())
    assert facts.apps == ()
    assert facts.executions == 3
    with anyio.fail_after(30):
        while facts.idle_s == 0.0:  # within the same turn of the driver's loop
            (facts,) = await driver.ask(ListShared())
    async with driver.app(9) as app:
        await prepare(app)
    assert driver.engine.compiled == 1
    await gone(driver, 9)
    assert await driver.ask(Evict("0" * 16)) == 0
    assert await driver.ask(Evict(facts.key)) == 1
    assert await driver.ask(ListShared()) == ()
    async with driver.app(9) as app:
        await prepare(app)
    assert driver.engine.compiled == 2


async def test_an_idle_executable_goes_after_a_while(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "IDLE_S", 0.05)
    async with driver.app(7) as app:
        await prepare(app)
        assert len(driver.device.sharing.all()) == 1
    await until(lambda: driver.device.sharing.all() == [])


async def test_of_many_idle_executables_the_latest_stay(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without weights count nothing in bytes."""
    monkeypatch.setattr(sharing, "MOST_IDLE", 2)
    async with driver.app(7) as app:
        models = [await prepare(app, W * factor) for factor in (1, 2, 3, 4)]
        for model in models[:3]:
            await model.aclose()
        left = {shared.label for shared in driver.device.sharing.all()}
        assert left == {product(W * factor).token.hex()[:16] for factor in (2, 3, 4)}  # the last one is in use


async def test_idle_executables_have_few_threads(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MOST_IDLE_THREADS", 8)
    async with driver.app(7) as app:
        models = [await prepare(app, W * factor, threads=threads) for factor, threads in enumerate((4, 3, 4, 0), 1)]
        for model in models:
            await model.aclose()
        left = {shared.label for shared in driver.device.sharing.all()}
        assert left == {product(W * factor).token.hex()[:16] for factor in (2, 3, 4)}


async def test_the_one_that_is_idle_for_longest_makes_room(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MOST_BYTES", 2 * W.nbytes)
    async with driver.app(7) as app:
        models = [await prepare(app, W * factor) for factor in (1, 2)]
        for model in models:
            await model.aclose()
        assert len(driver.device.sharing.all()) == 2
        third = await prepare(app, W * 3)
        left = {shared.label for shared in driver.device.sharing.all()}
        assert left == {product(W * factor).token.hex()[:16] for factor in (2, 3)}
        fourth = await prepare(app, W * 4)  # what is in use stays, though both are over the bound with a fifth
        fifth = await prepare(app, W * 5)
        assert len(driver.device.sharing.all()) == 3
        for model in (third, fourth, fifth):
            await model.aclose()
        assert len(driver.device.sharing.all()) == 2


async def test_a_model_in_quarantine_is_refused_and_others_are_not(driver: Driver) -> None:
    driver.engine.go.clear()
    reader = PageReader(os.dup(driver.page.fd))
    async with driver.app(7) as app:
        asking = asyncio.create_task(prepare(app))
        await until(lambda: driver.engine.compiled == 1)
        (key,) = reader.suspect_keys()
        driver.engine.go.set()
        model = await asking
        assert reader.suspect_keys() == frozenset()
        assert [facts.key for facts in await driver.ask(ListShared())] == [f"{key:016x}"]
        (slot,) = driver.device.page._taken  # type: ignore[union-attr]
        began = slot.begin()
        assert reader.suspect_keys() == {key}
        slot.end(began)
        await driver.ask(Quarantine(((key, time.monotonic_ns() + 600 * 10**9),)))
        with pytest.raises(ModelQuarantinedError, match="does not prepare it") as caught:
            await prepare(app)
        assert 590 < caught.value.until_s <= 600
        await prepare(app, W * 2)
        await driver.ask(Quarantine(((key, time.monotonic_ns() - 1),)))
        await prepare(app)
        await model.aclose()
    reader.close()


async def test_cache_files_in_quarantine_are_not_loaded(driver: Driver, tmp_path: Path) -> None:
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("model", "data")]
    files = aionn.hal.CacheHandles((fds[0],), (fds[1],), bytes(32))
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(driver.app(7))
        await (await app.prepare_model(product(), PrepareOptions(), files)).aclose()
        await driver.ask(Evict(""))
        loaded = await app.prepare_model_from_cache(PrepareOptions(), files)
        (facts,) = await driver.ask(ListShared())
        assert facts.size_bytes == sum(os.fstat(fd).st_size for fd in fds)
        await loaded.aclose()
        await driver.ask(Evict(""))
        await driver.ask(Quarantine(((int(facts.key, 16), 2**62),)))
        with pytest.raises(ModelQuarantinedError):
            await app.prepare_model_from_cache(PrepareOptions(), files)
    assert driver.engine.loaded == 1
    for fd in fds:
        os.close(fd)


def test_a_model_that_has_run_before_is_no_suspect_beside_one_that_runs_first() -> None:
    words = [0] * (layout.slot_word(2) + 1)
    words[layout.SLOTS_USED] = 2
    for slot, finished in enumerate((4, 0)):
        at = layout.slot_word(slot)
        words[at + layout.KEY], words[at + layout.BEGUN], words[at + layout.FINISHED] = slot + 1, finished + 1, finished
    assert layout.suspect_keys(words) == {2}
    words[layout.slot_word(1) + layout.BEGUN] = 0
    assert layout.suspect_keys(words) == {1}
