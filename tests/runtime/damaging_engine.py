"""An engine that writes beside its outputs, into the shared memory of queues and statistics page. It repeats its inputs.

A run damages what the first element of its input says: a positive number is the seed of random damage, a negative one is one of
`LOSE_NEXT`, `FREEZE_PAGE` and `COMPUTE_LONG`. Zero damages nothing. The engine finds the memory as a stray pointer does: among all that
its process may write to.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aionn.fmq import layout
from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model
from aionn.pages.layout import BEGUN, HEARTBEAT, SINCE, SLOTS_USED, slot_word
from aionn.testing.fake_engine import FakeEngine, FakeExecutable

NAME = "tests.runtime.damaging_engine:DamagingEngine"

LOSE_NEXT, FREEZE_PAGE, COMPUTE_LONG = -1.0, -2.0, -3.0
"""Wait for the next request and take it out of the queue. Say on the page that a run goes on which began in the future. Use a CPU for
3.5 seconds, which damages nothing."""

QUEUE_BYTES = layout.grantors_for(24, 1024)[1]
_QUEUE_WORDS = (
    layout.READ_OFFSET,
    layout.WRITE_OFFSET,
    layout.FLAG_OFFSET,
    layout.CONTROL_OFFSET + layout.READER_ARMED_OFFSET,
    layout.CONTROL_OFFSET + layout.WRITER_ARMED_OFFSET,
    layout.CONTROL_OFFSET + layout.CLOSED_OFFSET,
)
_LIBC = ctypes.CDLL(None)


class Place(NamedTuple):
    """A mapping of a queue or of a statistics page."""

    kind: str
    first: int

    def store(self, at: int, content: bytes) -> None:
        """Write through the kernel, which refuses where the mapping has gone meanwhile."""
        reading, writing = os.pipe()
        try:
            os.write(writing, content)
            _LIBC.read(reading, ctypes.c_void_p(self.first + at), len(content))
        finally:
            os.close(reading)
            os.close(writing)

    def word(self, at: int) -> int:
        return ctypes.c_uint64.from_address(self.first + at).value


def damaged_maps(wanted: str = "") -> list[Place]:
    """Return the mappings of queues ("aionn") and of the page ("aionn-stats"), or those of one kind."""
    found = []
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            place, rights, *_, name = line.split(maxsplit=5)
            first, end = (int(number, 16) for number in place.split("-"))
            kind = name.removeprefix("/memfd:").removesuffix(" (deleted)\n")
            if rights[1:4:2] == "ws" and (kind == "aionn-stats" or (kind == "aionn" and QUEUE_BYTES <= end - first < QUEUE_BYTES + 4096)):
                found.append(Place(kind, first))
    return [place for place in found if place.kind == wanted or not wanted]


def damage(seed: int) -> None:
    """Write random bytes: some now, while a run is on, and some a little later from another thread, when lanes and listener sleep."""
    chance = random.Random(seed)
    _write(chance)
    later = threading.Timer(chance.random() / 500, _write, (chance,))
    later.daemon = True
    later.start()


def _write(chance: random.Random) -> None:
    for place in damaged_maps():
        for _ in range(chance.randrange(3)):
            if place.kind == "aionn-stats":
                at = chance.choice((HEARTBEAT * 8, slot_word(chance.randrange(2)) * 8)) + chance.randrange(128)
            else:
                at = chance.choice((*_QUEUE_WORDS, chance.randrange(QUEUE_BYTES - 8))) + chance.randrange(8)
            place.store(at, bytes((chance.choice((0, 1, chance.randrange(256))),)))


def lose_next() -> None:
    """Take the next request out of its queue unseen: of two queues, the one that gets something is that of requests."""
    queues, until = damaged_maps("aionn"), time.monotonic() + 20
    while time.monotonic() < until:
        for queue in queues:
            if queue.word(layout.READ_OFFSET) < (written := queue.word(layout.WRITE_OFFSET)):
                queue.store(layout.READ_OFFSET, struct.pack("=Q", written))
                return
    raise TimeoutError("no next request came")


def freeze_page() -> None:
    """Say that one more model runs, since an hour from now."""
    (page,) = damaged_maps("aionn-stats")
    for word, value in ((SLOTS_USED, 2), (slot_word(1) + BEGUN, 1), (slot_word(1) + SINCE, time.monotonic_ns() + 3600 * 10**9)):
        page.store(word * 8, struct.pack("=Q", value))


class DamagingExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        report = super().run(inputs, outputs, timing)
        order = float(np.asarray(next(iter(inputs.values()))).flat[0])
        if order > 0:
            damage(int(order))
        elif order == LOSE_NEXT:
            lose_next()
        elif order == FREEZE_PAGE:
            freeze_page()
        elif order == COMPUTE_LONG:
            until = time.monotonic() + 3.5
            while time.monotonic() < until:
                pass
        return report


class DamagingEngine(FakeEngine):
    name = "damaging"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        made = super().compile(model, options)
        return DamagingExecutable(self, made.operands, made.weights)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        made = super().load(artifact, options)
        return DamagingExecutable(self, made.operands, made.weights)
