"""An app that is a copy of the template is what an app is that was started by exec."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import apps
from tests.apps import App, AppTemplate, run_app
from tests.leaks import leak_check, wait_for_end

IS_COPY = "import sys; print('numpy' in sys.modules)"
"""Prints whether the app began with what the template had imported."""


@pytest.fixture(scope="module")
def made() -> Iterator[AppTemplate]:
    template = AppTemplate()
    assert template.why == ""
    yield template
    template.end()


@pytest.fixture
def template(made: AppTemplate, monkeypatch: pytest.MonkeyPatch) -> AppTemplate:
    """The template of this module. Other modules have none with `--real-starts`."""
    monkeypatch.setattr(apps, "template", made)
    return made


def is_copy(*argv: str, **named: Any) -> bool:
    return (
        json.loads(run_app([sys.executable, *(argv or ("-c", IS_COPY))], stdout=subprocess.PIPE, check=True, **named).stdout.lower())
        is True
    )


FACTS = """
import json, os, signal, sys, warnings
with open("/proc/self/cmdline") as command, open("/proc/self/environ") as environment:
    shown = command.read(), sorted(environment.read().split("\\0"))
with open("/proc/self/status") as status:
    rights = [line for line in status if line.startswith(("SigB", "SigI", "SigC", "Shd", "Umask", "Cap", "Groups"))]
streams = [(one.name, one.encoding, one.errors, one.line_buffering, one.write_through) for one in (sys.stdin, sys.stdout, sys.stderr)]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "warnings": [sys.warnoptions, list(map(str, warnings.filters[:2]))], "shown": shown, "environment": dict(os.environ), "rights": rights,
    "folder": os.getcwd(), "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "streams": streams,
    "descriptors": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if fd in (0, 2) or fd > 4},
    "interrupt": str(signal.getsignal(signal.SIGINT)), "name": __name__,
}))
"""


@pytest.mark.parametrize("kind", ["code", "module", "script"])
def test_a_copy_sees_what_a_started_app_sees(kind: str, template: AppTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "facts.py").write_text(FACTS, encoding="utf-8")
    words = {"code": ["-c", FACTS], "module": ["-m", "facts"], "script": ["facts.py"]}[kind]
    environment = {**os.environ, "MORE": "\u00e9=1", "PYTHONWARNINGS": "ignore:a", "PATH": "/bin"}
    found = []
    reading, writing = os.pipe()
    for each in (template, None):
        monkeypatch.setattr(apps, "template", each)
        with (tmp_path / "errors").open("w") as errors:
            ran = run_app(
                [sys.executable, "-W", "error:b", *words, "a b", "-c", ""],
                cwd=tmp_path,
                env=environment,
                input="",
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=(reading, writing),
                start_new_session=kind == "code",
                text=True,
                check=True,
            )
        found.append(json.loads(ran.stdout))
        found[-1]["descriptors"]["0"] = found[-1]["descriptors"]["0"].partition(":")[0]  # another pipe for each
    os.close(reading)
    os.close(writing)
    assert found[0] == found[1]
    assert found[0]["parent"] == os.getpid()
    assert {str(reading), str(writing)} <= set(found[0]["descriptors"])


ENDINGS = {
    "nothing": "pass",
    "code": "import sys; print(1); sys.exit(7)",
    "large code": "raise SystemExit(256 + 3)",
    "text": "import sys; sys.exit('it fails')",
    "error": "def fails():\n    1 / 0\ntry:\n    fails()\nfinally:\n    print('unflushed', end='')",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError from error",
    "hook": "import sys; sys.excepthook = lambda *_: print('hook'); 1 / 0",
    "interrupt": "def waits():\n    raise KeyboardInterrupt\nwaits()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "syntax": "1 +",
    "at the end": "import atexit; atexit.register(print, 'at exit'); print('first')",
    "thread": "import threading, time\nthreading.Timer(0.01, print, ('thread',)).start()\nprint('main'); 1 / 0",
    "finalizer": "class Kept:\n    def __del__(self):\n        print('freed')\nkept = Kept()",
    "closed": "import os; os.close(1); print(1)",
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("kind", ["code", "module", "script"])
def test_a_copy_ends_as_a_started_app_ends(
    name: str, kind: str, template: AppTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 shows the lines of the source of `-c` in tracebacks. Those of a copy lack them."""
    (tmp_path / "ending.py").write_text(ENDINGS[name], encoding="utf-8")
    words = {"code": ["-c", ENDINGS[name]], "module": ["-m", "ending"], "script": [str(tmp_path / "ending.py")]}[kind]
    ended = []
    for each in (None, template):
        monkeypatch.setattr(apps, "template", each)
        with leak_check():
            ran = run_app([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        shows_more = kind == "code" and sys.version_info >= (3, 13)
        errors = re.sub(r"^    .*\n", "", ran.stderr, flags=re.MULTILINE) if shows_more else ran.stderr
        ended.append((ran.returncode, ran.stdout, errors))
    assert ended[0] == ended[1]
    assert ended[0] != (0, "", "") or name == "nothing"


WITH_DRIVER = """
import json, logging, mmap, os, signal, socket, sys
import aionn, psutil
from aionn.testing import identity_model

kept = socket.socketpair()
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
signal.signal(signal.SIGUSR1, lambda *_: None)
logging.basicConfig(level=1)

def targets(pid):
    return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{fd}")}

async def main():
    async with aionn.Runtime(start=(), sandbox="off", template=False) as runtime:
        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=["reference"])
        (driver,) = psutil.Process().children()
        environment = driver.environ()
        assert environment.pop("AIONN_APP_PID") == str(os.getpid())
        with open(f"/proc/{driver.pid}/maps") as maps, open(f"/proc/{driver.pid}/status") as status:
            has_mapping = sys.argv[1] in maps.read()
            signals = [line for line in status if line.startswith(("SigB", "SigI", "SigC"))]
        shared = sorted(one.partition(":")[0] for one in targets(driver.pid) & targets(os.getpid()))
        print(has_mapping, json.dumps([driver.cmdline(), environment, signals, shared]))

aionn.run(main)
"""


def test_a_driver_of_a_copy_is_a_fork_that_has_what_a_started_driver_has(
    template: AppTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mapped").write_bytes(b"x")
    said = []
    for each in (None, template):
        monkeypatch.setattr(apps, "template", each)
        with leak_check():
            command = [sys.executable, "-c", WITH_DRIVER, str(tmp_path / "mapped")]
            said.append(run_app(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout)
    (started, facts), (forked, same) = (line.split(" ", 1) for line in said)
    assert (started, forked) == ("False", "True")
    assert facts == same


def test_a_copy_reads_what_it_is_given_and_is_waited_for_like_any_child(template: AppTemplate) -> None:
    echo = "import sys\nfor line in sys.stdin:\n    print(line.upper(), end='', flush=True)"
    with leak_check(), App([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdin is not None
        assert app.stdout is not None
        app.stdin.write("one\n")
        app.stdin.flush()
        assert app.stdout.readline() == "ONE\n"
        assert app.poll() is None
        app.stdin.close()
        assert app.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_at_any_moment_ends_a_copy(number: signal.Signals, template: AppTemplate) -> None:
    works = "import time\nwhile True:\n    time.sleep(0.001)"  # a signal just before a long sleep would not be seen
    for _ in range(5):
        with App([sys.executable, "-c", works], stderr=subprocess.DEVNULL) as app:
            app.send_signal(number)
        assert app.returncode == -number
    assert is_copy()


def test_an_app_that_cannot_be_a_copy_is_started_by_exec(template: AppTemplate, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IS_COPY, encoding="utf-8")
    assert is_copy()
    assert is_copy("-W", "error", "script.py", cwd=tmp_path)
    assert not is_copy("-P", "-c", IS_COPY)
    assert not is_copy("-m", "coverage", "run", "--data-file", str(tmp_path / "data"), "script.py", cwd=tmp_path)
    assert not is_copy(env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not is_copy(preexec_fn=lambda: None)
    assert not is_copy(umask=0o77)
    with pytest.raises(FileNotFoundError):
        is_copy(cwd=tmp_path / "missing")
    with pytest.raises(subprocess.CalledProcessError):
        is_copy("missing.py", stderr=subprocess.DEVNULL)


def test_without_its_template_an_app_is_started_by_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    with leak_check():
        killed = AppTemplate()
        monkeypatch.setattr(apps, "template", killed)
        assert is_copy()
        killed.process.kill()
        select.select([os_pidfd := os.pidfd_open(killed.process.pid)], [], [])
        os.close(os_pidfd)
        assert not is_copy()
        killed.end()


LEAVES = "from tests.apps import AppTemplate; template = AppTemplate(); print(template.process.pid, flush=True)"


@pytest.mark.parametrize("ending", ["input()", "import os; os._exit(0)", "import sys; sys.exit()"])
def test_a_template_ends_with_the_process_that_has_made_it(ending: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", f"{LEAVES}; {ending}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        template = int(maker.stdout.readline())
        maker.kill()
    assert wait_for_end(template, 30.0)
