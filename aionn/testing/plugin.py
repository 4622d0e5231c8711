"""The pytest plugin with the fixture `fake_device`. It needs pytest and no inference engine.

`fake_device` is a `FakeDevice`. After the test it compares what the process holds with what it held before: child processes,
descriptors (memfds, pidfds, eventfds, sockets, FIFOs) and mappings of shared memory. The fixture lists what is left and fails the
test. It ends processes that are left, so that the next test begins clean.

Every run of pytest loads the plugin, also for projects that do not use it. So it imports what the fixture needs when a test asks for it.

The plugin is found through the entry point group `pytest11`. Where aionn is not installed, `-p aionn.testing.plugin` loads it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aionn.testing.fake_device import FakeDevice

_KINDS = ("/memfd:aionn", "anon_inode:[pidfd]", "anon_inode:[eventfd]", "socket:", "pipe:", "pidfd:")


@dataclass(frozen=True)
class _Held:
    """What this process holds: children by pid and start, descriptors by target and inode, mappings by inode."""

    processes: frozenset[tuple[int, int]]
    descriptors: Counter[tuple[str, int]]
    mappings: Counter[str]

    @classmethod
    def now(cls) -> _Held:
        gc.collect()  # a view in a reference cycle (a traceback, a closed task) is garbage, not a leak
        return cls(frozenset(_children()), _descriptors(), _mappings())

    def left_since(self, before: _Held) -> list[str]:
        processes = [f"process {pid} ({_command(pid)})" for pid, _ in sorted(self.processes - before.processes)]
        descriptors = [f"{count} descriptor(s) of {target}" for (target, _), count in (self.descriptors - before.descriptors).items()]
        mappings = [f"{count} mapping(s) of {what}" for what, count in (self.mappings - before.mappings).items()]
        return [*processes, *descriptors, *mappings]


@pytest.fixture
def fake_device() -> Iterator[FakeDevice]:
    """A device that follows the test's orders. The test fails if it leaves a process, a descriptor or a mapping behind.

    Examples:
        >>> async def test_my_app_survives_a_crash(fake_device):
        ...     async with aionn.Runtime() as runtime:
        ...         compilation = await runtime.compile(model, devices=(fake_device.name,))
        ...         fake_device.crash()
        ...         with pytest.raises(aionn.DriverDiedError):
        ...             await compilation.compute(inputs)
    """
    import uvloop

    from aionn.testing.fake_device import FakeDevice

    # libuv makes one pipe for signals with the first loop of a process and keeps it. It must exist before the fixture counts.
    uvloop.new_event_loop().close()
    before = _Held.now()
    with FakeDevice() as device:
        yield device
    after = _Held.now()
    left = after.left_since(before)
    for pid, _ in after.processes - before.processes:
        _end(pid)
    if left:
        pytest.fail(f"the test left behind: {', '.join(left)}; leave every aionn.Runtime, and drop views of its memory", pytrace=False)


def _children() -> Iterator[tuple[int, int]]:
    """Return every process below this one with its start time, zombies included."""
    from aionn.pages.process_use import of_each_process, stat_of

    parents: dict[int, list[tuple[int, int]]] = {}
    for stat in of_each_process(stat_of)[0]:
        parents.setdefault(stat.parent, []).append((stat.pid, stat.start_time))
    found = list(parents.get(os.getpid(), []))
    for child in found:
        found.extend(parents.get(child[0], []))
    return iter(found)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip() or "a zombie"
    except OSError:
        return "ended since"


def _descriptors() -> Counter[tuple[str, int]]:
    held: Counter[tuple[str, int]] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target, inode = os.readlink(f"/proc/self/fd/{entry}"), os.fstat(int(entry)).st_ino
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith(_KINDS):
            held[target, inode] += 1
    return held


def _mappings() -> Counter[str]:
    held: Counter[str] = Counter()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if "memfd:aionn" in line:
                _, _, _, _, inode, path = line.rstrip().split(maxsplit=5)
                held[f"{path} (inode {inode})"] += 1
    return held


def _end(pid: int) -> None:
    """End a process that was left, and reap it if it is a child of this one. The watch of an open runtime may be quicker."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return
