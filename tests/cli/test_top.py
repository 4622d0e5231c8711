"""`aionn top`: real apps in processes of their own, watched by the real command; at a pseudo-terminal, too."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

import aionn
from aionn.cli.top import SORTS, content
from aionn.cli.top_reading import BurstFigures, DeviceFigures, Figures, Reading, RuntimeFigures, figures, read
from aionn.pages._page import bucket_of
from aionn.pages.app_layout import DEVICE_COUNTERS, DROPPED, PID, SENT, Kind
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.layout import percentile_s
from aionn.testing import FakeDevice, identity_model
from tests.apps import run_app
from tests.pages.processes import program

pytestmark = pytest.mark.usefixtures("surroundings")

APP = """
import asyncio, json, statistics, sys, time
import numpy as np
import aionn
from aionn.testing import FakeDevice, identity_model

async def main():
    opened_s = time.monotonic()
    async with aionn.Runtime(name="door", start=()) as first, aionn.Runtime(name="gate", start=()) as second:
        entered_s = time.monotonic()
        model, inputs, times = aionn.Model.from_onnx(identity_model()), {"input": np.zeros((1, 16), np.float32)}, []
        quick = await first.compile(model, devices=(FakeDevice.name,), name="quick")
        other = await second.compile(model, devices=("reference",), name="other")
        async with quick.burst(name="front") as busy, other.burst(name="back") as idle:
            began_s = time.monotonic()
            for _ in range(100):
                sent = time.perf_counter_ns()
                await busy.compute(inputs)
                times.append(time.perf_counter_ns() - sent)
            await idle.compute(inputs)
            took_s = time.monotonic() - began_s
            print("ready", flush=True)
            figures = {"p50_ns": statistics.median(times), "took_s": took_s, "opened_s": opened_s, "entered_s": entered_s}
            print(json.dumps(figures), flush=True)
            await asyncio.to_thread(sys.stdin.readline)

with FakeDevice() as fake:
    fake.delay(0.004)
    aionn.run(main)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """An app that has computed, and that no test ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with program(APP) as running:
            yield running


@pytest.fixture
def neighbour(app: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The same app, for tests that start one of their own."""
    return app


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "aionn", "top", *map(str, arguments)]


def ran(*arguments: object, code: int = 0, **options: Any) -> tuple[str, str]:
    """What the command said on stdout and stderr."""
    done = run_app(command(*arguments), capture_output=True, text=True, timeout=60, check=False, **options)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def of_process(pid: int, found: Any) -> dict[str, Any]:
    return {runtime["name"]: runtime for runtime in found["runtimes"] if runtime["pid"] == pid}


def use_now(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, and how many threads it has."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    resident, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    return resident * 1024, threads


def test_one_snapshot_says_what_the_apps_themselves_measured(neighbour: subprocess.Popen[str]) -> None:
    with program(APP) as app:
        assert app.stdout is not None
        own = json.loads(app.stdout.readline())
        processes = {pid: use_now(pid) for pid in (app.pid, *(child.pid for child in psutil.Process(app.pid).children()))}
        asked_s = time.monotonic()
        found = json.loads(ran("--once", "--json")[0])
        answered_s = time.monotonic()
        runtimes = of_process(app.pid, found)
        assert of_process(neighbour.pid, found).keys() == runtimes.keys() == {"door", "gate"}
        door, gate = runtimes["door"], runtimes["gate"]
        bursts = {burst["model"]: burst for runtime in (door, gate) for burst in runtime["bursts"]}
        quick = bursts["quick"]
        assert quick["counters"]["answered"] == 100
        assert quick["fps"] * quick["over_s"] == pytest.approx(100)
        assert own["took_s"] <= quick["over_s"] <= answered_s - own["opened_s"]
        assert abs(bucket_of(int(quick["p50_s"] * 1e9)) - bucket_of(int(own["p50_ns"]))) <= 1
        assert quick["p50_s"] <= quick["p99_s"]
        assert (quick["in_flight"], quick["dropped"], quick["path"]) == (0, 0, "burst")
        assert bursts["other"]["counters"]["answered"] == 1
        assert asked_s - own["entered_s"] <= door["uptime_s"] <= answered_s - own["opened_s"]
        drivers = [device for runtime in (door, gate) for device in runtime["devices"] if device["pid"]]
        assert len(drivers) == 2
        for shown in (door, *drivers):  # an idle process touches a page now and then, and a thread may just be ending
            resident, threads = zip(processes[shown["pid"]], use_now(shown["pid"]), strict=True)
            assert 0.98 * min(resident) <= shown["rss_bytes"] <= 1.02 * max(resident)
            assert min(threads) <= shown["threads"] <= max(threads)
        assert {device["device"] for device in drivers} == {"reference", FakeDevice.name}
        for device in drivers:
            assert (device["state"], device["restarts"]) == ("idle", 0)
        table = ran("--once")[0]
        assert f"door  pid {app.pid}  " in table
        assert re.search(rf"door {app.pid}\s+quick\s", table)
        alone = ran("--pid", app.pid, "--interval", "0.1")[0]
        assert f"pid {app.pid}" in alone
        assert f"pid {neighbour.pid}" not in alone


MANY = """
import os, resource, sys
from aionn.pages.app_layout import Kind; from aionn.pages import app_layout; from aionn.pages.app_page import open_page
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
first = os.open("/dev/null", os.O_RDONLY)
others = [os.dup(first) for _ in range(1000)]
page = open_page()
others += [os.dup(first) for _ in range(1000)]
runtimes = [page.slot(Kind.RUNTIME, name, "serving") for name in ("left", "right")]
bursts = []
for number in range(64):
    name = ("left", "right")[number % 2]
    burst = page.slot(Kind.BURST, f"model{number % 8}", "reference", "first", f"burst{number}", name, parent=runtimes[number % 2])
    for _ in range(number):
        burst.answered(1_000_000 * (number + 1), 1000)
    bursts.append(burst)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_64_bursts_of_two_runtimes_are_found_among_two_thousand_descriptors() -> None:
    """Row O4: what is shown of each burst is what the burst has counted, and times lie in the bucket of what was measured."""
    with program(MANY) as app:
        assert len(os.listdir(f"/proc/{app.pid}/fd")) > 2000
        found = of_process(app.pid, json.loads(ran("--once", "--json")[0]))
        assert found.keys() == {"left", "right"}
        bursts = {burst["burst"]: burst for runtime in found.values() for burst in runtime["bursts"]}
        assert len(bursts) == 64
        for number in range(64):
            shown = bursts[f"burst{number}"]
            assert shown["counters"]["answered"] == number
            assert shown["fps"] * shown["over_s"] == pytest.approx(number)
            if number:
                assert bucket_of(int(shown["p50_s"] * 1e9)) - bucket_of(1_000_000 * (number + 1)) in (-1, 0, 1)


def test_a_snapshot_as_json_imports_neither_rich_nor_what_an_app_needs() -> None:
    script = "import sys; from aionn.cli import main; main(['top', '--once', '--json']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "runtimes" in json.loads(done.stdout)
    assert not set(done.stderr.split()) & {"rich", "cyclopts", "numpy", "onnx", "anyio", "asyncio", "uvloop", "msgspec", "aionn.runtime"}


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (("--pid", os.getpid()), "has no open aionn runtime of this release", 1),
        (("--pid", 2**22 + 1), "there is no process 4194305", 1),
        (("--interval", 0), "--interval 0 is not a time that can be shown; give a number of seconds from 0.1 on", 2),
        (("--interval", "nan"), "--interval nan is not a time", 2),
        (("--once", "--wrong"), "--wrong", 2),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_sentence(arguments: tuple[object, ...], sentence: str, code: int) -> None:
    out, err = ran(*arguments, code=code)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert sentence in err


def test_the_pid_of_a_driver_is_answered_with_that_of_its_app(app: subprocess.Popen[str]) -> None:
    found = json.loads(ran("--pid", app.pid, "--json")[0])
    driver = found["runtimes"][0]["devices"][0]["pid"]
    assert f"process {driver} is a driver; give the number of its app, --pid {app.pid}" in ran("--pid", driver, code=1)[1]


AS_NOBODY = """
import os, sys
import json, aionn.cli.top, aionn.cli.commands, encodings.idna, rich.cells, rich._unicode_data
from aionn.cli import main
sys.stderr.write("")
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # Python itself may lie where nobody can read, so all is imported before
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_processes_of_another_user_are_counted(app: subprocess.Popen[str]) -> None:
    as_nobody = [sys.executable, "-c", AS_NOBODY, "top"]
    done = subprocess.run([*as_nobody, "--json"], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert of_process(app.pid, found) == {}
    assert found["unreadable"] >= 1
    done = subprocess.run([*as_nobody, "--pid", str(app.pid)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"process {app.pid} belongs to another user; run aionn top as that user or as root" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount /proc")
def test_a_proc_that_hides_processes_is_named() -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", AS_NOBODY, "top", "--once"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"this machine does not let /proc be mounted: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"no aionn runtime is open here; /proc hides the processes of other users \(hidepid=(2|invisible)\)\n", done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount /proc")
def test_a_machine_without_proc_is_named() -> None:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh", *command("--once", "--json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "mount:" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"this machine does not let /proc be covered: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "aionn: /proc shows no processes, and pages are found there; mount a proc file system at /proc\n"


def test_without_a_runtime_there_is_a_sentence() -> None:
    console = Console(width=80)
    for shown, sentence in (
        (Figures(None, (), 0, ""), "no aionn runtime is open here"),
        (Figures(None, (), 1, ""), "no aionn runtime is open here; 1 process of other users cannot be read"),
        (Figures(None, (), 7, "hidepid=2"), "no aionn runtime is open here; /proc hides the processes of other users (hidepid=2)"),
    ):
        with console.capture() as printed:
            console.print(content(shown))
        assert " ".join(printed.get().split()).startswith(sentence)


@pytest.fixture
def page() -> Iterator[AppPage]:
    opened = open_page()
    yield opened
    close_page(opened)


def test_two_readings_give_what_happened_between_them(page: AppPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "here", "degraded", "a driver is being restarted")
    page.beat(runtime)
    burst = page.slot(Kind.BURST, "silero", "onnxruntime", "onnxruntime", "door", "here")
    quiet = page.slot(Kind.SINGLE, "silero", "onnxruntime", "onnxruntime", "", "here")
    device = page.lasting(Kind.DEVICE, "onnxruntime", "", "", "", "here")
    device.add(DEVICE_COUNTERS["starts"], 3)
    burst.add(SENT, 100)
    for _ in range(100):
        burst.answered(1_000_000_000, 1_000_000)
    before = read(os.getpid())
    burst.add(SENT, 52)
    for _ in range(50):
        burst.answered(1_000_000, 500_000)
    burst.add(DROPPED, 4)
    now = read(os.getpid())
    app, earlier = now.apps[0], before.apps[0]
    later = replace(now, at_s=before.at_s + 2, apps=(replace(app, now_ns=earlier.now_ns + 2_000_000_000),))
    shown = only(figures(later, before))
    assert (shown.name, shown.state, shown.reason, shown.count) == ("here", "degraded", "a driver is being restarted", 1)
    (row,) = shown.bursts  # what `compute` has not used is left out
    assert (row.model, row.burst, row.stage, row.fps, row.in_flight, row.dropped) == ("silero", "door", "onnxruntime", 25, 2, 4)
    assert row.p99_s is not None
    assert row.p99_s < 0.002  # the seconds that came before do not count
    since_opened = only(figures(now)).bursts[0]
    assert since_opened.p99_s is not None
    assert since_opened.p99_s > 0.5
    (one,) = shown.devices
    assert (one.device, one.pid, one.state, one.starts, one.restarts) == ("onnxruntime", None, "ended", 3, 2)
    for stage in ("onnxruntime", "openvino"):  # a swap: the counts move to the parent before, and begin again from 0
        burst.follow(page.past(Kind.PAST_BURSTS, "silero", stage, stage, "door", "here"))
    burst.add(SENT, 1)
    burst.answered(2_000_000, 1_000_000)
    swapped = only(figures(read(os.getpid()), now)).bursts[0]
    assert swapped.counters["answered"] == 1
    assert swapped.fps is not None
    assert swapped.fps > 0
    assert swapped.p50_s is not None
    assert 0.0015 < swapped.p50_s < 0.0025
    for slot in (burst, quiet, runtime):
        page.release(slot)


def only(shown: Figures) -> RuntimeFigures:
    (runtime,) = shown.runtimes
    return runtime


def test_a_loop_that_does_not_run_is_shown_as_stalled(page: AppPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "here", "serving")
    page.beat(runtime)
    reading = read(os.getpid())
    later = replace(reading.apps[0], now_ns=reading.apps[0].now_ns + 7_000_000_000)
    assert only(figures(reading)).state == "serving"
    assert (only(figures(replace(reading, apps=(later,)))).state, only(figures(replace(reading, apps=(later,)))).reason) == (
        "stalled",
        "its event loop has not run for 7 s",
    )
    elsewhere = replace(reading.apps[0], same_clock=False)
    assert only(figures(replace(reading, apps=(elsewhere,)))).state == "serving"
    page.release(runtime)


def test_runtimes_of_one_name_are_shown_as_one(page: AppPage) -> None:
    slots = [page.slot(Kind.RUNTIME, "here", state) for state in ("serving", "compiling")]
    for slot in slots:
        page.beat(slot)
    shown = only(figures(read(os.getpid())))
    assert (shown.count, shown.state) == (2, "serving, compiling")
    for slot in slots:
        page.release(slot)


def test_a_device_is_shown_with_its_process_and_its_starts(page: AppPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "here", "serving")
    device = page.lasting(Kind.DEVICE, "onnxruntime", "", "low", "", "here")
    device.describe(PID, struct.pack("=Q", 1))
    device.add(DEVICE_COUNTERS["starts"], 1)
    (one,) = only(figures(read(os.getpid()))).devices
    assert (one.device, one.priority, one.state, one.pid, one.restarts) == ("onnxruntime", "low", "starting", None, 0)
    page.release(runtime)


@pytest.mark.parametrize("ns", [1_000, 5_000, 700_000, 40_000_000, 3_000_000_000])
def test_a_percentile_lies_in_the_bucket_of_what_was_measured(ns: int) -> None:
    buckets = [0] * 90
    buckets[bucket_of(ns)] = 10
    for share in (0.01, 0.5, 0.99):
        found = percentile_s(buckets, share)
        assert found is not None
        assert bucket_of(int(found * 1e9) - 1) == bucket_of(ns)
    assert percentile_s([0] * 90, 0.5) is None
    assert percentile_s([0] * 89 + [1], 0.5) == 16.0  # longer than all others: the edge is all that is known


@pytest.mark.anyio
async def test_what_a_driver_does_is_shown(fake: FakeDevice) -> None:
    async with aionn.Runtime(name="busy", start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        async with compilation.burst() as burst:
            fake.hang()
            call = asyncio.ensure_future(burst.compute({"input": np.zeros((1, 16), np.float32)}))
            await fake.heard("run")
            (device,) = only(figures(read(os.getpid()))).devices
            assert (device.device, device.state) == (fake.name, "executing")
            assert device.state_s is not None
            assert only(figures(read(os.getpid()))).bursts[0].in_flight == 1
            os.kill(device.pid or 0, signal.SIGKILL)
            with pytest.raises(aionn.DriverDiedError):
                await call


def shown_at(width: int, reading: Reading, sort: str = "model") -> str:
    console = Console(width=width)
    with console.capture() as printed:
        console.print(content(figures(reading), sort))
    return printed.get()


def test_eighty_columns_cut_names_and_never_numbers(page: AppPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "r" * 60, "serving", "a long reason " * 4)
    slots = []
    for number, millions in enumerate((3, 900, 20)):
        slots.append(page.slot(Kind.BURST, f"[model]{number} " * 6, "onnxruntime", "onnxruntime:cuda", f"entrance {number} " * 4, "r" * 60))
        slots[-1].add(SENT, millions)
        slots[-1].add(DROPPED, 123456 - number)
        slots[-1].answered(millions * 1_000_000, 500_000)
    reading = read(os.getpid())
    narrow = shown_at(80, reading)
    assert max(map(len, narrow.splitlines())) <= 80
    assert all(str(123456 - number) in narrow for number in range(3))
    assert len(narrow.splitlines()) == 6  # nothing is wrapped
    assert "[model]0" in narrow
    orders = {sort: re.findall(r" (12345[456])", shown_at(200, reading, sort)) for sort in SORTS}
    assert orders["p99"] == ["123455", "123454", "123456"] == orders["queue"]
    assert orders["drops"] == orders["model"] == ["123456", "123455", "123454"]
    for slot in (*slots, runtime):
        page.release(slot)


def test_a_name_that_would_steer_the_terminal_is_shown_as_text(page: AppPage) -> None:
    """A page of another user, whom root watches, may hold anything."""
    evil = "[b]\x1b]0;x\x07\x9b2J"
    slots = [page.slot(Kind.RUNTIME, evil, "serving", evil), page.slot(Kind.DEVICE, evil, "", "", "", evil)]
    slots[1].add(DEVICE_COUNTERS["starts"], 1)
    slots.append(page.slot(Kind.BURST, evil, evil, evil, evil, evil))
    shown = shown_at(200, read(os.getpid()))
    assert shown.count(r"[b]\x1b]0;x\x07\x9b2J") >= 5
    assert all(line.isprintable() for line in shown.splitlines())
    for slot in slots:
        page.release(slot)


class Screen:
    """`aionn top` at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int, settings: list[Any]) -> None:
        self.process, self._terminal, self.settings = process, terminal, settings
        self.text = ""

    def until(self, wanted: str) -> str:
        """Read what it shows until the text comes, from the last time on. Return what came before the text."""
        return self.until_match(re.escape(wanted))[0]

    def until_match(self, pattern: str) -> tuple[str, re.Match[str]]:
        """Read what it shows until a text matches, from the last time on. Return what came before it, and the match."""
        deadline_s = time.monotonic() + 30
        while (found := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"{pattern!r} never came; the last of the screen: {self.text[-2000:]!r}"
            try:
                self.text += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError as error:
                pytest.fail(f"the screen ended ({error}) before {pattern!r} came: {self.text[-2000:]!r}")
        before, self.text = self.text[: found.start()], self.text[found.end() :]
        return before, found

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def ended(self) -> int:
        """Wait for the end of the command, reading what it still shows. Returns its exit code, and checks the terminal's state."""
        with suppress(OSError):
            while self.process.poll() is None:
                if select.select([self._terminal], [], [], 0.05)[0]:
                    self.text += os.read(self._terminal, 65536).decode(errors="replace")
        code = self.process.wait(20)
        assert self.settings_now() == self.settings
        return code

    def settings_now(self) -> list[Any]:
        return termios.tcgetattr(self._terminal)


ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"


@contextmanager
def screen(*arguments: object, lines: int = 24) -> Iterator[Screen]:
    """Run the command at a pseudo-terminal of 80 columns, in a process group of its own."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
    settings = termios.tcgetattr(theirs)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm-256color"}, process_group=0
    )
    try:
        yield Screen(process, ours, settings)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_screen_obeys_its_keys_and_gives_the_terminal_back(app: subprocess.Popen[str]) -> None:
    with screen("--pid", app.pid, "--interval", "0.1") as top:
        top.until(ENTERED)
        top.until("door")
        assert top.settings_now() != top.settings  # keys are read one by one
        _, over = top.until_match(r"over (\d+\.\d) s")
        assert float(over[1]) >= 0.1  # a busy machine shows later
        top.press("s")
        top.until("s sort: fps")
        top.press("ss")
        top.until("s sort: age")
        top.press("p")
        top.until("p go on (paused)")
        top.press("p")
        top.until("p pause")
        top.press("q")
        top.until(LEFT)
        assert top.ended() == 0


def test_a_screen_that_is_too_small_says_so(app: subprocess.Popen[str]) -> None:
    with screen("--pid", app.pid, lines=8) as top:
        top.until("more lines; make the terminal taller")
        top.press("q")
        assert top.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_screen_and_the_terminal_is_as_before(app: subprocess.Popen[str], number: signal.Signals) -> None:
    with screen("--pid", app.pid) as top:
        top.until("q quit")
        top.process.send_signal(number)
        top.until(LEFT)
        assert top.ended() == (130 if number == signal.SIGINT else -number)


def test_a_stopped_screen_gives_the_terminal_back_and_goes_on_later(app: subprocess.Popen[str]) -> None:
    with screen("--pid", app.pid) as top:
        top.until("q quit")
        top.press("s")
        top.until("sort: fps")
        top.process.send_signal(signal.SIGTSTP)
        top.until(LEFT)
        found = os.waitid(os.P_PID, top.process.pid, os.WSTOPPED)
        assert found is not None
        assert found.si_status == signal.SIGTSTP
        assert top.settings_now() == top.settings
        top.process.send_signal(signal.SIGCONT)
        top.until(ENTERED)
        top.until("sort: fps")
        top.press("q")
        assert top.ended() == 0


def test_the_kill_of_the_app_that_is_watched_ends_the_screen_with_a_sentence() -> None:
    with program(APP) as app, screen("--pid", app.pid, "--interval", "0.1") as top:
        top.until("quick")
        app.kill()
        app.wait()
        top.until(LEFT)
        top.until("the runtime was closed or its process ended: there is no process")
        assert top.ended() == 0


def test_the_kill_of_an_app_takes_it_off_the_screen_of_all_apps(neighbour: subprocess.Popen[str]) -> None:
    with program(APP) as app, screen("--interval", "0.1", lines=200) as top:
        top.until(f"pid {app.pid}")
        app.kill()
        app.wait()
        top.until("q quit")
        until_s = time.monotonic() + 30
        while f"pid {app.pid}" in top.until("q quit"):  # screens that were under way
            assert time.monotonic() < until_s
        for _ in range(2):
            shown = top.until("q quit")
            assert f"pid {neighbour.pid}" in shown
            assert f"pid {app.pid}" not in shown
        top.press("q")
        assert top.ended() == 0


def test_the_page_about_the_columns_names_every_figure() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "top.md").read_text(encoding="utf-8")
    for kind, unnamed in ((BurstFigures, set()), (DeviceFigures, {"starts"})):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert {name for name in fields if f"`{name}`" not in page} == unnamed
