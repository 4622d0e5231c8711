"""What a detector of Frigate gets from `aionn serve-frigate`, for `tests.bench.adapters`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from aionn.adapters.frigate.decoding import rows_of
from aionn.engines.processor import usable_cpus
from tests.adapters.frigate.detector_client import DetectorClient, serve_frigate
from tests.adapters.frigate.detector_models import KINDS
from tests.bench.adapters_detector import DetectorProcess
from tests.bench.real_report import Lanes, NotAvailableError, Options, Report, Taken, ratios
from tests.bench.real_worker import session_of
from tests.bench.starts import divided
from tests.bench.starts_processes import descendants, group_bytes
from tests.cli.serving import Serving
from tests.service.served import serving as folder_of_sockets

MODEL = "yolo.onnx"
SIDE, CAMERAS, RATE = 320, 6, 10.0
SHAPE = (1, 3, SIDE, SIDE)
KINDLY = ("--timeout-ms", "30000")
KILLS, ANSWERS = 5, 1000
BETWEEN_S, SETTLE_S = 1.0, 1.0

Picture = NDArray[np.float32]


def yolo(dtype: str = "float32", width: int = 32, classes: int = 80) -> bytes:
    """Return a model of the size of a small YOLO: convolutions of four sizes, and heads at strides 8, 16 and 32, with random weights.

    `dtype`: of the picture, "float32" or "uint8".
    """
    random = np.random.default_rng(1)
    nodes: list[Any] = []
    constants: dict[str, NDArray[Any]] = {}

    def convolution(entry: str, channels: tuple[int, int], kernel: int, stride: int, bias: NDArray[Any] | None = None) -> str:
        name, (given, made) = f"c{len(nodes)}", channels
        weights = random.standard_normal((made, given, kernel, kernel)) * np.sqrt((1 if bias is not None else 2.8) / (given * kernel**2))
        if bias is not None:  # boxes all over the picture, and scores of which a tenth counts
            weights *= np.array([400] * 2 + [60] * 2 + [9] * classes)[:, None, None, None]
        constants[f"{name}.w"] = weights.astype(np.float32)
        constants[f"{name}.b"] = (np.zeros(made) if bias is None else bias).astype(np.float32)
        nodes.append(helper.make_node("Conv", [entry, f"{name}.w", f"{name}.b"], [name], strides=[stride] * 2, pads=[kernel // 2] * 4))
        if bias is None:
            nodes.append(helper.make_node("Sigmoid", [name], [f"{name}.s"]))
            nodes.append(helper.make_node("Mul", [name, f"{name}.s"], [f"{name}.o"]))
        return name if bias is not None else f"{name}.o"

    entry = "images"
    if dtype == "uint8":
        constants["most"] = np.array(255, np.float32)
        nodes.append(helper.make_node("Cast", ["images"], ["numbers"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Div", ["numbers", "most"], ["shares"]))
        entry = "shares"
    last, channels = convolution(entry, (3, width // 2), 3, 2), width // 2
    flat, places = [], 0
    for number in range(4):
        last = convolution(last, (channels, width // 2 * 2**number), 3, 2)
        channels = width // 2 * 2**number
        for _ in range(2):
            last = convolution(last, (channels, channels), 3, 1)
        if number:
            cells = (SIDE // (4 * 2**number)) ** 2
            head = convolution(last, (channels, 4 + classes), 1, 1, np.array([SIDE / 2] * 2 + [40] * 2 + [-5] * classes))
            constants[f"{head}.shape"] = np.array([1, 4 + classes, cells])
            nodes.append(helper.make_node("Reshape", [head, f"{head}.shape"], [f"{head}.flat"]))
            flat.append(f"{head}.flat")
            places += cells
    constants["parts"] = np.array([4, classes])
    nodes.append(helper.make_node("Concat", flat, ["all"], axis=2))
    nodes.append(helper.make_node("Split", ["all", "parts"], ["boxes", "logits"], axis=1))
    nodes.append(helper.make_node("Sigmoid", ["logits"], ["scores"]))
    nodes.append(helper.make_node("Concat", ["boxes", "scores"], ["output0"], axis=1))
    graph = helper.make_graph(
        nodes,
        "yolo",
        [helper.make_tensor_value_info("images", TensorProto.UINT8 if dtype == "uint8" else TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, (1, 4 + classes, places))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


@contextmanager
def folder_with_model(dtype: str = "float32") -> Iterator[Path]:
    with folder_of_sockets() as folder:
        (folder / MODEL).write_bytes(yolo(dtype))
        yield folder


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Serving]:
    """Run the server with the model in a folder."""
    with serve_frigate(folder, "--device", "onnxruntime", "--model", str(folder / MODEL), *arguments) as server:
        yield server
        server.end()


def picture(seed: int = 0, dtype: str = "float32") -> NDArray[Any]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, SHAPE, np.uint8) if dtype == "uint8" else random.random(SHAPE, np.float32)


# ---- D1 ----------------------------------------------------------------------------------------------------------------------


async def detector(report: Report, options: Options) -> None:
    """D1: one client, as Frigate's detector is one."""
    report.check("D1", f"answers of {ANSWERS} that differ from plain ONNX Runtime with plain decoding", [_differing()], 0.0)
    for dtype in ("uint8", "float32"):
        _added(report, options, dtype)
    after_ms, wrong = _after_kills(options.rounds)
    report.check("D1", "ms from SIGKILL of the driver to the next right answer", after_ms, 200.0)
    report.check("D1", f"wrong answers after {len(after_ms)} kills", [float(wrong)], 0.0)


def _added(report: Report, options: Options, dtype: str) -> None:
    """Measure what the way to the driver adds to a picture: beside a session with default options, and beside one with the driver's.

    Threads of a default session spin. So its time is far from equal on different machines, and a part of the difference is not the way's.
    Much of the way's own time is ZeroMQ's, so an echo of the same bytes is shown, too.
    """
    with folder_with_model(dtype) as folder, served(folder, *KINDLY) as server, DetectorClient(server.address, 30_000) as client:
        usual, threads = onnxruntime.InferenceSession(folder / MODEL), usable_cpus()
        like_drivers, image = session_of(str(folder / MODEL), threads), picture(dtype=dtype)

        def ours() -> NDArray[Any] | None:
            return client.detect(image, "yologeneric")

        def plain(session: Any) -> NDArray[Any]:
            return rows_of("yologeneric", {"": session.run(None, {"images": image})[0]}, SIDE, SIDE)

        client.asks_for(MODEL)
        right = plain(usual)
        found = ours()
        if found is None or not right.any() or not np.allclose(found, right, rtol=1e-3, atol=1e-4):
            raise NotAvailableError("the answers of the model differ")
        beside = {"default options": usual, f"{threads} threads, no spinning": like_drivers}
        lanes: Lanes = {"aionn serve-frigate": [], **{name: [] for name in beside}, "an echo over ZeroMQ": []}
        with _echoing(folder) as endpoint, DetectorClient(endpoint, 30_000) as other:
            acts = (ours, lambda: plain(usual), lambda: plain(like_drivers), lambda: other.detect(image, "yologeneric"))
            for _ in range(options.rounds):
                for name, act in zip(lanes, acts, strict=True):
                    lanes[name].append(_paced(act, options.frames))
        report.show(f"a picture of {SIDE} x {SIDE} {dtype}, 30 a second, with the decoding; plain ONNX Runtime by its options", lanes)
        for name in beside:
            added_ms = [(a.p50 - b.p50) / 1e3 for a, b in zip(lanes["aionn serve-frigate"], lanes[name], strict=True)]
            report.check("D1", f"added p50 in ms, {dtype}, beside ORT with {name}", added_ms, 1.0)


@contextmanager
def _echoing(folder: Path) -> Iterator[str]:
    """Run a process that answers each request with 480 bytes."""
    endpoint = f"ipc://{folder}/echo"
    script = (
        "import sys, zmq\n"
        "router = zmq.Context().socket(zmq.ROUTER)\n"
        "router.bind(sys.argv[1])\n"
        "while True:\n"
        "    client, *_ = router.recv_multipart(copy=False)\n"
        "    router.send_multipart([client.bytes, b'', bytes(480)])"
    )
    with subprocess.Popen([sys.executable, "-c", script, endpoint]) as process:
        try:
            yield endpoint
        finally:
            process.kill()


def _differing() -> float:
    differing = 0
    with folder_of_sockets() as folder, serve_frigate(folder, *KINDLY, "--device", "onnxruntime") as server:
        for number, kind in enumerate(KINDS):
            content = kind.model()
            session = onnxruntime.InferenceSession(content)
            with DetectorClient(server.address, 30_000) as client:
                client.sends(f"{number}.onnx", content)
                for seed in range(ANSWERS // len(KINDS)):
                    image = kind.picture(seed)
                    wanted = kind.rows(session.run(None, kind.inputs(image)))
                    found = client.detect(image, kind.model_type)
                    differing += found is None or not np.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        server.end()
    return float(differing)


def _paced(act: Callable[[], object], count: int, rate: float = 30.0) -> Taken:
    taken = []
    due_s = time.monotonic()
    for _ in range(count):
        time.sleep(max(0.0, due_s - time.monotonic()))
        began_ns = time.perf_counter_ns()
        act()
        taken.append(time.perf_counter_ns() - began_ns)
        due_s += 1 / rate
    return Taken.of(taken)


def _after_kills(rounds: int) -> tuple[list[float], int]:
    """Return the time from each kill to the next right answer, and how many answers were wrong. The client has Frigate's own timeout."""
    image = picture()
    outputs = onnxruntime.InferenceSession(yolo()).run(None, {"images": image})
    right = rows_of("yologeneric", {"": outputs[0]}, SIDE, SIDE)
    after_ms: list[float] = []
    wrong = 0
    with folder_with_model() as folder, served(folder) as server, DetectorClient(server.address) as client:
        for _ in range(KILLS * rounds):
            end_s = time.monotonic() + BETWEEN_S
            while time.monotonic() < end_s:
                client.asks_for(MODEL)
                client.detect(image, "yologeneric")
            (pid,) = [pid for pid in descendants(server.process.pid) if _is_driver(pid)]
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            while True:
                found = client.detect(image, "yologeneric")
                if found is not None and np.allclose(found, right, rtol=1e-3, atol=1e-4):
                    break
                wrong += found is not None
                client.asks_for(MODEL)
            after_ms.append((time.monotonic() - killed_s) * 1e3)
    return after_ms, wrong


def _is_driver(pid: int) -> bool:
    return b"aionn.driver\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


# ---- D2 ----------------------------------------------------------------------------------------------------------------------


async def cameras(report: Report, options: Options) -> None:
    """D2: a thread for each camera, in this process."""
    multiprocessing.set_start_method("spawn", force=True)
    lanes: Lanes = {"aionn serve-frigate": [], "a detector process": []}
    held: dict[str, list[float]] = {name: [] for name in lanes}
    ours, theirs = lanes
    with folder_with_model() as folder:
        with served(folder):
            pass  # it fills the cache, as the first start on a machine does
        for number in range(options.rounds):
            for name in (ours, theirs) if number % 2 else (theirs, ours):
                taken, memory_mb = (_served_six if name == ours else _rival_six)(folder, options.frames)
                lanes[name].append(taken)
                held[name].append(memory_mb)
    report.show(f"{CAMERAS} cameras at {RATE:g} a second, from the moment at which a picture is due", lanes)
    report.note("memory", held, "MB")
    report.check("D2", "p99: aionn serve-frigate / a detector process", ratios(lanes, ours, theirs, "p99"), 1.0)
    report.check("D2", "PSS: aionn serve-frigate / a detector process", divided(held[ours], held[theirs]), 1.3)


def _served_six(folder: Path, frames: int) -> tuple[Taken, float]:
    with ExitStack() as stack:
        server = stack.enter_context(served(folder, *KINDLY))
        clients = [stack.enter_context(DetectorClient(server.address, 30_000)) for _ in range(CAMERAS)]
        taken = _six(lambda camera, image: clients[camera].detect(image, "yologeneric"), frames)
        return taken, group_bytes([server.process.pid, *descendants(server.process.pid)]) / 1e6


def _rival_six(folder: Path, frames: int) -> tuple[Taken, float]:
    with DetectorProcess(str(folder / MODEL), SHAPE, CAMERAS) as rival:
        taken = _six(rival.detect, frames)
        assert rival.process.pid is not None
        return taken, group_bytes([rival.process.pid]) / 1e6


def _six(ask: Callable[[int, Picture], object], frames: int) -> Taken:
    """Ask for each camera in its thread, at its rate and a sixth of a period after the camera before it."""
    taken: list[int] = []
    errors: list[BaseException] = []
    begin_ns = time.monotonic_ns() + int(SETTLE_S * 1e9)

    def camera(number: int) -> None:
        image = picture(number)
        try:
            for frame in range(-10, frames):  # the first ones do not count
                due_ns = begin_ns + int((frame + 10 + number / CAMERAS) / RATE * 1e9)
                time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
                ask(number, image)
                if frame >= 0:
                    taken.append(time.monotonic_ns() - due_ns)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=camera, args=(number,)) for number in range(CAMERAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise NotAvailableError(f"a camera failed: {errors[0]!r}")
    return Taken.of(taken)
