"""Replicas of Ray Serve that hold models: what callers meet when a replica, a driver or a new version fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import onnxruntime
import psutil
import pytest
from anyio.abc import TaskGroup

import aionn
import aionn.ray
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import VARIABLE, SecondFakeEngine
from tests.leaks import ended
from tests.ray.applications import MARK, Application
from tests.real_models import carried
from tests.scaled_model import scaled_model

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore"),  # Ray Serve makes many
]

X = {"x": np.ones((1, 16), np.float32)}


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio"


class App(Application):
    """An application of `Watched` replicas."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._declared = False

    def holder(self, fakes: tuple[FakeDevice, ...] = (), **arguments: Any) -> dict[str, Any]:
        """Return arguments of a holder whose drivers have the mark, and obey those fakes."""
        variables = {MARK: self.mark} | {name: os.environ[name] for name in (VARIABLE, SecondFakeEngine.variable)[: len(fakes)]}
        return {"runtime": {"state_dir": str(self.folder / "state"), "driver_env": variables, **arguments.pop("runtime", {})}, **arguments}

    async def run(self, models: dict[str, Any], holder: dict[str, Any], **options: Any) -> Any:
        """Deploy it, and return its handle once it is ready."""
        from ray import serve

        from tests.ray.deployments import Watched

        made = serve.deployment(name="Watched", **aionn.ray.serve_options(ray_actor_options={"num_cpus": 1}, **options))(Watched)
        return await self.launch(made.bind(models, **holder))

    async def deploy(self, models: dict[str, Any], holder: dict[str, Any], user_config: Any, **options: Any) -> None:
        """Deploy it as `serve deploy` does, from a config."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        arguments = {"models": models, "holder": holder, "options": {"ray_actor_options": {"num_cpus": 1}, **options}}
        deployments = [] if user_config is None else [{"name": "Watched", "user_config": user_config}]
        app = {"name": self.name, "route_prefix": None, "import_path": "tests.ray.deployments:application"}
        config = {"applications": [{**app, "args": arguments, "deployments": deployments}]}
        client: Any = _get_global_client()
        await anyio.to_thread.run_sync(client.deploy_apps, ServeDeploySchema.model_validate(config))

    async def status(self, wanted: Callable[[Any], bool]) -> Any:
        """Return the status of the deployment as soon as it is as wanted."""
        from ray import serve

        while True:
            app = (await anyio.to_thread.run_sync(serve.status)).applications.get(self.name)
            if app is not None and "Watched" in app.deployments and wanted(app.deployments["Watched"]):
                return app.deployments["Watched"]
            await anyio.sleep(0.05)


@pytest.fixture
async def app(ray_serve: str, tmp_path: Path) -> AsyncIterator[App]:
    """An application, which is deleted at the end. None of its drivers may be left."""
    made = App(tmp_path)
    yield made
    await made.delete()


async def replicas(handle: Any, count: int, without: frozenset[int] = frozenset()) -> dict[int, dict[str, Any]]:
    """Ask until so many replicas have said who they are, by pid."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < count:
        one = await handle.who.remote()
        if one["pid"] not in without:
            found[one["pid"]] = one
    return found


async def until_configured(handle: Any, pid: int, user_config: Any) -> None:
    """Return when that replica has taken a config, or has failed at it and goes on."""
    with anyio.fail_after(60):
        while (one := await handle.who.remote())["pid"] != pid or one["configs"][-1:] != [user_config]:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def voice(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"input": random.uniform(-0.1, 0.1, (1, 576)).astype(np.float32), "state": np.zeros((2, 1, 128), np.float32)}


def voices(folder: Path) -> dict[str, Any]:
    return {"vad": aionn.ray.ModelSpec(str(carried("silero")), devices=("onnxruntime",), cache_dir=str(folder / "cache"))}


class Load:
    """Callers that call one after the other, and compare each answer with ONNX Runtime.

    Attributes:
        answered: how many calls were right. errors: of the others.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._inputs = [voice(seed) for seed in range(8)]
        session = onnxruntime.InferenceSession(carried("silero"), providers=["CPUExecutionProvider"])
        self._expected = [session.run(["output"], inputs)[0] for inputs in self._inputs]
        self.answered = 0
        self.errors: list[Exception] = []

    @asynccontextmanager
    async def running(self, callers: int) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            going = [True]
            for number in range(callers):
                tasks.start_soon(self._call, number, going)
            yield
            going.clear()

    async def _call(self, number: int, going: list[bool]) -> None:
        while going:
            try:
                outputs = await self._handle.infer.remote(self._inputs[number])
            except Exception as error:
                self.errors.append(error)
                continue
            np.testing.assert_allclose(outputs["output"], self._expected[number], rtol=0, atol=1e-6)
            self.answered += 1

    async def further(self, calls: int) -> None:
        """Return when so many more calls have been answered."""
        wanted = self.answered + calls
        while self.answered < wanted:  # noqa: ASYNC110 - the answers come from other processes
            await anyio.sleep(0.005)


@contextmanager
def fakes(count: int) -> Iterator[tuple[FakeDevice, ...]]:
    with FakeDevice() as first:
        if count == 1:
            yield (first,)
        else:
            with FakeDevice(SecondFakeEngine) as second:
                yield (first, second)


def identity(device: str | None = None, stages: tuple[str, ...] | None = None, **others: Any) -> dict[str, Any]:
    devices = None if device is None else (device,)
    return {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=devices, stages=stages, warm_up=0, **others)}


# --- deaths ------------------------------------------------------------------------------------------------------------


SOAK = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kills", [pytest.param(kills, marks=SOAK) for kills in (1, 10)])
async def test_the_death_of_a_replica_costs_the_calls_in_flight_and_leaves_no_driver(app: App, kills: int) -> None:
    callers = 4
    handle = await app.run(voices(app.folder), app.holder(), num_replicas=2)
    load = Load(handle)
    gone_s, back_s = [], []
    async with load.running(callers):
        for _ in range(kills):
            before = await replicas(handle, 2)
            victim = before[min(before)]
            assert victim["drivers"]
            await load.further(20)
            failed, began = len(load.errors), time.monotonic()
            kill(victim["pid"])
            for pid in victim["drivers"]:
                assert await ended(pid, 30)
            gone_s.append(time.monotonic() - began)
            await load.further(20)
            await replicas(handle, 1, without=frozenset(before))
            back_s.append(time.monotonic() - began)
            assert len(load.errors) - failed <= callers, load.errors
    print(f"\n{kills} replicas killed, {load.answered} calls answered, {len(load.errors)} failed")
    print(f"seconds until its driver was gone: {shown(gone_s)}; until a new replica answered: {shown(back_s)}")


def shown(seconds: list[float]) -> str:
    return " ".join(f"{one:.3f}" for one in seconds)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=SOAK)])
async def test_the_death_of_a_driver_is_not_the_callers_concern(app: App, kills: int) -> None:
    handle = await app.run(voices(app.folder), app.holder())
    ((pid, before),) = (await replicas(handle, 1)).items()
    load = Load(handle)
    back_s = []
    async with load.running(4):
        for _ in range(kills):
            await load.further(20)
            now = await handle.who.remote()
            began = time.monotonic()
            kill(now["drivers"][0])
            assert await ended(now["drivers"][0], 30)
            await load.further(5)
            back_s.append(time.monotonic() - began)
    after = await handle.who.remote()
    assert load.errors == []
    assert (after["pid"], after["same_thread"]) == (pid, True)
    assert after["drivers"] != before["drivers"]
    print(f"\n{kills} drivers killed, {load.answered} calls answered; seconds until five calls were answered: {shown(back_s)}")


async def test_a_call_whose_driver_dies_is_made_again_and_errors_arrive_as_themselves(app: App) -> None:
    with fakes(1) as (fake,):
        handle = await app.run(identity(fake.name), app.holder((fake,)))
        fake.crash(after=3)  # each driver dies in its fourth run
        for number in range(10):
            (answer,) = (await handle.infer.remote({"x": np.full((1, 16), number, np.float32)})).values()
            assert answer[0, 0] == number
        assert (await handle.describe.remote())["m"]["retried"] == 3
        fake.behave()
        fake.crash()
        with pytest.raises(aionn.DriverDiedError) as died:
            await handle.infer.remote(X)
        assert died.value.exit_code == -signal.SIGKILL
        fake.behave()
        with pytest.raises(aionn.CallerError, match="the model's inputs are"):
            await handle.infer.remote({"z": X["x"]})
        fake.fail("out of beans")
        with pytest.raises(aionn.ExecutionError, match="out of beans") as failed:
            await handle.infer.remote(X)
        assert failed.value.status


@pytest.mark.soak
async def test_a_driver_lives_as_long_as_its_replica(app: App) -> None:
    """A driver ends with the thread that has started it. Serve runs constructor and calls in one thread."""
    handle = await app.run(voices(app.folder), app.holder())
    for _ in range(20):
        await handle.infer.remote(voice(0))
        now = await handle.who.remote()
        assert now["same_thread"]
        assert now["drivers"] == now["first_drivers"]
    parents = {psutil.Process(pid).ppid() for pid in now["drivers"]}
    assert parents == {now["pid"]}


# --- hangs -------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_a_hung_driver_is_killed_and_the_replica_stays(app: App) -> None:
    with fakes(1) as (fake,):
        handle = await app.run(identity(fake.name), app.holder((fake,), runtime={"hang_s": 1.0}))
        before = await handle.who.remote()
        fake.hang()
        with pytest.raises(aionn.DriverHungError) as hung:
            await handle.infer.remote(X)
        assert hung.value.waited_s >= 1.0
        fake.behave()
        await handle.infer.remote(X)
        assert (await handle.who.remote())["pid"] == before["pid"]


@pytest.mark.soak
async def test_a_replica_whose_driver_stays_hung_is_replaced(app: App) -> None:
    with fakes(1) as (fake,):
        holder = app.holder((fake,), runtime={"hang_s": None}, hang_after_s=2.0)
        handle = await app.run(identity(fake.name), holder, health_check_period_s=0.2)
        before = await handle.who.remote()
        fake.hang()
        calls: list[Exception] = []

        async def call() -> None:
            try:
                await handle.infer.remote(X)
            except Exception as error:
                calls.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await fake.heard("run")
            assert await ended(before["pid"], 100)
            fake.behave()
        assert len(calls) == 1, "the call that hung has ended with an error"
        await replicas(handle, 1, without=frozenset({before["pid"]}))
        await handle.infer.remote(X)


# --- slow starts -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_a_slow_compile_is_not_restarted(app: App) -> None:
    """It takes longer than all health checks that Serve would allow."""
    with fakes(1) as (fake,):
        fake.delay(4.0, "compile")
        handle = await app.run(identity(fake.name), app.holder((fake,)), health_check_period_s=0.2, health_check_timeout_s=0.4)
        compiled_by = await fake.heard("compile")
        assert compiled_by in (await handle.who.remote())["drivers"]
        with anyio.move_on_after(0):
            await fake.heard("compile")
            pytest.fail("the model was compiled twice")


@pytest.mark.soak
async def test_with_stages_a_replica_is_ready_before_the_better_one_is_compiled(app: App) -> None:
    with fakes(2) as (quick, better):
        better.hang("compile")
        models = identity(stages=(quick.name, better.name), cache_dir=str(app.folder / "cache"))
        handle = await app.run(models, app.holder((quick, better)))
        assert (await handle.describe.remote())["m"]["device"] == quick.name
        await handle.infer.remote(X)
        better.behave()


# --- upgrades ----------------------------------------------------------------------------------------------------------


def written(path: Path, factor: float) -> str:
    path.write_bytes(scaled_model(np.full((1, 16), factor, np.float32)))
    return str(path)


def shows(factor: float, seen: list[tuple[int, float]]) -> bool:
    return seen[-1][1] == factor


class Viewer:
    """Callers who watch cameras of replicas.

    Attributes:
        seen: by stream, what came: numbers of frames, and the factor of the model. broken: streams that ended with an error.
    """

    def __init__(self, handle: Any, until: Path) -> None:
        self._handle = handle
        self.until = until
        self.seen: list[list[tuple[int, float]]] = []
        self.pids: set[int] = set()
        self.broken: list[Exception] = []

    def begin(self, tasks: TaskGroup) -> None:
        """Open one more stream."""
        self.seen.append([])
        tasks.start_soon(self._watch, self.seen[-1])

    async def _watch(self, seen: list[tuple[int, float]]) -> None:
        try:
            async for pid, number, factor in self._handle.options(stream=True).watch.remote(str(self.until)):
                self.pids.add(pid)
                seen.append((number, factor))
        except Exception as error:
            self.broken.append(error)

    async def frames(self, wanted: Callable[[list[tuple[int, float]]], bool]) -> None:
        """Return when all streams have come so far."""
        while not all(wanted(seen) for seen in self.seen):
            assert self.broken == []
            await anyio.sleep(0.01)


@asynccontextmanager
async def watching(handle: Any, folder: Path, count: int) -> AsyncIterator[Viewer]:
    """Open streams until so many replicas have one."""
    viewer = Viewer(handle, folder / "until")
    async with anyio.create_task_group() as tasks:
        try:
            while len(viewer.pids) < count:
                viewer.begin(tasks)
                await viewer.frames(lambda seen: len(seen) >= 1)
            yield viewer
        finally:
            viewer.until.touch()


async def test_versions_change_under_open_streams(app: App) -> None:
    from ray import serve

    files = {number: written(app.folder / f"{number}.onnx", number) for number in (2, 3)}
    (app.folder / "broken.onnx").write_bytes(b"not a model")
    models = {"m": {"source": files[2], "devices": ["onnxruntime"], "cache_dir": str(app.folder / "cache")}}
    holder = app.holder(failed_upgrade="keep")

    def config(path: str) -> dict[str, Any]:
        return {"models": {"m": {"source": path}}}

    def healthy(status: Any) -> bool:
        return bool(status.status == "HEALTHY")

    await app.deploy(models, holder, config(files[2]), num_replicas=2)
    await app.status(healthy)
    handle = serve.get_app_handle(app.name)
    pids = set(await replicas(handle, 2))
    async with watching(handle, app.folder, 2) as viewer:
        for factor, path in ((3.0, files[3]), (3.0, str(app.folder / "broken.onnx")), (2.0, files[2])):
            await app.deploy(models, holder, config(path), num_replicas=2)
            for pid in pids:  # the status is healthy before Serve begins, too, and a broken version changes no frame
                await until_configured(handle, pid, config(path))
            await viewer.frames(partial(shows, factor))
            await app.status(healthy)
        came = [len(seen) for seen in viewer.seen]
        await viewer.frames(lambda seen: len(seen) > max(came))
    assert viewer.broken == []
    for seen in viewer.seen:
        assert [number for number, _ in seen] == list(range(1, len(seen) + 1)), "a frame is lost, or comes late"
        factors = [factor for _, factor in seen]
        changes = [factor for at, factor in enumerate(factors) if at == 0 or factors[at - 1] != factor]
        assert changes in ([2.0, 3.0, 2.0], [3.0, 2.0])
    assert set(await replicas(handle, 2)) == pids


@pytest.mark.soak
async def test_a_broken_version_is_in_the_status_and_the_version_before_serves(app: App) -> None:
    from ray import serve

    files = {number: written(app.folder / f"{number}.onnx", number) for number in (2, 3)}
    models = {"m": {"source": files[2], "devices": ["onnxruntime"], "cache_dir": str(app.folder / "cache")}}
    options = {"num_replicas": 2, "max_constructor_retry_count": 1}
    good = {"models": {"m": {"source": files[3]}}}
    broken = {"models": {"m": {"source": files[2], "digest": "0" * 64}}}

    await app.deploy(models, app.holder(), good, **options)
    await app.status(lambda status: status.status == "HEALTHY")
    handle = serve.get_app_handle(app.name)
    before = set(await replicas(handle, 2))
    await app.deploy(models, app.holder(), broken, **options)
    failed = await app.status(lambda status: status.status in ("UNHEALTHY", "DEPLOY_FAILED"))
    assert f"asks for {'0' * 64}" in failed.message
    for _ in range(10):
        assert (await handle.infer.remote(X))["y"][0, 0] == 3.0
        assert (await handle.who.remote())["pid"] in before
    await app.deploy(models, app.holder(), good, **options)
    await app.status(lambda status: status.status == "HEALTHY")
    after = await replicas(handle, 2)
    assert len(before & after.keys()) == 1, "Serve has replaced the one replica in which the upgrade failed"
