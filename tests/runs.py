"""How a run of the tests goes: who supervises it, how a test that hangs fails alone, which tests have a process of their own, the order.

    pytest ── tests/reaper.py ── pytest, which gives out the tests ── workers of pytest-xdist ── processes of `own_process`

Invariants
    Nothing outlives pytest: the reaper kills what is left when the run ends, also if pytest itself is killed.
    A test runs in a worker, also with `-n 0`, which is one worker. So a worker that ends fails one test, and another goes on.
    A test that hangs is interrupted by SIGALRM. If that does not end it, the worker ends `GRACE_S` later. xdist then names the test.
    A test with the mark `own_process` runs in a process that has run no other test. Tests of the same group share it.
    With `--pdb`, `--trace` or `-s` one process runs everything, because a debugger needs the terminal.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

GRACE_S = 30.0
"""How long an interrupted test may clean up before its process is ended."""

ENDED_WITHIN_S = 60.0
"""How long a process of `own_process` may take to end after its last test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order", nargs="?", type=int, const=-1, metavar="SEED", help="shuffle packages, modules and tests; print the seed"
    )
    parser.addoption("--own-process", type=int, metavar="FD", help="for tests/runs.py only: the socket over which tests are asked for")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "own_process(group): run in a fresh process; tests of one group, or of a module with the mark, share it"
    )
    config.stash[STDERR] = os.dup(2)  # a running test's own is captured
    config.add_cleanup(lambda: os.close(config.stash[STDERR]))
    if hasattr(config, "workerinput"):
        os.fork = os.forkpty = fork_refused
        if config.pluginmanager.hasplugin("_cov"):
            os.environ[MEASURED] = "1"


# -- the supervised run ------------------------------------------------------------------------------------------------------------


def debugs(config: pytest.Config) -> bool:
    option = config.option
    return bool(option.usepdb or option.trace or option.capture == "no")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads -n
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Start this very command again below the reaper, and pass signals on."""
    if debugs(config):
        config.option.numprocesses = 0
        return None
    inside = hasattr(config, "workerinput") or config.option.own_process is not None
    if inside or os.environ.get("AIONN_TESTS_REAPER") == str(os.getppid()) or sys.argv[1:] != list(config.invocation_params.args):
        return None
    reaper = [sys.executable, os.fspath(Path(__file__).with_name("reaper.py")), str(os.getpid())]
    with subprocess.Popen([*reaper, sys.executable, *sys.orig_argv[1:], *added(config)], start_new_session=True) as run:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: run.send_signal(number))
        return run.wait()


def added(config: pytest.Config) -> list[str]:
    """Return what the supervised run gets beside the user's arguments."""
    option, more = config.option, []
    if config.getoption("numprocesses", None) == 0:
        more += ["-n", "1"]
    if option.random_order == -1:
        more += [f"--random-order={random.randrange(1 << 31)}"]
    return more


def is_whole(config: pytest.Config) -> bool:
    """Whether no file and no folder is named."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_xdist_auto_num_workers() -> int:
    """Three tests for each two usable CPUs, because a test often waits for a driver that starts or ends."""
    return max(1, len(os.sched_getaffinity(0)) * 3 // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["whole"] = is_whole(node.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a worker of a whole run, import a share of the test modules before pytest imports all of them.

    pytest compiles each test module anew after a checkout, and keeps the bytecode. All workers would do so at once, each for all modules.
    """
    given = getattr(session.config, "workerinput", {})
    if given.get("whole"):
        house = Path(__file__).parent
        share = slice(int(given["workerid"].removeprefix("gw")), None, given["workercount"])
        for path in sorted(house.rglob("test_*.py"))[share]:
            with suppress(Exception):  # pytest will say what is wrong with it
                import_module(".".join(path.relative_to(house.parent).with_suffix("").parts))


# -- the order ---------------------------------------------------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.random_order
    return None if seed is None else f"random order: --random-order={seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the packages, the modules in each package and the tests in each module. Fixtures of a module are still set up once.

    Without a seed, tests of the whole house come first. Many of them take long, and no worker should wait for one at the end.
    """
    seed = config.option.random_order
    if seed is None:
        house = Path(__file__).parent
        items.sort(key=lambda item: item.path.parent != house)
    else:
        items.sort(key=lambda item: [zlib.crc32(f"{seed} {node.nodeid}".encode()) for node in item.listchain()])


# -- a test that hangs -------------------------------------------------------------------------------------------------------------

STDERR = pytest.StashKey[int]()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Arm a second timer behind that of pytest-timeout. It needs no GIL, and it ends the process with all stacks on stderr."""
    if elsewhere(item):
        return True  # the other process has the timers
    if not debugs(item.config):
        faulthandler.dump_traceback_later(settings.timeout + GRACE_S, exit=True, file=item.config.stash[STDERR])
    return None  # go on to pytest-timeout


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest-timeout's own timer is gone at the first failure, before the teardown


# -- what coverage looks at --------------------------------------------------------------------------------------------------------

MEASURED = "AIONN_TESTS_MEASURED"
"""In the environment where the run measures coverage."""


def measured() -> list[str]:
    """Return what stands between Python and `-m MODULE` to start it in a process whose lines count, where the run measures coverage.

    Only a process that ends by itself, as after a signal that it handles, keeps what it has measured.
    """
    return ["-m", "coverage", "run", "--source=aionn", "--branch", "--parallel-mode"] if os.environ.get(MEASURED) else []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, None, None]:
    """End the coverage that pytest-cov starts in a worker before it knows that it is one. `no_cover` pauses only the one that follows."""
    plugin = session.config.pluginmanager.getplugin("_cov")
    measures = hasattr(session.config, "workerinput") and plugin is not None and plugin.cov_controller is not None
    if measures:
        plugin.cov_controller.cov.stop()
    yield
    if measures:
        plugin.cov_controller.cov._warn_preimported_source = False  # else each end of a pause warns


# -- a process of one's own --------------------------------------------------------------------------------------------------------


class OwnProcess:
    """A pytest that runs the tests of one group, each when it is asked to."""

    def __init__(self, group: str, item: pytest.Item, number: int) -> None:
        self.group, config = group, item.config
        ids = [other.nodeid for other in item.session.items if group_of(other) == group]
        base = Path(config.option.basetemp)  # of this worker, in the folder of the run
        command = [
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            f"--basetemp={base.parent}/own-{base.name}-{number}",
        ]
        command = [*measured(), *command]
        command += ["--every-case"] if config.getoption("every_case", False) else []
        # A group with a name has many tests, and drivers from one template as in any worker. Others have what an app has.
        real_starts = config.getoption("real_starts", None)  # None: other projects do not have the option
        command += ["--real-starts"] if real_starts or (".py" in group and real_starts is not None) else []
        command += [] if config.option.timeout is None else [f"--timeout={config.option.timeout}"]
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, *command, f"--own-process={there.fileno()}", *ids],
                cwd=config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        self._socket, self._lines = here, here.makefile("rw", encoding="utf-8")
        self._pidfd = os.pidfd_open(self._process.pid)

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run the test there, and give its outcome here."""
        answer = ""
        try:
            self._lines.write(json.dumps([item.nodeid, following and following.nodeid]) + "\n")
            self._lines.flush()
            ends: list[Any] = [self._socket, self._pidfd]
            select.select(ends, [], [])  # a child of the process may keep the socket open
            if self._socket in select.select(ends, [], [], 0)[0]:
                answer = self._lines.readline()
        except (BrokenPipeError, ConnectionResetError):
            pass
        if not answer:
            pytest.fail(f"the test's own process ended with exit code {self._process.wait()} during this test", pytrace=False)
        outcome, text = json.loads(answer)
        if outcome == "skipped":
            pytest.skip(text)
        if outcome != "passed":
            pytest.fail(text, pytrace=False)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Let the process end.

        Raises:
            subprocess.TimeoutExpired: it did not end, and was killed.
        """
        with suppress(OSError):  # what was not sent to a process that has ended
            self._lines.close()
        self._socket.close()
        os.close(self._pidfd)
        try:
            self._process.wait(ENDED_WITHIN_S)
        finally:
            self._process.kill()
            self._process.wait()


OWN = pytest.StashKey[OwnProcess]()
NUMBER = pytest.StashKey[int]()


def group_of(item: pytest.Item | None) -> str | None:
    """Return which tests share a process with this one. Return None for a test without the mark."""
    for node, mark in () if item is None else item.iter_markers_with_node("own_process"):
        return str(mark.args[0]) if mark.args else node.nodeid
    return None


def elsewhere(item: pytest.Item) -> bool:
    """Whether this worker lets another process run the test."""
    return hasattr(item.config, "workerinput") and group_of(item) is not None


def fork_refused() -> NoReturn:
    raise RuntimeError(
        "this process has run other tests, whose threads would be missing in a child; a test that forks needs @pytest.mark.own_process"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    if elsewhere(item):
        item.setup = lambda: None  # type: ignore[method-assign]  # its fixtures are set up there
        item.runtest = lambda: run_elsewhere(item, nextitem)  # type: ignore[method-assign]
    return (yield)


def run_elsewhere(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test in its own process. The process ends after the last test of its group."""
    group, stash = group_of(item), item.session.stash
    assert group is not None
    following = nextitem if group_of(nextitem) == group else None
    if OWN not in stash:
        stash[NUMBER] = stash.get(NUMBER, 0) + 1
        stash[OWN] = OwnProcess(group, item, stash[NUMBER])
    process = stash[OWN]
    try:
        process.run(item, following)
    finally:
        if following is None or process.has_ended():
            del stash[OWN]
            process.end()


class Outcomes:
    """What the reports of one test come to."""

    def __init__(self) -> None:
        self.outcome, self.texts = "passed", [""]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed:
            return
        if self.outcome != "failed":
            self.outcome = report.outcome
        if report.skipped:
            self.texts.append(report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else report.longreprtext)
        else:
            self.texts += [report.longreprtext, *(f"{title}\n{content}" for title, content in report.sections)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In a process of `own_process`: run each test that is asked for over the socket, until the socket's end."""
    if session.config.option.own_process is None:
        return None
    items = {item.nodeid: item for item in session.items}
    with socket.socket(fileno=session.config.option.own_process) as asked, asked.makefile("rw", encoding="utf-8") as lines:
        asked.set_inheritable(False)
        while line := lines.readline():
            name, following = json.loads(line)
            outcomes = Outcomes()
            session.config.pluginmanager.register(outcomes)
            items[name].config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
            session.config.pluginmanager.unregister(outcomes)
            lines.write(json.dumps([outcomes.outcome, "\n".join(outcomes.texts).strip()]) + "\n")
            lines.flush()
    return True
