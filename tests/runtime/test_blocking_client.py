"""`aionn.blocking.attach`: a thread without an event loop, and without a runtime, computes by a driver of a service."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

import aionn
import aionn.blocking
from aionn.testing import FakeDevice, identity_model
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import leak_check
from tests.runtime.service import Service

pytestmark = pytest.mark.usefixtures("surroundings")

SHAPE = (1, 16)


def of(number: float) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full(SHAPE, number, np.float32)}


def right(burst: aionn.BlockingBurst, number: float, **how: Any) -> None:
    assert (burst.compute(of(number), **how)["input_out"] == number).all()


def outcome(act: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return act(*arguments)
    except BaseException as error:
        return error


class Served:
    """A service in the loop of another thread."""

    def __init__(self, portal: BlockingPortal, runtime: aionn.Runtime, path: Path, device: str) -> None:
        self.portal, self.runtime, self.path, self.device = portal, runtime, path, device
        self.service: Service = self._new()

    def _new(self) -> Service:
        async def new() -> Service:
            return Service(self.path, self.runtime, self.device)

        return self.portal.call(new)

    def end(self) -> None:
        self.portal.call(self.service.aclose)

    def replace(self) -> None:
        self.path.unlink()
        self.service = self._new()

    def driver_pid(self) -> int:
        (pid,) = self.portal.call(lambda: [device.pid for device in self.runtime.devices if device.pid is not None])
        return pid


@contextmanager
def serving(path: Path, device: str = "onnxruntime") -> Iterator[Served]:
    with (
        leak_check(),
        start_blocking_portal("asyncio", {"use_uvloop": True}) as portal,
        portal.wrap_async_context_manager(aionn.Runtime(start=())) as runtime,
    ):
        served = Served(portal, runtime, path, device)
        try:
            yield served
        finally:
            served.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.sock"


def attached(path: Path, **how: Any) -> aionn.BlockingBurst:
    return aionn.blocking.attach(identity_model(), service=path, **how)


def test_a_thread_gets_what_the_engine_computes(path: Path, silero_path: Path) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    with serving(path) as served, aionn.blocking.attach(silero_path, devices=("onnxruntime",), service=path) as burst:
        for _ in range(20):
            assert_same(burst.compute(inputs), expected)
        assert burst.compute(inputs, measure_timing=True).timing is not None
        assert burst.compute(inputs).device == "onnxruntime"
        counts = burst.statistics()
        assert (counts["computed"], counts["connections"], counts["failed"], counts["in_flight"]) == (22, 1, 0, 0)
        assert {name: operand.dimensions for name, operand in burst.inputs.items()} == {"input": (1, 576), "state": (2, 1, 128)}
        assert burst.outputs.keys() == expected.keys()
        (asked,) = served.service.asked
        assert (asked.name, asked.devices) == (silero_path.name, ("onnxruntime",))


def test_open_shapes_and_large_inputs_go_the_same_way(path: Path) -> None:
    model = identity_model({"x": ("rows", 1024)})
    with serving(path), aionn.blocking.attach(model, service=path) as burst:
        for rows in (1, 300, 2, 300, 300, 7):
            given = np.full((rows, 1024), rows, np.float32)
            assert np.array_equal(burst.compute({"x": given})["x_out"], given)
        with burst.frame(shapes={"x": (7, 1024)}) as frame:
            frame["x"][:] = 9
            assert (burst.compute(frame)["x_out"] == np.full((7, 1024), 9)).all()


def test_each_thread_has_a_burst_of_its_own(fake: FakeDevice, path: Path) -> None:
    found: list[Any] = []

    def work(number: int) -> None:
        with attached(path) as burst:
            for step in range(20):
                right(burst, number * 100 + step)

    with serving(path, fake.name) as served:
        threads = [threading.Thread(target=lambda number=number: found.append(outcome(work, number))) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [None] * 6
        assert len(served.service.compilations) == 1
        assert len({served.driver_pid()}) == 1


def test_a_driver_that_dies_ends_the_call_and_the_next_call_asks_the_service_again(fake: FakeDevice, path: Path) -> None:
    with serving(path, fake.name) as served, attached(path) as burst:
        right(burst, 1)
        first = served.driver_pid()
        fake.hang()

        def kill() -> None:
            served.portal.call(fake.heard, "run")
            os.kill(first, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(aionn.DriverDiedError):
            burst.compute(of(2))
        thread.join()
        fake.behave()
        right(burst, 3)
        assert served.driver_pid() != first
        assert len(served.service.asked) == 2
        fake.hang()
        second = served.driver_pid()

        def kill_and_heal() -> None:
            served.portal.call(fake.heard, "run")
            os.kill(second, signal.SIGKILL)  # before the healing, after which the driver would answer
            fake.behave()

        thread = threading.Thread(target=kill_and_heal)
        thread.start()
        right(burst, 4, retry=1)
        thread.join()
        assert burst.statistics()["connections"] == 3


def test_an_open_burst_outlives_the_service_and_a_new_service_serves_it(fake: FakeDevice, path: Path) -> None:
    with serving(path, fake.name) as served, attached(path) as burst:
        right(burst, 1)
        served.end()
        right(burst, 2)
        os.kill(served.driver_pid(), signal.SIGKILL)
        found = outcome(right, burst, 3)
        if isinstance(found, aionn.DriverDiedError):  # the call was sent before the death was seen
            found = outcome(right, burst, 3)
        assert isinstance(found, aionn.DeviceUnavailableError), found
        assert "aionn serve" in str(found)
        served.replace()
        right(burst, 4)


def test_a_deadline_ends_a_call(fake: FakeDevice, path: Path) -> None:
    with serving(path, fake.name), attached(path) as burst:
        right(burst, 1)
        fake.hang()
        with pytest.raises(aionn.DeadlineError):
            burst.compute(of(2), timeout_s=0.05)
        fake.behave()
        right(burst, 3)


def test_a_deadline_ends_attaching_and_leaves_nothing(fake: FakeDevice, path: Path) -> None:
    with leak_check(), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(aionn.DeadlineError):
            attached(path, timeout_s=0.05)


def test_closing_in_another_thread_ends_the_call(fake: FakeDevice, path: Path) -> None:
    with serving(path, fake.name) as served:
        burst = attached(path).open()
        right(burst, 1)
        fake.hang()

        def close() -> None:
            served.portal.call(fake.heard, "run")
            burst.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(aionn.CallerError, match="closed while this call waited"):
            burst.compute(of(2))
        thread.join()
        with pytest.raises(aionn.CallerError, match="not open"):
            burst.compute(of(3))
        burst.close()
        fake.behave()


def test_ctrl_c_ends_a_call_and_the_burst_stays_usable(fake: FakeDevice, path: Path) -> None:
    with serving(path, fake.name) as served, attached(path) as burst:
        right(burst, 1)
        fake.hang()

        def interrupt() -> None:
            served.portal.call(fake.heard, "run")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            burst.compute(of(2))
        thread.join()
        fake.behave()
        right(burst, 3)
        assert burst.statistics()["pinned_frames"] == 0


@pytest.mark.parametrize("entered", [False, True])
def test_a_burst_that_the_app_drops_gives_everything_back(fake: FakeDevice, path: Path, entered: bool) -> None:
    with serving(path, fake.name) as served, attached(path), leak_check():
        burst = attached(path)
        if entered:
            right(burst.__enter__(), 1)
        del burst
        gc.collect()
        served.portal.call(served.service.until_connected, 1)


@pytest.mark.own_process
def test_a_child_of_fork_gets_an_error_and_the_parents_burst_goes_on(fake: FakeDevice, path: Path) -> None:
    with serving(path, fake.name), attached(path) as burst:
        right(burst, 1)
        pid = os.fork()
        if pid == 0:
            found = outcome(burst.compute, of(2))
            burst.close()
            os._exit(0 if isinstance(found, aionn.CallerError) and "aionn.blocking.attach in this process" in str(found) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        right(burst, 3)


def test_a_model_that_the_service_cannot_prepare_is_its_error(path: Path) -> None:
    with serving(path), pytest.raises(aionn.CallerError, match="not an ONNX model"):
        aionn.blocking.attach(b"no model", service=path)


def test_no_service_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path) -> None:
    with leak_check():
        with pytest.raises(aionn.DeviceUnavailableError, match=r"service\.sock.*aionn serve"):
            attached(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))  # a stale file: nobody listens
        listener.close()
        monkeypatch.setenv("AIONN_SERVICE", str(path))
        with pytest.raises(aionn.DeviceUnavailableError, match=str(path)):
            aionn.blocking.attach(identity_model())
        monkeypatch.setenv("AIONN_SERVICE", "off")
        with pytest.raises(aionn.DeviceUnavailableError, match="'off'"):
            aionn.blocking.attach(identity_model())
        monkeypatch.delenv("AIONN_SERVICE")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        with pytest.raises(aionn.DeviceUnavailableError, match=str(tmp_path / "aionn" / "service.sock")):
            aionn.blocking.attach(identity_model())
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
        with pytest.raises(aionn.CallerError, match=r"no place for its socket: '.*/nowhere' is not the absolute path of a folder;"):
            aionn.blocking.attach(identity_model())
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        if not os.path.isdir(f"/run/user/{os.getuid()}"):
            with pytest.raises(aionn.CallerError, match="XDG_RUNTIME_DIR is not set, and '/run/user/"):
                aionn.blocking.attach(identity_model())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"model": 7}, "got int"),
        ({"model": "/nowhere/at/all.onnx"}, "cannot be read"),
        ({"model": os.curdir}, "not a regular file"),
        ({"devices": "cpu"}, "names in a tuple"),
        ({"name": "two\nlines"}, "one line"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"options": {"x": object()}}, "options="),
    ],
)
def test_a_wrong_argument_is_said(path: Path, how: dict[str, Any], said: str) -> None:
    with leak_check(), pytest.raises(aionn.CallerError, match=said):
        aionn.blocking.attach(**{"model": identity_model(), "service": path, **how})
