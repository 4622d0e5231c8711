"""Clients that mean harm: each costs itself its request, a sentence in the log says why, and the others go on."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import anyio
import numpy as np
import psutil
import pytest
import zmq

from aionn.testing import FakeDevice, fake_model, identity_model
from tests.adapters.frigate.detector_client import DetectorClient, serve_frigate
from tests.adapters.frigate.detector_models import KINDS
from tests.cli.serving import Serving
from tests.service.served import serving as folder_of_sockets

FLAT_BYTES = 24_000_000
"""How much memory may change between two looks. A client that could fill memory would send more by far."""


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with folder_of_sockets() as folder, serve_frigate(folder, "--timeout-ms", "30000", "--max-model", "40M") as running:
        yield running
        assert running.end() == 0


@contextmanager
def raw(server: Serving) -> Iterator[socket.socket]:
    """A connection that has shaken hands as a REQ socket does (ZMTP 3.0, mechanism NULL)."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(server.address.removeprefix("ipc://"))
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
        sock.sendall(bytes([4, len(ready)]) + ready)
        received = b""
        while b"READY" not in received:
            received += sock.recv(4096)
        yield sock


def long_frame(flags: int, announced: int) -> bytes:
    return bytes([flags | 2]) + announced.to_bytes(8, "big")


def memory(server: Serving) -> int:
    found: int = psutil.Process(server.process.pid).memory_info().rss
    return found


class Good:
    """A client that asks for what it should, and gets the right answer each time."""

    def __init__(self, server: Serving) -> None:
        self.kind = next(kind for kind in KINDS if kind.model_type == "ssd")
        self.client = DetectorClient(server.address, 30_000)
        assert self.client.sends("good.onnx", self.kind.model())["model_loaded"]
        self.first = self.client.detect(self.kind.picture(0), "ssd")

    def check(self) -> None:
        found = self.client.detect(self.kind.picture(0), "ssd")
        assert found is not None
        assert self.first is not None
        assert found[:, 1].any()
        assert np.array_equal(found, self.first)


@pytest.fixture
def good(server: Serving) -> Iterator[Good]:
    found = Good(server)
    with found.client:
        yield found


TENSOR = {"shape": [1, 64, 96, 3], "dtype": "uint8", "model_type": "ssd"}
BYTES = bytes(64 * 96 * 3)


def header(**changes: object) -> bytes:
    return json.dumps({**TENSOR, **changes}).encode()


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([b"{", BYTES], "a first frame that is not the JSON of a request: Input data was truncated"),
        ([b"[" * 60_000, BYTES], "Expected `object`, got `array`"),
        ([b'{"x":' + b"[" * 60_000, BYTES], "not the JSON of a request: maximum recursion depth"),
        ([b"{" + b" " * 70_000 + b"}"], "it has 70002 bytes, and at most 65536 are read"),
        ([b"\xff\xfe", BYTES], "not the JSON of a request: JSON is malformed"),
        ([b'{"shape": "all"}', BYTES], "Expected `array`, got `str`"),
        ([header(), BYTES, b"more"], "a client sent 4 frames"),
        ([header()], "and 0 tensors; expected 1 tensor"),
        ([b"{}"], "dtype='', model_type='' and 0 tensors"),
        ([header(dtype="complex128"), BYTES], "dtype='complex128'"),
        ([header(model_type="other"), BYTES], "model_type='other'"),
        ([header(shape=[1, 64, 96, 4]), BYTES], "18432 bytes for uint8 of shape (1, 64, 96, 4); expected 4 extents"),
        ([header(shape=[-1, 64, 96, -3]), BYTES], "of shape (-1, 64, 96, -3)"),
        ([header(shape=[2**62, 2**62, 2**62, 4]), BYTES], "expected 4 extents from 1 on"),
        ([header(shape=[64 * 96 * 3]), BYTES], "of shape (18432,)"),
        ([header(shape=[1, 0, 96, 3]), b""], "of shape (1, 0, 96, 3)"),
        ([header(shape=[1, 96, 64, 3]), BYTES], "a request was not computed: "),
        (
            [header(dtype="float32", shape=[1, 16, 96, 3]), BYTES],
            "a picture of float32 came for the model 'good.onnx'; set input_dtype: int",
        ),
        ([header(model_type="yolox"), BYTES], "model_type='yolox', which does not fit its model: the outputs have"),
        ([header(shape=[1, 3, 64, 96]), BYTES], "came for the model 'good.onnx'; set input_tensor: nhwc"),
    ],
)
def test_nonsense_has_one_sentence_and_no_answer(server: Serving, good: Good, frames: Sequence[bytes], sentence: str) -> None:
    with DetectorClient(server.address) as client:
        assert client.asks_for("good.onnx")["model_loaded"]
        assert client.ask(frames, 200) is None
        server.until(re.escape(sentence))
    good.check()


def test_a_model_of_zeros(server: Serving, good: Good) -> None:
    content = bytes(35_000_000)  # malloc may keep freed blocks of up to 32 MiB
    with DetectorClient(server.address) as client:
        assert client.sends("zeros.onnx", content) == {"model_saved": False, "model_loaded": False}
        server.until("the model 'zeros.onnx' of a client does not serve: ")
        good.check()
        before = memory(server)
        for _ in range(5):
            assert client.sends("zeros.onnx", content) == {"model_saved": False, "model_loaded": False}
            good.check()
        assert memory(server) - before < FLAT_BYTES


def test_a_model_that_takes_no_picture(server: Serving, good: Good) -> None:
    with DetectorClient(server.address) as client:
        assert client.sends("rows.onnx", identity_model()) == {"model_saved": False, "model_loaded": False}
        server.until("the model's input 'input' has 2 extents; a detector takes pictures, which have 4")
        assert client.asks_for("rows.onnx") == {"model_available": False, "model_loaded": False}
        assert client.ask([b'{"model_data": true, "model_name": "none.onnx"}'], 30_000) == [b'{"model_saved":false,"model_loaded":false}']
        server.until("the model 'none.onnx' of a client does not serve: it has 0 bytes")
    good.check()


def test_many_clients_that_send_models_which_take_long(fake: FakeDevice) -> None:
    """Those that wait for a compile are few, so pictures of others are still computed."""
    content = fake_model({"picture": ((1, 8, 8, 3), np.uint8)}, {"detections": ((1, 1, 1, 7), np.float32)})
    picture = np.zeros((1, 8, 8, 3), np.uint8)
    with (
        folder_of_sockets() as folder,
        serve_frigate(folder, "--timeout-ms", "30000", "--device", fake.name) as server,
        ExitStack() as stack,
    ):
        client = stack.enter_context(DetectorClient(server.address, 30_000))
        assert client.sends("good.onnx", content)["model_loaded"]
        fake.hang("compile")
        context = zmq.Context()
        stack.callback(context.term)
        for number in range(100):
            sock = stack.enter_context(context.socket(zmq.REQ))
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(server.address)
            sock.send_multipart([json.dumps({"model_data": True, "model_name": f"{number}.onnx"}).encode(), content + bytes(number)])
        server.until("clients send too many models at this moment")
        for _ in range(5):
            assert client.detect(picture, "ssd") is not None
        fake.behave()


def test_a_client_that_sends_on_while_its_picture_hangs_in_the_driver(fake: FakeDevice) -> None:
    """What comes at once makes the socket readable once. It is dropped at once, too, so another client is answered meanwhile."""
    model = fake_model({"picture": ((1, 8, 8, 3), np.uint8)}, {"detections": ((1, 1, 1, 7), np.float32)})
    context = zmq.Context()
    with folder_of_sockets() as folder, serve_frigate(folder, "--timeout-ms", "300000", "--device", fake.name) as server:
        with DetectorClient(server.address, 30_000) as client, context.socket(zmq.DEALER) as flood:
            assert client.sends("m.onnx", model)["model_loaded"]
            fake.hang("run")
            flood.setsockopt(zmq.LINGER, 0)
            flood.connect(server.address)
            flood.send_multipart([b"", b'{"model_request": true, "model_name": "m.onnx"}'])
            assert flood.recv_multipart()
            for _ in range(1000):
                flood.send_multipart([b"", header(shape=[1, 8, 8, 3]), bytes(192)])
            anyio.run(fake.heard, "run")
            for _ in range(5):
                assert client.asks_for("m.onnx")["model_loaded"]
            fake.behave()
        context.term()


def test_two_gigabytes_that_are_announced(server: Serving, good: Good) -> None:
    before = memory(server)
    for _ in range(5):
        with raw(server) as sock:
            sock.sendall(bytes([1, 0]) + long_frame(0, 2 * 10**9))
            with suppress(ConnectionResetError):
                while sock.recv(65536):  # the server closes the connection
                    pass
        good.check()
    assert memory(server) - before < FLAT_BYTES


def test_half_messages_and_connections_that_stall(server: Serving, good: Good) -> None:
    before = memory(server)
    with ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(raw(server) if number % 2 else socket.socket(socket.AF_UNIX))
            if not number % 2:
                sock.connect(server.address.removeprefix("ipc://"))
            elif number % 4 == 1:
                sock.sendall(bytes([1, 0]) + long_frame(0, 1_000_000) + bytes(500))
        for _ in range(20):
            good.check()
        assert memory(server) - before < FLAT_BYTES
    good.check()


def test_clients_that_come_and_go_do_not_make_the_server_forget_one_that_asks(server: Serving, good: Good) -> None:
    context = zmq.Context()
    try:
        for number in range(1100):
            with context.socket(zmq.REQ) as sock:
                sock.setsockopt(zmq.LINGER, 0)
                sock.connect(server.address)
                sock.send_multipart([b'{"model_request": true, "model_name": "good.onnx"}'])
                assert sock.recv() == b'{"model_available":true,"model_loaded":true}'
            if number % 100 == 0:
                good.check()
        good.check()
    finally:
        context.term()


def test_a_client_that_does_not_wait_for_its_answers(server: Serving, good: Good) -> None:
    """It sends a thousand pictures and reads nothing. Only one of them at a time is in work."""
    before = memory(server)
    context = zmq.Context()
    try:
        flood = context.socket(zmq.DEALER)
        flood.connect(server.address)
        flood.send_multipart([b"", b'{"model_request": true, "model_name": "good.onnx"}'])
        for _ in range(1000):
            flood.send_multipart([b"", header(), BYTES])
        server.until("a client sent a request before its last one was answered")
        good.check()
        other = context.socket(zmq.DEALER)
        other.connect(server.address)
        other.send_multipart([b"no empty frame", header(), BYTES])
        server.until("expected what a REQ socket sends")
        good.check()
    finally:
        context.destroy(linger=0)
    good.check()
    assert memory(server) - before < FLAT_BYTES
