"""What the clients of a web app see when its drivers are killed again and again."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from aionn.testing import FakeDevice
from tests.asgi.served import Served, served

CLIENTS, KILLS = 8, 20


def ask(port: int, number: int, over: Event, found: Counter[str]) -> None:
    """Ask again and again until `over`. Count in `found` how often each answer came, and what ended a connection."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while not over.is_set():
            try:
                response = http.post("/detect", json=[float(number)] * 16)
            except httpx.HTTPError as error:
                found[type(error).__name__] += 1
                continue
            found[str(response.status_code)] += 1
            if response.status_code == 200:
                assert response.json() == [float(number)] * 16
            elif response.status_code == 503:
                assert int(response.headers["Retry-After"]) >= 1
                assert "does not serve now (DriverDiedError)" in response.json()["detail"]


def storm(app: Served) -> tuple[Counter[str], int]:
    """Kill the driver again and again under the calls of several clients. Return all answers, and how many calls met a death."""
    app.until_ready()
    over, found = Event(), [Counter[str]() for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, app.port, number, over, found[number]) for number in range(CLIENTS)]
        try:
            for _ in range(KILLS):
                before = [one["200"] for one in found]
                # The next driver serves every client, so no death comes soon after another one, and starts are not put off.
                while any(one["200"] <= count for one, count in zip(found, before, strict=True)):
                    assert not any(client.done() for client in clients), [client.exception() for client in clients if client.done()]
                    over.wait(0.005)
                os.kill(app.drivers()[0], signal.SIGKILL)
        finally:
            over.set()
        for client in clients:
            client.result()
    return sum(found, Counter()), app.http.get("/died").json()


def test_a_death_is_an_answer_503_and_nothing_else(fake: FakeDevice) -> None:
    fake.delay(0.02)
    with served("handled_app") as app:
        answers, died = storm(app)
        _, _, errors = app.end()
    assert set(answers) == {"200", "503"}
    assert answers["503"] == died
    assert died >= KILLS  # most deaths meet all calls
    assert "Traceback" not in errors


def test_with_a_retry_no_call_fails(fake: FakeDevice) -> None:
    """But for those that meet a second death. The next driver is killed only after a call over it, so there are few."""
    fake.delay(0.02)
    with served("retrying_app") as app:
        answers, died = storm(app)
        _, _, errors = app.end()
    assert set(answers) <= {"200", "503"}
    assert died >= KILLS
    assert answers["503"] * 2 <= died  # each of these has met two deaths
    assert answers["200"] > 0
    assert "Traceback" not in errors


def test_without_handlers_a_death_is_an_answer_500(fake: FakeDevice) -> None:
    """So the two tests above would see it."""
    fake.delay(0.5)
    with served("unhandled_app") as app, ThreadPoolExecutor(1) as pool:
        app.until_ready()
        call = pool.submit(app.detect, 1)
        while app.http.get("/died").json() == 0:
            for driver in app.drivers():
                with suppress(ProcessLookupError):
                    os.kill(driver, signal.SIGKILL)
        assert call.result().status_code == 500
        _, _, errors = app.end()
        assert "DriverDiedError" in errors


def test_a_websocket_is_closed_with_the_code_for_later(fake: FakeDevice) -> None:
    fake.delay(0.5)
    with served("handled_app") as app:
        app.until_ready()
        with connect(f"ws://127.0.0.1:{app.port}/stream") as stream:
            stream.send(str([5.0] * 16))
            while app.http.get("/died").json() == 0:
                for driver in app.drivers():
                    with suppress(ProcessLookupError):
                        os.kill(driver, signal.SIGKILL)
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013


def test_a_response_that_has_begun_is_cut_and_the_app_goes_on(fake: FakeDevice) -> None:
    """Its status was sent before the driver died, so the client can see the failure only by the end of the connection."""
    fake.delay(0.05)
    with served("handled_app") as app:
        app.until_ready()
        with app.http.stream("GET", "/numbers") as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines) == "0"
            os.kill(app.drivers()[0], signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                list(lines)
        assert app.detect(1).status_code == 200
        _, _, errors = app.end()
    assert "DriverDiedError" in errors


def test_with_a_retry_a_response_that_has_begun_is_whole(fake: FakeDevice) -> None:
    fake.delay(0.02)
    with served("retrying_app") as app:
        app.until_ready()
        with app.http.stream("GET", "/numbers") as response:
            lines = response.iter_lines()
            assert next(lines) == "0"
            os.kill(app.drivers()[0], signal.SIGKILL)
            assert list(lines) == [str(number) for number in range(1, 100)]
        assert app.http.get("/died").json() == 1
        _, _, errors = app.end()
    assert "Traceback" not in errors
