"""Hostile and careless apps at the socket of a service: they harm neither the service, nor its drivers, nor other apps."""

from __future__ import annotations

import mmap
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import onnx
import pytest

import aionn
import aionn.blocking
from aionn.driver.sharing import QUOTAS
from aionn.hal.interfaces import PrepareOptions
from aionn.pages.finding import find_page
from aionn.pages.layout import HEARTBEAT, PAGE_BYTES
from aionn.pages.record_reader import RecordReader
from aionn.remote import connection
from aionn.remote.calls import (
    DigestModel,
    Drain,
    EndGuest,
    EngineOptionsMessage,
    Evict,
    Fd,
    FreeBuffer,
    Guests,
    ListShared,
    OpenModel,
    PrepareModel,
    Quarantine,
    ReadService,
    TakeOver,
)
from aionn.remote.connection import ControlSocket, PeerLimits
from aionn.remote.control import GUEST_BODY_BYTES, Attach, CallMessage, Cancel, Failed, Refused, Reply, decode, encode
from aionn.remote.device import model_message, options_message
from aionn.service import models, server
from aionn.service.listening import listen
from aionn.service.server import Service
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.service.hostile import DEFAULTS, MODEL, Hostile, begun_frame, descriptors_of, hostile
from tests.service.served import Looking, Served, evicted, odd_descriptor

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    by = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < by
        time.sleep(0.05)


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sentence(failed: object) -> str:
    assert isinstance(failed, Failed), failed
    return failed.failure.message


KILLED_APP = """
import asyncio, sys
import numpy as np
import aionn
from aionn.testing import FakeDevice, identity_model

SLOW = ["tests.service.number_engines:NumberEngine"]

def model(width):
    return aionn.Model.from_onnx(identity_model({"input": (1, width)}))

async def main(path):
    async with aionn.Runtime(service=path, start=()) as runtime:
        compilations = [await runtime.compile(model(width), devices=SLOW) for width in (3, 4)]
        async with compilations[0].burst() as burst:
            await burst.compute({"input": np.ones((1, 3), np.float32)})
            asyncio.ensure_future(burst.compute({"input": np.full((1, 3), 7, np.float32)}))
            (device,) = [device for device in runtime.devices if device.pid]
            while device.activity.state != "executing":
                await asyncio.sleep(0.01)
            print("now", flush=True)
            await asyncio.sleep(100)

asyncio.run(main(*sys.argv[1:]))
"""


def test_an_app_that_is_killed_in_a_long_run_leaves_no_model(served: Served) -> None:
    """The run takes longer than the driver waits for the end of a burst."""
    with App([sys.executable, "-c", KILLED_APP, served.path], stdout=subprocess.PIPE) as app:
        assert app.stdout is not None
        assert app.stdout.readline() == b"now\n"
        assert len(served.guests()) == 1
        app.kill()
    until(lambda: served.guests() == [])
    (driver,) = served.facts()["drivers"]
    assert [model["apps"] for model in driver["models"]] == [[]] * len(driver["models"])
    assert all(model["idle_s"] > 0 for model in driver["models"])
    assert evicted(served.path) == len(driver["models"]) >= 2


def test_clients_with_other_sockets_stay_nowhere(served: Served, folder: Path) -> None:
    with hostile(served.path) as app:
        app.open_model(folder).close()
        pid = served.facts()["drivers"][0]["pid"]
        until(lambda: served.guests() == [])
        before = descriptors_of(pid)
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            for _ in range(20):
                guest = app.open_model(folder)
                with socket.socket(socket.AF_INET, kind) as other:
                    guest.post(Attach(Fd(other.fileno()), 1))
                with suppress(EOFError, ConnectionResetError):
                    guest.read()
                guest.close()
        until(lambda: served.guests() == [] and descriptors_of(pid) <= before)


def test_a_guest_brings_no_more_clients_than_its_quota_and_speaks_for_no_other_app(served: Served, folder: Path) -> None:
    with hostile(served.path) as app, hostile(served.path) as other:
        victim, guest = other.open_model(folder), app.open_model(folder)
        held = []
        for _ in range(QUOTAS.clients + 4):
            ours, theirs = socket.socketpair()
            with theirs:
                guest.post(Attach(Fd(theirs.fileno()), 1, 2))
            held.append(Hostile(ours))
        assert sum(isinstance(client.greeting, Refused) for client in held) == 6  # all are of this process
        for call in (Guests(), EndGuest(2), Drain(), Evict(""), Quarantine(((1, 2**62),)), ListShared()):
            assert "service" in sentence(guest.call(call))
            assert "service" in sentence(held[0].call(call))
        assert victim.call(FreeBuffer(0)) is None
        guest.close()
        for client in held:
            client.close()
        until(lambda: [guest["models"] for guest in served.guests()] == [1])
        victim.close()


@pytest.mark.timeout(60)
async def test_a_service_that_is_taken_over_by_a_process_that_dies_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(server, "TAKE_OVER_S", 0.3)
    path = str(folder / "service.sock")
    service = Service(listen(path))
    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)

        def dies() -> None:
            with hostile(path) as first, hostile(path) as second:
                taken = first.call(TakeOver())
                assert "another service is taking over" in sentence(second.call(TakeOver()))
                kept.append(os.dup(taken.listening))
                os.close(taken.listening)
                os.close(taken.lock)

        await anyio.to_thread.run_sync(dies)
        with anyio.fail_after(30):
            for _ in range(2):
                async with aionn.Runtime(service=path, start=()) as runtime:
                    await runtime.compile(aionn.Model.from_onnx(MODEL), devices=["reference"])
                os.set_blocking(kept[0], True)  # it is the service's open file, too, whose loop must not wait in it
        with pytest.raises(aionn.CallerError, match="listens at"):
            listen(path)
        os.close(kept.pop())
        service.end()
    listen(path).end()


def test_apps_that_come_and_go_without_a_pause_hold_up_no_other_one(served: Served) -> None:
    over, rounds = threading.Event(), []

    def flood() -> None:
        by = time.monotonic() + 20
        while not over.is_set() and time.monotonic() < by:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, suppress(OSError):
                sock.connect(served.path)
                rounds.append(1)

    with hostile(served.path) as app:
        flooding = [threading.Thread(target=flood) for _ in range(2)]
        for thread in flooding:
            thread.start()
        until(lambda: len(rounds) > 200)
        for _ in range(5):
            assert not isinstance(app.call(ReadService()), Failed)
        still_flooded = all(thread.is_alive() for thread in flooding)
        over.set()
        for thread in flooding:
            thread.join()
    assert still_flooded


async def test_a_service_whose_folder_was_removed_ends_and_leaves_the_next_one_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.0)
    monkeypatch.setattr(server, "until_beat_s", lambda: 0.1)
    run = folder / "run"
    path = str(run / "service.sock")
    old = listen(path)
    shutil.rmtree(run)
    new = listen(path)
    old.end()
    assert new.reachable
    service = Looking(new)
    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)
        with anyio.fail_after(10):
            while service.looks < 3:  # noqa: ASYNC110 -- a look has no event
                await anyio.sleep(0.05)
        assert not service._stop.is_set()
        shutil.rmtree(run)
        with anyio.fail_after(10):
            await service._stop.wait()
        newest = listen(path)
    assert newest.reachable
    newest.end()
    assert not newest.reachable


@pytest.mark.parametrize("kind", ["path", "write", "folder", "zero", "pipe", "socket", "sparse"])
def test_what_is_no_readable_file_is_no_model(served: Served, folder: Path, kind: str) -> None:
    file = folder / "model.onnx"
    file.write_bytes(MODEL)
    with hostile(served.path) as app, socket.socket(socket.AF_UNIX) as sock:
        pipe = os.pipe()
        opened = {
            "path": lambda: os.open(file, os.O_PATH),
            "write": lambda: os.open(file, os.O_WRONLY),
            "folder": lambda: os.open(folder, os.O_RDONLY),
            "zero": lambda: os.open("/dev/zero", os.O_RDONLY),
            "pipe": lambda: os.dup(pipe[0]),
            "socket": lambda: os.dup(sock.fileno()),
            "sparse": lambda: os.open(file, os.O_RDWR),
        }[kind]()
        if kind == "sparse":
            os.truncate(file, 0)
            os.truncate(file, 1 << 40)
        for asked in (OpenModel(Fd(opened), "", ("reference",)), DigestModel(Fd(opened))):
            assert sentence(app.call(asked))
        for fd in (opened, *pipe):
            os.close(fd)
        assert app.call(DEFAULTS).pid in [driver["pid"] for driver in served.facts()["drivers"]]


async def test_an_app_can_ask_a_driver_for_traces_and_not_write_to_its_page(served: Served) -> None:
    with hostile(served.path) as app:
        found = app.call(DEFAULTS)
        (own,) = [path for path in os.listdir(f"/proc/{found.pid}/fd") if "aionn-stats" in os.readlink(f"/proc/{found.pid}/fd/{path}")]
        for way in (f"/proc/self/fd/{found.page}", f"/proc/{found.pid}/fd/{own}"):
            page = os.open(way, os.O_RDWR)
            with pytest.raises(PermissionError):
                os.pwrite(page, bytes(8), HEARTBEAT * 8)
            with pytest.raises(PermissionError):
                mmap.mmap(page, PAGE_BYTES)
            os.close(page)
        for fd in (found.page, found.pidfd, found.socket):
            os.close(fd)
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(MODEL), devices=["reference"])
        async with compilation.burst() as burst:
            await burst.compute({"input": np.ones((1, 16), np.float32)})
            own_page = find_page(os.getpid())
            assert own_page is not None
            recorder = RecordReader(own_page)
            for _ in range(20):
                await burst.compute({"input": np.ones((1, 16), np.float32)})
            (driver,) = [device.pid for device in runtime.devices if device.pid]
            assert {records.pid for records in recorder.close().contents} == {os.getpid(), driver}


def weighted(location: str) -> bytes:
    """A model whose weights lie in that file: y = x ^ w."""
    weights = onnx.helper.make_tensor("w", onnx.TensorProto.UINT8, [64], bytes(64), raw=True)
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, [64]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("BitwiseXor", ["x", "w"], ["y"])], "g", [x], [y], [weights])
    content: bytes = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]).SerializeToString()
    return content


def test_the_service_opens_no_file_that_a_model_names(served: Served, folder: Path) -> None:
    """It may read more than an app in a container. Such an app says where its model lies, too."""
    (folder / "weights").write_bytes(b"w" * 64)
    file = folder / "model.onnx"
    with hostile(served.path) as app, aionn.blocking.attach(MODEL, service=served.path):
        for location in ("weights", *map(str, range(3, 40))):
            file.write_bytes(weighted(location))
            with file.open("rb") as opened:
                said = sentence(app.call(OpenModel(Fd(opened.fileno()), "mine")))
                assert f"model 'mine': tensor 'w' of graph 'g' lies in the file '{location}' beside the model" in said
        file.write_bytes(weighted("weights"))
        with file.open("rb") as opened, odd_descriptor() as odd:
            assert "can be read" in sentence(app.call(OpenModel(Fd(opened.fileno()), beside=(("weights", Fd(odd)),))))
            many = tuple((str(number), Fd(opened.fileno())) for number in range(65))
            assert "has 65 files beside it, but the service takes 64" in sentence(app.call(OpenModel(Fd(opened.fileno()), beside=many)))
    for content in (b"w", b"v"):
        (folder / "weights").write_bytes(content * 64)
        with aionn.blocking.attach(file, service=served.path) as burst:
            assert burst.compute({"x": np.zeros(64, np.uint8)})["y"].tobytes() == content * 64


async def test_models_for_threads_count_for_the_app_that_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MOST_OF_AN_APP", 3)
    path = str(folder / "service.sock")
    service = Looking(listen(path))

    def attaches() -> None:
        for width in range(2, 8):
            model = folder / f"{width}.onnx"
            model.write_bytes(identity_model({"input": (1, width)}))
            with aionn.blocking.attach(model, devices=["reference"], service=path) as burst:
                burst.compute({"input": np.ones((1, width), np.float32)})
            assert len(service._models._kept) == min(width - 1, 3)
        with pytest.raises(aionn.QuotaError, match="prepares 5 bytes for one app"), monkeypatch.context() as patched:
            patched.setattr(models, "MOST_BYTES_OF_AN_APP", 5)
            aionn.blocking.attach(MODEL, service=path)

    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)
        await anyio.to_thread.run_sync(attaches)
        service.end()


async def test_a_larger_message_is_refused_by_the_app_and_ends_a_hostile_one(served: Served, folder: Path) -> None:
    with hostile(served.path) as app:
        guest = app.driver()
        guest.sock.sendall(begun_frame(GUEST_BODY_BYTES + 1, 0))
        with pytest.raises((EOFError, ConnectionResetError)):
            guest.read()
        guest.close()
    nodes = [onnx.helper.make_node("Identity", ["x"], ["y"], doc_string="x" * (GUEST_BODY_BYTES + 1))]
    x, y = ([onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1])] for name in "xy")
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", x, y), opset_imports=[onnx.helper.make_opsetid("", 18)])
    async with aionn.Runtime(service=served.path, start=()) as runtime:
        with pytest.raises(aionn.CallerError, match="at most 16777216 fit; make the graph smaller"):
            await runtime.compile(aionn.Model.from_onnx(model.SerializeToString()), devices=["reference"])


def test_a_number_of_a_call_is_used_once(served: Served, folder: Path) -> None:
    """What a guest prepares is kept under the number of its call, and another call of that number would take its place."""
    model = aionn.Model.from_onnx(MODEL)
    assert model.graph  # it is read
    prepare = PrepareModel(model_message(model), options_message(PrepareOptions(), EngineOptionsMessage()), None)
    with hostile(served.path) as app, hostile(served.path) as other:
        victim = other.open_model(folder)
        guest = app.driver()
        for _ in range(3):
            guest.post(CallMessage(7, prepare))
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                guest.read()
        guest.close()
        assert victim.call(FreeBuffer(0)) is None
        until(lambda: [guest["models"] for guest in served.guests()] == [1])
        victim.close()


def test_what_an_app_sends_is_bounded(served: Served) -> None:
    with hostile(served.path) as app:
        app.sock.sendall(begun_frame(server.LIMITS.message_bytes + 1, 0))
        with pytest.raises((EOFError, ConnectionResetError)):
            app.read()
    with hostile(served.path) as app:
        assert "expected the fields" in sentence(app.call(msgspec.structs.replace(DEFAULTS, needs=b"{{")))
        with Path("/proc/self/exe").open("rb") as file:
            assert "the service takes 4096" in sentence(app.call(OpenModel(Fd(file.fileno()), "x" * 5000, ("reference",))))
        large = msgspec.structs.replace(DEFAULTS, environment={"AIONN_TEST_WORD": "x" * 200_000})
        assert "driver_env has 200015 characters, but a service takes 16384" in sentence(app.call(large))
    held = [Hostile.at(served.path) for _ in range(server.MOST_OF_A_PROCESS + 5)]
    assert [isinstance(each.greeting, Refused) for each in held[:-6]] == [False] * (server.MOST_OF_A_PROCESS - 1)
    refused = held[-1].greeting
    assert isinstance(refused, Refused)
    assert f"process {os.getpid()} is attached {server.MOST_OF_A_PROCESS} times" in refused.failure.message
    for each in held:
        each.close()
    until(lambda: not served.facts()["apps"])


def test_a_service_without_descriptors_waits_for_some(served: Served) -> None:
    pid = served.process.pid
    attached = Hostile.at(served.path)
    attached.driver().close()
    until(lambda: served.guests() == [])  # it has imported what it needs, and reads modules with descriptors
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors_of(pid), before[1]))
    waiting = []
    for _ in range(3):
        app = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        app.connect(served.path)
        waiting.append(app)
    before_s = cpu_s(pid)
    time.sleep(2.5)
    assert cpu_s(pid) - before_s < 0.5
    assert 1 <= served.log.count("an app cannot attach now") <= 4
    assert "what hands a driver over to an app found no free file descriptor" in sentence(attached.call(DEFAULTS))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    attached.driver().close()
    attached.close()
    for app in waiting:
        Hostile(app).close()


async def test_a_peer_that_reads_nothing_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it has sent before waits for it, so a peer that only writes takes no memory."""
    monkeypatch.setattr(connection, "_MOST_UNREAD", 16)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    answer, taken_in, many = Cancel(1), 0, 10**5

    def echo(message: object, descriptors: object) -> None:
        nonlocal taken_in
        taken_in += 1
        channel.post(answer)

    channel = ControlSocket(ours, echo, lambda error: None, limits=PeerLimits(10**9))
    frame = encode(CallMessage(1, ReadService()))[0] * 100
    try:
        unchanged = 0  # turns of the loop, each of which takes in what there is from a peer that is read
        while unchanged < 200 and taken_in < many:
            before = taken_in
            with suppress(BlockingIOError):
                theirs.send(frame)
                before = -1
            await anyio.lowlevel.checkpoint()
            unchanged = unchanged + 1 if taken_in == before else 0
        before = taken_in
        assert before < many
        assert select.select([], [theirs], [], 0)[1] == []
        while select.select([theirs], [], [], 0)[0]:
            theirs.recv(1 << 20)
            await anyio.lowlevel.checkpoint()
        with anyio.fail_after(10):
            while taken_in == before:
                await anyio.sleep(0.05)
                with suppress(BlockingIOError):
                    theirs.recv(1 << 20)
    finally:
        channel.close()
        theirs.close()


@pytest.mark.both_loops
async def test_a_model_of_a_client_that_goes_is_compiled_no_further(folder: Path, fake_device: FakeDevice) -> None:
    """Another client waits for the same model, and gets it."""
    path, file = str(folder / "service.sock"), folder / "model.onnx"
    file.write_bytes(MODEL)
    service = Looking(listen(path))
    fake_device.hang("compile")

    def asked(app: Hostile) -> int:
        with file.open("rb") as opened:
            return app.begin(OpenModel(Fd(opened.fileno()), "", (fake_device.name,)))

    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)
        first, second = [await anyio.to_thread.run_sync(Hostile.at, path) for _ in range(2)]
        try:
            asked(first)
            await fake_device.heard("compile")
            call = asked(second)
            with anyio.fail_after(10):
                while sum(app._in_flight for app in service.apps) < 2:  # noqa: ASYNC110 -- another process has no event
                    await anyio.sleep(0.01)
            first.close()
            with anyio.fail_after(10):
                await fake_device.heard("compile")  # the first one was given up while it hung
            fake_device.behave()
            answer = await anyio.to_thread.run_sync(second.read)
            assert isinstance(answer, Reply)
            assert answer.id == call
            opened = decode(answer.answer, second._fds.__next__, OpenModel)
            os.close(opened.pidfd)
            os.close(opened.socket)
        finally:
            fake_device.behave()
            first.close()
            second.close()
            service.end()


async def test_calls_that_wait_hold_few_descriptors_of_the_service(folder: Path, fake_device: FakeDevice) -> None:
    """An app has as many over all its connections, and as before once its calls are over."""
    path, file = str(folder / "service.sock"), folder / "model.onnx"
    file.write_bytes(MODEL)
    service = Looking(listen(path))
    fake_device.hang("compile")
    each = 61
    most = server.MOST_DESCRIPTORS // each

    def ask(app: Hostile, count: int) -> None:
        with file.open("rb") as opened:
            fd = Fd(opened.fileno())
            beside = tuple((f"{number}.bin", fd) for number in range(each - 1))
            for _ in range(count):
                app.begin(OpenModel(fd, "", (fake_device.name,), beside=beside))

    async def hold(count: int) -> None:
        with anyio.fail_after(10):
            while sum(app.descriptors for app in service.apps) != count:  # noqa: ASYNC110 -- another process has no event
                await anyio.sleep(0.01)

    async with anyio.create_task_group() as group:
        group.start_soon(service.serve)
        apps = [await anyio.to_thread.run_sync(Hostile.at, path) for _ in range(2)]
        try:
            await anyio.to_thread.run_sync(ask, apps[0], most)
            await hold(most * each)
            await anyio.to_thread.run_sync(ask, apps[1], 1)
            answer = await anyio.to_thread.run_sync(apps[1].read)
            assert answer.failure.kind == "QuotaError"
            assert f"which takes {server.MOST_DESCRIPTORS}" in sentence(answer)
            fake_device.behave()
            await hold(0)
            await anyio.to_thread.run_sync(ask, apps[1], 1)
            opened = decode((await anyio.to_thread.run_sync(apps[1].read)).answer, apps[1]._fds.__next__, OpenModel)
            os.close(opened.pidfd)
            os.close(opened.socket)
        finally:
            fake_device.behave()
            for app in apps:
                app.close()
            service.end()
