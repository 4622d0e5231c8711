"""A service that has been taken over: `python -m tests.service.taken_over FOLDER TARGET` prints what became of all attacks, as JSON.

It gives its rights away as `aionn serve` does. Then it attacks what a driver of the evil engine attacks, and its own starter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from aionn.remote.orders import LEAVES_TEMPLATE
from aionn.runtime.processes.spawning import checked_sandbox
from aionn.runtime.processes.starter import Starter
from aionn.service.confinement import confine_service
from tests.sandbox import evil_files, evil_kernel, evil_network, evil_processes  # noqa: F401 -- they register attacks
from tests.sandbox.evil_calls import ATTACKS, Target, outcome

STATE = "/nonexistent/state"


def orders(starter: Starter, folder: Path) -> dict[str, Callable[[], object]]:
    """Orders by which a service could get rights back, by what they are about."""

    def order(more: dict[str, str], **changed: str) -> int:
        given = {"engine": "reference", "fd": "3", "schedule": "0", "state": STATE, "sandbox": "auto", "exports": "", "counter": "4"}
        arguments = [*(given | changed).values(), "", "shared"]
        return starter.start(arguments, 0, more, ())

    def usual() -> None:
        """A driver without a socket, which ends by itself. Only that it is made counts."""
        os.waitpid(order({"AIONN_TEST_WORD": "one"}), 0)

    return {
        "usual": usual,
        "no sandbox": lambda: order({}, sandbox="off"),
        "other state": lambda: order({}, state=str(folder)),
        "other exports": lambda: order({}, exports=str(folder / "exports")),
        "exports above": lambda: order({}, exports="/tmp/aionn-exports-1/../x"),
        "few arguments": lambda: starter.start([LEAVES_TEMPLATE], 0, {}, ()),
        "no number": lambda: starter.start(["", "", "", STATE, "auto", ""], "x", {}, ()),  # type: ignore[arg-type]
        **{f"{name}": lambda name=name: order({name: str(folder)}) for name in ("LD_PRELOAD", "PYTHONPATH", "HOME", "GLIBC_TUNABLES")},  # type: ignore[misc]
    }


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return f"denied: {error.strerror}"
    return "success"


def main(folder: Path, target: Target) -> None:
    path, level = str(folder / "service.sock"), checked_sandbox(None)
    starter, found = confine_service(level, STATE, path)
    outcomes = {name: outcome(name, target) for name in ATTACKS}
    own = outcome_of_its_own_folder(folder / "x")
    ordered = {name: refusal(act) for name, act in orders(starter, folder).items()} if starter is not None else {}
    print(msgspec.json.encode((found, outcomes, own, ordered)).decode())


def outcome_of_its_own_folder(path: Path) -> str:
    with suppress(OSError):
        path.write_text("x")
        path.unlink()
        return "success"
    return "denied"


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Target))
