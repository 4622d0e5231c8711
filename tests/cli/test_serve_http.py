"""`aionn serve-http` as a person or a supervisor meets it: its lines, its answers, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette

from aionn.cli import main
from aionn.cli.serving.http import server_config
from aionn.testing import FakeDevice, identity_model
from tests.cli.serving import serve_http
from tests.real_models import carried

MODEL = {"inputs": [{"name": "input", "shape": [1, 16], "datatype": "FP32", "data": [2.5] * 16}]}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "same.onnx"
    path.write_bytes(identity_model())
    return str(path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_a_signal(model: str, tmp_path: Path, number: int, code: int) -> None:
    arguments = (model, f"vad={carried('silero')}", "--device", "onnxruntime", "--threads", "1")
    with serve_http(*arguments, "--cache-dir", str(tmp_path / "cache"), "--state-dir", str(tmp_path / "state")) as server:
        assert server.http.get("/v2/health/live").status_code == 200
        assert server.http.get("/livez").status_code == 200
        server.until_ready()
        assert server.printed[-1].endswith(f"ready: http://{server.address}/v2/models/same, http://{server.address}/v2/models/vad")
        assert [server.http.get(path).status_code for path in ("/v2/health/ready", "/readyz", "/startupz")] == [200] * 3
        assert server.http.get("/v2/models/vad").json()["inputs"][0]["shape"] == [1, 576]
        answer = server.http.post("/v2/models/same/infer", json=MODEL).json()
        assert answer["outputs"][0]["data"] == [2.5] * 16
        assert "aionn_executions_total" in server.http.get("/metrics").text
        assert server.end(number) == code
        assert len(server.printed) == (2 if code == 0 else 3), server.printed
    entries = list((tmp_path / "cache" / "entries").iterdir())
    assert len(entries) >= 2, "both models are stored"


def test_it_goes_on_when_a_driver_is_killed(model: str) -> None:
    with serve_http(model, "--device", "onnxruntime") as server:
        server.until_ready()
        (driver,) = server.drivers()
        os.kill(driver, signal.SIGKILL)
        assert server.http.post("/v2/models/same/infer", json=MODEL).status_code == 200
        assert server.end() == 0


def test_a_signal_in_the_midst_of_a_compile_ends_it(model: str, fake: FakeDevice) -> None:
    fake.hang("compile")
    with serve_http(model, "--device", fake.name) as server:
        anyio.run(fake.heard, "compile")
        response = server.http.post("/v2/models/same/infer", json=MODEL)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
        assert server.http.get("/v2/health/live").status_code == 200
        assert server.end() == 0


def test_the_largest_body(model: str) -> None:
    with serve_http(model, "--device", "reference", "--max-body", "1k") as server:
        server.until_ready()
        assert server.http.post("/v2/models/same/infer", json=MODEL).status_code == 200
        response = server.http.post("/v2/models/same/infer", content=json.dumps(MODEL).encode() + b" " * 1000)
        assert (response.status_code, "more than 1000 bytes" in response.text) == (413, True)
        assert server.end() == 0


def test_more_clients_than_the_usual_number_of_open_files(model: str) -> None:
    """The limit is low here. A connection takes a descriptor, and without one no driver gets memory for a request."""
    with ExitStack() as opened:
        server = opened.enter_context(
            serve_http(model, "--device", "onnxruntime", prefix=("sh", "-c", 'ulimit -S -n 128 && exec "$@"', "sh"))
        )
        server.until_ready()
        host, port = server.address.split(":")
        clients = [opened.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(200)]
        content = json.dumps(MODEL).encode()
        for client in clients:
            client.sendall(b"POST /v2/models/same/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        assert {client.recv(15) for client in clients} == {b"HTTP/1.1 200 OK"}
        for client in clients:
            client.close()
        assert server.end() == 0


def test_it_is_served_by_the_quick_parser() -> None:
    """uvicorn takes the one that is installed. Its own, in Python, takes half as long again for a small request."""
    config = server_config(Starlette())
    config.load()
    assert config.http_protocol_class.__name__ == "HttpToolsProtocol"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "needs a model"),
        (("missing.onnx",), 2, "there is no file 'missing.onnx'"),
        (("{model}", "{model}"), 2, "two models have the name 'same'"),
        (("a/b={model}",), 2, "cannot stand in a path"),
        (("={model}",), 2, "cannot stand in a path"),
        (("{model}", "--max-body", "many"), 2, "--max-body 'many' is not a number of bytes"),
        (("{model}", "--threads", "0"), 1, "threads"),
        (("{model}", "--device", "nope"), 1, "device 'nope' is not installed"),
        (("{model}", "--listen", "256.0.0.1:0"), 2, "--listen '256.0.0.1:0': the host '256.0.0.1' is not known"),
        (("{model}", "--listen", "192.0.2.1:0"), 1, "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
        (("{broken}",), 1, "not an ONNX model"),
    ],
)
def test_wrong_usage_is_one_sentence(
    model: str, tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"broken")
    given = [one.format(model=model, broken=tmp_path / "broken.onnx") for one in arguments]
    assert main(["serve-http", *given, *([] if "--listen" in given else ["--listen", "127.0.0.1:0"])]) == code
    errors = capfd.readouterr().err
    assert sentence in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_a_port_that_is_taken(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve-http", model, "--listen", where]) == 1
    assert f"cannot listen on {where}: Address already in use; give another address" in capfd.readouterr().err


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_without_the_packages_it_names_the_extra(missing: str, model: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from aionn.cli import main; sys.exit(main(['serve-http', {model!r}]))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == "aionn: aionn serve-http needs Starlette and uvicorn; install them with: pip install 'aionn[web]'\n"
