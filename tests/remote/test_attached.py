"""`AttachedDriver`: what the end of a connection means where no runtime's loop says why."""

import os
import socket
import subprocess
import sys

import pytest

import aionn
from aionn.fmq.thread_waits import ThreadWaits
from aionn.remote import attached
from aionn.remote.attached import AttachedDriver
from aionn.remote.calls import Prepared
from aionn.remote.control import ATTACHED


def pidfd_of(alive: bool) -> int:
    """Return the pidfd of a process whose parent is another process. A client of a service sees its driver so."""
    if alive:
        return os.pidfd_open(os.getppid())
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as child:
        return os.pidfd_open(child.pid)


@pytest.mark.parametrize(("alive", "error"), [(True, aionn.ExecutionError), (False, aionn.DriverDiedError)])
def test_the_end_of_the_connection_is_the_drivers_death_only_if_its_process_has_ended(
    alive: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "PATIENCE_S", 0.0)
    ours, theirs = socket.socketpair()
    waits = ThreadWaits()
    driver = AttachedDriver("d", ours, lambda: pidfd_of(alive), Prepared(ATTACHED, (), ()), waits, None, lambda: True)
    theirs.close()
    waits.wait(driver._greeting)
    assert type(driver.connection.ended_by) is error
    waits.close()
