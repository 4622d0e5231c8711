"""An S3 server for tests, in a thread: objects in memory, conditional puts, lists, parts, and the faults of a real one.

Faults follow a seed: an answer with status 503, an answer that comes late, and an answer whose body ends too early.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_SLOW_S = 0.02


@dataclass
class Stored:
    content: bytes
    written_s: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'


@dataclass
class FakeS3:
    """The server's state. Tests read and change it, under `lock`.

    Attributes:
        objects: by bucket and key, as in "bucket/prefix/blake3/...".
        faults: share of the answers that have each fault: "error", "slow", "torn".
        full: every write is refused with 507.
        hangs: no request is answered any more.
        hangs_at: requests whose path holds this text are not answered.
        requests: method and path of each request, in the order they came.
        clients: the ports of clients whose connections are open here. That of a client that was killed stays until its requests are done.
    """

    port: int = 0
    objects: dict[str, Stored] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=dict)
    full: bool = False
    hangs_at: str | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    clients: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)
    chance: random.Random = field(default_factory=lambda: random.Random(17))
    hangs: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def environment(self) -> dict[str, str]:
        """What a process needs to use this server as `s3://bucket/...`."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }

    def strikes(self, fault: str) -> bool:
        with self.lock:
            return self.chance.random() < self.faults.get(fault, 0.0)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeS3

    def setup(self) -> None:
        super().setup()
        with self.state.lock:
            self.state.clients.add(self.client_address[1])

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            with self.state.lock:
                self.state.clients.discard(self.client_address[1])

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 -- the base class's name
        return

    def _begin(self) -> tuple[str, dict[str, list[str]], bytes] | None:
        """Read the request. Return its key, query and body, or None if it was answered by a fault."""
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = unquote(parts.path).lstrip("/")
        state = self.state
        with state.lock:
            state.requests.append((self.command, key))
        if state.hangs.is_set() or (state.hangs_at is not None and state.hangs_at in key):
            state.over.wait()
            self.close_connection = True
            return None
        if state.strikes("slow"):
            state.over.wait(_SLOW_S)
        if state.strikes("error"):
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return None
        return key, parse_qs(parts.query, keep_blank_values=True), body

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, *, length: int | None = None) -> None:
        torn = self.command == "GET" and len(body) > 1 and self.state.strikes("torn")
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if torn else body)
        if torn:
            self.close_connection = True

    def do_HEAD(self) -> None:
        if (begun := self._begin()) is None:
            return
        with self.state.lock:
            found = self.state.objects.get(begun[0])
        if found is None:
            self._answer(404)
        else:
            self._answer(200, headers=self._headers(found), length=len(found.content))

    def _headers(self, found: Stored) -> dict[str, str]:
        return {"ETag": found.etag, "Last-Modified": formatdate(found.written_s, usegmt=True)}

    def do_GET(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, _ = begun
        if "list-type" in query:
            self._list(key, query)
            return
        with self.state.lock:
            found = self.state.objects.get(key)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        asked = self.headers.get("Range")
        if asked is None:
            self._answer(200, found.content, self._headers(found))
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        end = min(int(last) + 1 if last else len(found.content), len(found.content))
        headers = {**self._headers(found), "Content-Range": f"bytes {first}-{end - 1}/{len(found.content)}"}
        self._answer(206, found.content[int(first) : end], headers)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        bucket = bucket.rstrip("/")
        prefix = query.get("prefix", [""])[0]
        with self.state.lock:
            found = {key[len(bucket) + 1 :]: one for key, one in self.state.objects.items() if key.startswith(f"{bucket}/{prefix}")}
        after = query.get("continuation-token", [""])[0]
        most = int(query.get("max-keys", ["1000"])[0])
        names = sorted(name for name in found if name > after)
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(found[name].content)}</Size><ETag>{escape(found[name].etag)}</ETag>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(found[name].written_s))}.000Z</LastModified></Contents>"
            for name in names[:most]
        )
        more = f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>" if len(names) > most else ""
        truncated = "true" if more else "false"
        text = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{rows}</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def do_PUT(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, body = begun
        state = self.state
        if state.full:
            self._answer(507, b"<Error><Code>InsufficientStorage</Code><Message>the bucket is full</Message></Error>")
            return
        if "uploadId" in query:
            with state.lock:
                state.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._answer(200, headers={"ETag": Stored(body).etag})
            return
        with state.lock:
            if self.headers.get("If-None-Match") == "*" and key in state.objects:
                status = 412
            else:
                state.objects[key] = Stored(body)
                status = 200
        # The object is there, and its writer never hears of it.
        if status == 200 and state.strikes("torn"):
            self.close_connection = True
            return
        self._answer(status, headers={"ETag": Stored(body).etag} if status == 200 else None)

    def do_POST(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, _ = begun
        with self.state.lock:
            if "uploads" in query:
                upload = f"upload{len(self.state.parts)}"
                self.state.parts[upload] = {}
                text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            else:
                parts = self.state.parts[query["uploadId"][0]]
                self.state.objects[key] = stored = Stored(b"".join(parts[number] for number in sorted(parts)))
                text = f"<CompleteMultipartUploadResult><ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def do_DELETE(self) -> None:
        if (begun := self._begin()) is None:
            return
        with self.state.lock:
            if "uploadId" in begun[1]:
                self.state.parts.pop(begun[1]["uploadId"][0], None)
            else:
                self.state.objects.pop(begun[0], None)
        self._answer(204)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        return  # a client that was killed


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Run a server for the block."""
    state = FakeS3()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="fake S3")
    thread.start()
    try:
        yield state
    finally:
        state.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
