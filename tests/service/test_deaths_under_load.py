"""Apps, drivers and services are killed again and again: nothing is lost beside what died, and nothing stays behind (`-m soak`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apps import App
from tests.service.hostile import descriptors_of
from tests.service.served import Served, alive, evicted

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600), pytest.mark.usefixtures("surroundings")]

APPS, APP_KILLS, DRIVER_KILLS, SERVICE_KILLS = 8, 300, 50, 20
FIRST = 5
"""Deaths before the first look at what a process holds: by then it has imported and reserved all that it needs."""

FIRST_OF_A_SHARED_DRIVER = 100
"""The same for the driver that apps leave. The arenas of malloc grow until they hold the fullest moment, a third over the first 100 deaths.
Over the next 500 the driver had 22 to 24 MB, without a trend. A leak of 18 KiB a death fails."""

# An app with models of its own, so that none of them is at the deaths of three drivers.
APP = """
import asyncio, sys
import numpy as np
import aionn
from aionn.testing import identity_model

async def main(path, number):
    frames = died = turn = 0
    async with aionn.Runtime(service=path, start=()) as runtime:
        while True:
            width, turn = 4 + number + 16 * (turn % 4000), turn + 1
            model = aionn.Model.from_onnx(identity_model({"input": (1, width)}))
            try:
                compilation = await runtime.compile(model, devices=["reference"])
                async with compilation.burst() as burst:
                    for _ in range(40):
                        frames += 1
                        outputs = await burst.compute({"input": np.full((1, width), frames % 1000, np.float32)})
                        assert (outputs["input_out"] == frames % 1000).all()
                        await asyncio.sleep(0.02)
            except (aionn.DriverDiedError, aionn.ServiceDiedError):
                died += 1
                await asyncio.sleep(0.05)
            print(frames, died, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Streaming:
    """Another process that compiles and streams, and says how it goes."""

    def __init__(self, path: str, folder: Path, number: int) -> None:
        self.said, self.errors = folder / f"said{number}", folder / f"errors{number}"
        with self.said.open("wb") as said, self.errors.open("wb") as errors:
            self.process = App([sys.executable, "-c", APP, path, str(number)], stdout=said, stderr=errors)

    @property
    def counts(self) -> tuple[int, int]:
        """How many frames it has sent, and how many deaths it has seen."""
        lines = self.said.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be under way
        frames, died = map(int, lines[-1].split()) if lines else (0, 0)
        return frames, died

    def go_on(self, frames: int = 1) -> None:
        """Wait for so many more frames of it."""
        before = self.counts[0]
        until(lambda: self.counts[0] >= before + frames, self)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def until(holds: Callable[[], bool], *apps: Streaming) -> None:
    by = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < by
        for app in apps:
            assert app.process.poll() is None, app.errors.read_text(encoding="utf-8")
        time.sleep(0.02)


@pytest.fixture
def apps(served: Served, folder: Path) -> list[Streaming]:
    return [Streaming(served.path, folder, number) for number in range(APPS)]


@pytest.fixture(autouse=True)
def killed_at_the_end(apps: list[Streaming]) -> object:
    yield
    for app in apps:
        app.kill()


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, mappings and KiB of private memory of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
    return descriptors_of(pid), len(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()), private


def settled(pid: int, served: Served, guests: int) -> tuple[int, int, int]:
    """What a process holds when no model is idle in a driver. The least of some looks, because the apps go on."""
    until(lambda: len(served.guests()) <= guests)
    looks = []
    for _ in range(10):
        evicted(served.path)
        looks.append(held(pid))
    return min(each[0] for each in looks), min(each[1] for each in looks), min(each[2] for each in looks)


def check_back_at(before: tuple[int, int, int], after: tuple[int, int, int], what: str) -> None:
    print(f"{what}: descriptors {before[0]} -> {after[0]}, mappings {before[1]} -> {after[1]}, KiB {before[2]} -> {after[2]}")
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 40
    assert after[2] <= before[2] * 1.15


def test_apps_that_are_killed_cost_the_others_nothing(served: Served, apps: list[Streaming], folder: Path) -> None:
    for app in apps:
        app.go_on()
    (driver,) = served.facts()["drivers"]
    pids = {"service": served.process.pid, "driver": driver["pid"]}
    before = dict.fromkeys(pids, (0, 0, 0))
    for kill in range(APP_KILLS):
        if kill == FIRST_OF_A_SHARED_DRIVER:
            before = {name: settled(pid, served, APPS) for name, pid in pids.items()}
        number = 1 + kill % (APPS - 1)  # the first one lives
        apps[number].kill()
        apps[number] = Streaming(served.path, folder, number)
        apps[number].go_on()
        apps[0].go_on()
    assert apps[0].counts[1] == 0
    for name, pid in pids.items():
        check_back_at(before[name], settled(pid, served, APPS), name)


def test_a_driver_that_is_killed_is_followed_by_another(served: Served, apps: list[Streaming]) -> None:
    for app in apps:
        app.go_on()
    before, drivers = (0, 0, 0), set[int]()
    for kill in range(DRIVER_KILLS):
        (driver,) = served.facts()["drivers"]
        drivers.add(driver["pid"])
        if kill == FIRST:
            before = settled(served.process.pid, served, APPS)
        os.kill(driver["pid"], signal.SIGKILL)
        for app in apps:
            app.go_on(41)  # an app between two models sees nothing
    assert len(drivers) == DRIVER_KILLS
    assert sum(app.counts[1] for app in apps) > DRIVER_KILLS
    assert "refused for" not in served.log
    check_back_at(before, settled(served.process.pid, served, APPS), "service")


def test_a_service_that_is_killed_is_followed_by_another(served: Served, apps: list[Streaming], folder: Path) -> None:
    for app in apps:
        app.go_on()
    last, drivers = served, set[int]()
    try:
        for _ in range(SERVICE_KILLS):
            drivers |= {driver["pid"] for driver in last.facts()["drivers"]}
            last.kill()
            last = Served(folder)
            for app in apps:
                app.go_on(81)  # two turns, so each app has attached again
        left = {driver["pid"] for driver in last.facts()["drivers"]}
        assert len(left) == 1
        until(lambda: not any(map(alive, drivers - left)))
        assert "Traceback" not in last.log
    finally:
        for app in apps:
            app.kill()
        last.end()


def test_a_service_that_is_replaced_again_and_again_loses_no_frame(served: Served, apps: list[Streaming], folder: Path) -> None:
    """Each time one of the apps is killed, and another one comes. A service ends when the models in its drivers are closed."""
    for app in apps:
        app.go_on()
    services = [served]
    try:
        for replaced in range(SERVICE_KILLS):
            services.append(Served(folder, "--replace"))
            number = replaced % APPS
            apps[number].kill()
            apps[number] = Streaming(served.path, folder, number)
            for app in apps:
                app.go_on(41)
            guests = [guest["guest"] for guest in services[-1].guests()]
            assert apps[number].process.pid in guests
            print(number, [service.process.poll() for service in services])
        until(lambda: [service.process.poll() for service in services[:-1]] == [0] * SERVICE_KILLS)  # although apps live
        assert sum(app.counts[1] for app in apps) == 0
        for app in apps:
            app.kill()
        assert not any("Traceback" in service.log for service in services)
    finally:
        for app in apps:
            app.kill()
        for service in services:
            service.end()
