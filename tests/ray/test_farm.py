"""The compile farm: F9 (killed workers), F10 (no node, or no farm any more), F11 (one compile for many), and what an app sees.

The node is real, and so are Ray's workers and the drivers in them. The fake engine is slow on demand. Its events say which process
compiles: a driver of this process, or one of a worker on the node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest

import aionn
from aionn import fleet
from aionn.caching import keyring as keyrings
from aionn.fleet import ArtifactRequest, BuilderKey
from aionn.fleet.artifact_store import ArtifactStore, trusted_files
from aionn.fleet.requests import open_address
from aionn.fleet.sweeping import check_store
from aionn.hal.trust import Keyring
from aionn.ray.resources import device_resources, device_versions
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.fleet.builders import trust
from tests.ray.missing import misses
from tests.real_models import carried, some_input
from tests.scaled_model import scaled_model

Kind, Reason = aionn.CacheOutcomeKind, aionn.MissReason
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def keyring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, farm_key: BuilderKey) -> Path:
    """The keyring of this user, which trusts the node."""
    folder = tmp_path / "trusted"
    folder.mkdir(mode=0o755)
    trust(folder, farm_key)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(folder))
    monkeypatch.delenv("AIONN_ADOPT", raising=False)
    monkeypatch.setattr(keyrings, "_warned", set())
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def farm_of(store: Path, fake: FakeDevice | None = None, **arguments: Any) -> Any:
    """A farm whose workers follow the orders of a fake device."""
    from aionn.ray import Farm

    environment = {"env_vars": {"AIONN_FAKE_DEVICE": os.environ["AIONN_FAKE_DEVICE"]}} if fake is not None else None
    return Farm(store, runtime_env=environment, **arguments)


async def sound(store: Path, key: BuilderKey) -> int:
    """Check a store as `aionn fleet verify` does. Returns how many statements it has."""
    opened = ArtifactStore(open_address(store, patience_s=30))
    found = await check_store(opened, trusted_files(Keyring((key.public,))))
    assert (found.bad, found.unnamed) == ((), 0)
    return found.statements


class App:
    """An app with a new cache and new records, whose steps are kept."""

    def __init__(self, folder: Path, farm: Any) -> None:
        self.folder, self.farm, self.steps = folder, farm, list[str]()

    async def compile(self, model: aionn.Model, device: str) -> aionn.CacheOutcome:
        async with aionn.Runtime(state_dir=self.folder / "state") as runtime:
            fleet.use_backend(runtime, self.farm)
            compilation = await runtime.compile(model, devices=(device,), cache_dir=self.folder / "cache", on_event=self.heard)
            return compilation.outcomes[0]

    def heard(self, event: Any) -> None:
        self.steps.append(getattr(event, "step", ""))


def farm_driver(pid: int) -> psutil.Process:
    """The driver with that pid, which is a child of a worker on the node and not of this process."""
    driver = psutil.Process(pid)
    assert driver.ppid() != os.getpid()
    return driver


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "aionn.ray" and record.levelno == logging.WARNING]


# --- an app ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_fresh_app_gets_hits_of_two_models_that_the_farm_compiles(
    ray_cluster: str, tmp_path: Path, store: Path, farm_key: BuilderKey
) -> None:
    async def answers(runtime: aionn.Runtime, name: str, app: App, cache_dir: Path | None) -> tuple[aionn.CacheOutcome, list[Any]]:
        model = await runtime.load(carried(name))
        compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=cache_dir, on_event=app.heard)
        inputs = {name: some_input(operand) for name, operand in model.inputs.items()}
        return compilation.outcomes[0], [array.copy() for array in (await compilation.compute(inputs)).values()]

    app, alone = App(tmp_path, farm_of(store)), App(tmp_path, None)
    for name in ("silero", "orientation"):
        async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
            fleet.use_backend(runtime, app.farm)
            outcome, farmed = await answers(runtime, name, app, tmp_path / "cache")
            assert (outcome.kind, outcome.detail) == (Kind.HIT, "compiled by builder 'farm'")
        async with aionn.Runtime(state_dir=tmp_path / "other state") as runtime:
            _, local = await answers(runtime, name, alone, None)
        for one, other in zip(farmed, local, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert "compiling" not in app.steps
    assert "compiling" in alone.steps
    assert await sound(store, farm_key) == 2


@pytest.mark.anyio
async def test_the_apps_driver_never_compiles_what_the_farm_has_compiled(
    ray_cluster: str, tmp_path: Path, store: Path, fake: FakeDevice
) -> None:
    fake.hang("compile")
    app = App(tmp_path, farm_of(store, fake))
    with anyio.fail_after(100):
        asked = asyncio.create_task(app.compile(aionn.Model.from_onnx(identity_model()), fake.name))
        farm_driver(await fake.heard("compile"))
        fake.behave()
        outcome = await asked
    assert (outcome.kind, outcome.detail) == (Kind.HIT, "compiled by builder 'farm'")
    assert "compiling" not in app.steps
    second = App(tmp_path / "second", farm_of(store, fake))  # another app: what is in the store is fetched, and Ray is not asked
    fake.fail("the farm was asked once more", "compile")
    assert (await second.compile(aionn.Model.from_onnx(identity_model()), fake.name)).kind is Kind.HIT


@pytest.mark.anyio
async def test_a_farm_whose_key_is_not_trusted_costs_a_local_compile(
    ray_cluster: str, tmp_path: Path, store: Path, keyring: Path, fake: FakeDevice
) -> None:
    (keyring / "farm.pub").unlink()
    trust(keyring, BuilderKey.generate("other"))
    app = App(tmp_path, farm_of(store, fake))
    outcome = await app.compile(aionn.Model.from_onnx(identity_model()), fake.name)
    assert (outcome.kind, outcome.reason) == (Kind.MISS, Reason.UNTRUSTED_BUILDER)
    assert "compiling" in app.steps


@pytest.mark.anyio
async def test_a_stage_is_made_by_the_farm_while_the_first_one_serves(
    ray_cluster: str, tmp_path: Path, store: Path, fake: FakeDevice, best: FakeDevice
) -> None:
    fake.hang("compile")
    model = aionn.Model.from_onnx(identity_model())
    frame = np.ones((1, 16), np.float32)
    async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
        policy = aionn.StagePolicy(executions=1, min_gain=None, backend=farm_of(store, fake))
        stages, kept = (best.name, fake.name), tmp_path / "cache"
        compilation = await runtime.compile(model, mode="staged", stages=stages, stage_policy=policy, cache_dir=kept)
        made = asyncio.create_task(compilation.wait_for_stage(fake.name))
        with anyio.fail_after(100):
            farm_driver(await fake.heard("compile"))
            stage = compilation.stages[1]
            assert stage.step.startswith("farm: "), stage.step
            np.testing.assert_array_equal((await compilation.compute({"input": frame}))["input_out"], frame)
            fake.behave()
            await made
        assert (stage.state, stage.made_by, stage.local_reason) == ("serving", "backend", "")
        np.testing.assert_array_equal((await compilation.compute({"input": frame}))["input_out"], frame)


# --- F9 --------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_killed_worker_is_replaced_and_leaves_nothing(
    ray_cluster: str, tmp_path: Path, store: Path, farm_key: BuilderKey, fake: FakeDevice
) -> None:
    await kill_worker(tmp_path, store, farm_key, fake)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.anyio
async def test_ten_killed_workers_are_replaced(ray_cluster: str, tmp_path: Path, store: Path, farm_key: BuilderKey) -> None:
    ended_s = []
    for number in range(10):
        with FakeDevice() as fake:
            (tmp_path / str(number)).mkdir()
            ended_s.append(await kill_worker(tmp_path / str(number), store, farm_key, fake, float(number)))
    assert await sound(store, farm_key) == 10
    print(
        f"10 workers killed, 10 results at the second attempt; their drivers ended after {', '.join(f'{s * 1e3:.0f}' for s in ended_s)} ms"
    )


async def kill_worker(folder: Path, store: Path, farm_key: BuilderKey, fake: FakeDevice, factor: float = 2.0) -> float:
    """SIGKILL a worker in mid-compile, and have the second attempt succeed. Return the seconds after which the driver had ended."""
    fake.hang("compile")
    app = App(folder, farm_of(store, fake))
    with anyio.fail_after(100):
        asked = asyncio.create_task(app.compile(aionn.Model.from_onnx(scaled_model(np.full(100, factor, np.float32))), fake.name))
        driver = farm_driver(await fake.heard("compile"))
        folders = [work_folder(driver)]
        pidfd = os.pidfd_open(driver.pid)
        began = time.monotonic()
        os.kill(driver.ppid(), signal.SIGKILL)
        await anyio.wait_readable(pidfd)  # the driver ends with its worker
        ended_s = time.monotonic() - began
        os.close(pidfd)
        second = farm_driver(await fake.heard("compile"))
        assert second.pid != driver.pid
        folders.append(work_folder(second))
        fake.behave()
        outcome = await asked
    assert (outcome.kind, outcome.detail) == (Kind.HIT, "compiled by builder 'farm'")
    assert any("(attempt 2)" in step for step in app.steps), app.steps
    assert not any("(attempt 3)" in step for step in app.steps), app.steps
    assert "compiling" not in app.steps
    await sound(store, farm_key)
    assert folders[0] != folders[1]
    with anyio.fail_after(30):  # a task of another test may be removing the first one just now
        while left := [folder for folder in folders if folder.exists()]:
            assert folders[1] not in left
            await anyio.sleep(0.01)
    return ended_s


def work_folder(driver: psutil.Process) -> Path:
    """The folder of the task in which a driver compiles. The driver's worker holds the folder."""
    links = [link.readlink() for link in Path(f"/proc/{driver.ppid()}/fd").iterdir() if link.is_symlink()]
    (folder,) = (link for link in links if link.name.startswith("aionn-farm-"))
    return folder


# --- F10 -------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_without_a_node_that_has_the_device_the_app_compiles_and_logs_what_nodes_have(
    ray_cluster: str, tmp_path: Path, store: Path, fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    fake.tell(version="an unknown one")
    farm = farm_of(store, fake)
    app = App(tmp_path, farm)
    outcome = await app.compile(aionn.Model.from_onnx(identity_model()), fake.name)
    assert outcome.kind is Kind.MISS
    assert "compiling" in app.steps
    (warning,) = warnings_in(caplog)
    nodes = announced_devices()
    assert len(nodes) == 2
    assert all(name in warning for name in nodes)
    with pytest.raises(aionn.DeviceUnavailableError, match=nodes[0]) as raised:
        await farm.require_node(fake.name, "an unknown one")
    assert raised.value.device == fake.name
    with pytest.raises(aionn.DeviceUnavailableError, match="bytes of memory"):
        await farm.require_node(fake.name, "1", memory_bytes=1 << 60)
    again = App(tmp_path / "again", farm)
    assert (await again.compile(aionn.Model.from_onnx(identity_model()), fake.name)).kind is Kind.MISS
    assert len(warnings_in(caplog)) == 1


def announced_devices() -> list[str]:
    import ray

    return device_resources(ray.cluster_resources())


@pytest.mark.anyio
async def test_a_worker_with_another_version_of_the_device_refuses_and_names_both(
    ray_cluster: str, tmp_path: Path, store: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from aionn.ray import farm as farm_module

    async def update(_: ArtifactStore, __: ArtifactRequest) -> None:
        """The device of the node is updated after the app has started its driver."""
        fake.tell(version="2")

    monkeypatch.setattr(farm_module, "ask_store", update)
    assert (await App(tmp_path, farm_of(store, fake)).compile(aionn.Model.from_onnx(identity_model()), fake.name)).kind is Kind.MISS
    (warning,) = warnings_in(caplog)
    assert "in version '2" in warning
    assert "but '1" in warning


@pytest.mark.anyio
async def test_a_node_without_a_key_says_so(
    ray_cluster: str, tmp_path: Path, store: Path, fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    from aionn.ray import Farm

    farm = Farm(store, runtime_env={"env_vars": {"AIONN_FARM_KEY": ""}})
    assert (await App(tmp_path, farm).compile(aionn.Model.from_onnx(identity_model()), fake.name)).kind is Kind.MISS
    (warning,) = warnings_in(caplog)
    assert "AIONN_FARM_KEY is not set" in warning


@pytest.mark.anyio
async def test_a_cancelled_compile_ends_the_task_and_its_driver(ray_cluster: str, tmp_path: Path, store: Path, fake: FakeDevice) -> None:
    fake.hang("compile")
    with anyio.fail_after(100):
        asked = asyncio.create_task(App(tmp_path, farm_of(store, fake)).compile(aionn.Model.from_onnx(identity_model()), fake.name))
        driver = farm_driver(await fake.heard("compile"))
        worker = psutil.Process(driver.ppid())
        pidfd = os.pidfd_open(driver.pid)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await anyio.wait_readable(pidfd)
        os.close(pidfd)
    assert worker.is_running()  # Ray's worker has closed the runtime, and was not killed


# --- F11 -------------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_sixteen_misses_at_once_are_one_compile(
    ray_cluster: str, tmp_path: Path, store: Path, farm_key: BuilderKey, fake: FakeDevice
) -> None:
    import ray

    path, waiting = tmp_path / "model.onnx", tmp_path / "waiting"
    path.write_bytes(scaled_model(np.full(100, 3.0, np.float32)))
    os.mkfifo(waiting)
    named = str(path), str(store), str(waiting), fake.name
    version = (await anyio.to_thread.run_sync(device_versions, [fake.name]))[fake.name]
    orders = {"env_vars": {"AIONN_FAKE_DEVICE": os.environ["AIONN_FAKE_DEVICE"]}}
    keys = {"env_vars": {"AIONN_TRUSTED_BUILDERS": os.environ["AIONN_TRUSTED_BUILDERS"]}}
    fake.hang("compile")
    fifo = os.open(waiting, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    tasks = [ray.remote(misses).options(num_cpus=0, runtime_env=keys).remote(4, named, version, orders) for _ in range(4)]
    with anyio.fail_after(100):
        farm_driver(await fake.heard("compile"))
        seen = 0
        while seen < 16:
            await anyio.wait_readable(fifo)
            seen += len(os.read(fifo, 16))
        os.close(fifo)
        fake.tell(hang=())
        assert await asyncio.gather(*tasks) == [4] * 4
    with anyio.move_on_after(0.5) as limit:
        await fake.heard("compile")  # it would be in the FIFO by now
    assert limit.cancelled_caught
    assert await sound(store, farm_key) == 1
