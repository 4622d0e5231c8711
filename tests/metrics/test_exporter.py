"""The exporter for all processes: what they have counted stays counted, however they end. Row O6 of the acceptance."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import httpx
import psutil
import pytest

from aionn.cli.metrics import print_metrics, serve_metrics
from aionn.cli.printing import NotDoneError, UsageError, address_of
from aionn.metrics import AllRuntimes
from aionn.pages.finding import find_page
from tests.apps import App, run_app
from tests.leaks import leak_check
from tests.metrics.samples import families, value, values
from tests.metrics.workers import SERVER, WRITER, Worker
from tests.pages.processes import memfds

NAME = f"workers of {os.getpid()}"
"""No other process on this machine has this name."""


@pytest.fixture
def exporter() -> Iterator[AllRuntimes]:
    everything = AllRuntimes()
    yield everything
    everything.close()


def answered(exporter: AllRuntimes) -> int:
    metrics = list(exporter.collect())
    counted = value(metrics, "aionn_executions_total", runtime=NAME, status="ok")
    assert value(metrics, "aionn_execution_seconds_count", runtime=NAME) == counted
    return int(counted)


def test_ten_restarts_lose_and_invent_nothing(exporter: AllRuntimes) -> None:
    with leak_check():
        chance = random.Random(15)
        workers = [Worker(WRITER, NAME).ready() for _ in range(4)]
        try:
            exporter.look()
            total, series = 0, None
            for _turn in range(10):
                for worker in workers:
                    worker.do(number := chance.randrange(1000))
                    total += number
                    if chance.random() < 0.5:
                        worker.do("burst")  # the counts go to another slot
                assert answered(exporter) == total
                victim = chance.randrange(4)
                workers[victim].kill()
                assert answered(exporter) == total
                workers[victim] = Worker(WRITER, NAME).ready()
                exporter.look()
                assert answered(exporter) == total
                found = {
                    name: set(values(exporter.collect(), name, runtime=NAME)) for name in ("aionn_executions_total", "aionn_in_flight")
                }
                assert series in (None, found)
                series = found
        finally:
            for worker in workers:
                worker.kill()
        metrics = list(exporter.collect())
        assert value(metrics, "aionn_executions_total", runtime=NAME, status="ok") == total > 10_000
        assert values(metrics, "aionn_in_flight", runtime=NAME) == {}  # nothing is left of the gauges
        exporter.close()


def test_real_workers_that_are_killed_with_an_open_burst(exporter: AllRuntimes) -> None:
    with Worker(SERVER, NAME) as worker:
        exporter.look()
        worker.do(20)
        assert answered(exporter) == 20
        assert value(exporter.collect(), "aionn_bursts", runtime=NAME) >= 1
        worker.kill()
        assert answered(exporter) == 20
    with Worker(SERVER, NAME) as worker:
        exporter.look()
        worker.do(10)
        assert answered(exporter) == 30
    assert answered(exporter) == 30


def test_a_process_that_is_killed_in_mid_use_loses_at_most_what_it_was_counting(exporter: AllRuntimes) -> None:
    with Worker(WRITER, NAME) as worker:
        worker.do(1)
        exporter.look()
        assert worker.process.stdin is not None
        worker.process.stdin.write("100000000\n")
        worker.process.stdin.flush()
        before, scrapes, until_s = 1.0, 0, time.monotonic() + 30
        while scrapes < 20 or before == 1:  # a busy machine may let it begin late
            now = value(exporter.collect(), "aionn_executions_total", runtime=NAME, status="ok")
            assert now >= before
            before, scrapes = now, scrapes + 1
            assert time.monotonic() < until_s, "it was not counting"
    last = value(exporter.collect(), "aionn_executions_total", runtime=NAME, status="ok")
    assert last >= before
    assert value(exporter.collect(), "aionn_executions_total", runtime=NAME, status="ok") == last


def test_a_page_that_closes_and_another_one_of_the_same_process_count_once_each(exporter: AllRuntimes) -> None:
    with Worker(WRITER, NAME) as worker:
        total = 0
        for number in (7, 11, 13):
            worker.do(number)
            total += number
            assert answered(exporter) == total
            worker.do("close")
            exporter.look()
            assert answered(exporter) == total


FORKING = """
import os, sys, time
from aionn.pages.app_layout import Kind; from aionn.pages import app_layout; from aionn.pages.app_page import open_page
page = open_page()
burst = page.slot(Kind.BURST, "detector", "reference", "first", "", sys.argv[1])
burst.add(app_layout.COMPUTED, 5)
if os.fork():
    print("ready", flush=True)
sys.stdin.read()
"""


def test_a_child_of_fork_is_not_counted_again(exporter: AllRuntimes) -> None:
    with Worker(FORKING, NAME) as worker:
        assert value(exporter.collect(), "aionn_executions_total", runtime=NAME, status="ok") == 5
        assert find_page(worker.process.pid) is not None


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_uvicorn_with_four_workers_and_ten_kills(exporter: AllRuntimes) -> None:
    """The row as it stands: one worker at a time is killed between requests, and uvicorn starts another one."""
    app = "tests.metrics.worker_app:app"
    with psutil.Popen(
        [sys.executable, "-m", "uvicorn", "--fd", "0", "--workers", "4", "--log-level", "warning", app],
        env=dict(os.environ, AIONN_TEST_NAME=NAME),
        stdin=(listener := _listener()).fileno(),
    ) as server:
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            with httpx.Client(timeout=60) as client:
                asked, before = 0, 0
                for _turn in range(10):
                    pids: set[int] = set()
                    while len(pids) < 4:  # all four have answered, so all have been found
                        pids.add(httpx.get(url, timeout=60).json()["pid"])
                        asked += 1
                        exporter.look()
                    for _ in range(20):
                        client.get(url).raise_for_status()
                        asked += 1
                    now = answered(exporter)
                    assert now == asked >= before
                    before = now
                    victim = pids.pop()
                    os.kill(victim, 9)
                    psutil.wait_procs([psutil.Process(victim)] if psutil.pid_exists(victim) else [], timeout=20)
                    client.close()
                    client = httpx.Client(timeout=60)
            assert answered(exporter) == asked
        finally:
            server.terminate()
            server.wait(30)
            listener.close()


def _listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    return listener


# ---- the command ---------------------------------------------------------------------------------------------------------------------


aionn = partial(run_app, capture_output=True, text=True, timeout=60)
COMMAND = [sys.executable, "-m", "aionn", "metrics"]


def shown(text: str) -> float:
    return value(families(text).values(), "aionn_executions_total", runtime=NAME, status="ok")


def test_the_command_prints_what_is_there_now(capsys: pytest.CaptureFixture[str]) -> None:
    with Worker(WRITER, NAME) as worker:
        worker.do(42)
        print_metrics(as_json=False)
        assert shown(capsys.readouterr().out) == 42
        print_metrics(as_json=True)
        printed = json.loads(capsys.readouterr().out)
    (executions,) = (family for family in printed if family["name"] == "aionn_executions")
    assert executions["type"] == "counter"
    (sample,) = (one for one in executions["samples"] if one["labels"]["runtime"] == NAME and one["labels"]["status"] == "ok")
    assert (sample["name"], sample["value"]) == ("aionn_executions_total", 42)


def test_the_command_serves_until_it_is_ended() -> None:
    with Worker(WRITER, NAME) as worker:
        server = App([*COMMAND, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = server.stderr.readline().split()[-1]
            worker.do(42)
            response = httpx.get(url, timeout=60)
            assert response.headers["content-type"].startswith("text/plain")
            taken = url.removeprefix("http://").removesuffix("/metrics")
            with pytest.raises(NotDoneError, match=f"^cannot listen on {taken}: Address already in use; give another"):
                serve_metrics(taken)
            worker.kill()
            again = httpx.get(url, timeout=60)
            for text in (response.text, again.text):
                assert shown(text) == 42
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()
            server.communicate()


def test_kills_of_apps_that_are_read_and_of_the_exporter_leave_nothing() -> None:
    """Row O3: an app ends by SIGKILL while the exporter reads it, then the exporter ends so. Neither disturbs another process."""
    with leak_check(), Worker(WRITER, NAME) as other:
        server = App([*COMMAND, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = server.stderr.readline().split()[-1]
            counted: list[float] = []
            over, scraped = threading.Event(), threading.Semaphore(0)

            def scrape() -> None:
                with httpx.Client() as client:
                    while not over.is_set():
                        counted.append(shown(client.get(url, timeout=60).text))
                        scraped.release()

            thread = threading.Thread(target=scrape)
            thread.start()
            try:
                other.do(42)
                killed: set[str] = set()
                for _ in range(2):  # the exporter looks for processes once a second
                    with Worker(WRITER, NAME) as app:
                        assert app.process.stdin is not None
                        app.process.stdin.write("100000000\n")
                        app.process.stdin.flush()
                        killed |= memfds(app.process.pid)
                        before = counted[-1] if counted else 42.0
                        while not counted or counted[-1] <= before:  # until the exporter has read what this app counts
                            assert scraped.acquire(timeout=60)
                        app.kill()
            finally:
                over.set()
                thread.join(60)
            assert not thread.is_alive()
            assert counted == sorted(counted)
            assert counted[-1] > 42
            assert len(killed) == 2
            assert shown(httpx.get(url, timeout=60).text) >= counted[-1]  # what has ended is not mapped any more after this look
            assert memfds(server.pid, other.process.pid) & killed == set()  # tests beside this one read all apps, too
            own = memfds(other.process.pid)
            assert len(own) == 1
            server.kill()
            server.wait()
            assert memfds(other.process.pid) == own
            other.do(1)
            everything = AllRuntimes()
            assert answered(everything) == 43
            everything.close()
        finally:
            server.kill()
            server.wait()
            if server.stderr is not None:
                server.stderr.close()


@pytest.mark.parametrize(
    ("listen", "sentence"),
    [
        ("9787", "is not HOST:PORT"),
        ("127.0.0.1", "is not HOST:PORT"),
        ("127.0.0.1:99999", "is not HOST:PORT"),
        ("::1:9787", "is not HOST:PORT"),
        ("no.such.host.invalid:9787", "is not known"),
        ("..:9787", "is not known"),
        (f"{'a' * 64}.invalid:9787", "is not known"),
    ],
)
def test_an_address_that_cannot_be_is_refused_in_a_sentence(listen: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        address_of(listen)


def test_addresses() -> None:
    assert address_of("127.0.0.1:9787") == ("127.0.0.1", 9787)
    assert address_of("[::1]:0") == ("::1", 0)


def test_without_the_extra_the_command_names_it() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; from aionn.cli import main; sys.exit(main(['metrics', '--once']))"
    refused = aionn([sys.executable, "-c", code])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "pip install 'aionn[metrics]'" in refused.stderr
