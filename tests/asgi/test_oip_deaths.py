"""What clients of the Open Inference Protocol see of compiles, deaths, hangs, deadlines and ends: the statuses, and no lost frame."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

import aionn
import aionn.asgi
from aionn.testing import FakeDevice, identity_model
from tests.asgi.oip_by_hand import connected, head
from tests.asgi.oip_served import OipServed, oip_served
from tests.leaks import leak_check

LENGTH = "Inference-Header-Content-Length"
COLUMNS = 4096


def specs(fake: FakeDevice) -> dict[str, aionn.asgi.ModelSpec]:
    return {"same": (aionn.Model.from_onnx(identity_model({"input": ("N", COLUMNS)})), {"devices": (fake.name,)})}


def request(rows: int = 1, value: float = 1.0, **parameters: Any) -> tuple[bytes, dict[str, str]]:
    data = np.full((rows, COLUMNS), value, np.float32).tobytes()
    one = {"name": "input", "shape": [rows, COLUMNS], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True, **parameters}}).encode()
    return text + data, {LENGTH: str(len(text))}


SMALL, LARGE = 1, 96
"""Rows of a request whose body comes at once, and of one that is written into a frame while it comes."""


def values(response: httpx.Response) -> set[float]:
    assert response.status_code == 200, response.text
    return set(np.frombuffer(response.content[int(response.headers[LENGTH]) :], np.float32).tolist())


def driver_of(served: OipServed) -> int:
    async def pid() -> int | None:
        return served.models.runtime.health().devices[0].pid

    found = served.portal.call(pid)
    assert found is not None
    return found


def retried(served: OipServed, name: str = "same") -> int:
    return served.counts(name)["connections"] - 1


def test_a_model_that_compiles_is_answered_with_503(fake: FakeDevice) -> None:
    fake.hang("compile")
    with oip_served(specs(fake), wait=False) as served:
        anyio.run(fake.heard, "compile")
        assert served.http.get("/v2/health/live").status_code == 200
        for response in (
            served.http.get("/v2/health/ready"),
            served.http.get("/v2/models/same"),
            served.http.get("/v2/models/same/ready"),
            served.http.get("/v2/models/same/stats"),
            served.infer("same", *request()),
        ):
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
        assert "does not serve yet" in served.infer("same", *request()).json()["error"]
        assert served.http.get("/v2/models/stats").json() == {"model_stats": []}
        assert served.infer("other", *request()).status_code == 404
        fake.behave()
        served.portal.call(served.models.wait)
        assert served.http.get("/v2/models/same/ready").json() == {"name": "same", "ready": True}
        assert values(served.infer("same", *request())) == {1.0}


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_a_call_is_made_again_when_its_driver_dies(fake: FakeDevice, rows: int) -> None:
    """The driver is killed while it computes. The client sees latency, not an error."""
    with oip_served(specs(fake)) as served:
        assert values(served.infer("same", *request(rows, 2.0))) == {2.0}
        fake.hang("run")
        found: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: found.append(served.infer("same", *request(rows, 3.0))))
        asking.start()
        pid = anyio.run(fake.heard, "run")
        os.kill(pid, signal.SIGKILL)  # first, or the run that hangs would go on and answer
        fake.behave()
        asking.join()
        assert values(found[0]) == {3.0}
        assert retried(served) == 1
        served.no_frame_is_lost("same")


@pytest.mark.parametrize("rows", [SMALL, LARGE])
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_request_that_kills_every_driver_ends(fake: FakeDevice, rows: int, retries: int) -> None:
    with oip_served(specs(fake), retry_stateless=retries) as served:
        first = driver_of(served)
        fake.crash("run")
        response = served.infer("same", *request(rows))
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "ended by signal 9" in response.json()["error"]
        assert retried(served) == retries
        fake.behave()
        assert values(served.infer("same", *request(rows, 4.0))) == {4.0}
        assert driver_of(served) != first
        served.no_frame_is_lost("same")


def test_an_execution_that_fails_is_not_made_again(fake: FakeDevice) -> None:
    with oip_served(specs(fake)) as served:
        fake.fail("the sum is odd")
        response = served.infer("same", *request())
        assert response.status_code == 422
        assert "the sum is odd" in response.json()["error"]
        assert served.counts("same")["failed"] == 1
        fake.behave()
        stats = served.http.get("/v2/models/same/stats").json()["model_stats"][0]["inference_stats"]
        assert (stats["success"]["count"], stats["fail"]["count"]) == (0, 1)
        assert stats["fail"]["ns"] > 0


def test_a_hang_is_503_and_not_tried_again(fake: FakeDevice) -> None:
    with oip_served(specs(fake), hang_s=0.5) as served:
        fake.hang("run", with_gil=True)
        response = served.infer("same", *request())
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "made no progress" in response.json()["error"]
        fake.behave()
        assert values(served.infer("same", *request())) == {1.0}
        assert retried(served) == 1, "one connection after the hang, for the next request"


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_the_timeout_of_a_request_is_504(fake: FakeDevice, rows: int) -> None:
    with oip_served(specs(fake)) as served:
        fake.hang("run")
        response = served.infer("same", *request(rows, timeout=50_000))
        assert response.status_code == 504
        assert "deadline" in response.json()["error"]
        fake.behave()
        assert values(served.infer("same", *request(rows, timeout=30_000_000))) == {1.0}
        served.no_frame_is_lost("same")


def test_a_timeout_that_has_passed_runs_nothing(fake: FakeDevice) -> None:
    with oip_served(specs(fake)) as served:
        assert served.infer("same", *request(LARGE, timeout=1)).status_code == 504
        assert served.counts("same")["computed"] == served.counts("same")["failed"] == 0


def test_a_client_that_leaves_while_the_driver_computes_leaves_no_frame(fake: FakeDevice) -> None:
    with oip_served(specs(fake)) as served:
        fake.hang("run")
        content, headers = request(LARGE)
        lines = (f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in headers.items()))
        with connected(served) as leaving:
            leaving.sendall(head("same", *lines) + content)
            anyio.run(fake.heard, "run")
        fake.behave()
        began = time.monotonic()
        while served.counts("same")["computed"] == 0:
            assert time.monotonic() - began < 30
        assert values(served.infer("same", *request())) == {1.0}
        served.no_frame_is_lost("same")


def test_a_closed_runtime_is_503(fake: FakeDevice) -> None:
    with oip_served(specs(fake)) as served:
        served.portal.call(served.models.runtime.aclose)
        assert served.http.get("/v2/health/live").status_code == 503
        assert served.http.get("/v2/models/same/ready").status_code == 503
        for rows in (SMALL, LARGE):
            response = served.infer("same", *request(rows))
            assert (response.status_code, "closed" in response.text) == (503, True), response.text


# ---- compilations that the app has made itself ----------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_compilations_of_the_app_by_name(fake: FakeDevice, anyio_backend: Any) -> None:
    async with leak_check(), aionn.Runtime(start=()) as runtime:
        first = await runtime.compile(aionn.Model.from_onnx(identity_model({"input": ("N", COLUMNS)})), devices=(fake.name,))
        models = {"same": first}
        app = Starlette(routes=aionn.asgi.oip(runtime, models))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:

            async def infer(name: str) -> httpx.Response:
                content, headers = request()
                return await http.post(f"/v2/models/{name}/infer", content=content, headers=headers)

            async with anyio.create_task_group() as tasks:  # the burst is opened once
                for _ in range(8):
                    tasks.start_soon(infer, "same")
            assert (await http.get("/v2/health/ready")).status_code == 200
            stats = (await http.get("/v2/models/same/stats")).json()["model_stats"][0]
            assert (stats["inference_count"], stats["inference_stats"]["success"]["count"]) == (8, 8)
            models["later"] = await runtime.compile(aionn.Model.from_onnx(identity_model({"input": ("N", COLUMNS)})), devices=(fake.name,))
            assert values(await infer("later")) == {1.0}
            await first.aclose()
            models["same"] = models["later"]
            assert values(await infer("same")) == {1.0}
            two = aionn.Model.from_onnx(identity_model({"input": ("N", COLUMNS), "second": ("N", COLUMNS)}))
            models["same"] = await runtime.compile(two, devices=(fake.name,))
            refused = await infer("same")  # with the JSON that fitted the model before
            assert (refused.status_code, "the request has no input 'second'" in refused.text) == (400, True)
            del models["later"]
            assert (await infer("later")).status_code == 404


@pytest.mark.anyio
async def test_wrong_arguments(fake: FakeDevice) -> None:
    with pytest.raises(aionn.CallerError, match=r"models by name need their runtime"):
        aionn.asgi.oip(None, {})
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CallerError, match="a runtime without models"):
            aionn.asgi.oip(runtime)
        with pytest.raises(aionn.CallerError, match="give compilations by name"):
            aionn.asgi.oip(runtime, "model.onnx")  # type: ignore[arg-type]
        with pytest.raises(aionn.CallerError, match="give a compilation"):
            aionn.asgi.oip(runtime, {"a": "model.onnx"})  # type: ignore[dict-item]
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        with pytest.raises(aionn.CallerError, match="without '/'"):
            aionn.asgi.oip(runtime, {"a/b": compilation})
    with pytest.raises(aionn.CallerError, match="max_body_bytes"):
        aionn.asgi.oip(max_body_bytes=0)
    with pytest.raises(aionn.CallerError, match="retry_stateless"):
        aionn.asgi.oip(retry_stateless=-1)
