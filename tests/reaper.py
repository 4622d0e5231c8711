"""Run a command, then end every process that it has left behind: `python tests/reaper.py COMMAND...`

`tests/runs.py` starts pytest below this program. A process whose parent ends becomes a child of this program, so none gets away.

Invariants
    Every process that the command has started is a descendant of this process, daemons too.
    The rest is killed when the command ends, when this program's own parent ends (by SIGKILL, too), and at a second signal.
    The first SIGINT, SIGTERM or SIGHUP interrupts the command, which then prints its summary.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_ENDED = signal.SIGUSR1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(parent: int, command: list[str]) -> int:
    """Run the command, and return its exit status as a shell does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD, PARENT_ENDED})
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) or prctl(PR_SET_PDEATHSIG, int(PARENT_ENDED), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        return 1
    os.environ["AIONN_TESTS_REAPER"] = str(os.getpid())
    pid = os.posix_spawn(command[0], command, os.environ, setsigmask=(), setsigdef=SIGNALS)
    try:
        return wait(pid)
    finally:
        end_the_rest()


def wait(command: int) -> int:
    """Reap what ends until the command ends. Return early if the parent ends or a second signal comes."""
    interrupted = False
    while True:
        number = signal.sigwait({*SIGNALS, signal.SIGCHLD, PARENT_ENDED})
        if number in SIGNALS and not interrupted:
            interrupted = True
            os.kill(command, signal.SIGINT)  # not reaped yet, so the pid is still the command's
        elif number != signal.SIGCHLD:
            return 128 + number
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code


def end_the_rest() -> None:
    """Kill children until there are none. The children of a child that ends become children of this process."""
    with suppress(ChildProcessError):
        while True:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
