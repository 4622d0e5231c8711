"""What a store or a network in hostile hands can do to those who read it: nothing that lasts, and nothing without a bound."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from blake3 import blake3

from aionn.caching.manifest import StoredFile
from aionn.errors import CallerError
from aionn.fleet import StoreError, requests
from aionn.fleet.artifact_store import MAX_STATEMENT_BYTES, ArtifactStore
from aionn.fleet.requests import open_address
from tests.fleet.entries import artifact, some_bytes
from tests.fleet.fake_s3 import FakeS3

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0
_OK = b'HTTP/1.1 200 OK\r\nLast-Modified: Mon, 23 Nov 2026 10:00:00 GMT\r\nETag: "x"\r\n'


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server that answers each connection once, in any way. This process's buckets use it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                asked = b""
                while b"\r\n\r\n" not in asked and (piece := connection.recv(65536)):
                    asked += piece
                if asked:  # else the client has opened a connection that it did not need
                    answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FakeS3(port=listening.getsockname()[1]).environment().items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            listening.close()
            thread.join(PATIENCE_S)


def bucket() -> ArtifactStore:
    return ArtifactStore(open_address("s3://artifacts", patience_s=PATIENCE_S))


async def test_a_statement_that_never_ends_is_read_up_to_its_bound() -> None:
    """The server announces 100 bytes, and sends chunks without an end."""
    refused = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(_OK + b"Content-Length: 100\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
        except OSError:
            refused.set()
            raise

    with server(answer):
        assert await bucket().statement(artifact("one", b"a").place) is None
        assert refused.wait(PATIENCE_S)
    assert MAX_STATEMENT_BYTES < 1 << 20


async def test_a_slow_store_is_no_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience is for each piece of a file. The server sends more only after a piece has been taken."""
    content, taken = some_bytes(1, 3 << 20), threading.Event()
    take = requests._take

    def take_and_note(*arguments: object) -> None:
        take(*arguments)  # type: ignore[arg-type]
        taken.set()

    def answer(connection: socket.socket) -> None:
        connection.sendall(_OK + b"Content-Length: %d\r\n\r\n" % len(content) + content[: 1 << 20])
        if taken.wait(PATIENCE_S):
            connection.sendall(content[1 << 20 :])

    monkeypatch.setattr(requests, "_take", take_and_note)
    fd = os.memfd_create("slow")
    try:
        with server(answer):
            store = ArtifactStore(open_address("s3://artifacts", patience_s=10.0))
            assert await store.fetch([StoredFile(len(content), blake3(content).digest())], [fd]) is None
        assert os.pread(fd, len(content) + 1, 0) == content
    finally:
        os.close(fd)


async def test_what_a_store_answers_is_one_short_sentence_without_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MAX_REASON", 600)  # as long as the path of the object, and a part of the answer
    body = b"<Error><Message>\x1b[2J\x1b]0;owned\x07 " + b"lies " * 50_000 + b"</Message></Error>"

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with server(answer), pytest.raises(StoreError) as raised:
        await bucket().statement(artifact("one", b"a").place)
    assert str(raised.value).isprintable()
    assert r"\x1b[2J\x1b]0;owned\x07 lies lies" in str(raised.value)
    assert len(str(raised.value)) < 1000


async def test_a_list_without_an_end_is_an_error(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MAX_OBJECTS", 3)
    store = bucket()
    for number in range(3):
        await artifact(str(number), b"a").push(store)
    assert len(await store.statements()) == 3
    await artifact("one more", b"a").push(store)
    with pytest.raises(StoreError, match="more than 3 objects"):
        await store.statements()


@pytest.mark.parametrize("kind", ["fifo", "symlink", "folder"])
async def test_what_is_no_file_is_not_read_from_a_folder(tmp_path: Path, kind: str) -> None:
    """A FIFO would hold a thread of the app for as long as no writer opens it."""
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=PATIENCE_S, make=True))
    one = artifact("one", b"a")
    await one.push(store)
    path = tmp_path / "store" / one.place.path
    path.rename(tmp_path / "statement")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        path.symlink_to(tmp_path / "statement")
    else:
        path.mkdir()
    assert await store.statement(one.place) is None
    found = await store.requests.find(one.place.path)
    assert found is not None
    assert await store.read_statement(one.place, found) == b""
    if kind == "fifo":
        with pytest.raises(OSError, match="No such device"):  # no thread has it open
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize(
    "address", ["s3://ID:SECRET@bucket/p", "s3://SECRET@bucket", "s3://bucket/p?key=SECRET", "s3://bucket/p#SECRET", "s3://"]
)
def test_an_address_with_credentials_is_refused_and_not_quoted(address: str) -> None:
    with pytest.raises(CallerError, match="credentials come from") as raised:
        open_address(address, patience_s=1.0)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("ending", ["#1", "?x=1"])
def test_no_part_of_a_folders_address_is_dropped(tmp_path: Path, ending: str) -> None:
    """`gc` of file:///store#1 must not sweep the folder /store."""
    with pytest.raises(CallerError, match="write # and \\? of a path as %23 and %3F"):
        open_address(f"file://{tmp_path}{ending}", patience_s=1.0)
    folder = tmp_path / f"a{ending}"
    folder.mkdir()
    assert open_address(f"file://{quote(str(folder))}", patience_s=1.0).folder == folder
