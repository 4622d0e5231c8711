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
    prefix: tuple[str, ...] = ()
    alone: bool = False

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def run(self, *arguments: str, prefix: tuple[str, ...] = ()) -> Verdict:
        command = [*prefix, sys.executable, "-m", "aionn", "doctor", "--json", "--state-dir", str(self.state), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with nullcontext() if self.alone else among_doctors(fcntl.LOCK_SH):
            done = run_app(command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=100)
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
    def enter(self) -> tuple[str, ...]:
        """A command that enters the cgroup and becomes the command behind it."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh")


def with_limit(option: str, value: int) -> tuple[str, ...]:
    """A command that sets a limit with `ulimit` and becomes the command behind it."""
    return ("sh", "-c", f'ulimit {option} {value} && exec "$@"', "sh")
