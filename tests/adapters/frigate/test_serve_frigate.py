"""`aionn serve-frigate` as Frigate's detectors and a person meet it: answers, models, deaths of drivers, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.adapters.frigate import detectors
from aionn.cli import main
from aionn.cli.checks.frigate import frigate
from aionn.testing import FakeDevice, fake_model, identity_model
from tests.adapters.frigate.detector_client import DetectorClient, serve_frigate
from tests.adapters.frigate.detector_models import KINDS, Kind
from tests.service.served import Served
from tests.service.served import serving as folder_of_sockets

PATIENT = ("--timeout-ms", "30000")
"""No timing of a busy machine decides a test that is not about time."""

PICTURES = 125
FOUND = np.array([[3, 0.9, 0.1, 0.2, 0.5, 0.6]], np.float32)
SSD = np.array([[[[0, 3, 0.9, 0.2, 0.1, 0.6, 0.5]]]], np.float32)
"""What a model of the fake device answers, and what it means."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_of_sockets() as found:
        yield found


def patient(endpoint: str) -> DetectorClient:
    return DetectorClient(endpoint, 30_000)


def named(model_type: str) -> Kind:
    return next(kind for kind in KINDS if kind.model_type == model_type)


def wanted_rows(kind: Kind, pictures: list[NDArray[Any]]) -> list[NDArray[Any]]:
    session = onnxruntime.InferenceSession(kind.model(), providers=["CPUExecutionProvider"])
    return [kind.rows(session.run(None, kind.inputs(picture))) for picture in pictures]


def check(client: DetectorClient, kind: Kind, seeds: range) -> None:
    pictures = [kind.picture(seed) for seed in seeds]
    for picture, rows in zip(pictures, wanted_rows(kind, pictures), strict=True):
        found = client.detect(picture, kind.model_type)
        assert found is not None
        np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)


def test_answers_are_those_of_plain_onnx_runtime(folder: Path) -> None:
    """A thousand of them. More models than it keeps are sent, and each by its own client."""
    with serve_frigate(folder, *PATIENT, "--device", "onnxruntime") as server:
        for number, kind in enumerate(KINDS):
            with patient(server.address) as client:
                name = f"{number}.onnx"
                assert client.asks_for(name) == {"model_available": False, "model_loaded": False}
                assert client.sends(name, kind.model()) == {"model_saved": True, "model_loaded": True}
                assert client.asks_for(name) == {"model_available": True, "model_loaded": True}
                check(client, kind, range(PICTURES))
        with patient(server.address) as client:
            known = [client.asks_for(f"{number}.onnx")["model_loaded"] for number in range(len(KINDS))]
        assert known == [False] * 4 + [True] * 4
        assert len(server.drivers()) == 1
        assert server.end() == 0
        assert [
            line
            for line in server.printed[1:]
            if not re.search(r"model '\d\.onnx' \(\d\.\d MB\) of a detector serves on onnxruntime after", line)
        ] == []


def test_cameras_share_one_driver_and_each_gets_its_own_answers(folder: Path) -> None:
    kinds = [named("yolox"), named("ssd"), named("dfine")]
    with serve_frigate(folder, *PATIENT, "--device", "onnxruntime") as server:

        def camera(number: int) -> None:
            kind = kinds[number % len(kinds)]
            with patient(server.address) as client:
                assert client.sends("same-name.onnx", kind.model())["model_loaded"]
                check(client, kind, range(100 * number, 100 * number + 40))

        with ThreadPoolExecutor(6) as cameras:
            list(cameras.map(camera, range(6)))
        assert len(server.drivers()) == 1
        assert server.end() == 0


def test_one_model_for_every_detector(folder: Path) -> None:
    kind = named("yologeneric")
    path = folder / "own.onnx"
    path.write_bytes(kind.model())
    with serve_frigate(folder, *PATIENT, "--model", str(path)) as server:
        with patient(server.address) as client:
            assert client.asks_for("../../etc/passwd") == {"model_available": True, "model_loaded": True}
            check(client, kind, range(3))
            assert client.sends("another.onnx", kind.model()) == {"model_saved": False, "model_loaded": False}
            check(client, kind, range(3, 5))
        server.until("the model 'another.onnx' of a client does not serve: this server has the model of --model")
        assert server.end() == 0


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("broken.onnx", b"\0" * 4096, "'broken.onnx' of a client does not serve: .*not an ONNX model"),
        ("empty.onnx", b"", "it has 0 bytes"),
        ("large.onnx", b"x" * 100_001, "it has 100001 bytes; a model has from 1 to 100000, which --max-model sets"),
        ("", b"x", "a model's name has from 1 to 255"),
        ("two-inputs.onnx", identity_model({"a": (1, 3, 8, 8), "b": (1, 3, 8, 8)}), "the model has the inputs a, b; a detector has one"),
    ],
)
def test_a_model_that_does_not_serve(folder: Path, name: str, content: bytes, sentence: str) -> None:
    kind = named("ssd")
    with serve_frigate(folder, *PATIENT, "--max-model", "100k") as server, patient(server.address) as client:
        assert client.sends(name, content) == {"model_saved": False, "model_loaded": False}
        server.until(sentence)
        assert client.asks_for(name) == {"model_available": False, "model_loaded": False}
        assert client.sends("right.onnx", kind.model())["model_loaded"]
        check(client, kind, range(2))
        assert server.end() == 0


def endless() -> bytes:
    """A model whose loop takes years."""
    numbers = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["goes"]), helper.make_node("Sin", ["v"], ["w"])],
        "body",
        [numbers("i", TensorProto.INT64, []), numbers("go", TensorProto.BOOL, []), numbers("v", TensorProto.FLOAT, (1, 3, 8, 8))],
        [numbers("goes", TensorProto.BOOL, []), numbers("w", TensorProto.FLOAT, (1, 3, 8, 8))],
    )
    picture, output = (numbers(name, TensorProto.FLOAT, (1, 3, 8, 8)) for name in ("picture", "detections"))
    constants = [numpy_helper.from_array(np.array(2**60), "times"), numpy_helper.from_array(np.array(True), "yes")]
    loop = helper.make_node("Loop", ["times", "yes", "picture"], ["detections"], body=body)
    graph = helper.make_graph([loop], "endless", [picture], [output], constants)
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


@pytest.mark.anyio
async def test_a_model_whose_first_run_never_ends_is_refused_and_its_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other clients wait for it, and its run would keep a CPU for good."""
    monkeypatch.setattr(detectors, "OPEN_S", 1.0)
    async with aionn.Runtime() as runtime:
        serving = detectors.Detectors(runtime, {"devices": ("onnxruntime",)}, 10**6, lambda _: None)
        try:
            with pytest.raises(aionn.DeadlineError):
                await serving.receive("endless.onnx", memoryview(endless()))
            driver = psutil.Process(next(device.pid for device in runtime.devices if device.name == "onnxruntime"))
            right = await serving.receive("right.onnx", memoryview(named("ssd").model()))
            assert serving.find("endless.onnx") is None
            assert serving.find("right.onnx") is right
            before = driver.cpu_times()
            await anyio.sleep(1)
            after = driver.cpu_times()
            assert after.user + after.system - before.user - before.system < 0.5
        finally:
            serving.end()


def test_the_model_that_was_unused_for_longest_makes_room(folder: Path) -> None:
    kind = named("ssd")
    with serve_frigate(folder, *PATIENT) as server, ExitStack() as stack:
        clients = [stack.enter_context(patient(server.address)) for _ in range(5)]
        for number, client in enumerate(clients[:4]):
            assert client.sends(f"{number}.onnx", kind.model())["model_loaded"]
        for client in (*clients[1:4], clients[0]):
            check(client, kind, range(1))
        assert clients[4].sends("4.onnx", kind.model())["model_loaded"]
        assert [clients[4].asks_for(f"{number}.onnx")["model_loaded"] for number in range(5)] == [True, False, True, True, True]
        check(clients[0], kind, range(1, 3))
        assert server.end() == 0


def test_a_model_with_an_open_batch_axis_has_run_before_it_counts_as_loaded(folder: Path, fake: FakeDevice) -> None:
    model = fake_model({"picture": (("batch", 8, 8, 3), np.uint8)}, {"detections": ((1, 1, 1, 7), np.float32)})
    with serve_frigate(folder, *PATIENT, "--device", fake.name) as server, patient(server.address) as client:
        assert client.sends("m.onnx", model)["model_loaded"]
        anyio.run(fake.heard, "run")
        assert server.end() == 0


@pytest.mark.parametrize("name", ["../up.onnx", "/tmp/absolute.onnx", "a/b.onnx", ".", "n" * 255])
def test_a_name_is_never_a_path(folder: Path, name: str) -> None:
    before = set(folder.rglob("*"))
    kind = named("ssd")
    with serve_frigate(folder, *PATIENT) as server, patient(server.address) as client:
        assert client.sends(name, kind.model())["model_loaded"]
        check(client, kind, range(2))
        files = [
            Path(path) for place in ("/dev/shm", "/tmp", "/var/tmp") for path in glob(f"{place}/aionn-exports-{server.process.pid}-*/*")
        ]
        assert [re.sub("[0-9a-f]{32}", "", path.name) for path in files] == [".onnx"]
        assert files[0].parent.stat().st_mode & 0o777 == 0o700
        assert server.end() == 0
    assert not files[0].parent.exists()
    assert not [path for path in set(folder.rglob("*")) - before if path.suffix == ".onnx"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_a_signal(folder: Path, number: int, code: int) -> None:
    with serve_frigate(folder) as server, patient(server.address) as client:
        assert client.sends("m.onnx", named("ssd").model())["model_loaded"]
        assert (folder / "detector").is_socket()
        assert server.end(number) == code
    assert not (folder / "detector").exists()


def test_a_signal_in_the_midst_of_a_compile_ends_it(folder: Path, fake: FakeDevice) -> None:
    fake.hang("compile")
    with serve_frigate(folder, *PATIENT, "--device", fake.name) as server, patient(server.address) as client:
        thread = threading.Thread(target=lambda: client.ask([b'{"model_data": true, "model_name": "m.onnx"}', fake_model()], 1000))
        thread.start()
        anyio.run(fake.heard, "compile")
        thread.join()
        assert client.asks_for("m.onnx") == {"model_available": False, "model_loaded": False}
        assert server.end() == 0


def fake_detector() -> bytes:
    return fake_model({"picture": ((1, 8, 8, 3), np.uint8)}, {"detections": ((1, 1, 1, 7), np.float32)})


PICTURE = np.zeros((1, 8, 8, 3), np.uint8)


@contextmanager
def asked(client: DetectorClient, answers: list[NDArray[np.float32] | None]) -> Iterator[None]:
    """Ask for one picture in a thread while the body runs."""
    thread = threading.Thread(target=lambda: answers.append(client.detect(PICTURE, "ssd")))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_picture_that_is_in_a_driver_when_it_dies_is_computed_in_the_next_one(folder: Path, fake: FakeDevice) -> None:
    fake.answer({"detections": SSD})
    answers: list[NDArray[np.float32] | None] = []
    with serve_frigate(folder, *PATIENT, "--device", fake.name) as server, patient(server.address) as client:
        assert client.sends("m.onnx", fake_detector())["model_loaded"]
        fake.hang("run")
        with asked(client, answers):
            os.kill(anyio.run(fake.heard, "run"), signal.SIGKILL)
            fake.tell(hang=())
        assert answers[0] is not None
        assert np.array_equal(answers[0][:1], FOUND), "never zeros"
        assert server.end() == 0


def test_a_driver_that_dies_is_replaced_before_the_next_picture_comes(folder: Path, fake: FakeDevice) -> None:
    """The new driver has run the model when no client has sent anything since the death."""
    fake.answer({"detections": SSD})
    with serve_frigate(folder, *PATIENT, "--device", fake.name) as server, patient(server.address) as client:
        assert client.sends("m.onnx", fake_detector())["model_loaded"]
        (pid,) = server.drivers()
        for _ in range(3):
            fake.tell()  # from here on, what is heard is new
            os.kill(pid, signal.SIGKILL)
            pid, before = anyio.run(fake.heard, "run"), pid
            assert pid != before
            found = client.detect(PICTURE, "ssd")
            assert found is not None
            assert np.array_equal(found[:1], FOUND)
        assert server.end() == 0


def test_what_comes_too_late_is_not_answered(folder: Path, fake: FakeDevice) -> None:
    fake.answer({"detections": SSD})
    with serve_frigate(folder, "--device", fake.name) as server, DetectorClient(f"ipc://{folder}/detector") as client:
        assert client.sends("m.onnx", fake_detector())["model_loaded"]
        fake.hang("run")
        assert client.detect(PICTURE, "ssd") is None
        server.until("a request was not answered within 200 ms; if this goes on, take a smaller model")
        fake.behave()
        fake.answer({"detections": SSD})
        found = None
        while found is None:  # each answer that comes is right
            assert client.asks_for("m.onnx")["model_loaded"], "a client that connects anew asks for its model"
            found = client.detect(PICTURE, "ssd")
        assert np.array_equal(found[:1], FOUND)
        assert server.end() == 0


def test_a_client_that_connects_anew_gets_no_answer_of_a_model_that_it_has_not_asked_for(folder: Path) -> None:
    kind = named("ssd")
    with serve_frigate(folder, *PATIENT) as server:
        with patient(server.address) as client:
            assert client.sends("m.onnx", kind.model())["model_loaded"]
        with DetectorClient(server.address) as client:
            assert client.detect(kind.picture(0), "ssd") is None
            server.until("a client sent a tensor and has not asked for a model")
        assert server.end() == 0


def test_a_server_whose_socket_is_removed_ends(folder: Path) -> None:
    with serve_frigate(folder) as server:
        (folder / "detector").unlink()
        server.until(f"aionn: the socket {folder}/detector has been removed; start this command again")
        assert server.process.wait() == 1


def test_a_model_cannot_read_the_file_of_another_one_as_its_external_data(folder: Path) -> None:
    """It tries each name that stands in the folder of received models, as far as a client can know it."""
    kind = named("ssd")
    with serve_frigate(folder, *PATIENT) as server, patient(server.address) as client:
        assert client.sends("first.onnx", kind.model())["model_loaded"]
        spy = onnx.load_model_from_string(kind.model())
        weights = spy.graph.initializer[0]
        weights.data_location = TensorProto.EXTERNAL
        for name in ("0.onnx", "1.onnx", "2.onnx", "first.onnx"):
            del weights.external_data[:]
            weights.external_data.add(key="location", value=name)
            assert not client.sends("spy.onnx", spy.SerializeToString())["model_loaded"]
            server.until("'spy.onnx' of a client does not serve: ")
        assert server.end() == 0


def test_the_drivers_of_a_service(folder: Path) -> None:
    kind = named("yolox")
    service = Served(folder)
    try:
        with (
            serve_frigate(folder, *PATIENT, "--device", "onnxruntime", "--service", service.path) as server,
            patient(server.address) as client,
        ):
            assert client.sends("m.onnx", kind.model())["model_loaded"]
            check(client, kind, range(5))
            assert server.drivers() == []
            (driver,) = service.facts()["drivers"]
            os.kill(driver["pid"], signal.SIGKILL)
            check(client, kind, range(5, 10))
            assert server.end() == 0
    finally:
        service.end()


def test_a_socket_that_a_killed_server_has_left_is_replaced(folder: Path) -> None:
    with serve_frigate(folder) as server:
        server.process.kill()
        server.process.wait()
        assert (folder / "detector").is_socket()
    with serve_frigate(folder, *PATIENT) as server, patient(server.address) as client:
        assert client.asks_for("m.onnx") == {"model_available": False, "model_loaded": False}
        assert server.end() == 0


def test_an_endpoint_where_another_server_listens(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve_frigate(folder, *PATIENT) as server, patient(server.address) as client:
        assert main(["serve-frigate", "--endpoint", server.address]) == 2
        assert f"listens at {folder}/detector already; stop it, or give another path with --endpoint" in capfd.readouterr().err
        assert client.asks_for("m.onnx") == {"model_available": False, "model_loaded": False}
        assert server.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--endpoint", "tcp://127.0.0.1:5555"), 2, "--endpoint 'tcp://127.0.0.1:5555': only Unix sockets are served"),
        (("--endpoint", "ipc://relative"), 2, "only Unix sockets are served; give an absolute path, as ipc:///run/aionn/frigate"),
        (
            ("--endpoint", "ipc:///tmp/detector"),
            2,
            "others may write to the folder /tmp; give a path in a folder of this user's with --endpoint",
        ),
        (("--endpoint", "ipc://{folder}/" + "n" * 120), 1, "give another path with --endpoint"),
        (("--endpoint", "ipc://{folder}/plain.onnx"), 2, "plain.onnx is not a socket; give another path with --endpoint"),
        (("--model", "missing.onnx"), 2, "there is no file 'missing.onnx'"),
        (("--model", "{folder}/plain.onnx"), 1, "not an ONNX model"),
        (("--endpoint", "ipc://{folder}/" + "n" * 90), 1, "AF_UNIX path too long; give another path with --endpoint"),
        (("--timeout-ms", "0"), 2, "--timeout-ms is 0"),
        (("--threads", "0"), 2, "--threads=0; give a whole number, from 1 to 1024"),
        (("--device", "nonsense"), 2, "device 'nonsense' is not installed"),
        (("--max-model", "many"), 2, "--max-model 'many' is not a number of bytes"),
        (("--service", "{folder}/none"), 1, "{folder}/none"),
    ],
)
def test_wrong_usage_is_one_sentence(
    folder: Path, arguments: tuple[str, ...], code: int, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "plain.onnx").write_bytes(b"plain")
    given = {"--endpoint": f"ipc://{folder}/socket", "--state-dir": f"{folder}/state"} | {arguments[0]: arguments[1].format(folder=folder)}
    assert main(["serve-frigate", *chain.from_iterable(given.items())]) == code
    errors = capfd.readouterr().err
    assert sentence.format(folder=folder) in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not (folder / "socket").exists()


def test_the_doctor_looks_at_the_endpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"ipc://{folder}/detector"
    row = frigate(endpoint)
    assert (row.status, row.found) == (
        "ok",
        f"no server listens at {endpoint}, which is Frigate's default; other endpoints are not looked at",
    )
    with serve_frigate(folder) as server:
        row = frigate(endpoint)
        assert (row.status, row.found) == ("ok", f"a server listens at {endpoint}")
        server.process.kill()
        server.process.wait()
        row = frigate(endpoint)
        assert (row.status, row.way_out) == ("warn", "start aionn serve-frigate")
    row = frigate(f"{endpoint}.lock")
    assert (row.status, row.way_out) == ("warn", "start aionn serve-frigate"), "a plain file"
    row = frigate(f"{endpoint}/below")
    assert (row.status, row.found) == ("fail", f"{folder}/detector/below: Not a directory")
    monkeypatch.setattr("aionn.cli.checks.frigate.find_spec", lambda name: None)
    assert "pip install 'aionn[frigate]'" in frigate(endpoint).found


def test_without_pyzmq_it_names_the_extra() -> None:
    script = "import sys; sys.modules['zmq'] = None; from aionn.cli import main; sys.exit(main(['serve-frigate']))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == "aionn: aionn serve-frigate needs pyzmq; install it with: pip install 'aionn[frigate]'\n"
