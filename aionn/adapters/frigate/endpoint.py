"""`Endpoint`: the ZeroMQ socket of Frigate's detectors. It needs pyzmq.

The socket is a ROUTER, so a client that has gone blocks no answer for the others. Each request is a task, and all requests of a model
share one burst. A request that is not answered in its time is dropped without an answer, and its client asks anew.

A reader of the loop receives, and its callback starts the task. Pictures come so seldom that the caches are cold each time. So each
turn of the loop and each line of Python before the driver has its picture costs several times what it costs in a benchmark's loop.

ZeroMQ reads a message whole before it is seen here. So `MAXMSGSIZE` bounds each frame, and a client that announces more is cut off.
The log has no sentence about that: to its monitor sockets, ZeroMQ reports such an end as it reports a client that leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict

import zmq

from aionn.adapters.frigate.decoding import DECODERS, rows_of
from aionn.adapters.frigate.detectors import Detector, Detectors
from aionn.adapters.frigate.messages import Header, RefusedRequestError, model_answer, parsed, tensor_of
from aionn.errors import AionnError, DeadlineError, text_of
from aionn.service.listening import Listening

logger = logging.getLogger("aionn.frigate")

MOST_TENSOR_BYTES = 64_000_000
MOST_REQUESTS = 64
"""So many requests are in work at once. More wait in the socket, which takes from its clients in turns."""

MOST_CLIENTS = 1024
"""The model of so many clients is remembered. One that is forgotten gets no answer, and asks for its model again."""

REPEATED_S, MOST_SENTENCES = 60.0, 50
"""The log has each sentence at most once in so long, and at most so many different ones."""

_LONGEST_SENTENCE = 400
_STALLED_MS = 15_000
"""A connection without a sign of life for so long is asked for one, and then closed. That frees what it has sent of a message."""


class Endpoint:
    """The socket at which detectors ask.

    Args:
        listening: the Unix socket.
        timeout_s: how long a detector waits for the answer to a tensor.
        most_bytes: the largest frame.
    """

    def __init__(self, listening: Listening, detectors: Detectors, timeout_s: float, most_bytes: int) -> None:
        self._detectors = detectors
        self._timeout_s = timeout_s
        self._chosen: OrderedDict[bytes, Detector] = OrderedDict()
        self._in_work: set[bytes] = set()
        self._places = MOST_REQUESTS
        self._tasks = asyncio.TaskGroup()  # anyio's takes four times as long to start a task
        self._logged: dict[str, float] = {}
        self._left_out = 0
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.set_hwm(2)
        self._socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _STALLED_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _STALLED_MS)
        self._socket.setsockopt(zmq.USE_FD, os.dup(listening.sock.fileno()))  # it would replace the socket of another server that listens
        self._socket.bind(f"ipc://{listening.path}")

    async def serve(self) -> None:
        """Answer requests until this call is cancelled, or the runtime is closed."""
        loop, descriptor = asyncio.get_running_loop(), self._socket.FD
        async with self._tasks:
            loop.add_reader(descriptor, self._receive)
            try:
                await self._detectors.watch()
            finally:
                loop.remove_reader(descriptor)
                self._places = 0  # a group that ends takes no task

    def _receive(self) -> None:
        """Begin the next request, if there is one and a place for it.

        The descriptor becomes readable once for all messages that have come, and sending may consume that. So this is called until
        nothing is left, once a turn, and after each request.
        """
        if len(self._in_work) >= self._places:
            return
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
            while frames[-1].more:  # ZeroMQ hands a message over when it has all frames
                frames.append(self._socket.recv(copy=False))
        except zmq.Again:
            return
        client = frames[0].bytes
        if client in self._in_work:
            self._complain("a client sent a request before its last one was answered")
        else:
            self._in_work.add(client)
            self._tasks.create_task(self._answer(client, [frame.buffer for frame in frames[1:]]))
        asyncio.get_running_loop().call_soon(self._receive)  # a client that sends without end must not hold the loop

    def end(self) -> None:
        """Close the socket."""
        self._socket.context.destroy(linger=0)

    async def _answer(self, client: bytes, frames: list[memoryview]) -> None:
        answer = None
        try:
            header, data = parsed(frames)
            if header.model_request:
                answer = self._model_asked_for(client, header.model_name)
            elif header.model_data:
                answer = await self._model_sent(client, header.model_name, data)
            else:
                answer = await self._computed(client, header, data, time.monotonic() + self._timeout_s)
        except RefusedRequestError as error:
            self._complain(str(error))
        except DeadlineError:
            self._complain(
                f"a request was not answered within {self._timeout_s * 1000:.0f} ms; if this goes on, take a smaller model, or raise both "
                "request_timeout_ms of Frigate's detector and --timeout-ms",
            )
        except AionnError as error:
            self._complain(f"a request was not computed: {text_of(error)}")
        except Exception:  # one client's request must not end those of the others
            logger.exception("a request failed by a defect of aionn")
        finally:
            self._in_work.discard(client)
        if answer is not None:  # a ROUTER drops what a client does not take, so this does not wait
            self._socket.send_multipart((client, b"", answer))
        self._receive()

    def _model_asked_for(self, client: bytes, name: str) -> bytes:
        detector = self._detectors.find(name)
        if detector is not None:
            self._choose(client, detector)
        return model_answer("model_available", detector is not None, detector is not None)

    async def _model_sent(self, client: bytes, name: str, data: memoryview | None) -> bytes:
        detector = None
        try:
            detector = await self._detectors.receive(name, data or memoryview(b""))
            self._choose(client, detector)
        except (AionnError, OSError) as error:
            self._complain(f"the model {name!r} of a client does not serve: {text_of(error)}")
        return model_answer("model_saved", detector is not None, detector is not None)

    async def _computed(self, client: bytes, header: Header, data: memoryview | None, by_s: float) -> bytes | None:
        tensor, width, height = tensor_of(header, data, DECODERS)
        detector = self._detectors.fixed or self._chosen.get(client)
        if detector is None:
            raise RefusedRequestError("a client sent a tensor and has not asked for a model; it asks after its own timeout")
        self._choose(client, detector)  # the clients that are forgotten are those that ask nothing
        outputs = await detector.compute(tensor, width, height, max(0.0, by_s - time.monotonic()))
        answer = rows_of(header.model_type, outputs, width, height).tobytes()
        if time.monotonic() > by_s:
            raise DeadlineError("the answer came too late")
        return answer

    def _choose(self, client: bytes, detector: Detector) -> None:
        self._chosen[client] = detector
        self._chosen.move_to_end(client)
        if len(self._chosen) > MOST_CLIENTS:
            self._chosen.popitem(last=False)

    def _complain(self, sentence: str) -> None:
        """Log a sentence, unless it was logged in the last minute, or many others were."""
        now_s, sentence = time.monotonic(), sentence[:_LONGEST_SENTENCE]
        self._logged = {text: at_s for text, at_s in self._logged.items() if now_s - at_s < REPEATED_S}
        if sentence in self._logged or len(self._logged) >= MOST_SENTENCES:
            self._left_out += 1
            return
        more = f" ({self._left_out} complaints were left out of the log before)" if self._left_out else ""
        self._left_out = 0
        self._logged[sentence] = now_s
        logger.warning("%s%s", sentence, more)
