"""What the parts of the farm do in one process, without a cluster."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import aionn
from aionn.caching.outcomes import MissReason, Refusal
from aionn.fleet import BuilderKey, encode_public_key, use_backend
from aionn.ray import flights, tasks
from aionn.ray.orders import Order, OrderResult, decode_result, decode_state, encode
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.fleet.fake_s3 import FakeS3, fake_s3

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def order_for(store: Path) -> Order:
    return Order(b"k" * 32, "d", "1", b"m" * 32, str(store), b"t" * 32, "fast_single_answer", "medium", 0, False, 1, {}, 100)


async def test_what_became_of_an_order_stays_known_when_an_old_task_begins_late(tmp_path: Path) -> None:
    actor, order = flights.Flights(), order_for(tmp_path)
    flight = actor._flights[order.flight] = flights._Flight(order)
    flight.waiters[1] = math.inf
    flight.show("done", OrderResult(builder=b"b"))
    assert await actor.started(order.flight) == 0
    await actor.report(order.flight, "compiling")
    encoded = await actor.follow(order.flight, 1, flight.state.number)
    assert encoded is not None
    assert decode_state(encoded).result == OrderResult(builder=b"b")


@pytest.mark.parametrize(
    ("reason", "lost"),
    [(MissReason.ABSENT, True), (MissReason.WRONG_BYTES, True), (MissReason.UNREADABLE, True), (MissReason.IO_ERROR, False)],
)
async def test_a_model_is_sent_again_only_if_the_store_has_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: MissReason, lost: bool
) -> None:
    async def refused(*_: object) -> Refusal:
        return Refusal(reason, "it cannot be had")

    monkeypatch.setattr(tasks, "fetch_model", refused)
    made = await tasks._compiled(order_for(tmp_path), BuilderKey.generate("farm"), lambda _: None)
    assert ("it cannot be had" in made.refusal, made.model_lost) == (True, lost)
    assert made.kind == f"model: {reason.value}"


@pytest.mark.parametrize("same", [True, False])
async def test_failures_of_a_farm_are_one_warning_for_each_kind(
    same: bool, tmp_path: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Their texts begin alike where the kinds differ, and begin otherwise where the kinds are the same."""
    import ray

    alike = "the task that compiles it has failed: node "
    results = [
        OrderResult(refusal="fleet-model-1: it cannot be compiled", kind="compile: CompilationError"),
        OrderResult(refusal="fleet-model-2: it cannot be compiled", kind="compile: CompilationError"),
    ]
    if not same:
        results = [
            OrderResult(refusal=alike + "1 has died", kind="task: NodeDiedError"),
            OrderResult(refusal=alike + "2 has no memory", kind="task: OutOfMemoryError"),
        ]

    async def nothing(*_: object, **__: object) -> None:
        pass

    async def result(*_: object) -> OrderResult:
        return results.pop(0)

    trusted = tmp_path / "trusted"
    trusted.mkdir(mode=0o700)
    (trusted / "farm.pub").write_bytes(encode_public_key(BuilderKey.generate("farm").public))
    (trusted / "farm.pub").chmod(0o600)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(trusted))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(aionn.ray.Farm, "require_node", nothing)
    monkeypatch.setattr(aionn.ray.Farm, "_compile_once", result)
    (tmp_path / "store").mkdir()
    farm = aionn.ray.Farm(tmp_path / "store")
    caplog.set_level(logging.INFO, logger="aionn.ray")
    for extent in (4, 5):
        async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
            use_backend(runtime, farm)
            model = aionn.Model.from_onnx(identity_model({"input": (1, extent)}))
            await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    assert results == []
    levels = [record.levelno for record in caplog.records if "the compile farm has nothing" in record.getMessage()]
    assert levels == [logging.WARNING, logging.INFO if same else logging.WARNING]


async def test_a_task_names_the_kind_of_its_refusal_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tasks.KEY_VARIABLE, raising=False)
    found = decode_result(tasks.compile_order(encode(order_for(tmp_path)), None))
    assert found.kind == "key: CallerError"
    assert tasks.KEY_VARIABLE in found.refusal


def test_a_farm_takes_a_store_that_the_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(aionn.CallerError, match="in memory"):
        aionn.ray.Farm("memory://")
    monkeypatch.chdir(tmp_path)
    Path("store").mkdir()
    farm: Any = aionn.ray.Farm("store", wait_s=math.inf)
    assert farm._address == str(tmp_path / "store"), "nodes have other working directories"
    assert farm.wait_s == math.inf


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with fake_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize(("silent", "patience_s"), [("", 0.4), ("model/", 3.0)])
async def test_a_store_that_is_down_costs_a_farm_its_patience_once(
    silent: str, patience_s: float, s3: FakeS3, tmp_path: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The cluster is left alone with the store. A store that can still be read is asked for artifacts."""
    import ray
    from obstore.store import S3Store

    opened, nodes = list[str](), list[str]()

    def count_bucket(name: str, **options: Any) -> Any:
        opened.append(name)
        return S3Store(name, **options)

    async def note_node(_: aionn.ray.Farm, device: str, *__: str, **___: int) -> None:
        nodes.append(device)

    trusted = tmp_path / "trusted"
    trusted.mkdir(mode=0o700)
    (trusted / "farm.pub").write_bytes(encode_public_key(BuilderKey.generate("farm").public))
    (trusted / "farm.pub").chmod(0o600)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(trusted))
    monkeypatch.setattr("aionn.fleet.requests.S3Store", count_bucket)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(aionn.ray.Farm, "require_node", note_node)
    s3.hangs_at = silent
    farm = aionn.ray.Farm("s3://artifacts", patience_s=patience_s)
    assert opened == ["artifacts"]
    asked, before = [], set[str]()
    for extent in (4, 5):
        async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
            use_backend(runtime, farm)
            model = aionn.Model.from_onnx(identity_model({"input": (1, extent)}))
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
        assert [outcome.kind for outcome in compilation.outcomes] == [aionn.CacheOutcomeKind.MISS]
        with anyio.fail_after(30):
            while not s3.requests:  # noqa: ASYNC110  (what was sent comes to the server's thread a moment later)
                await anyio.sleep(0.01)
        paths = {path for _, path in [*s3.requests]}
        asked.append({path.split("/")[1] for path in paths - before})
        before |= paths
    assert asked == ([{"statement", "model"}, {"statement"}] if silent else [{"statement"}, set()])
    assert nodes == ([fake.name] if silent else [])
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "artifact store s3://artifacts" in warnings[0]
