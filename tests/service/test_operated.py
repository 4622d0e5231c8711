"""The service as an operator meets it: signals, systemd's units and its socket, `aionn doctor`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aionn
from aionn.cli import main
from aionn.cli import service as cli_service
from aionn.cli.checks.service import service as checked_service
from aionn.cli.commands import run_command
from aionn.cli.service import ServeServiceOptions, plain_options
from aionn.service.units import NAMES, write_units
from tests.apps import run_app
from tests.service.served import Served, alive
from tests.service.test_service import MODEL, REFERENCE, pid_of, right, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]


@contextmanager
def activated(activate: str, folder: Path, path: str) -> Iterator[None]:
    """systemd's own program, which makes the socket and starts the service at a connection."""
    arguments = [activate, "--listen", path, sys.executable, "-m", "aionn", "serve", "--state-dir", str(folder / "state")]
    with (folder / "log").open("wb") as log, subprocess.Popen(arguments, stderr=log, stdout=log) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def listens(path: str) -> bool:
    """Whether a process accepts connections there. A socket has its path before that."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()]
    return any(row[-1] == path and row[3] == "00010000" for row in sockets)  # __SO_ACCEPTCON


async def test_streams_go_on_when_the_service_is_asked_to_end(folder: Path) -> None:
    served = Served(folder)
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        async with compilation.burst() as burst:
            await right(burst.compute, 1)
            driver = pid_of(runtime)
            served.end()
            for number in range(200):
                await right(burst.compute, number)
            assert alive(driver)
    await until(lambda: not alive(driver))


def test_a_service_without_apps_leaves_nothing(folder: Path) -> None:
    served = Served(folder)
    served.end()
    assert served.process.returncode == 0
    assert not os.path.exists(served.path)


def test_units_are_what_systemd_takes(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd is not installed")
    paths = write_units(str(tmp_path / "units"))
    assert [os.path.basename(path) for path in paths] == list(NAMES)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"}
    found = subprocess.run([verify, "--user", "verify", *paths], env=environment, capture_output=True, text=True, timeout=60)
    ours = [line for line in found.stderr.splitlines() if "aionn" in line]
    assert ours == []


async def test_systemd_starts_the_service_at_the_first_connection(folder: Path) -> None:
    activate = shutil.which("systemd-socket-activate")
    if activate is None:
        pytest.skip("systemd is not installed")
    path = str(folder / "s.sock")
    with activated(activate, folder, path):
        await until(lambda: listens(path))
        async with aionn.Runtime(service=path, start=()) as runtime:
            await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)


GIVEN = """
import os, socket, sys
kind = sys.argv[1]
if kind == "file":
    given = os.open("/dev/null", os.O_RDONLY)
else:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if kind == "packets" else socket.SOCK_STREAM)
    sock.bind("\\0aionn-test-" + str(os.getpid()))
    if kind != "silent":
        sock.listen()
    given = sock.detach()
if given != 3:
    os.dup2(given, 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
from aionn.errors import CallerError
from aionn.service.listening import inherited
try:
    print("listens" if inherited() else "nothing")
except CallerError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [("stream", "listens"), ("file", "systemd gives no socket"), ("packets", "of another kind"), ("silent", "of another kind")],
)
def test_what_systemd_gives_is_a_stream_socket_that_listens(kind: str, said: str) -> None:
    done = run_app([sys.executable, "-c", GIVEN, kind], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert said in done.stdout


def test_doctor_looks_at_the_service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert checked_service().status == "ok"
    (folder / "aionn").mkdir(mode=0o700)
    served = Served(folder / "aionn")
    try:
        row = checked_service()
        assert (row.status, row.found) == (
            "ok",
            f"a service listens at {served.path}, confined by: {', '.join(served.facts()['sandbox']['holds'])}",
        )
        os.chmod(served.path, 0o666)
        assert "chmod 600" in checked_service().way_out
    finally:
        served.end()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "none"))
    assert checked_service().status == "warn"


WITHOUT_LIBRARIES = """
import sys
sys.modules |= dict.fromkeys(("cyclopts", "rich", "numpy"))
from aionn.cli import main
sys.exit(main(["serve", "--socket", sys.argv[1], "--state-dir", sys.argv[2]]))
"""


async def test_a_service_needs_no_library_of_the_command_line_and_no_numpy(folder: Path) -> None:
    """So a service that runs for months does not hold them. Its drivers compute, and apps without a loop have it compile for them."""
    path = folder / "service.sock"
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(path), str(folder / "state")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:  # noqa: ASYNC220 -- it takes no time
        try:
            await until(lambda: f"aionn: info: serving at {path}\n" in (folder / "log").read_text(encoding="utf-8"))
            async with aionn.Runtime(service=path, start=()) as runtime:
                await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--replace"],
        ["--socket", "/run/a b"],
        ["--state-dir", "s", "--replace", "--socket", "x"],
        ["--systemd", "folder"],
    ],
)
def test_plain_options_are_what_the_command_line_reads(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeServiceOptions] = []
    monkeypatch.setattr(cli_service, "serve", served.append)
    assert run_command(["serve", *words]) == 0
    assert served == [plain_options(words)]
    assert main(["serve", *words]) == 0
    assert served[0] == served[1]


@pytest.mark.parametrize("words", [["--help"], ["--socket"], ["--socket", ""], ["--socket", "--replace"], ["--socket=x"], ["x"], ["--no"]])
def test_other_options_are_read_by_the_command_line(words: list[str]) -> None:
    assert plain_options(words) is None
