"""What the tests of every room share: the two event loops, and the real files that the carriers bring.

A carrier that is not installed fails the test, with the command that installs it: a skipped test proves nothing.
`AIONN_REQUIRE_MODELS=` (empty) in the environment lets such tests be skipped on a machine that cannot have them.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("AIONN_REQUIRE_MODELS", "1")
# Idle threads of NumPy's BLAS would spin for 40 ms after each import, in each of some thousand processes. (2^4 is OpenBLAS's least.)
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # the tests' own use of ONNX Runtime leaves no files either
# Where drivers find the engines of tests. It is the same for all tests, since a template serves drivers of one environment only.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([os.fspath(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job: apps that the tests start and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as under nohup

from aionn.testing import FakeDevice
from aionn.testing.fake_engine import SecondFakeEngine
from tests import apps
from tests.real_models import carried  # after that line: it may be asked for a file while modules are collected

# How fast examples are made and run is the machine's business, and no failure.
hypothesis.settings.register_profile("aionn", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("aionn")


pytest_plugins = ["tests.runs"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run all combinations of parameters, and async tests on both event loops")
    parser.addoption(
        "--real-starts", action="store_true", help="let each test start its drivers and its apps by exec, without templates that are kept"
    )


def case_and_loop(item: pytest.Item) -> tuple[str, bool] | None:
    """Return which case of which test this is, and whether it runs on uvloop. Return None for a test without `anyio_backend`."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or "anyio_backend" not in callspec.params:
        return None
    on_uvloop = callspec.params["anyio_backend"] == ("asyncio", {"use_uvloop": True})
    # The text of the case, because pytest's indices of it differ between the loops.
    return item.nodeid.replace("uvloop" if on_uvloop else "asyncio", "", 1), on_uvloop


def on_one_loop(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return each case of an async test on one of the two loops. With the mark `both_loops` it stays on both.

    The case's name decides, so a case has the same loop on every machine and in every selection. About half of them have uvloop.
    A case that is selected with one loop only runs on that loop.
    """
    cases = [None if item.get_closest_marker("both_loops") else case_and_loop(item) for item in items]
    selected = set(cases)
    return [
        item
        for item, case in zip(items, cases, strict=True)
        if case is None or case[1] == bool(zlib.crc32(case[0].encode()) & 1) or (case[0], not case[1]) not in selected
    ]


def in_few_combinations(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return as few cases of each test with several parameters as it takes for each value of each parameter to occur.

    All cases of a list run that is no product of values, because each was written down for a reason of its own.
    A test for which the combination matters has the mark `every_combination`.
    """
    tests: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    lists: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for item in items:
        parameters = {name: repr(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}
        loop = parameters.pop("anyio_backend", "")
        if len(parameters) > 1 and not item.get_closest_marker("every_combination"):
            one = item.nodeid.partition("[")[0], loop if item.get_closest_marker("both_loops") else ""
            tests.setdefault(one, {})[item.nodeid] = parameters
            names = [mark.args[0] for mark in item.iter_markers("parametrize")]
            lists.setdefault(one, set()).update(tuple(each) for each in names if not isinstance(each, str) and len(each) > 1)
    kept: set[str] = set()
    sampled: set[str] = set()
    for one, cases in tests.items():
        for names_of_list in lists[one]:
            rows = {tuple(parameters[name] for name in names_of_list) for parameters in cases.values()}
            if len(rows) < math.prod(len(set(column)) for column in zip(*rows, strict=True)):
                for parameters in cases.values():
                    parameters[" ".join(names_of_list)] = " ".join(parameters.pop(name) for name in names_of_list)
        sampled.update(cases)
        missing = {pair for parameters in cases.values() for pair in parameters.items()}
        while missing:
            best = max(cases, key=lambda case: len(cases[case].items() & missing))  # the first one of several
            kept.add(best)
            missing -= cases[best].items()
    return [item for item in items if item.nodeid in kept or item.nodeid not in sampled]


def turn_coverage_off(items: list[pytest.Item]) -> None:
    """Measure no coverage in tests of hypothesis. They run the same lines hundreds of times, which the tracer makes twice as slow."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(trylast=True)  # after -k and -m, so `-k uvloop` still selects all of its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases which run the same code as others do, unless `--every-case` is given.

    A process of `own_process` runs what it is asked for.
    """
    turn_coverage_off(items)
    if config.getoption("--every-case") or config.getoption("--own-process") is not None:
        return
    kept = in_few_combinations(on_one_loop(items))
    if len(kept) < len(items):
        running = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in running])
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):
        # Read by now, and not meant for pytests that tests start in other projects. The workers of pytest-xdist still have to read it.
        os.environ.pop("PYTEST_ADDOPTS", None)
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Processes by the thousand start in these tests; without bytecode each would compile aionn anew, a third of its start.
        # Theirs is kept elsewhere, since the environment forbids it here.
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode = tempfile.mkdtemp(prefix="aionn-tests-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(bytecode, ignore_errors=True))
        # Drivers are confined, so none of them could keep the bytecode of its engine.
        for engine in ("onnx", "onnxruntime", "openvino"):
            subprocess.run([sys.executable, "-c", f"import {engine}"], check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module", autouse=True)
def what_is_there_already_is_no_garbage() -> None:
    """The collections of thousands of leak checks need not look again at all that earlier modules have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def warnings_go_where_pytest_looks() -> Iterator[None]:
    """The command `aionn`, called in this process, prints warnings on stderr from then on. Later modules compare stderr and logs."""
    logger = logging.getLogger("aionn")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture(scope="session", autouse=True)
def no_driver_starts_early() -> Iterator[None]:
    """A driver starts when a test needs one. The tests of the early start turn the default on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aionn.runtime.processes.spawning.BY_DEFAULT", False)
        yield


class KeepsTemplate:
    """What keeps a worker's template of drivers between tests, as an open runtime would."""

    has_drivers = True


def warm_spawn(spawn: Any) -> Any:
    """Return a `posix_spawn` that starts `tests.warm_driver` in place of `aionn.driver`."""

    def start(path: str, arguments: list[str], *others: Any, **named: Any) -> int:
        number: int = spawn(path, ["tests.warm_driver" if word == "aionn.driver" else word for word in arguments], *others, **named)
        return number

    return start


@pytest.fixture(scope="session", autouse=True)
def drivers_are_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drivers of all tests of a worker are copies of one template. Starting thousands by exec would take longer than all else.

    `real_starts` is for tests of starts. Tests have what an app has with `--real-starts`, and in a process of `own_process` without a name.
    """
    if request.config.option.real_starts:
        yield
        return
    from aionn.engines.installed import BUILT_IN
    from aionn.runtime.processes import template
    from aionn.runtime.processes.spawning import USUAL, Settings, Spawned

    keeper = KeepsTemplate()
    template.use_template(keeper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_spawn", warm_spawn(os.posix_spawn))
        first = Spawned("onnxruntime", BUILT_IN["onnxruntime"], USUAL, Settings(sandbox="auto"))
    left = template.template_of_thread()
    if left is not None:
        apps.wait_until_ready(left)
    first.end()
    assert template.why_none() == ""
    yield
    template.leave_template(keeper)
    template.end_unused()


@pytest.fixture(scope="session", autouse=True)
def apps_are_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """The apps that tests start with `tests.apps` are copies of one template, except with `--real-starts`."""
    if request.config.option.real_starts:
        yield
        return
    apps.template = apps.AppTemplate()
    yield
    apps.template.end()
    apps.template = None


@pytest.fixture
def real_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test has what an app has: its first driver is started by exec, and leaves the template of the others. So are its apps."""
    from aionn.runtime.processes import template

    monkeypatch.setattr(apps, "template", None)
    here = template._here
    kept, users = here.template, here.users
    here.template, here.users = None, type(users)()
    yield
    template.end_unused()
    here.template, here.users = kept, users


@pytest.fixture(scope="session", autouse=True)
def workers_have_the_priority_of_the_app() -> Iterator[None]:
    """Workers compile at the app's priority. `workers_in_the_background` is for tests that look at their own priority.

    A better stage needs up to four starts of workers. All of them run on the last CPU with the highest niceness. Beside ten busy
    processes on that CPU they get 0.15 % of it, and one start takes minutes.
    """
    from aionn.runtime.processes.devices import Devices

    start_worker = Devices.start_worker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Devices, "start_worker", lambda devices, name, threads: start_worker(devices, name, 0))
        patch.setattr(Devices, "start_worker_in_the_background", start_worker, raising=False)
        yield


@pytest.fixture
def workers_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have their own low priority, as in an app."""
    from aionn.runtime.processes.devices import Devices

    monkeypatch.setattr(Devices, "start_worker", Devices.start_worker_in_the_background)  # type: ignore[attr-defined]


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Each async test runs on asyncio's own loop or on uvloop, and with `--every-case` or the mark `both_loops` on both."""
    return request.param


@pytest.fixture(params=["lanes", "listener"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether lanes serve the bursts of this process, and of drivers that the test starts. Else their listeners do it alone."""
    lanes: bool = request.param == "lanes"
    monkeypatch.setattr("aionn.driver.prepared_model.LANES", lanes)
    monkeypatch.setenv("AIONN_LANES", "1" if lanes else "0")
    return lanes


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


@pytest.fixture
def quick() -> Iterator[FakeDevice]:
    """A stage that serves at once, 10 ms a run."""
    with FakeDevice() as device:
        device.delay(0.01)
        yield device


@pytest.fixture
def best() -> Iterator[FakeDevice]:
    """A better stage: another engine, with an answer at once."""
    with FakeDevice(SecondFakeEngine) as device:
        yield device


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers keep their records in the test's own directory, and can import engines that tests define."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def silero_path() -> Path:
    """Static shapes, recurrent state: input f32[1,576], state f32[2,1,128] -> output f32[1,1], stateN f32[2,1,128]."""
    return carried("silero")


@pytest.fixture
def orientation_path() -> Path:
    """One open dimension, 6.8 MB of constants: x f32[N,3,224,224] -> f32[N,4]."""
    return carried("orientation")


@pytest.fixture
def recording_path() -> Path:
    """44 s of speech, mono, 48 kHz, 16 bits."""
    return carried("speech")
