"""The service gives its rights away before it accepts an app, and its drivers have their own rules only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

import aionn
import aionn.blocking
from aionn.cli import main
from aionn.cli.checks.sandbox import files, system_calls
from aionn.needs import Confinement
from aionn.runtime.processes.environment import driver_environment
from aionn.runtime.processes.spawning import Settings, Spawned
from aionn.runtime.processes.template import template_of_thread
from tests.apps import wait_until_ready
from tests.sandbox.asking import WORD, targets
from tests.sandbox.evil_calls import Target
from tests.service.served import Served, parent_of
from tests.service.test_service import MODEL, REFERENCE, pid_of, right, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

ROOT = Path(__file__).parents[2]
WHOLE = pytest.mark.skipif(any(row.status != "ok" for row in (files(), system_calls())), reason="this kernel confines no service")

FREE = {f"{name} of the {who}" for name in ("kill", "pidfd") for who in ("app", "sibling", "victim")} | {
    *("kill the group", "kill everything", "signal the peer of a socket", "list all processes"),
    *(f"open {name} of the {who}" for name in ("cmdline", "status", "stat", "task", "fd", "io") for who in ("app", "sibling")),
    *(f"list the folder of the {who}" for who in ("app", "sibling")),
}
"""What a service may do: send signals, and read what Linux shows every user of a process. It opens `io`, and may not read it."""

NOTHING_GIVEN = {"reopen the weights for reading", "reopen the weights for writing"}
"""Attacks on what an app gives a driver."""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with targets(tmp_path) as found:
        yield msgspec.structs.replace(found, sibling=found.victim)
        assert Path(found.secret).read_text() == WORD


def taken_over(folder: Path, target: Target, *outer: str, level: str = "auto") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.service.taken_over", str(folder), msgspec.json.encode(target).decode()]
    if outer:
        command = [sys.executable, "-m", "tests.sandbox.outer", *outer, "--", *command]
    environment = {**os.environ, "AIONN_SANDBOX": level, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, env=environment)


def said_by(done: subprocess.CompletedProcess[str]) -> tuple[Confinement, dict[str, str], str, dict[str, str]]:
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[Confinement, dict[str, str], str, dict[str, str]])


def successes(outcomes: dict[str, str]) -> set[str]:
    return {name for name, found in outcomes.items() if not found.startswith(("denied E", "missing E"))} - NOTHING_GIVEN


@WHOLE
def test_a_service_that_was_taken_over_reaches_nothing_and_orders_no_right_back(target: Target, folder: Path) -> None:
    found, outcomes, own, ordered = said_by(taken_over(folder, target))
    assert {"files", "system calls", "network", "processes", "no made code", "no capabilities"} <= set(found.holds)
    assert successes(outcomes) <= FREE
    assert own == "success"
    assert sorted(os.listdir(target.folder)) == ["empty", "file", "removed", "renamed"]
    assert ordered.pop("usual") == "success"
    assert [name for name, answer in ordered.items() if not answer.startswith("denied: ")] == []
    assert len(ordered) > 8


@WHOLE
def test_without_a_sandbox_these_attacks_have_success(target: Target, folder: Path) -> None:
    """Else the test above would prove nothing. Level "off" gives nothing away."""
    found, outcomes, _, _ = said_by(taken_over(folder, target, level="off"))
    assert found == Confinement("off")
    assert {"fork", "execute", "open the secret", "open environ of the app"} <= successes(outcomes)
    assert len(successes(outcomes) - FREE) > 100


def test_a_kernel_without_landlock_is_named_and_a_required_sandbox_is_refused(target: Target, folder: Path) -> None:
    without = [f"{name}=ENOSYS" for name in ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")]
    found, outcomes, _, _ = said_by(taken_over(folder, target, *without))
    assert "this kernel has no Landlock" in "; ".join(found.lacks)
    assert outcomes["open the secret"] == "success"
    if "system calls" in found.holds:
        assert not successes(outcomes) & {"fork", "execute", "connect to TCP", "ptrace"}
    for level in ("require", "strict"):
        done = taken_over(folder, target, *without, level=level)
        assert done.returncode != 0
        assert f"sandbox={level!r} cannot be had" in done.stderr


def test_a_kernel_that_makes_no_copies_leaves_the_service_free_and_says_so(target: Target, folder: Path) -> None:
    found, _, _, _ = said_by(taken_over(folder, target, "clone:32768=EPERM"))
    assert found.holds == ()
    assert "the service is not confined, because no process can start its drivers then" in found.lacks[0]
    assert "cannot be had" in taken_over(folder, target, "clone:32768=EPERM", level="require").stderr


def status(pid: int | None) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def children_of(served: Served) -> list[int]:
    return list(map(int, Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text(encoding="utf-8").split()))


def starter_of(served: Served) -> int:
    (found,) = [pid for pid in children_of(served) if status(pid)["Name"] == "aionn-starter"]
    return found


@WHOLE
async def test_drivers_are_the_services_children_under_their_own_rules_alone(served: Served) -> None:
    """The first one, one of other variables, a copy of a template, the next one after a death."""
    pid = served.process.pid
    assert (status(pid)["Seccomp_filters"], status(pid)["NoNewPrivs"], status(pid)["CapEff"].strip("0")) == ("1", "1", "")
    assert status(starter_of(served))["Seccomp_filters"] == "0"
    drivers = []
    for more in ({}, {"AIONN_TEST_WORD": "one"}, {"MY_ENGINE": "two"}):
        async with aionn.Runtime(service=served.path, start=(), driver_env=more) as runtime:
            await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
            drivers.append(pid_of(runtime))
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        assert pid_of(runtime) == drivers[0]
        os.kill(drivers[0] or 0, signal.SIGKILL)
        await until(lambda: pid_of(runtime) is None)
        await right(compilation.compute, 2)
        drivers.append(pid_of(runtime))
        for driver in drivers[1:]:
            assert parent_of(driver) == pid
            assert (status(driver)["Seccomp_filters"], status(driver)["Seccomp"]) == ("1", "2")
        assert "exit code -9" in served.log
    assert len({*drivers}) == 4


@WHOLE
async def test_a_confined_service_refuses_what_would_give_rights_back(served: Served) -> None:
    for options, why in (({"sandbox": "off"}, "AIONN_SANDBOX=off"), ({"driver_env": {"PYTHONPATH": "/tmp"}}, "PYTHONPATH; set it")):
        async with aionn.Runtime(service=served.path, start=(), **options) as runtime:
            with pytest.raises(aionn.DeviceUnavailableError, match=why):
                await runtime.compile(MODEL, devices=REFERENCE)
    assert children_of(served) == [starter_of(served)]  # the copies that have refused are waited for


@WHOLE
async def test_a_service_without_its_starter_says_so_and_serves_on(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        os.kill(starter_of(served), signal.SIGKILL)
        async with aionn.Runtime(service=served.path, start=(), driver_env={"MY_ENGINE": "two"}) as other:
            for _ in range(2):
                with pytest.raises(aionn.DeviceUnavailableError, match="process that starts drivers for this service has ended; restart"):
                    await other.compile(MODEL, devices=REFERENCE)
        await right(compilation.compute, 1)


async def test_the_starter_ends_with_a_service_that_is_killed(folder: Path) -> None:
    served = Served(folder)
    starter = starter_of(served)
    served.kill()
    await until(lambda: not os.path.exists(f"/proc/{starter}") or status(starter)["State"][0] == "Z")


def orders_to_a_template() -> list[int]:
    """What becomes of orders to the template of a confined service. Each thread has its own."""
    given = ["reference", "3", "0", "/nonexistent/state", "auto", "", "4", "", "shared"]
    spawned = Spawned("reference", "", "0", Settings(state_dir=given[3], sandbox=given[4], shared=True))
    try:
        made, template = list[int](), template_of_thread()
        assert template is not None
        wait_until_ready(template)
        assert template.pid
        with open(os.devnull, "rb+") as null:
            for place, word in ((4, "off"), (3, "/tmp"), (5, "/tmp/x"), (0, "reference")):
                changed = [*given[:place], word, *given[place + 1 :]]
                made.append(template.order(changed, driver_environment("auto", 0, {}), (null.fileno(),) * 3))
        for pid in filter(None, made):
            os.waitpid(pid, 0)
        return made
    finally:
        spawned.end()


@WHOLE
async def test_a_template_of_a_confined_service_makes_no_driver_with_other_rights() -> None:
    *refused, usual = await anyio.to_thread.run_sync(orders_to_a_template)
    assert refused == [0, 0, 0]
    assert usual > 0


@WHOLE
def test_ps_and_doctor_say_what_confines_the_service(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"files", "network"} <= set(served.facts()["sandbox"]["holds"])
    assert main(["ps", "--socket", served.path]) == 0
    assert "the service is confined by: limits, no new privileges" in capsys.readouterr().out
    assert "the service is confined by: limits, no new privileges" in served.log


@WHOLE
def test_a_file_that_only_the_app_may_read_is_compiled_by_its_descriptor(served: Served, tmp_path: Path) -> None:
    """The service may open no file of the user, by no path."""
    file = tmp_path / "model.onnx"
    file.write_bytes(aionn.testing.identity_model({"input": (1, 4)}))
    with aionn.blocking.attach(file, devices=REFERENCE, service=served.path) as burst:
        assert burst.compute({"input": np.ones((1, 4), np.float32)})["input_out"].tolist() == [[1, 1, 1, 1]]
