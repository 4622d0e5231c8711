"""A run of the tests as `tests/runs.py` makes it: a hang fails alone, nothing outlives pytest, some tests have their own process."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aionn.runtime.processes import template
from tests.leaks import left_running, processes_with

MARK = "AIONN_RUNS_MARK"

CONFTEST = """
    import sys

    pytest_plugins = ["tests.runs"]

    def pytest_configure():
        sys.modules["tests.runs"].GRACE_S = 1.0
"""

SETTINGS = """
    [pytest]
    addopts = -ra -p no:cacheprovider -p pytest_timeout -p xdist
    timeout = 3
    timeout_method = signal
"""

HANGS = """
    import ctypes, os, subprocess, threading, time

    LEFT = ["setsid", "--fork", "sleep", "600"]  # a daemon: its parent ends at once

    def test_before():
        subprocess.run(LEFT, check=True)
        subprocess.Popen(["sleep", "600"])

    def test_in_python():
        threading.Event().wait()

    def test_between(): pass

    def test_that_swallows_the_interrupt():
        while True:
            try:
                time.sleep(600)
            except BaseException:
                pass

    def test_with_the_gil():
        subprocess.run(LEFT, check=True)
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        lock(mutex)  # waits for itself, goes on waiting after a signal, and holds the GIL

    def test_after(): pass
"""

WAITS = """
    import os, signal, subprocess, threading

    def test_waits():
        subprocess.run(["setsid", "--fork", "sleep", "600"], check=True)
        subprocess.Popen(["sh", "-c", "trap '' INT TERM HUP; sleep 600 & wait"])
        open(os.environ["READY"], "w").write("ready")
        threading.Event().wait()

    def test_after(): pass
"""

OWN = """
    import os, sys, pytest

    SEEN = []

    def test_here():
        import shelve
        SEEN.append(os.getpid())

    @pytest.mark.own_process
    def test_alone(tmp_path):
        assert not SEEN
        assert "shelve" not in sys.modules

    def test_that_forks_here():
        os.fork()

    @pytest.mark.own_process
    def test_that_forks_there():
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    @pytest.mark.own_process
    def test_that_crashes():
        os.abort()

    @pytest.mark.own_process("group")
    def test_first_of_the_group():
        SEEN.append(os.getpid())

    @pytest.mark.own_process("group")
    def test_second_of_the_group():
        assert SEEN == [os.getpid()]
        print("printed by the second")
        raise ValueError("the second's own error")

    @pytest.mark.own_process("group")
    def test_third_of_the_group():
        assert SEEN == [os.getpid()]
        pytest.skip("the third's reason")

    @pytest.mark.own_process
    def test_that_hangs_there():
        while True:
            try:
                import time; time.sleep(600)
            except BaseException:
                pass

    def test_here_again():
        assert SEEN == [os.getpid()]
"""


class Project:
    """A folder of tests whose runs go as aionn's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        root = Path(__file__).parents[1]
        (folder / "conftest.py").write_text(textwrap.dedent(CONFTEST))
        (folder / "pytest.ini").write_text(textwrap.dedent(SETTINGS))
        self._environment = {**os.environ, MARK: self.mark, "PYTHONPATH": os.fspath(root), "READY": os.fspath(folder / "ready")}
        self._environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take half of the time of a start
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
            self._environment.pop(name, None)

    def start(self, tests: str, *arguments: str) -> subprocess.Popen[str]:
        (self.folder / "test_it.py").write_text(textwrap.dedent(tests))
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self, tests: str, *arguments: str) -> list[str]:
        """Run the tests to the end, and return the lines that were printed. Nothing may be left at that moment."""
        with self.start(tests, *arguments) as run:
            said = run.communicate()[0]
        assert run.returncode == 1, said
        assert processes_with(MARK, self.mark) == [], said
        return said.splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    for left in processes_with(MARK, made.mark):
        os.kill(int(left.split()[1].rstrip(":")), signal.SIGKILL)


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.soak), "2"])  # with 0, each hang waits for the one before
def test_a_test_that_hangs_fails_alone_by_name_and_nothing_is_left(project: Project, workers: str) -> None:
    said = project.output(HANGS, "-n", workers)
    failed = {line.split()[1].partition("::")[2] for line in said if line.startswith("FAILED ")}
    assert failed == {"test_in_python", "test_that_swallows_the_interrupt", "test_with_the_gil"}, said
    assert "3 failed, 3 passed" in said[-1]
    assert any("in test_with_the_gil" in line for line in said)  # where it hung


def test_a_seed_gives_one_order_in_which_modules_stay_whole(project: Project) -> None:
    for name in "abcd":
        (project.folder / f"test_{name}.py").write_text("".join(f"def test_{number}(): pass\n" for number in range(5)))

    def order(*arguments: str) -> list[str]:
        with project.start("def test_it(): pass", "-v", *arguments) as run:
            said = run.communicate()[0]
        assert run.returncode == 0, said
        return [line.split()[-1] for line in said.splitlines() if "PASSED" in line] + re.findall("--random-order=[0-9]+", said)

    usual, drawn = order("-n", "0"), order("-n", "0", "--random-order")
    assert order("-n", "1", drawn[-1]) == drawn
    assert sorted(drawn[:-1]) == sorted(usual)
    assert drawn[:-1] != usual
    modules = [name.partition("::")[0] for name in drawn[:-1]]
    assert sum(one != other for one, other in itertools.pairwise(modules)) == 4


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_pytest_after_a_signal(project: Project, number: signal.Signals, workers: str) -> None:
    ready = project.folder / "ready"
    os.mkfifo(ready)
    with project.start(WAITS, "-n", workers, "--timeout", "0") as run:
        assert ready.read_text() == "ready"
        late_s = time.monotonic() + 30
        while len(processes_with(MARK, project.mark)) < 6:  # both pytests, the reaper, a worker, and two that the test leaves, one of sh
            assert time.monotonic() < late_s
        run.send_signal(number)
        said = run.communicate()[0]
    assert left_running(MARK, project.mark) == []
    if number is signal.SIGKILL:
        assert run.returncode == -number
    else:
        assert run.returncode == pytest.ExitCode.INTERRUPTED
        assert "KeyboardInterrupt" in said
        assert re.fullmatch("=+ .* in [0-9.]+s =+", said.splitlines()[-1]), said


def test_tests_with_their_own_process_share_nothing_with_others(project: Project) -> None:
    said = project.output(OWN, "-n", "0", "-v")
    outcomes = {
        line.rpartition("::")[2].split()[0]: line.split("] ")[-1].split()[0] for line in said if line.startswith("[gw") and "%]" in line
    }
    failed = {"test_that_forks_here", "test_that_crashes", "test_second_of_the_group", "test_that_hangs_there"}
    assert {name for name, outcome in outcomes.items() if outcome == "FAILED"} == failed, said
    assert "4 failed, 5 passed, 1 skipped" in said[-1]
    text = "\n".join(said)
    assert "own process ended with exit code -6 during this test" in text
    assert "a test that forks needs @pytest.mark.own_process" in text
    assert "ValueError: the second's own error" in text
    assert "printed by the second" in text
    assert "the third's reason" in text
    assert "in test_that_hangs_there" in text


COUNTED = """
    import sys, pytest

    @pytest.mark.no_cover
    def test_not_traced():
        assert sys.gettrace() is None

    def test_traced():
        assert sys.gettrace() is not None
"""


def test_a_worker_traces_no_test_with_the_mark(project: Project) -> None:
    with project.start(COUNTED, "-n", "1", "-p", "pytest_cov", "--cov=test_it", "--cov-report=") as run:
        said = run.communicate()[0]
    assert "2 passed" in said, said


def test_drivers_of_tests_need_not_import_what_their_template_has(request: pytest.FixtureRequest) -> None:
    if request.config.option.real_starts:
        pytest.skip("with --real-starts no template is kept")
    left = template.template_of_thread()
    assert left is not None
    with open(f"/proc/{left.pid}/maps", encoding="utf-8") as maps:
        text = maps.read()
    assert "onnxruntime_pybind11_state" in text
    assert "onnx_cpp2py_export" in text
