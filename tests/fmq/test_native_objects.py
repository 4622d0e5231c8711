"""Misuse native objects from Python: without `__init__`, without optional parts, closed in the middle of a call. Python goes on.

Each misuse runs in a child of fork, because a mistake in C ends the process by a signal.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest

from aionn.burst.packets import DATUM_BYTES
from aionn.fmq import MessageQueue
from aionn.fmq._ring import CONTROL_BYTES, Caller, Listener, Ring
from tests.fmq.queues import both_ends

pytestmark = [pytest.mark.own_process, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

ENDS = ["_set_closed", "_set_ended"]
METHODS = sorted({name for name in vars(Ring) if callable(getattr(Ring, name)) and not name.startswith("__")} - {*ENDS}) + ENDS
EXCHANGE = sorted({name for kind in (Caller, Listener) for name in vars(kind) if not name.startswith("__")})
MORE: tuple[tuple[Any, ...], ...] = (
    (b"", 1, 2**62, 0),
    (b"", None, 2**62, 0),
    (b"", 1, 2**62),
    ({}, {}, b"", 2**62, 0),
    ({1: 2}, {1: 2}, b"", 0, 0),
    (1, 2**62, None),
    (8, 0, (1, 2, 3, 4, 5, 6)),
    (8, 10**6, (mock.Mock, *[lambda *_: None] * 5)),
)
VALUES: tuple[Any, ...] = (0, 1, -1, 2**70, 1.5, None, b"", bytes(DATUM_BYTES), bytearray(DATUM_BYTES))


def in_child(use: Callable[[], int]) -> int:
    """Run `use` in a child of fork and return how many calls it made. A signal that ends the child fails the test."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(use()).encode())
            os._exit(0)
        except BaseException as error:
            os.write(write, repr(error).encode())
            os._exit(1)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), signal.strsignal(os.WTERMSIG(status))
    assert status == 0, said
    return int(said)


def begin(caller: Caller) -> None:
    """Let a `Caller` ask for nothing that matters."""
    caller.begin(8, 0, (mock.Mock, *[lambda *_: None] * 5))  # type: ignore[arg-type]


def call_all(made: object, names: list[str]) -> int:
    """Call every method with every choice of up to two arguments, and those of `Caller` with more; return how many calls were made."""
    calls = 0
    for name in names:
        method = getattr(made, name, None)
        if not callable(method):
            continue
        for arguments in [(), *product(VALUES, repeat=1), *product(VALUES, repeat=2), *MORE]:
            if name == "_release" or (name == "wait_flag" and arguments[1:] != (0,)):
                continue  # `_release` ends the object; a wait without a past deadline does not end
            calls += 1
            try:
                method(*arguments)
            except Exception:  # every refusal is right: the process lives
                continue
    return calls


@pytest.mark.parametrize("kind", [Ring, MessageQueue], ids=lambda kind: kind.__name__)
def test_a_queue_made_without_init_refuses_every_call(kind: type[Ring]) -> None:
    assert in_child(lambda: call_all(kind.__new__(kind), METHODS)) > 1000


@pytest.mark.parametrize("kind", [Caller, Listener], ids=lambda kind: kind.__name__)
def test_an_exchange_cannot_be_made_without_its_queues(kind: type[Caller] | type[Listener]) -> None:
    def use() -> int:
        try:
            made: Any = kind.__new__(kind)
        except TypeError:
            return -1
        return call_all(made, EXCHANGE)

    assert in_child(use) == -1


def bare_rings() -> Iterator[Ring]:
    """Rings with and without a flag word and control words, synchronized and not."""
    for flag, control, synchronized in product((None, 4), (None, CONTROL_BYTES), (True, False)):
        parts = [None if size is None else mmap.mmap(-1, max(size, 8)) for size in (8, 8, 48, flag, control)]
        yield Ring(parts[0], parts[1], parts[2], parts[3], parts[4], DATUM_BYTES, synchronized, -1, -1)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", range(8))
def test_a_queue_without_some_of_its_words_refuses_what_needs_them(at: int) -> None:
    assert in_child(lambda: call_all(list(bare_rings())[at], METHODS)) > 1000


def test_arming_with_a_mask_needs_a_flag_word() -> None:
    refused: list[int] = []

    class Refusing(Ring):
        def _raise_refusal(self, code: int) -> None:
            refused.append(code)
            raise LookupError

    parts = [mmap.mmap(-1, size) for size in (8, 8, 48, CONTROL_BYTES)]

    def use() -> int:
        ring = Refusing(parts[0], parts[1], parts[2], None, parts[3], DATUM_BYTES, True, -1, -1)
        for arm in (ring.arm_reader, ring.arm_writer):
            with pytest.raises(LookupError):
                arm(2, 1)
        assert ring.arm_reader(2)  # nothing of the flag word is asked for
        return refused.count(9)  # NO_FLAG

    assert in_child(use) == 2


class ClosingNumber:
    """A number that closes queues when it is asked for its value."""

    def __init__(self, *queues: MessageQueue) -> None:
        self.queues, self.asked = queues, 0

    def __index__(self) -> int:
        self.asked += 1
        for queue in self.queues:
            queue.close()
        return 1


COUNTED = [
    ("read", 0), ("peek", 0), ("_begin_read", 0), ("_begin_write", 0), ("commit_read", 0), ("commit_write", 0),
    ("arm_reader", 0), ("arm_writer", 0), ("spin_until_readable", 0), ("spin_until_readable", 1),
    ("wait_flag", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at"), COUNTED)
def test_a_queue_that_its_argument_closes_is_not_touched_any_more(name: str, at: int) -> None:
    def use() -> int:
        with both_ends(DATUM_BYTES, 8) as (queue, peer):
            assert peer.write(bytes(DATUM_BYTES))
            assert queue.begin_read(1)
            assert queue.begin_write(1)
            number = ClosingNumber(queue)
            with pytest.raises(Exception, match="closed here"):
                getattr(queue, name)(*[1][:at], number)
            return number.asked

    assert in_child(use) == 1


def test_an_exchange_whose_argument_closes_its_queues_does_nothing() -> None:
    def use() -> int:
        asked = 0
        for name in ("next", "send", "post"):
            with both_ends(DATUM_BYTES, 8) as (queue, peer), both_ends(DATUM_BYTES, 8) as (other, _):
                assert peer.write(bytes(2 * DATUM_BYTES))
                number = ClosingNumber(queue, other)
                if name == "next":
                    with pytest.raises(ValueError, match="open"):
                        Listener(queue, other, number)  # type: ignore[arg-type]
                else:
                    caller = Caller(queue, other)
                    begin(caller)
                    arguments: tuple[Any, ...] = (bytes(DATUM_BYTES), None) if name == "send" else ({}, {}, bytes(DATUM_BYTES))
                    assert getattr(caller, name)(*arguments, number) is None
                asked += number.asked
        return asked

    assert in_child(use) == 3


def test_what_only_says_that_it_is_a_queue_is_not_taken_for_one() -> None:
    class Pretender:
        __class__ = MessageQueue  # type: ignore[assignment]

    def use() -> int:
        pretender: Any = Pretender()
        assert isinstance(pretender, Ring)
        for make in (lambda: Caller(pretender, pretender), lambda: Listener(pretender, pretender, 0)):
            with pytest.raises(ValueError, match="24-byte elements"):
                make()
        return 1

    assert in_child(use) == 1


def test_a_queue_is_initialised_once_even_after_its_release() -> None:
    parts = [mmap.mmap(-1, size) for size in (8, 8, 48)]

    def use() -> int:
        ring = Ring(parts[0], parts[1], parts[2], None, None, DATUM_BYTES, True, -1, -1)
        for _ in range(2):
            with pytest.raises(TypeError, match="once"):
                ring.__init__(parts[0], parts[1], parts[2], None, None, 8, False, -1, -1)  # type: ignore[misc]
            ring._release()
        return 1

    assert in_child(use) == 1
