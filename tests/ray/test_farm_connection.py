"""The farm and the app's connection to the cluster, which the app may end at any time."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import aionn
from aionn.fleet import BuilderKey
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.ray import test_farm as farms

keyring = farms.keyring
store = farms.store
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def connected(ray_address: str) -> Iterator[Any]:
    """Ray, connected for one test, which may disconnect it."""
    import ray

    ray.init(address=ray_address, log_to_driver=False, configure_logging=False, namespace="aionn-tests")
    yield ray
    ray.shutdown()


async def test_no_cluster_is_started_for_an_app_that_has_disconnected(
    connected: Any, tmp_path: Path, store: Path, farm_key: BuilderKey, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    fake.hang("compile")
    farm = farms.farm_of(store, fake)
    with anyio.fail_after(100):
        asked = asyncio.create_task(farms.App(tmp_path, farm).compile(aionn.Model.from_onnx(identity_model()), fake.name))
        farms.farm_driver(await fake.heard("compile"))
        connected.shutdown()
        monkeypatch.setattr(connected, "init", lambda *_, **__: started.append("a cluster"))  # most calls of Ray would do so
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        for thread in threading.enumerate():
            if thread.name == "aionn Ray call":
                await anyio.to_thread.run_sync(thread.join)
        fake.behave()
        other = aionn.Model.from_onnx(identity_model({"other": (1, 16)}))
        outcome = await farms.App(tmp_path / "again", farm).compile(other, fake.name)
    assert outcome.kind is aionn.CacheOutcomeKind.MISS
    assert started == []


async def test_the_environment_of_the_tasks_is_there_for_the_actor_and_variables_are_not(connected: Any) -> None:
    from aionn.ray.flights import flights_actor

    needs = {"config": {"setup_timeout_seconds": 77}, "env_vars": {"AIONN_FARM_KEY": "other"}}

    def environment(_: Any) -> dict[str, Any]:
        import ray

        return dict(ray.get_runtime_context().runtime_env)

    def asked() -> list[dict[str, Any]]:
        actors = [flights_actor(needs), flights_actor({**needs, "env_vars": {}}), flights_actor()]
        assert actors[0]._actor_id == actors[1]._actor_id != actors[2]._actor_id
        found = [connected.get(actor.__ray_call__.remote(environment)) for actor in actors[1:]]
        connected.kill(actors[0])
        return found

    with_packages, plain = await anyio.to_thread.run_sync(asked)
    assert with_packages["config"]["setup_timeout_seconds"] == 77
    assert "env_vars" not in with_packages
    assert "config" not in plain


async def test_a_task_whose_last_node_is_gone_is_not_waited_for(
    connected: Any, tmp_path: Path, store: Path, farm_key: BuilderKey, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aionn.ray import farm as farm_module

    monkeypatch.setattr(farm_module, "_NODES_AGAIN_S", 0.0)
    fake.hang("compile")
    with anyio.fail_after(100):
        asked = asyncio.create_task(
            farms.App(tmp_path, farms.farm_of(store, fake)).compile(aionn.Model.from_onnx(identity_model()), fake.name)
        )
        farms.farm_driver(await fake.heard("compile"))
        monkeypatch.setattr(connected, "nodes", list)
        assert psutil.Process(await fake.heard("compile")).ppid() == os.getpid()
        fake.behave()
        assert (await asked).kind is aionn.CacheOutcomeKind.MISS


async def test_the_death_of_the_actor_costs_a_second_task(
    connected: Any, tmp_path: Path, store: Path, farm_key: BuilderKey, fake: FakeDevice
) -> None:
    from aionn.ray import Farm
    from aionn.ray.flights import flights_actor

    # Apps with another environment have an actor of their own. Farms of other tests use the usual one.
    own = {"config": {"setup_timeout_seconds": 78}}
    farm = Farm(store, runtime_env={**own, "env_vars": {"AIONN_FAKE_DEVICE": os.environ["AIONN_FAKE_DEVICE"]}})
    fake.hang("compile")
    with anyio.fail_after(100):
        asked = asyncio.create_task(farms.App(tmp_path, farm).compile(aionn.Model.from_onnx(identity_model()), fake.name))
        first = farms.farm_driver(await fake.heard("compile"))
        connected.kill(await anyio.to_thread.run_sync(flights_actor, own))
        assert farms.farm_driver(await fake.heard("compile")).pid != first.pid
        fake.behave()
        assert (await asked).detail == "compiled by builder 'farm'"
        connected.kill(await anyio.to_thread.run_sync(flights_actor, own))
