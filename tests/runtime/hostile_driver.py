"""A driver process that lies: an "engine" that takes the control socket for itself as soon as it is made.

Asked for as "tests.runtime.hostile_driver:LIE" (the tests' root must be on PYTHONPATH): any attribute of this module is an engine
that tells that lie, by its name in `GREETINGS`, `ANSWERS`, `TEXTS` or `EXECUTED`, and the truth otherwise.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from aionn.burst.packets import DATUM_BYTES, decode_request, encode_result_body, result_identity_datum
from aionn.errors import AionnError
from aionn.fmq import MessageQueue
from aionn.hal import CacheFiles, DeviceType, ErrorStatus, MQDescriptor, Operand, OperandType, OutputShape, Result, Timing
from aionn.hal.queues import MQFlavor
from aionn.hal.types import UNKNOWN_TIME_US
from aionn.pages.layout import PAGE_BYTES
from aionn.pages.page import DriverPage
from aionn.remote import calls, control
from aionn.remote.calls import Fd
from aionn.remote.control import HEADER, PROTOCOL, CallMessage, Failed, Failure, Ready, Reply
from tests.remote.frames import frame

Frame = tuple[bytes, int]
"""Bytes, and how many descriptors (of pipes) go with them. PAGE: those of a statistics page. HUGE_PAGES: those of one
that only looks like it."""

PAGE = -1
HUGE_PAGES = -2
READY = frame(Ready(PROTOCOL, "hostile", "1\x1b[31m", DeviceType.CPU, CacheFiles(), runs_on="\x07", page=(Fd(0), Fd(1))))
OTHER = (("else", Operand(OperandType.INT8, (7,))),)


def reply(call: CallMessage[Any], answer: object, pipes: int = 0) -> Frame:
    message = Failed(call.id, answer) if isinstance(answer, Failure) else Reply(call.id, answer)
    return frame(message, pipes), pipes


def raw(value: object) -> Frame:
    """A frame around any MessagePack value."""
    body = msgspec.msgpack.encode(value)
    return HEADER.pack(len(body), 0, 0) + body, 0


GREETINGS: dict[str, list[Frame]] = {
    "noise": [(b"\xff" * 100, 0)],
    "text": [(b"HTTP/1.1 200 OK\r\n\r\n", 0)],
    "endless": [(HEADER.pack(2**32 - 1, 0, 0), 0)],
    "descriptors_that_never_come": [(HEADER.pack(len(READY) - HEADER.size, 9, 0) + READY[HEADER.size :], 0)],
    "descriptors_nobody_spoke_of": [(READY, 5)],
    "no_page": [(frame(Ready(PROTOCOL, "hostile", "1", DeviceType.CPU, CacheFiles())), 0)],
    "a_pipe_for_a_page": [(READY, 2)],
    "a_page_of_huge_pages": [(READY, HUGE_PAGES)],
    "descriptors_without_end": [(READY[:1], 200), (READY[1:2], 200)],
    "another_protocol": [(frame(Ready(PROTOCOL + 1, "hostile", "1", DeviceType.CPU, CacheFiles())), 0)],
    "two_greetings": [(READY, PAGE), (READY, PAGE)],
    "an_answer_first": [(frame(Reply(1, None)), 0)],
    "wrong_types": [raw(["Ready", "one", 2, 3, "four", [5]])],
    "a_name_of_numbers": [raw(["Ready", PROTOCOL, [1, 2], "1", 2, [0, 0], False])],
    "too_many_fields": [raw(["Ready", PROTOCOL, "hostile", "1", 2, [0, 0], False, 1, 2, 3])],
    "half": [(READY[:-3], PAGE)],
    "nothing": [],
}

STEERING = "\x1b]0;a title\x07\x1b[2J\r\x9b31mforged\u202e"
"""Control sequences of a terminal, the second kind of each among them, and a character that turns the direction of text."""


def steering_lines() -> list[Frame]:
    """Two lines of a log. The second one is longer than a driver of aionn would send."""
    texts = (f"first\n\t{STEERING}", STEERING * 2000)
    return [(frame(CallMessage(number, calls.LogLine(30, STEERING, text))), 0) for number, text in enumerate(texts, 1)]


def steering_failure() -> Failure:
    return Failure("CompilationError", STEERING, reason=STEERING, notes=(STEERING,) * 99)


REFUSED = Failure("ExecutionError", "not today", status=int(ErrorStatus.GENERAL_FAILURE))
ENDING = ("half_an_answer", "no_answer", "burst_cut", "burst_dead")
"""Answers after which the driver ends."""

ANSWERS: dict[str, tuple[str, Callable[[CallMessage[Any]], list[Frame]]]] = {
    "flags_too_few": ("GetSupportedOperations", lambda call: [reply(call, ())]),
    "flags_too_many": ("GetSupportedOperations", lambda call: [reply(call, (True,) * 1000)]),
    "flags_of_text": ("GetSupportedOperations", lambda call: [raw(["Reply", call.id, ["yes"]])]),
    "another_answer": ("GetSupportedOperations", lambda call: [reply(call, 1)]),
    "another_id": ("GetSupportedOperations", lambda call: [(frame(Reply(call.id + 7, None)), 0)]),
    "twice": ("PrepareModel", lambda call: [prepared(call), prepared(call)]),
    "half_an_answer": ("PrepareModel", lambda call: [(prepared(call)[0][:-5], 0)]),
    "no_answer": ("PrepareModel", lambda call: []),
    "other_operands": ("PrepareModel", lambda call: [reply(call, calls.Prepared(1, OTHER, OTHER))]),
    "no_operands": ("PrepareModel", lambda call: [reply(call, calls.Prepared(1, (), ()))]),
    "a_failure_of_nobody": ("PrepareModel", lambda call: [reply(call, Failure("SystemExit", "\0" * 99, status=4711))]),
    "descriptors_and_an_error": ("PrepareModel", lambda call: [reply(call, Failure("CompilationError", "no"), 3)]),
    "a_call_that_is_not_its": ("PrepareModel", lambda call: [(frame(CallMessage(1, calls.CloseBurst(1))), 0), prepared(call)]),
    "token_0": ("Allocate", lambda call: [reply(call, 0)]),
    "no_memory_today": ("Allocate", lambda call: [reply(call, REFUSED)]),
    "token_negative": ("Allocate", lambda call: [reply(call, -5)]),
    "token_huge": ("Allocate", lambda call: [reply(call, 2**63)]),
    "burst_of_text": ("ConfigureExecutionBurst", lambda call: [raw(["Reply", call.id, "one"])]),
    "burst_refused": ("ConfigureExecutionBurst", lambda call: [reply(call, REFUSED)]),
    "burst_of_nothing": ("ConfigureExecutionBurst", lambda call: [reply(call, None)]),
    "burst_cut": ("ConfigureExecutionBurst", lambda call: [(reply(call, 1)[0][:-1], 0)]),
    "burst_dead": ("ConfigureExecutionBurst", lambda call: []),
}

TEXTS: dict[str, tuple[str, Callable[[CallMessage[Any]], list[Frame]]]] = {
    "log_lines": ("PrepareModel", lambda call: [*steering_lines(), prepared(call)]),
    "a_failure_that_steers": ("PrepareModel", lambda call: [reply(call, steering_failure())]),
}

RESULTS: dict[str, Result] = {
    "too_many_shapes": Result(ErrorStatus.NONE, (OutputShape((4,)),) * 9),
    "too_few_shapes": Result(ErrorStatus.NONE, (OutputShape((4,)),)),
    "a_shape_too_large": Result(ErrorStatus.NONE, (OutputShape((2**20, 2**10)),) * 2),
    "a_negative_shape": Result(ErrorStatus.NONE, (OutputShape((-4,)),) * 2),
    "too_little_room_for_ever": Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((2**20,), False),) * 2),
    "too_little_room_for_nothing": Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((0,), False),) * 2),
    "a_failure": Result(ErrorStatus.GENERAL_FAILURE, (), Timing(2**64 - 1, 0), "\0\x1b[31m" * 500),
}
"""Answers to an execution, over the control socket or a burst; the model has two outputs of shape (4,)."""

STATUSES: dict[str, Result] = {
    f"status_{status.name}": Result(status, (OutputShape((4,), False),) * 2, Timing(1, 2), f"told {status.name}")
    for status in ErrorStatus
    if status is not ErrorStatus.NONE
}
"""A driver that fails by the book, except for shapes and times that a failure does not have."""

TIMINGS: dict[str, Result] = {
    f"times_{on_device}_{in_driver}": Result(ErrorStatus.NONE, (), Timing(on_device, in_driver))
    for on_device in (3, UNKNOWN_TIME_US)
    for in_driver in (5, UNKNOWN_TIME_US)
}
"""What a driver may know of the time: both, one, none."""

EXECUTED = {**RESULTS, **STATUSES, **TIMINGS}

QUEUES = ("garbage", "an_answer_to_nobody", "an_answer_twice", "counters", "cut", "silence")
"""Lies told on a burst's result queue."""


def prepared(call: CallMessage[Any]) -> Frame:
    model = getattr(call.body, "model", None)
    return reply(call, calls.Prepared(1, model.inputs, model.outputs) if model is not None else None)


def huge_pages() -> int:
    """Return a memfd of the size and with the seals of a statistics page."""
    fd = os.memfd_create("aionn-stats", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class Hostile:
    """Never becomes an engine: it serves the socket until that ends."""

    def __init__(self, lie: str) -> None:
        self._lie = lie
        self._tokens = 0
        self._page = DriverPage()
        self._socket = socket.socket(fileno=os.dup(int(sys.argv[2])))
        self._socket.setblocking(True)
        try:
            self._serve()
        finally:
            os._exit(0)

    def _send(self, frames: list[Frame]) -> None:
        for data, pipes in frames:
            match pipes:
                case -1:
                    ends = [os.dup(self._page.fd), os.dup(self._page.asked_fd)]
                case -2:
                    ends = [huge_pages(), os.dup(self._page.asked_fd)]
                case _:
                    ends = [fd for _ in range(-(-pipes // 2)) for fd in os.pipe()]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", ends[: pipes if pipes > 0 else 2]))] if pipes else []
            self._socket.sendmsg([data], rights)
            for fd in ends:
                os.close(fd)

    def _serve(self) -> None:
        if self._lie in GREETINGS:
            self._send(GREETINGS[self._lie])
            if self._lie in ("half", "nothing"):
                return
        else:
            self._send([(READY, PAGE)])
        for call, fds in self._calls():
            verb, lie = {**ANSWERS, **TEXTS}.get(self._lie, ("", None))
            if lie is not None and type(call.body).__name__ == verb:
                self._send(lie(call))
                if self._lie in ENDING:
                    return
            else:
                self._send([self._honest(call, fds)])
            for fd in fds:
                os.close(fd)

    def _calls(self) -> Iterator[tuple[CallMessage[Any], list[int]]]:
        incoming, fds = b"", []
        while True:
            chunk, received, _, _ = socket.recv_fds(self._socket, 1 << 20, control.MAX_DESCRIPTORS)
            fds += received
            incoming += chunk
            while len(incoming) >= HEADER.size and len(incoming) >= HEADER.size + HEADER.unpack_from(incoming)[0]:
                length, count, _ = HEADER.unpack_from(incoming)
                taken, fds = fds[:count], fds[count:]
                message = control.decode(incoming[HEADER.size : HEADER.size + length], map(Fd, taken).__next__)
                incoming = incoming[HEADER.size + length :]
                if isinstance(message, CallMessage):
                    yield message, taken
            if not chunk:
                return

    def _honest(self, call: CallMessage[Any], fds: list[int]) -> Frame:
        match call.body:
            case calls.GetSupportedOperations(model=model):
                return reply(call, (True,) * len(model.operations))
            case calls.PrepareModel():
                return prepared(call)
            case calls.Execute():
                return reply(call, EXECUTED.get(self._lie, Result(ErrorStatus.NONE)))
            case calls.Allocate():
                self._tokens += 1
                return reply(call, self._tokens)
            case calls.ConfigureExecutionBurst():
                self._burst(call.body, fds)
                return reply(call, 1)
        return reply(call, None)

    def _burst(self, body: calls.ConfigureExecutionBurst, fds: list[int]) -> None:
        """Answer the burst's requests in a thread of its own, until it ends."""
        channels = []
        for message in (body.request_channel, body.result_channel):
            fds[:] = [fd for fd in fds if fd not in message.fds]
            channels.append(MessageQueue.attach(MQDescriptor(message.grantors, message.quantum, MQFlavor(message.flavor), message.fds)))
        threading.Thread(target=self._answer, args=channels, daemon=True).start()

    def _answer(self, requests: MessageQueue, results: MessageQueue) -> None:
        while True:
            try:
                datums = requests.read_in_thread(1)  # the others of a request come with the first
            except AionnError:
                return  # the burst is over
            datums += requests.read(requests.available_to_read()) or b""
            identity = decode_request(datums).identity or 0
            answer = encode_result_body(EXECUTED.get(self._lie, Result(ErrorStatus.NONE)), framed=True)
            match self._lie:
                case "garbage":
                    results.write(os.urandom(8 * DATUM_BYTES))
                case "an_answer_to_nobody":
                    results.write(answer + result_identity_datum(identity + 1000, 0))
                case "an_answer_twice":
                    results.write(2 * (answer + result_identity_datum(identity, 0)))
                case "cut":
                    results.write(answer)
                case "counters":
                    results._regions[0].view()[:128] = b"\xff" * 128
                    os.eventfd_write(results.reader_fd, 1)
                case "silence":
                    pass
                case _:
                    results.write(answer + result_identity_datum(identity, 0))


def __getattr__(name: str) -> Callable[[], Hostile]:
    if name.startswith("_") or name not in {*GREETINGS, *ANSWERS, *TEXTS, *EXECUTED, *QUEUES, "honest"}:
        raise AttributeError(name)
    return partial(Hostile, name)
