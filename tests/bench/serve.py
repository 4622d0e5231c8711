"""What callers of Ray Serve meet when a replica or a driver dies or hangs, and at an upgrade: rows F12, F13, F14 and F16.

    python -m tests.bench serve [--row F12,F13] [--kills 10] [--rate 200] [--rounds 3]

One Ray node, started for this run, whose replicas hold models. Calls are paced: each leaves at its time, whether or not the earlier ones
have been answered. So a stall shows in all calls that fall into it. Bounds are printed beside the figures.

    F12    SIGKILL one of two replicas: calls that fail, seconds until a new replica answers, p99 of the other replica before and meanwhile
    F13    SIGKILL a driver: calls that fail, p99 of the calls of the next second
    F14    a driver hangs: how long calls wait until it is killed (hang_s), or until a check of health fails (hang_s=None)
    F16    swap a version in under streams of 30 fps, and back: frames lost, p99 of frames before and at the swap, seconds of the way back
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

import aionn.ray
from aionn.cli.bench import Others, machine, machine_line
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import VARIABLE
from tests.leaks import ended
from tests.ray.cluster import ENVIRONMENT, shared_cluster
from tests.real_models import carried
from tests.scaled_model import scaled_model

ROOT = Path(__file__).parents[2]
HANG_S = 2.0
STEADY_S = 3.0
AROUND_S = 1.0
QUEUED_S = 5.0
"""So long a stall fills the queue of the handle. Calls beyond that would be refused."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for, and a folder for files."""

    folder: Path
    kills: int
    rate: float
    rounds: int


# --- calls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has ended. `pid` is that of the replica that has answered, or 0 after an error."""

    sent_s: float
    took_s: float
    pid: int
    error: str


@dataclass
class Load:
    """Calls at a fixed rate, each in a task of its own."""

    handle: Any
    rate: float
    inputs: dict[str, Any]
    calls: list[Call] = field(default_factory=list)
    in_flight: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send calls during the body, and wait for the answers at its end."""
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as sending:
                tasks.start_soon(self._send, tasks, sending)
                yield
            sending.cancel()

    async def _send(self, tasks: TaskGroup, sending: anyio.CancelScope) -> None:
        began, number = time.monotonic(), 0
        while not sending.cancel_called:
            tasks.start_soon(self._call)
            number += 1
            await anyio.sleep(max(0.0, began + number / self.rate - time.monotonic()))

    async def _call(self) -> None:
        sent, pid, error = time.monotonic(), 0, ""
        self.in_flight += 1
        try:
            pid = await self.handle.ask.remote(self.inputs)
        except Exception as failure:
            error = type(failure).__name__
        self.in_flight -= 1
        self.calls.append(Call(sent, time.monotonic() - sent, pid, error))

    def between(self, began: float, until: float) -> list[Call]:
        """The calls that were sent in that time."""
        return [call for call in self.calls if began <= call.sent_s < until]

    async def answered_by(self, wanted: Callable[[int], bool]) -> float:
        """Return when a process that is wanted has answered (s, CLOCK_MONOTONIC)."""
        seen = len(self.calls)
        while True:
            for call in self.calls[seen:]:
                if call.pid and wanted(call.pid):
                    return call.sent_s + call.took_s
            seen = len(self.calls)
            await anyio.sleep(0.002)


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else float("nan")


def show(row: str, what: str, values: Sequence[float], unit: str, bound: str = "") -> None:
    """Print the median of a figure and all its values."""
    each = " ".join(f"{value:.3g}" for value in values)
    print(f"{row}  {what:58} {statistics.median(values):8.3g} {unit:3} {f'bound {bound}' if bound else '':18} [{each}]", flush=True)


def voice() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"input": random.uniform(-0.1, 0.1, (1, 576)).astype(np.float32), "state": np.zeros((2, 1, 128), np.float32)}


async def run(name: str, models: dict[str, Any], holder: dict[str, Any], **options: Any) -> Any:
    """Deploy an application, and return its handle once it is ready."""
    from ray import serve

    from tests.bench.serve_replica import made

    app = made(models, holder, options)
    return await anyio.to_thread.run_sync(partial(serve.run, app, name=name, route_prefix=None))


async def delete(name: str) -> None:
    from ray import serve

    await anyio.to_thread.run_sync(serve.delete, name)


async def replicas(handle: Any, count: int) -> dict[int, list[int]]:
    """The drivers of so many replicas, by the replica's pid."""
    found: dict[int, list[int]] = {}
    while len(found) < count:
        try:
            pid, drivers, _ = await handle.who.remote()
        except Exception:  # the replica has just died, or the queue is full
            await anyio.sleep(0.01)
        else:
            found[pid] = drivers
    return found


# --- rows --------------------------------------------------------------------------------------------------------------


async def deaths(rows: Sequence[str], options: Options) -> None:
    """F12 and F13, in one application of two replicas."""
    folder = options.folder
    models = {"vad": aionn.ray.ModelSpec(str(carried("silero")), devices=("onnxruntime",), cache_dir=str(folder / "cache"))}
    queue = round(options.rate * QUEUED_S)
    handle = await run("deaths", models, {"runtime": {"state_dir": str(folder / "state")}}, num_replicas=2, max_queued_requests=queue)
    load = Load(handle, options.rate, voice())
    await replicas(handle, 2)
    async with load.running():
        await anyio.sleep(STEADY_S)  # the first calls of a handle are slow
        keeps_pace = load.in_flight <= load.rate / 2
        if not keeps_pace:
            print(f"F12, F13  not measured: {load.in_flight} calls wait: the machine is too busy for {load.rate:g} per second")
        if "F13" in rows and keeps_pace:
            await dead_drivers(load, options.kills * 2)
        if "F12" in rows and keeps_pace:
            await dead_replicas(load, options.kills)
    passed_s = max(call.sent_s for call in load.calls) - load.calls[0].sent_s
    failures = dict(Counter(call.error for call in load.calls if call.error)) or "none"
    print(f"F12, F13  {len(load.calls)} calls, {len(load.calls) / passed_s:.0f} per second; those that failed: {failures}")
    await delete("deaths")


async def dead_drivers(load: Load, kills: int) -> None:
    before = await replicas(load.handle, 2)
    second, failed = [], []
    for _ in range(kills):
        now = await replicas(load.handle, 2)
        victim = next(driver for drivers in now.values() for driver in drivers)
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        await anyio.sleep(AROUND_S * 2)
        calls = load.between(began, began + 1.0)
        second.append(p99([call.took_s for call in calls]))
        failed.append(sum(1 for call in load.between(began - AROUND_S, began + AROUND_S) if call.error))
    after = await replicas(load.handle, 2)
    show("F13", "p99 of the calls sent in the second after a driver's death", second, "s", "1.5")
    show("F13", "calls that failed", failed, "", "0")
    print(f"F13  replicas are {'the same' if before.keys() == after.keys() else 'OTHERS'}")


async def dead_replicas(load: Load, kills: int) -> None:
    gone, back, failed, flying, usual, meanwhile = [], [], [], [], [], []
    for _ in range(kills):
        before = await replicas(load.handle, 2)
        began = time.monotonic()
        await anyio.sleep(STEADY_S)
        victim, other = before
        killed, in_flight = time.monotonic(), load.in_flight
        os.kill(victim, signal.SIGKILL)
        for driver in before[victim]:
            await ended(driver, 30)
        gone.append(time.monotonic() - killed)
        new = await load.answered_by(lambda pid, before=before: pid not in before)  # type: ignore[misc]
        back.append(new - killed)
        failed.append(sum(1 for call in load.between(began, new) if call.error))
        flying.append(in_flight)
        usual.append(p99([call.took_s for call in load.between(began, killed) if call.pid == other]) * 1e3)
        meanwhile.append(p99([call.took_s for call in load.between(killed, new) if call.pid == other]) * 1e3)
    show("F12", "until the drivers of a killed replica were gone", gone, "s", "0.1")
    show("F12", "until a new replica answered", back, "s", "5")
    show("F12", "calls that failed", failed, "", f"{min(flying)} in flight")
    show("F12", "p99 of the other replica before", usual, "ms")
    show("F12", "p99 of the other replica until the new one answered", meanwhile, "ms")
    show("F12", "their ratio", [one / other for one, other in zip(meanwhile, usual, strict=True)], "", "2")


async def hangs(options: Options) -> None:
    """F14. A limit kills the driver, and the replica heals. Without one the check of health fails, and Serve replaces the replica."""
    runtime = {"state_dir": str(options.folder / "state"), "hang_s": HANG_S}
    waited, failing, replaced = [], [], []
    x = {"x": np.ones((1, 16), np.float32)}

    async def timed(handle: Any, times: list[float]) -> None:
        began = time.monotonic()
        try:
            await handle.ask.remote(x)
        except Exception:  # the error is expected
            times.append(time.monotonic() - began)

    for _ in range(options.rounds):
        with FakeDevice() as fake:
            variables = {VARIABLE: os.environ[VARIABLE]}
            models = {"m": aionn.ray.ModelSpec(identity_model({"x": (1, 16)}), devices=(fake.name,), warm_up=0)}
            handle = await run("hangs", models, {"runtime": {**runtime, "driver_env": variables}})
            await handle.ask.remote(x)
            fake.hang()
            times: list[float] = []
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(timed, handle, times)
            waited.append(max(times))
            fake.behave()
            await handle.ask.remote(x)
            await delete("hangs")

            holder = {"runtime": {**runtime, "driver_env": variables, "hang_s": None}, "hang_after_s": HANG_S}
            handle = await run("hangs", models, holder, graceful_shutdown_timeout_s=1.0)
            pid = await handle.ask.remote(x)
            fake.hang()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(timed, handle, times)
                await fake.heard("run")
                began = time.monotonic()
                await until_unhealthy(handle)
                failing.append(time.monotonic() - began)
                while True:
                    try:
                        if (await handle.who.remote())[0] != pid:
                            break
                    except Exception:  # the replica ends just now
                        await anyio.sleep(0.01)
                replaced.append(time.monotonic() - began)
            fake.behave()
            await delete("hangs")
    show("F14", f"longest of 4 calls, the driver is killed after {HANG_S:g} s", waited, "s", f"{HANG_S + 5:g}")
    show("F14", f"until check_health fails, health sees a hang after {HANG_S:g} s", failing, "s", f"{HANG_S + 2:g}")
    show("F14", "until another replica answers", replaced, "s")


async def until_unhealthy(handle: Any) -> None:
    while True:
        try:
            await handle.check_health.remote()
        except Exception:
            return
        await anyio.sleep(0.01)


async def upgrades(options: Options) -> None:
    """F16."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    files = {}
    for factor in (2.0, 3.0):
        path = options.folder / f"{factor:g}.onnx"
        path.write_bytes(scaled_model(np.full((1, 16), factor, np.float32)))
        files[factor] = str(path)
    models = {"m": {"source": files[2.0], "devices": ["onnxruntime"], "cache_dir": str(options.folder / "cache")}}
    arguments = {"models": models, "holder": {"runtime": {"state_dir": str(options.folder / "state")}}, "options": {"num_replicas": 2}}

    async def deploy(factor: float) -> None:
        deployments = [{"name": "Measured", "user_config": {"models": {"m": {"source": files[factor]}}}}]
        app = {"name": "upgrades", "route_prefix": None, "import_path": "tests.bench.serve_replica:application", "args": arguments}
        client: Any = _get_global_client()
        config = ServeDeploySchema.model_validate({"applications": [{**app, "deployments": deployments}]})
        await anyio.to_thread.run_sync(client.deploy_apps, config)

    await deploy(2.0)
    while (await anyio.to_thread.run_sync(serve.status)).applications["upgrades"].status != "RUNNING":  # noqa: ASYNC110 - other processes change it
        await anyio.sleep(0.05)
    handle = serve.get_app_handle("upgrades")
    until = options.folder / "until"
    streams: list[list[tuple[int, int, float, float, float]]] = []
    before, around, shown_s, swap_s = [], [], [], []

    async def watch(seen: list[tuple[int, int, float, float, float]]) -> None:
        async for frame in handle.options(stream=True).watch.remote(str(until)):
            seen.append(frame)

    async with anyio.create_task_group() as tasks:
        while len({frame[0] for seen in streams for frame in seen}) < 2:
            streams.append([])
            tasks.start_soon(watch, streams[-1])
            await wait_for(lambda: bool(streams[-1]))
        await anyio.sleep(STEADY_S)
        for number in range(options.rounds * 2):
            factor = 2.0 if number % 2 else 3.0
            began = time.monotonic()
            await deploy(factor)
            await wait_for(lambda: all(seen[-1][2] == factor for seen in streams))  # noqa: B023 - awaited at once
            if factor == 2.0:
                shown_s.append(time.monotonic() - began)
            await anyio.sleep(2 * AROUND_S)
            for seen in streams:
                at = max(one[3] for one in seen if one[2] != factor)  # the last frame of the version before
                before.append(p99([one[4] for one in seen if began - STEADY_S <= one[3] < began]) * 1e3)
                around.append(p99([one[4] for one in seen if abs(one[3] - at) <= AROUND_S]) * 1e3)
            await anyio.sleep(STEADY_S)
        swaps: dict[int, list[float]] = {}
        while len(swaps) < 2:
            pid, _, swaps[pid] = await handle.who.remote()
        swap_s = [seconds for times in swaps.values() for seconds in times[2::2]]  # the first is that of the start, then there and back
        until.touch()
    lost = sum(len(seen) - 1 for seen in streams if [frame[1] for frame in seen] != list(range(1, len(seen) + 1)))
    show("F16", f"streams with a frame lost or late, of {len(streams)}", [float(lost)], "", "0")
    show("F16", "p99 of frames before", before, "ms")
    show("F16", "p99 of frames within 1 s of the swap", around, "ms")
    show("F16", "their ratio", [one / other for one, other in zip(around, before, strict=True)], "", "2")
    show("F16", "the way back in a replica (reconfigure)", swap_s, "s", "1")
    show("F16", "the way back from `serve deploy` to the last stream", shown_s, "s")
    await delete("upgrades")


async def wait_for(wanted: Callable[[], bool]) -> None:
    while not wanted():  # noqa: ASYNC110 - frames come from other processes
        await anyio.sleep(0.01)


# --- the program -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench serve")
    parser.add_argument("--row", default="F12,F13,F14,F16", help="rows, with commas between them")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rate", type=float, default=200.0, help="calls per second")
    parser.add_argument("--rounds", type=int, default=3, help="of F14 and F16")
    given = parser.parse_args(argv)
    rows = given.row.split(",")
    os.environ.update(ENVIRONMENT)  # before Ray is imported
    os.environ["PYTHONPATH"] = os.fspath(ROOT)  # replicas import `serve_replica`
    warnings.simplefilter("ignore")  # Ray Serve makes many
    import ray
    from ray import serve

    print(machine_line(machine()))
    others = Others()
    with tempfile.TemporaryDirectory() as folder, shared_cluster(Path(folder)) as address:
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="aionn-bench")
        try:
            serve.start(proxy_location="Disabled")
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            options = Options(Path(folder), given.kills, given.rate, given.rounds)
            parts: list[Callable[[], Awaitable[None]]] = []
            if {"F12", "F13"} & set(rows):
                parts.append(partial(deaths, rows, options))
            parts += [partial(part, options) for row, part in (("F14", hangs), ("F16", upgrades)) if row in rows]
            for part in parts:
                anyio.run(part)
        finally:
            ray.shutdown()
    print(f"CPU use of all other processes, Ray's included: {others.share():.0%}")
