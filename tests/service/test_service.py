"""`aionn serve` and `Runtime(service=)`: apps share drivers, and the end of each party reaches the others as it should."""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
import pytest

import aionn
import aionn.blocking
from aionn import file_ranges
from aionn.file_ranges import Identity
from aionn.graph.files import OpenFile
from aionn.remote.calls import ConnectDriver, DigestModel, Fd, ListShared
from aionn.remote.control import HEADER, PROTOCOL, CallMessage, Failed, ServiceReady, decode, encode, failure_of, no_fd
from aionn.remote.device import RemoteDevice
from aionn.runtime import open_runtime
from aionn.runtime.processes import devices, handed, process
from aionn.runtime.processes.process import DriverProcess
from aionn.service import drivers, models, server
from aionn.service.listening import listen
from aionn.testing import identity_model
from tests import apps
from tests.apps import run_app
from tests.leaks import driver_pids, leak_check
from tests.scaled_model import scaled_model
from tests.service.hostile import Hostile, hostile
from tests.service.served import App, Looking, Served, alive, evicted, forked_app, odd_descriptor, parent_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

SHAPE = (1, 16)
MODEL = aionn.Model.from_onnx(identity_model({"input": SHAPE}))
REFERENCE = ["reference"]


async def right(call: Callable[..., Awaitable[aionn.Outputs]], number: float) -> None:
    outputs = await call({"input": np.full(SHAPE, number, np.float32)})
    assert (outputs["input_out"] == number).all()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not holds():  # noqa: ASYNC110 -- other processes have no event
            await anyio.sleep(0.05)


def pid_of(runtime: aionn.Runtime) -> int | None:
    return next((device.pid for device in runtime.devices if device.name == "reference"), None)


async def test_two_apps_share_one_driver_that_neither_has_started(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as first:
        kept = await first.compile(MODEL, devices=REFERENCE)
        await right(kept.compute, 1)
        with leak_check():
            async with aionn.Runtime(service=served.path, start=()) as second:
                compilation = await second.compile(MODEL, devices=REFERENCE)
                await right(compilation.compute, 2)
                async with compilation.burst() as burst:
                    await right(burst.compute, 3)
                    assert pid_of(first) == pid_of(second)
                    assert parent_of(pid_of(first)) == served.process.pid
                    assert [(guest["guest"], guest["models"]) for guest in served.guests()] == [(os.getpid(), 2)]
        await until(lambda: [guest["models"] for guest in served.guests()] == [1])


async def test_a_model_is_compiled_once_for_all_apps(served: Served, tmp_path: Path, silero_path: Path) -> None:
    async def outcome() -> aionn.CacheOutcome | None:
        async with aionn.Runtime(service=served.path, start=()) as runtime:
            model = await runtime.load(silero_path)
            compilation = await runtime.compile(model, devices=["onnxruntime"], cache_dir=tmp_path / "cache")
            await compilation.compute({"input": np.zeros((1, 576), np.float32), "state": np.zeros((2, 1, 128), np.float32)})
            return compilation.outcomes[0]

    kinds = [found.kind.value for _ in range(2) if (found := await outcome()) is not None]
    assert kinds == ["miss", "hit"]


class Weights:
    """A model with 9 MB of weights, in its file or beside it, and how many bytes of files this process has digested."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
        self.path, self._folder, self.digested = folder / "large.onnx", folder, 0
        values = np.random.default_rng(0).random((1500, 1500), np.float32)
        weights = onnx.numpy_helper.from_array(values, "w")
        x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 1500)) for name in "xy")
        graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weights])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        onnx.save_model(model, self.path, save_as_external_data=beside, location="weights", size_threshold=0)
        self.expected = values.sum(axis=0)[None]
        digests = OpenFile.digests

        def counting(file: OpenFile, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            self.digested += sum(end - start for start, end in ranges)
            return digests(file, ranges)

        monkeypatch.setattr(OpenFile, "digests", counting)

    def copy(self, folder: Path) -> Path:
        shutil.copytree(self._folder, folder)
        return folder / self.path.name


@pytest.mark.parametrize("beside", [False, True])
async def test_the_service_digests_a_large_model_for_its_apps(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    (tmp_path / "model").mkdir()
    weights = Weights(tmp_path / "model", monkeypatch, beside)
    inputs = {"x": np.ones((1, 1500), np.float32)}
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        model = await runtime.load(weights.path)
        compilation = await runtime.compile(model, devices=REFERENCE, cache_dir=tmp_path / "cache")
        np.testing.assert_allclose((await compilation.compute(inputs))["y"], weights.expected, rtol=1e-4)
        assert weights.digested == 0
    token = await (await aionn.Model.load(weights.copy(tmp_path / "copy"))).digest()
    assert weights.digested > 9_000_000  # now this process has digested by itself
    assert model.token == token


async def test_a_model_that_the_service_does_not_digest_is_digested_by_the_app(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aionn.service")
    weights = Weights(tmp_path, monkeypatch, beside=False)
    monkeypatch.setattr(models, "MOST_BYTES_OF_AN_APP", 5)
    path = str(folder / "service.sock")
    service = Looking(listen(path))
    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)
        async with aionn.Runtime(service=path, start=()) as runtime:
            compilation = await runtime.compile(await runtime.load(weights.path), devices=REFERENCE, cache_dir=tmp_path / "cache")
            outputs = await compilation.compute({"x": np.ones((1, 1500), np.float32)})
            np.testing.assert_allclose(outputs["y"], weights.expected, rtol=1e-4)
        service.end()
    assert weights.digested > 9_000_000
    assert "because the service did not: the model's files have" in caplog.text


async def test_an_unchanged_model_is_digested_once_for_all_apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    weights = Weights(tmp_path / "model", monkeypatch, beside=False)
    monkeypatch.setattr(file_ranges, "_RACY_NS", -(10**18))  # the file was written a moment ago
    kept = models.KeptModels()

    async def asked(path: Path, app: int) -> object:
        with path.open("rb") as file:
            return await kept.digests(DigestModel(Fd(file.fileno())), app)

    async with anyio.create_task_group() as group:
        for app in range(8):
            group.start_soon(asked, weights.path, app)
    once = weights.digested
    assert 9_000_000 < once < 18_000_000
    before = await asked(weights.path, 9)
    assert weights.digested == once
    content = bytearray(weights.path.read_bytes())
    content[-1000] ^= 1
    weights.path.write_bytes(content)
    assert await asked(weights.path, 9) != before
    assert weights.digested == 2 * once


async def test_a_digest_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x0a\xff")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(aionn.CallerError, match="not an ONNX model") as failed, (tmp_path / "broken.onnx").open("rb") as file:
        await models.KeptModels().digests(DigestModel(Fd(file.fileno())), 1)
    assert failed.tb is not None  # it holds what was open
    assert len(os.listdir("/proc/self/fd")) == before


async def test_each_app_sees_a_drivers_death_and_shares_the_next_one(served: Served) -> None:
    async with (
        aionn.Runtime(service=served.path, start=()) as first,
        aionn.Runtime(service=served.path, start=()) as second,
    ):
        bursts = [(await runtime.compile(MODEL, devices=REFERENCE)).burst() for runtime in (first, second)]
        async with bursts[0], bursts[1]:
            for burst in bursts:
                await right(burst.compute, 1)
            before = pid_of(first)
            assert before is not None
            os.kill(before, signal.SIGKILL)
            await until(lambda: pid_of(first) is None and pid_of(second) is None)
            for burst in bursts:
                await right(burst.compute, 2)
            assert before != pid_of(first) == pid_of(second)


async def test_a_stream_outlives_the_service_and_new_work_waits_for_another_one(served: Served, folder: Path) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        async with compilation.burst() as burst:
            await right(burst.compute, 1)
            before = pid_of(runtime)
            served.kill()
            await until(lambda: pid_of(runtime) is None)
            for number in range(100):
                await right(burst.compute, number)
            with pytest.raises(aionn.ServiceDiedError, match="the service has ended"), anyio.fail_after(5):
                await runtime.compile(MODEL, devices=REFERENCE)
            other = Served(folder)  # finds the socket that the dead one has left
            try:
                again = await runtime.compile(MODEL, devices=REFERENCE)
                await right(again.compute, 3)
                assert pid_of(runtime) not in (None, before)
                await right(burst.compute, 4)
            finally:
                other.end()
    await until(lambda: before is not None and not os.path.exists(f"/proc/{before}"))


async def test_a_service_is_replaced_under_a_stream(served: Served, folder: Path) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        async with compilation.burst() as burst:
            await right(burst.compute, 1)
            before = pid_of(runtime)
            other = Served(folder, "--replace")
            try:
                for number in range(100):
                    await right(burst.compute, number)
                async with aionn.Runtime(service=served.path, start=()) as newer:
                    await right((await newer.compile(MODEL, devices=REFERENCE)).compute, 5)
                    assert pid_of(newer) not in (None, before)
                assert served.process.poll() is None
                await right(burst.compute, 6)
            finally:
                await burst.aclose()
                await runtime.aclose()
                await until(lambda: served.process.poll() == 0)  # with its last guest
                other.end()


async def test_a_service_that_was_replaced_ends_although_its_app_lives(served: Served, folder: Path) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        kept, dropped = [await runtime.compile(MODEL, devices=REFERENCE) for _ in range(2)]
        async with kept.burst() as burst:
            await right(burst.compute, 1)
            before = pid_of(runtime)
            other = Served(folder, "--replace")
            try:
                await dropped.aclose()
                await until(lambda: pid_of(runtime) is None)
                newer = await runtime.compile(MODEL, devices=REFERENCE)
                assert pid_of(runtime) not in (None, before)
                await right(burst.compute, 2)
                assert alive(before)
                await kept.aclose()
                await until(lambda: served.process.poll() == 0)
                assert not alive(before)
                await right(newer.compute, 3)
                assert [guest["guest"] for guest in other.guests()] == [os.getpid()]
            finally:
                other.end()


async def test_what_a_killed_app_held_is_freed_and_others_go_on(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        async with compilation.burst() as burst:
            for number in range(3):
                app = App(served.path)
                assert sorted(guest["bursts"] for guest in served.guests()) == [1, 1]
                app.kill()
                await right(burst.compute, number)
                await until(lambda: len(served.guests()) == 1)


async def test_a_child_that_holds_the_sockets_keeps_no_dead_app(served: Served, folder: Path) -> None:
    """A child of `os.fork` in C has every descriptor of its parent, and aionn does not see that fork."""
    with forked_app(served.path):
        await until(lambda: served.guests() == [])


async def test_without_a_service_the_app_is_told_or_starts_its_drivers(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(folder / "none.sock")
    with pytest.raises(aionn.DeviceUnavailableError, match=r"no service listens there.*aionn serve"):
        await aionn.Runtime(service=missing).open()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("AIONN_SERVICE", "auto")
    caplog.set_level(logging.INFO)
    async with aionn.Runtime(start=()) as runtime:
        await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
        assert driver_pids() == [pid_of(runtime)]
    assert "this app starts its own drivers" in caplog.text
    for wrong in ("relative/path", 7, "x" * 200):
        with pytest.raises(aionn.CallerError, match="expected 'off', 'auto', or the absolute path"):
            aionn.Runtime(service=wrong)  # type: ignore[arg-type]


async def test_auto_finds_the_service_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "aionn").mkdir(mode=0o700)
    service = Served(folder / "aionn")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("AIONN_SERVICE", "auto")
    try:
        async with aionn.Runtime(start=()) as runtime:
            await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
            assert parent_of(pid_of(runtime)) == service.process.pid
    finally:
        service.end()


async def test_an_app_cannot_restart_a_driver_of_all(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        await runtime.compile(MODEL, devices=REFERENCE)
        device = next(device for device in runtime.devices if device.name == "reference")
        with pytest.raises(aionn.CallerError, match="other apps use"):
            await device.restart()


async def test_an_app_that_closes_waits_for_no_driver_of_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of its own may take GRACE_S to end. One of the service goes on."""
    monkeypatch.setattr(process, "GRACE_S", 60.0)
    monkeypatch.setattr(open_runtime, "CLOSE_S", 90.0)
    runtime = aionn.Runtime(service=served.path, start=())
    await runtime.open()
    await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
    before = pid_of(runtime)
    closing = asyncio.ensure_future(runtime.aclose())
    await asyncio.wait({closing}, timeout=30)
    assert closing.done()
    assert [driver["pid"] for driver in served.facts()["drivers"]] == [before]


async def test_apps_with_other_settings_have_other_drivers(served: Served) -> None:
    async with (
        aionn.Runtime(service=served.path, start=()) as first,
        aionn.Runtime(service=served.path, start=(), driver_env={"AIONN_TEST_WORD": "one"}) as second,
    ):
        for runtime in (first, second):
            await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
        assert pid_of(first) != pid_of(second)


async def test_a_blocking_burst_reaches_a_shared_driver(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)

        def in_thread() -> None:
            with compilation.blocking() as burst:
                assert (burst.compute({"input": np.full(SHAPE, 3, np.float32)})["input_out"] == 3).all()

        await anyio.to_thread.run_sync(in_thread)


def test_one_service_listens_at_a_path(served: Served, folder: Path) -> None:
    with pytest.raises(aionn.CallerError, match=r"listens at .* already; take its place with --replace"):
        listen(served.path)
    (folder / "file").write_text("mine")
    with pytest.raises(aionn.CallerError, match="is not a socket"):
        listen(str(folder / "file"))
    assert (folder / "file").read_text() == "mine"
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    with pytest.raises(aionn.CallerError, match="others may write to the folder"):
        listen(str(folder / "open" / "s.sock"))
    assert os.stat(served.path).st_mode & 0o077 == 0


async def test_a_call_that_the_end_of_a_service_cuts_off_is_asked_of_the_next_one(folder: Path) -> None:
    path, asked = str(folder / "s.sock"), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as fake:
        fake.bind(path)
        fake.listen()

        def two_services() -> None:
            for last in (False, True):
                app, _ = fake.accept()
                with app:
                    app.sendall(encode(ServiceReady(PROTOCOL, "\x1b[2J"))[0])
                    call = decode(app.recv(65536)[HEADER.size :], no_fd)
                    assert isinstance(call, CallMessage)
                    asked.append(call.body)
                    if last:
                        app.sendall(encode(Failed(call.id, failure_of(aionn.CallerError("the second one"))))[0])
                        app.recv(1)

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, two_services)
            async with aionn.Runtime(service=path, start=()) as runtime:
                with pytest.raises(aionn.CallerError, match="the second one"):
                    await runtime.compile(MODEL, devices=REFERENCE)
    assert [type(body) for body in asked] == [ConnectDriver, ConnectDriver]


@pytest.mark.parametrize("older", [True, False])
async def test_another_protocol_says_which_side_to_upgrade(folder: Path, older: bool) -> None:
    path = str(folder / "s.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as fake:
        fake.bind(path)
        fake.listen()

        def greet() -> None:
            app, _ = fake.accept()
            with app:
                app.sendall(encode(ServiceReady(PROTOCOL + (-1 if older else 1), "9.9\x1b[2J"))[0])
                app.recv(1)

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, greet)
            wanted = "upgrade the service" if older else "upgrade this app"
            with pytest.raises(aionn.DeviceUnavailableError, match=wanted) as refused:
                await aionn.Runtime(service=path).open()
            assert r"9.9\x1b[2J" in str(refused.value)


async def test_nonsense_at_the_socket_ends_its_sender_alone(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=REFERENCE)
        held = []
        with odd_descriptor() as zero:
            for message in (
                b"\0" * 64,
                b"\xff" * 4096,
                struct.pack("<IHH", 2**31, 0, 0),
                struct.pack("<IHH", 100, 9, 0) + b"x" * 50,
                b"\x01",
            ):
                sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sender.connect(served.path)
                socket.send_fds(sender, [message], [zero] * 5)
                held.append(sender)
                await right(compilation.compute, 1)
        for _ in range(300):  # more than the service takes
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sender.setblocking(False)
            with suppress(BlockingIOError):  # as many wait as the kernel lets wait
                sender.connect(served.path)
            held.append(sender)
        await right(compilation.compute, 2)
        for sender in held:
            sender.close()
        await until(lambda: len(served.facts()["apps"]) <= 1)
        assert "Traceback" not in served.log


async def test_the_third_death_by_one_model_puts_it_in_quarantine(served: Served) -> None:
    """Another model on the same device goes on to be served."""
    device = ["tests.service.number_engines:NumberEngine"]
    other = aionn.Model.from_onnx(identity_model({"input": SHAPE, "more": SHAPE}))
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=device)
        for _ in range(3):
            await right(compilation.compute, 1)
            with pytest.raises(aionn.DriverDiedError):
                await compilation.compute({"input": np.full(SHAPE, 666, np.float32)})
        with pytest.raises(aionn.ModelQuarantinedError) as caught, anyio.fail_after(60):
            await compilation.compute({"input": np.zeros(SHAPE, np.float32)})
        assert 0 < caught.value.until_s <= 600
        harmless = await runtime.compile(other, devices=device)
        outputs = await harmless.compute({"input": np.ones(SHAPE, np.float32), "more": np.ones(SHAPE, np.float32)})
        assert (outputs["more_out"] == 1).all()


async def test_ps_lists_models_and_evict_frees_what_no_app_holds(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        kept = await runtime.compile(MODEL, devices=REFERENCE)
        await right(kept.compute, 1)
        (driver,) = served.facts()["drivers"]
        (model,) = driver["models"]
        assert model["executions"] >= 1
        assert evicted(served.path) == 0
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        await runtime.compile(MODEL, devices=REFERENCE)
        assert pid_of(runtime) == driver["pid"]
    await until(lambda: served.guests() == [])
    assert evicted(served.path) == 1
    assert served.facts()["drivers"][0]["models"] == []


async def test_a_thread_attaches_without_an_event_loop(served: Served, silero_path: Path, folder: Path) -> None:
    model = folder / "model.onnx"
    model.write_bytes(identity_model({"input": SHAPE}))

    def attached() -> None:
        with (
            aionn.blocking.attach(model, devices=REFERENCE, service=served.path) as first,
            aionn.blocking.attach(model, devices=REFERENCE, service=served.path) as second,
        ):
            for number, burst in enumerate((first, second, first)):
                assert (burst.compute({"input": np.full(SHAPE, number, np.float32)})["input_out"] == number).all()
            assert sum(guest["models"] for guest in served.guests()) == 2
            ps = [sys.executable, "-m", "aionn", "ps", "--socket", served.path]
            printed = run_app(ps, check=True, capture_output=True, text=True, timeout=60).stdout
            assert "apps: 1, connections: 2," in " ".join(printed.split())
        with aionn.blocking.attach(silero_path, service=served.path) as burst:
            outputs = burst.compute({"input": np.zeros((1, 576), np.float32), "state": np.zeros((2, 1, 128), np.float32)})
            assert outputs["output"].shape == (1, 1)

    await anyio.to_thread.run_sync(attached)
    await until(lambda: served.guests() == [])


def test_a_model_that_was_written_just_now_is_read_again_for_the_next_client(served: Served, folder: Path) -> None:
    """A change within a tick of the kernel's clock leaves a file's times as they are, and so does one through a mapping."""
    contents = [scaled_model(np.full(SHAPE, gain, np.float32)) for gain in (2, 3)]
    path = folder / "model.onnx"
    path.write_bytes(bytes(len(contents[0])))
    found = []
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        for content in contents:
            mapping[:] = content
            with aionn.blocking.attach(path, devices=REFERENCE, service=served.path) as burst:
                found.append((float(burst.compute({"x": np.ones(SHAPE, np.float32)})["y"].max()), Identity.of(path.stat())))
    (before, identity), (after, same) = found
    assert identity == same, "the times show the change"
    assert (before, after) == (2.0, 3.0)


def test_a_service_keeps_no_model_without_a_file(served: Served) -> None:
    """No other client can ask for it, and each app that dies and is started again would leave the memory of one."""

    def held() -> int:
        count = 0
        for link in Path(f"/proc/{served.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                count += "memfd:aionn-model" in os.readlink(link)
        return count

    with aionn.blocking.attach(identity_model({"input": SHAPE}), devices=REFERENCE, service=served.path) as burst:
        for _ in range(3):
            with aionn.blocking.attach(identity_model({"input": SHAPE}), devices=REFERENCE, service=served.path):
                assert (burst.compute({"input": np.ones(SHAPE, np.float32)})["input_out"] == 1).all()
        by = time.monotonic() + 30
        while held():
            assert time.monotonic() < by
        assert (burst.compute({"input": np.ones(SHAPE, np.float32)})["input_out"] == 1).all()


def test_a_service_that_finds_a_model_in_its_cache_imports_no_numpy(
    folder: Path, silero_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apps, "template", None)  # a copy of it would have imported NumPy
    for hit in (False, True):  # to compile, the service reads the graph with the package onnx, which imports NumPy
        served = Served(folder)
        try:
            with aionn.blocking.attach(silero_path, service=served.path):
                (driver,) = served.facts()["drivers"]
                for pid, imports in ((driver["pid"], True), (served.process.pid, not hit)):
                    assert ("multiarray" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")) is imports
        finally:
            served.end()


def test_a_driver_that_dies_after_it_was_offered_costs_a_thread_no_try(served: Served, folder: Path) -> None:
    model = folder / "model.onnx"
    model.write_bytes(identity_model({"input": SHAPE}))
    burst = aionn.blocking.attach(model, devices=REFERENCE, service=served.path)
    (driver,) = served.facts()["drivers"]
    os.kill(driver["pid"], signal.SIGKILL)
    with burst:
        for number in range(2):
            assert (burst.compute({"input": np.full(SHAPE, number, np.float32)})["input_out"] == number).all()


def test_a_threads_client_says_what_is_wrong(served: Served, folder: Path) -> None:
    broken = folder / "broken.onnx"
    broken.write_bytes(b"this is no model")
    with pytest.raises(aionn.CallerError):
        aionn.blocking.attach(broken, service=served.path)
    with pytest.raises(aionn.CallerError, match="options has 'colour'; expected some of preference"):
        aionn.blocking.attach(broken, service=served.path, options={"colour": 1})
    with pytest.raises(aionn.CallerError, match="ask for 66 engine threads, but the service gives one model 64"):
        aionn.blocking.attach(broken, service=served.path, options={"threads": 33, "instances": 2})
    with pytest.raises(aionn.DeviceUnavailableError, match="nope"):
        aionn.blocking.attach(broken, service=served.path, devices=["nope"])


@pytest.mark.both_loops
async def test_a_driver_that_was_handed_over_to_a_cancelled_caller_is_let_go(served: Served) -> None:
    async with aionn.Runtime(service=served.path, start=()) as other, aionn.Runtime(service=served.path, start=()) as runtime:
        await other.compile(MODEL, devices=["onnxruntime"])  # so that its driver runs
        await runtime.compile(MODEL, devices=REFERENCE)  # so that the runtime is attached
        assert runtime._owned is not None
        all_devices = runtime._owned.devices
        assert all_devices.service is not None
        with leak_check():
            handed, real = anyio.Event(), all_devices.service.driver

            async def driver(*arguments: Any) -> Any:
                found = await real(*arguments)
                handed.set()
                return found

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(all_devices.service, "driver", driver)
                async with all_devices._turn:  # another start is under way
                    starting = asyncio.create_task(runtime.compile(MODEL, devices=["onnxruntime"]))
                    await handed.wait()
                    starting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await starting
        assert runtime.devices


async def test_the_greeting_of_an_old_driver_is_waited_for_from_now_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a start counts from the moment at which the driver was handed over, not from the start of its process."""
    async with aionn.Runtime(service=served.path, start=()) as first:
        kept = await first.compile(MODEL, devices=REFERENCE)
        began_s = time.monotonic()
        await right(kept.compute, 1)
        await until(lambda: time.monotonic() - began_s > 5.0)
        waits_s: list[float] = []

        class Noted(DriverProcess):
            async def ready(self) -> RemoteDevice:
                waits_s.append(time.monotonic() - self.life.started_ns / 1e9)
                return await super().ready()

        monkeypatch.setattr(devices, "DriverProcess", Noted)
        async with aionn.Runtime(service=served.path, start=()) as second:
            await right((await second.compile(MODEL, devices=REFERENCE)).compute, 2)
            assert pid_of(first) == pid_of(second)
        assert len(waits_s) == 1
        assert waits_s[0] < 4.0


async def test_a_service_that_stands_still_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        kept = await runtime.compile(MODEL, devices=REFERENCE, name="kept")
        await right(kept.compute, 1)
        monkeypatch.setattr(handed, "ANSWER_S", 0.5)
        served.process.send_signal(signal.SIGSTOP)
        try:
            await right(kept.compute, 2)
            with pytest.raises(aionn.ServiceDiedError, match=r"did not answer for 0\.5 s; if it stands still, end its process"):
                await runtime.compile(MODEL, devices=["onnxruntime"])
            command = [sys.executable, "-m", "aionn", "serve", "--replace", "--socket", served.path]
            done = await anyio.to_thread.run_sync(lambda: run_app(command, capture_output=True, text=True, timeout=60))
            assert done.returncode == 1
            assert "already; it does not answer, so end its process first" in done.stderr
        finally:
            served.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def looking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Looking, str]]:
    monkeypatch.setattr(server, "IDLE_DRIVER_S", 1.0)
    monkeypatch.setattr(server, "LOOK_S", 0.0)
    monkeypatch.setattr(server, "until_beat_s", lambda: 0.1)
    path = str(folder / "s.sock")
    service = Looking(listen(path), str(folder / "state"))
    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)
        yield service, path
        service.end()


async def test_a_driver_stays_while_it_keeps_a_model_and_ends_after_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with looking(folder, monkeypatch) as (service, path):
        async with aionn.Runtime(service=path, start=()) as runtime:
            await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
            driver = pid_of(runtime)
        looks = service.looks
        await until(lambda: service.looks > looks + 15)
        assert alive(driver)
        assert await anyio.to_thread.run_sync(evicted, path) == 1
        await until(lambda: not alive(driver))


async def test_what_no_client_has_asked_for_is_given_up_with_the_memory_of_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client passes a file that its model does not name, keeps its burst and goes on; the service keeps neither model nor file."""
    file = folder / "beside-of-an-app"
    file.touch()
    beside = os.open(file, os.O_RDONLY)

    def held() -> int:
        links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))
        return sum("beside-of-an-app" in link for link in links)

    async with looking(folder, monkeypatch) as (service, path):

        def ask() -> Hostile:
            with hostile(path) as client:
                return client.open_model(folder, beside=(("weights.bin", Fd(beside)),))

        guest = await anyio.to_thread.run_sync(ask)
        assert held() == 2
        looks = service.looks
        await until(lambda: service.looks > looks + 3)
        assert held() == 2, "a client may ask again soon"
        monkeypatch.setattr(models, "IDLE_S", 0.0)
        gc.collect()
        await until(lambda: held() == 1)
        assert not select.select([guest.sock], [], [], 0)[0], "its driver has not ended the connection"
        guest.sock.close()
    os.close(beside)


async def test_a_driver_without_guests_is_left_alone_until_it_may_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    ask = server._asked

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return await ask(*arguments)

    async with looking(folder, monkeypatch) as (service, path):
        monkeypatch.setattr(server, "IDLE_DRIVER_S", 1000.0)
        monkeypatch.setattr(server, "_asked", counted)
        for _ in range(2):
            async with aionn.Runtime(service=path, start=()) as runtime:
                await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
                before = asked
                await until(lambda: asked > before + 5)  # it has a guest, so it is asked at each look  # noqa: B023
            with anyio.fail_after(30):  # until the driver knows that the app has gone
                while asked != before:
                    before, looks = asked, service.looks
                    await until(lambda: service.looks > looks + 10)  # noqa: B023


async def test_a_driver_that_dies_between_two_questions_is_not_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = server._asked

    async def died(device: Any, question: Any) -> Any:
        return None if isinstance(question, ListShared) else await ask(device, question)

    async with looking(folder, monkeypatch) as (service, path), aionn.Runtime(service=path, start=()) as runtime:
        await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
        assert [driver.device for driver in (await service._facts()).drivers] == REFERENCE
        monkeypatch.setattr(server, "_asked", died)
        assert (await service._facts()).drivers == ()


async def test_settings_that_no_driver_has_make_room_for_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "MOST_SETTINGS", 1)
    async with looking(folder, monkeypatch) as (_, path):
        for word in ("one", "two"):
            async with aionn.Runtime(service=path, start=(), driver_env={"AIONN_TEST_WORD": word}) as runtime:
                await right((await runtime.compile(MODEL, devices=REFERENCE)).compute, 1)
                driver = pid_of(runtime)
                async with aionn.Runtime(service=path, start=()) as other:
                    with pytest.raises(aionn.CallerError, match="1 different settings, which is the most"):
                        await other.compile(MODEL, devices=REFERENCE)
            await anyio.to_thread.run_sync(evicted, path)
            await until(lambda: not alive(driver))  # noqa: B023 -- awaited at once
