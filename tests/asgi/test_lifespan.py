"""What `aionn.asgi.lifespan` does with errors of a compile, and what the routes say, without a server in between."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import aionn
import aionn.asgi
from aionn.asgi import served
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.values_models import linear_classifier

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def spec(fake: FakeDevice, **options: Any) -> served.ModelSpec:
    return aionn.Model.from_onnx(identity_model()), {"devices": (fake.name,), **options}


async def detect(request: Request) -> JSONResponse:
    burst = await aionn.asgi.burst(request.query_params.get("model", "detector"))(request)
    compilation = await aionn.asgi.compilation("detector")(request)
    return JSONResponse({"burst": type(burst).__name__, "compilation": compilation.name})


ROUTES = [*aionn.asgi.routes(), Route("/detect", detect), Mount("/inner", Starlette(routes=[Route("/detect", detect)]))]


@asynccontextmanager
async def client(lifespan: Any) -> AsyncIterator[tuple[httpx.AsyncClient, aionn.asgi.Models]]:
    """A client of an app that is under way, as a server would run it."""
    app = Starlette(routes=ROUTES)
    async with leak_check(), lifespan(app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://app") as http:
            yield http, state["aionn"]


async def until(seen: Callable[[], Any]) -> None:
    with anyio.fail_after(20):
        while not seen():  # noqa: ASYNC110  (health has no event)
            await anyio.sleep(0.005)


async def until_state(models: aionn.asgi.Models, state: str) -> aionn.Health:
    await until(lambda: models.runtime.health().state == state)
    return models.runtime.health()


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "aionn.asgi"]


async def test_the_models_serve_and_handlers_get_what_they_ask_for(fake: FakeDevice) -> None:
    async with client(aionn.asgi.lifespan({"detector": spec(fake)}, start=(), name="app")) as (http, models):
        assert (await http.get("/readyz")).status_code == 503
        await until_state(models, "serving")
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.headers["Cache-Control"]) == (200, "no-store")
        found = ready.json()
        assert (found["state"], found["text"]) == ("serving", "the runtime is serving")
        assert [(one["name"], one["state"]) for one in found["compilations"]] == [("detector", "serving")]
        assert found["devices"][0]["name"] == fake.name
        for path in ("/detect", "/inner/detect"):
            assert (await http.get(path)).json() == {"burst": "Burst", "compilation": "detector"}
        with pytest.raises(aionn.CallerError, match=r"no model 'other'; the models given to aionn.asgi.lifespan are 'detector'"):
            await http.get("/detect?model=other")


async def test_an_error_that_may_pass_is_logged_and_tried_again(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = anyio.Event()

    async def pause(seconds: float) -> None:
        assert seconds == 1.0
        await over.wait()

    class Pausing:
        def __getattr__(self, name: str) -> Any:
            return pause if name == "sleep" else getattr(anyio, name)

    monkeypatch.setattr(served, "anyio", Pausing())
    fake.crash("compile")
    async with client(aionn.asgi.lifespan({"detector": spec(fake)}, start=())) as (http, models):
        await until(lambda: logged(caplog))
        health = models.runtime.health()
        assert (health.state, health.live, health.ready) == ("starting", True, False)
        assert "tried again in 1 s" in str(health)
        assert "ended by signal 9" in str(health)
        assert (await http.get("/livez")).status_code == 200
        assert "tried again" in (await http.get("/detect")).text
        fake.behave()
        over.set()
        await until_state(models, "serving")
        assert (await http.get("/detect")).status_code == 200
    assert all("'detector'" in record.message and "is tried again in" in record.message for record in logged(caplog))


async def test_an_error_that_will_not_pass_is_logged_once_and_the_other_models_serve(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    specs: dict[str, served.ModelSpec] = {"detector": spec(fake), "missing": tmp_path / "m.onnx"}
    specs["side"] = tmp_path / "empty.onnx", {"required": False}
    async with client(aionn.asgi.lifespan(specs, start=())) as (http, models):
        await until(lambda: len(logged(caplog)) == 2 and models.wanted("detector").burst is not None)
        assert (await http.get("/detect")).status_code == 200
        health = models.runtime.health()
        assert (health.state, health.ready, len(health.reasons)) == ("starting", False, 1)
        assert "'missing' failed" in health.reasons[0]
        assert "not tried again" in health.reasons[0]
        assert {one.name: one.state for one in health.compilations} == {"detector": "serving", "missing": "failed", "side": "failed"}
        assert (await http.get("/startupz")).status_code == 503
    assert [record.levelno for record in logged(caplog)] == [logging.ERROR] * 2
    assert all("not tried again" in record.message for record in logged(caplog))


async def test_a_model_that_is_not_required_does_not_hold_up_readiness(fake: FakeDevice, tmp_path: Path) -> None:
    specs: dict[str, served.ModelSpec] = {"detector": spec(fake), "side": (tmp_path / "missing.onnx", {"required": False})}
    async with client(aionn.asgi.lifespan(specs, start=())) as (http, models):
        health = await until_state(models, "degraded")
        assert (await http.get("/readyz")).status_code == 200
        assert {one.name: one.state for one in health.compilations} == {"detector": "serving", "side": "failed"}
        assert "'side' failed" in str(health)


async def test_startupz_stays_after_the_first_time(fake: FakeDevice) -> None:
    async with client(aionn.asgi.lifespan({"detector": spec(fake)}, start=())) as (http, models):
        assert (await http.get("/startupz")).status_code == 503
        await until_state(models, "serving")
        assert (await http.get("/startupz")).status_code == 200
        await models.runtime.aclose()
        assert [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/startupz")] == [503, 503, 200]


async def test_the_end_of_the_app_in_the_midst_of_a_compile_leaves_nothing(fake: FakeDevice) -> None:
    fake.hang("compile")
    async with client(aionn.asgi.lifespan({"detector": spec(fake)}, start=())) as (_, models):
        await fake.heard("compile")
        assert models.runtime.health().state == "compiling"
    assert models.runtime.health().state == "closed"


async def test_a_model_whose_values_no_burst_takes_serves_as_a_compilation() -> None:
    specs: dict[str, served.ModelSpec] = {"detector": (linear_classifier([0, 1, 2]), {"devices": ("onnxruntime",)})}
    async with client(aionn.asgi.lifespan(specs, start=())) as (http, models):
        await until_state(models, "serving")
        assert models.wanted("detector").compilation is not None
        with pytest.raises(aionn.CallerError, match=r"use aionn.asgi.compilation\('detector'\)"):
            await http.get("/detect")


async def test_routes_of_a_runtime_that_the_app_opens_itself(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        app = Starlette(routes=aionn.asgi.routes(runtime))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:
            assert [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/startupz")] == [200, 503, 503]
            await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            assert [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/startupz")] == [200, 200, 200]


async def test_an_app_without_the_lifespan_gets_a_sentence() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=ROUTES)), base_url="http://app") as http:
        with pytest.raises(aionn.CallerError, match=r"give it lifespan=aionn\.asgi\.lifespan"):
            await http.get("/livez")


@pytest.mark.parametrize(
    ("models", "options", "sentence"),
    [
        ("detector.onnx", {}, "give paths by name"),
        ({"a": 3}, {}, "give a path, or a path and options"),
        ({"a": ("a.onnx", 3)}, {}, "give a path, or a path and options"),
        ({1: "a.onnx"}, {}, "give a path, or a path and options"),
        ({"a": ("a.onnx", {"cash_dir": "c"})}, {}, "'cash_dir', which Runtime.compile does not have"),
        ({"a": ("a.onnx", {"name": "b"})}, {}, "'name', which Runtime.compile does not have"),
        ({}, {"hang_s": 0}, "hang_s is 0"),
    ],
)
def test_wrong_arguments_are_refused_before_the_server_starts(models: Any, options: Any, sentence: str) -> None:
    with pytest.raises(aionn.CallerError, match=sentence):
        aionn.asgi.lifespan(models, **options)


def test_without_starlette_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['starlette'] = None\nimport aionn\nimport aionn.asgi"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("run pip install 'aionn[web]'")
