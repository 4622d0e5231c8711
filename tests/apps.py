"""Start apps of tests: `App` and `run_app` in place of `subprocess.Popen` and `subprocess.run`, where the start itself is not tested.

Most of the CPU time of a test's app is its imports. So apps are copies of a template which has imported what they need
(`tests/app_template.py`). A copy is a child of this process like any other, with the descriptors, folder, environment, arguments, exit
code and signals of an app that was started by exec. `pytest --real-starts` starts all of them by exec.

An app is started by exec, too, if it asks for what a template cannot change: other options of Python, or a variable which a library has
read when it was loaded.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aionn.remote.orders import OWN_NUMBER
from aionn.runtime.processes.template import Template, surroundings
from tests.fresh_start import TAKEN_OVER, read_at_load

__all__ = ["App", "AppTemplate", "run_app", "wait_until_ready"]

PATIENCE_S = 60.0
"""How long the template may take to make a copy. An app would not wait so long, but the machine of the tests is busy."""


def wait_until_ready(template: Template) -> None:
    """Wait until a template waits for orders, or has ended."""
    while not template.ended and not template.pid:
        select.select([template._orders], [], [])
        template.look()


class AppTemplate:
    """The template of the apps of this process. It ends with this process at the latest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # some tests start apps in threads
        self._environment = {name: value for name, value in os.environ.items() if name not in TAKEN_OVER}
        found = surroundings(self._environment)
        assert found is not None
        self._template = Template(found)
        orders, page = self._template.theirs
        self.process = subprocess.Popen(
            [sys.executable, os.fspath(Path(__file__).with_name("app_template.py")), str(orders), str(page)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(orders, page),
        )
        os.pwrite(page, self.process.pid.to_bytes(4, "little"), OWN_NUMBER)
        self._template.given()
        wait_until_ready(self._template)

    @property
    def why(self) -> str:
        """Why it makes no copies, or an empty text."""
        return self._template.why

    def start(self, argv: Sequence[str], environment: Mapping[str, str], cwd: str, places: Mapping[int, int], new_session: bool) -> int:
        """Make a copy run that command. Returns its number, or 0 where the command must be started in another way.

        Args:
            argv: its command line.
            environment: all its variables.
            cwd: its folder.
            places: a descriptor of this process for each of its numbers in the copy.
            new_session: whether the copy leads a session of its own.
        """
        if read_at_load(environment) != read_at_load(self._environment):
            return 0
        order = {"argv": argv, "environment": dict(environment), "cwd": cwd, "places": list(places), "start_new_session": new_session}
        with self._lock, pytest.MonkeyPatch.context() as patch:
            patch.setattr("aionn.runtime.processes.template._ANSWER_S", PATIENCE_S)
            # The template's own variables are those that must be as they were. The copy's are in the order.
            return self._template.order([json.dumps(order)], self._environment, list(places.values()))

    def end(self) -> None:
        self._template.end()
        self.process.wait()


template: AppTemplate | None = None
"""The one of this process. Without it, apps are started by exec. The fixture `apps_are_copies` makes it."""


SEES_IMPORTS = ["-m", "coverage"], ["-m", "pytest"]
"""Programs that measure modules or change them as they are imported."""


def is_plain(argv: Sequence[str], cwd: str) -> bool:
    """Whether that command is this Python with nothing but `-W FILTER` before the code, the module or the script."""
    executable, *words = argv
    while words[:1] == ["-W"]:
        del words[:2]
    runs = len(words) > 1 if words[:1] in (["-c"], ["-m"]) else words and os.path.isfile(os.path.join(cwd, words[0]))
    return executable == sys.executable and bool(runs) and words[:2] not in SEES_IMPORTS


class App(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose process is a copy of the template where it can be."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        pid = 0 if template is None else ordered(template, asked)
        if not pid:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*(asked[name] for name in PIPES))  # type: ignore[attr-defined]


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

UNUSUAL = {
    **dict.fromkeys(("executable", "preexec_fn", "startupinfo", "gid", "gids", "uid"), None),
    "close_fds": True,
    "shell": False,
    "restore_signals": True,
    "umask": -1,
    "process_group": -1,
    "creationflags": 0,
}
"""Arguments of `Popen` that must have these values."""


def ordered(template: AppTemplate, asked: Mapping[str, Any]) -> int:
    """Let the template start what `Popen` was asked for. Returns its number, or 0 if it must be started by exec."""
    if isinstance(asked["args"], str | bytes | os.PathLike) or any(asked[name] != value for name, value in UNUSUAL.items()):
        return 0
    argv = [os.fsdecode(word) for word in asked["args"]]
    cwd = os.fspath(asked["cwd"] or os.getcwd())
    if not os.path.isdir(cwd) or not is_plain(argv, cwd):
        return 0
    ends = {place: asked[name] for place, name in enumerate(("p2cread", "c2pwrite", "errwrite"))}
    places = {place: place if end == -1 else end for place, end in ends.items()}
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if asked["env"] is None else asked["env"]).items()}
    return template.start(argv, environment, cwd, places | {fd: fd for fd in asked["pass_fds"]}, asked["start_new_session"])


def run_app(
    argv: Sequence[str | os.PathLike[str]],
    *,
    input: str | bytes | None = None,  # noqa: A002 -- its name there
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **named: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does."""
    named |= {"stdin": subprocess.PIPE} if input is not None else {}
    named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    with App(argv, **named) as app:
        try:
            printed = app.communicate(input, timeout)
        except BaseException:  # a test's time limit, too
            app.kill()
            raise
    done = subprocess.CompletedProcess(argv, app.returncode, *printed)
    if check:
        done.check_returncode()
    return done
