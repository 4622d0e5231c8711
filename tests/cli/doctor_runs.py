"""Runs of the real `aionn doctor` in a process that a test has put into a bad place."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.apps import run_app

ROOT = Path(__file__).parent.parent.parent
AIONN = "import runpy; runpy.run_module('aionn', run_name='__main__', alter_sys=True)"
NOT_POSSIBLE = 77
"""The exit code of a process that cannot be put into its bad place."""

NEVER_JUDGED = ("cpu pressure",)
"""Other work on the machine that runs the tests is no fault of aionn."""


@contextmanager
def among_doctors(kind: int) -> Iterator[None]:
    """Let doctors of other tests wait for the body, which makes an orphan (`LOCK_EX`), or wait for such a body (`LOCK_SH`).

    A doctor sees the orphans of all processes of the user, and kills them with --fix.
    """
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, kind)
        yield
    finally:
        os.close(directory)


@dataclass
class Clinic:
    """Runs the command with a state directory of its own. `alone`: whether the test holds `among_doctors(LOCK_EX)`."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def run(self, *arguments: str, first: str = "") -> Verdict:
        """Run the command. `first`: Python that its process executes before, to be in a bad place."""
        program = ["-c", f"{first}\n{AIONN}"] if first else ["-m", "aionn"]
        command = [sys.executable, *program, "doctor", "--json", "--state-dir", str(self.state), *arguments]
        environment = {**os.environ, **self.environment}
        with nullcontext() if self.alone else among_doctors(fcntl.LOCK_SH):
            done = run_app(command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=100)
        if done.returncode == NOT_POSSIBLE:
            pytest.skip(f"the system does not allow it: {done.stderr}")
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stdout, done.stderr
        told = json.loads(done.stdout)
        verdict = Verdict({row["check"]: row for row in told["rows"]}, told["fixed"], done.stderr)
        assert done.returncode == (1 if verdict.failed else 0), done
        assert len(verdict.rows) == len(told["rows"]), "each row has a name of its own"
        return verdict


@dataclass
class Verdict:
    rows: dict[str, dict[str, Any]]
    fixed: list[str]
    stderr: str

    @property
    def failed(self) -> list[str]:
        return [name for name, row in self.rows.items() if row["status"] == "fail"]

    def ok(self, name: str) -> bool:
        return bool(self.rows[name]["status"] == "ok")


class RealCgroup:
    """A cgroup of version 1 of its own, removed afterwards."""

    def __init__(self, controller: str) -> None:
        self.path = Path("/sys/fs/cgroup", controller, f"aionn-doctor-{os.getpid()}")

    def __enter__(self) -> RealCgroup:
        if not (self.path.parent / "cgroup.procs").exists():
            pytest.skip("this machine has no cgroup of version 1 for it; the rows are tested on laid out trees, too")
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(FileNotFoundError):
            self.path.rmdir()

    def set(self, file: str, value: int) -> None:
        (self.path / file).write_text(str(value))

    @property
    def enter(self) -> str:
        """Python that enters the cgroup."""
        return f"with open({str(self.path / 'cgroup.procs')!r}, 'w') as procs: procs.write('0')"


def limit(name: str, value: int) -> str:
    """Python that sets a soft limit of the module `resource`."""
    return f"import resource; resource.setrlimit(resource.{name}, ({value}, resource.getrlimit(resource.{name})[1]))"
