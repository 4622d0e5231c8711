"""The live page: in a real browser with a made-up microphone and camera, and for clients that are not a browser.

The browser is the system's own chromium (Debian: `apt-get install chromium`). Where it is missing, its test is skipped and says so.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.leaks import processes_with, wait_for_end

SERVER = Path(__file__).parents[2] / "examples" / "live" / "server.py"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"

# What row O18 asks of a machine with nothing else to do, and how much longer a busy one may take.
SPEECH_WITHIN_S = 2.0
RECOVERED_WITHIN_S = 3.0
BUSY = 10

BLOCK = np.zeros(512, "<f4").tobytes()


class Server:
    """A server in a process.

    Attributes:
        url: its address, with a slash at the end. pid: of the process.
    """

    def __init__(self, stderr: Path) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "AIONN_TEST_MARK": self.mark}
        with stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", str(SERVER), "--listen", "127.0.0.1:0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.pid = self._process.pid
        self._stderr = stderr

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def stream(self, name: str, origin: str | None = "page") -> ClientConnection:
        """Return a WebSocket to one of the streams, as the page opens it."""
        header = Origin(self.url.rstrip("/") if origin == "page" else origin) if origin else None
        return connect(self.url.replace("http", "ws") + name, origin=header, open_timeout=60)

    def kill_driver(self, origin: str | None = None) -> list[str]:
        request = urllib.request.Request(self.url + "kill", method="POST", headers={"Origin": origin or self.url.rstrip("/")})
        with urllib.request.urlopen(request, timeout=20) as answer:
            killed: list[str] = json.load(answer)["killed"]
            return killed

    def descriptors(self) -> dict[str, tuple[int, int]]:
        """Return the descriptors by number, each with the device and the inode of its file."""
        found = {}
        for number in os.listdir(f"/proc/{self.pid}/fd"):
            with suppress(FileNotFoundError):  # it has just been closed
                status = os.stat(f"/proc/{self.pid}/fd/{number}")
                found[number] = status.st_dev, status.st_ino
        return found

    def close(self) -> str:
        """End the server as a shell does. Returns what it has written to stderr."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        assert processes_with("AIONN_TEST_MARK", self.mark) == []
        return self._stderr.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("live") / "stderr")
    try:
        yield running
    finally:
        written = running.close()
    assert written == ""


def answers(stream: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stream.recv(60))
    return found


# --- in a browser --------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path, recording_path: Path) -> Iterator[Any]:
    """A page of chromium whose microphone hears speech, and whose camera shows a clock."""
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip("chromium is not installed, so the live page was not tried in a browser; run apt-get install chromium")
    from playwright.sync_api import sync_playwright

    samples, rate = soundfile.read(recording_path, frames=48_000 * 8)
    soundfile.write(tmp_path / "speech.wav", samples, rate, subtype="PCM_16")
    flags = (
        "--headless=new",  # the old headless mode has no microphone
        "--no-sandbox",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={tmp_path / 'speech.wav'}",
        "--autoplay-policy=no-user-gesture-required",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
    )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=False, args=list(flags))
        try:
            yield chromium.new_context(permissions=["microphone", "camera"]).new_page()
        finally:
            chromium.close()


def test_a_browser_shows_speech_and_boxes_and_recovers_from_a_killed_driver(server: Server, browser: Any) -> None:
    from playwright.sync_api import expect

    complaints: list[str] = []
    browser.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    browser.on("pageerror", lambda error: complaints.append(str(error)))

    def shows(selector: str, text: str, within_s: float) -> float:
        """Wait until the page shows it. Returns after how many seconds it did."""
        began = time.monotonic()
        expect(browser.locator(selector)).to_have_text(re.compile(text), timeout=within_s * BUSY * 1e3)
        return time.monotonic() - began

    with server.stream("voice") as stream:  # the models are compiled while a page is loaded for the first time; that is not counted
        stream.send(BLOCK)
        answers(stream)
    browser.goto(server.url)
    speech_s = shows("#speech", r"^(0\.9|1\.0)", SPEECH_WITHIN_S)
    shows("#mark", "somebody speaks", SPEECH_WITHIN_S)
    shows("#count", r"^[1-9]", SPEECH_WITHIN_S)
    shows("#camera-row .fps", r"^[1-9]", SPEECH_WITHIN_S)
    shows("#voice-row .stage", "^onnxruntime$", SPEECH_WITHIN_S)
    assert browser.locator("#voice-row .recovered").inner_text() == "0"
    browser.click("#kill")
    recovered_s = shows("#voice-row .recovered", "^1$", RECOVERED_WITHIN_S)
    shows("#camera-row .recovered", "^1$", RECOVERED_WITHIN_S)
    shows("#speech", r"^(0\.9|1\.0)", RECOVERED_WITHIN_S)
    shows("#status", "A new driver has taken over", RECOVERED_WITHIN_S)
    assert complaints == []
    print(f"speech shown after {speech_s:.2f} s, recovered after {recovered_s:.2f} s")


def test_the_buttons_start_what_is_not_permitted_yet(server: Server, browser: Any) -> None:
    from playwright.sync_api import expect

    # With a made-up microphone the browser permits everything.
    browser.add_init_script("navigator.permissions.query = async () => ({ state: 'prompt' })")
    browser.goto(server.url)
    expect(browser.locator("#status")).to_have_text("Press a button to start.", timeout=30_000)
    expect(browser.get_by_role("button")).to_have_count(3, timeout=30_000)
    browser.get_by_role("button", name="Start microphone").click()
    expect(browser.locator("#speech")).to_have_text(re.compile(r"^(0\.9|1\.0)"), timeout=SPEECH_WITHIN_S * BUSY * 1e3)


# --- without a browser -----------------------------------------------------------------------------------------------------


def test_each_client_has_a_stream_of_its_own_and_a_kill_changes_no_answer(server: Server, recording_path: Path) -> None:
    samples, rate = soundfile.read(recording_path, frames=48_000 * 2, dtype="float32")
    blocks = samples[:: rate // 16_000][: 512 * 40].astype("<f4").reshape(40, 512)
    with server.stream("voice") as one, server.stream("voice") as two:
        heard: list[float] = []
        for number, block in enumerate(blocks):
            one.send(block.tobytes())
            heard.append(answers(one)["speech"])
            if number % 2 == 0:
                two.send(BLOCK)
                assert answers(two)["speech"] < 0.1, "silence, whatever the other one hears"
    assert max(heard) > 0.9
    with server.stream("voice") as again:
        for number, block in enumerate(blocks):
            if number in (5, 37):
                assert server.kill_driver() == ["onnxruntime"]
            again.send(block.tobytes())
            answer = answers(again)
            assert answer["speech"] == heard[number]
        assert answer["recovered"] == 2
        assert answer["stage"] == "onnxruntime"
        assert answer["age_ms"] > 0


def test_a_client_that_vanishes_ends_its_stream(server: Server) -> None:
    with server.stream("voice") as stream:
        for _ in range(40):  # with a snapshot, so that the stream has all the memory that it needs
            stream.send(BLOCK)
            answers(stream)
        before = server.descriptors()
        with server.stream("voice") as gone:
            gone.send(BLOCK)
            answers(gone)
            # Streams of tests before this one may still be closing, so the files of this stream are looked for, too.
            own = set(server.descriptors().values()) - set(before.values())
            assert own
            gone.socket.shutdown(socket.SHUT_RDWR)  # no closing handshake, as when a laptop is shut
        until_s = time.monotonic() + 30
        while own & set((now := server.descriptors()).values()) or len(now) > len(before):
            assert time.monotonic() < until_s, own & set(now.values())
            stream.send(BLOCK)  # a turn of the server
            answers(stream)


def picture_of(width: int, height: int) -> bytes:
    """A small JPEG picture that says it has so many pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    content = bytearray(file.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def test_what_is_not_the_page_is_refused(server: Server) -> None:
    for origin in ("http://elsewhere.example", None):
        with pytest.raises(InvalidStatus, match="403"):
            server.stream("voice", origin=origin)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        server.kill_driver("http://elsewhere.example")
    for host in (f"elsewhere.example:{server.port}", "", "[", "127.0.0.1.elsewhere.example"):  # names that lead to this machine
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        with closing(client):
            client.putrequest("POST", "/kill", skip_host=True)
            client.putheader("Host", host)
            client.putheader("Origin", f"http://{host}")
            client.endheaders()
            assert client.getresponse().status in (400, 403), host
    wrongs: list[tuple[str, bytes | str]] = [("voice", b"too short"), ("voice", "a text"), ("camera", b"no picture"), ("camera", "a text")]
    for name, wrong in (*wrongs, ("camera", picture_of(65_500, 65_500)), ("camera", picture_of(10_000, 10_000))):
        with server.stream(name) as stream:
            stream.send(wrong)
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(60)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1003, (name, wrong)


def test_a_server_with_open_streams_closes(tmp_path: Path) -> None:
    server = Server(tmp_path / "stderr")
    with server.stream("voice") as stream:
        stream.send(BLOCK)
        answers(stream)
        assert server.close() == ""
        assert wait_for_end(server.pid, 0)
        with pytest.raises(ConnectionClosed):
            stream.recv(10)
