"""The live page: in a real browser with a made-up microphone and camera, and for clients that are not a browser."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.apps import App
from tests.chromium import page_of_chromium
from tests.leaks import processes_with, wait_for_end

SERVER = Path(__file__).parents[2] / "examples" / "live" / "server.py"

# What row O18 asks of a machine with nothing else to do, and how much longer a busy one may take.
SPEECH_WITHIN_S = 2.0
RECOVERED_WITHIN_S = 3.0
SWAP_WITHIN_S = 9.0
BUSY = 10

BOX = (255, 45, 45)  # as app.js draws it

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
            self._process = App(
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
    samples, rate = soundfile.read(recording_path, frames=48_000 * 8)
    soundfile.write(tmp_path / "speech.wav", samples, rate, subtype="PCM_16")
    flags = (
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={tmp_path / 'speech.wav'}",
        "--autoplay-policy=no-user-gesture-required",
    )
    with page_of_chromium(["microphone", "camera"], flags) as page:
        yield page


class Page:
    """The live page in a browser: what it shows as text and as pixels, and what it complains about.

    Attributes:
        complaints: errors and warnings of its console.
    """

    def __init__(self, browser: Any, server: Server) -> None:
        self.browser = browser
        self.complaints: list[str] = []
        self._first_at: dict[str, int] = {}
        browser.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        browser.on("pageerror", lambda error: self.complaints.append(str(error)))
        with server.stream("voice") as stream:  # the models are compiled while a page is loaded for the first time; that is not counted
            stream.send(BLOCK)
            answers(stream)
        browser.goto(server.url)

    def shows(self, selector: str, text: str, within_s: float) -> float:
        """Wait until the page shows it. Returns after how many seconds it did."""
        from playwright.sync_api import expect

        began = time.monotonic()
        expect(self.browser.locator(selector)).to_have_text(re.compile(text), timeout=within_s * BUSY * 1e3)
        return time.monotonic() - began

    def pixels(self, selector: str) -> NDArray[np.int16]:
        """Return what the screen shows of an element: [rows, columns, 3] from 0 to 255."""
        picture = Image.open(io.BytesIO(self.browser.locator(selector).screenshot())).convert("RGB")
        return np.asarray(picture, np.int16)

    def coloured(self, selector: str, name: str) -> NDArray[np.bool_]:
        """Return which pixels of an element have a colour of the style sheet: [rows, columns]."""
        colour = self.browser.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')")
        return like(self.pixels(selector), ImageColor.getrgb(colour.strip()))

    def mark_at(self, name: str) -> int | None:
        """Return the column of the first line from the top to the bottom of the plot that has this colour, or None."""
        columns = np.flatnonzero(self.coloured("#plot", name).mean(axis=0) > 0.8)
        return int(columns[0]) if columns.size else None

    def mark_moves(self, name: str) -> bool:
        """Return whether a line of this colour has come and moved to the left, or left the plot, since this was first asked.

        A line between two columns has the colour of neither, so one look may miss it. A line that stands still is seen again.
        """
        at, first = self.mark_at(name), self._first_at.get(name)
        if at is not None:
            self._first_at.setdefault(name, at)
        return first is not None and (at is None or at < first - 5)

    def until(self, true: Callable[[], object], what: str, within_s: float = SPEECH_WITHIN_S) -> None:
        """Look at the page again and again until that is so."""
        until_s = time.monotonic() + within_s * BUSY
        while not true():
            assert time.monotonic() < until_s, what
            self.browser.wait_for_timeout(20)


def like(pixels: NDArray[np.int16], colour: tuple[int, ...]) -> NDArray[np.bool_]:
    return np.asarray(np.abs(pixels - np.array(colour[:3])).max(axis=2) < 40)


def test_a_browser_shows_speech_and_boxes_and_recovers_from_a_killed_driver(server: Server, browser: Any) -> None:
    page = Page(browser, server)
    speech_s = page.shows("#speech", r"^(0\.9|1\.0)", SPEECH_WITHIN_S)
    page.shows("#mark", "somebody speaks", SPEECH_WITHIN_S)
    page.shows("#count", r"^[1-9]", SPEECH_WITHIN_S)
    page.shows("#camera-row .fps", r"^[1-9]", SPEECH_WITHIN_S)
    page.shows("#voice-row .stage", "^onnxruntime$", SPEECH_WITHIN_S)
    assert browser.locator("#voice-row .recovered").inner_text() == "0"
    browser.click("#kill")
    recovered_s = page.shows("#voice-row .recovered", "^1$", RECOVERED_WITHIN_S)
    page.shows("#camera-row .recovered", "^1$", RECOVERED_WITHIN_S)
    page.shows("#speech", r"^(0\.9|1\.0)", RECOVERED_WITHIN_S)
    page.shows("#status", "A new driver has taken over", RECOVERED_WITHIN_S)
    assert page.complaints == []
    print(f"speech shown after {speech_s:.2f} s, recovered after {recovered_s:.2f} s")


def test_the_pictures_move_and_have_their_marks(server: Server, browser: Any) -> None:
    page = Page(browser, server)
    page.shows("#mark", "somebody speaks", SPEECH_WITHIN_S)
    page.shows("#count", r"^[1-9]", SPEECH_WITHIN_S)
    page.until(lambda: page.coloured("#timeline", "band").mean() > 0.02, "there is no mark where somebody speaks")
    assert page.coloured("#timeline", "voice").any()
    page.until(lambda: like(page.pixels("#picture"), BOX).sum() > 100, "there is no box around text")
    first = page.pixels("#picture")

    def video_moves() -> bool:
        """Whether whole squares have changed. The line of a box is too thin for that."""
        moved = np.abs(page.pixels("#picture") - first).max(axis=2) > 40
        rows, columns = moved.shape[0] // 8, moved.shape[1] // 8
        squares = moved[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).all(axis=(1, 3))
        return bool(squares.sum() > 3)

    page.until(video_moves, "the video stands still")
    sound = page.pixels("#timeline")
    page.until(lambda: (np.abs(page.pixels("#timeline") - sound).max(axis=2) > 40).sum() > 100, "the sound stands still")
    page.until(lambda: page.coloured("#plot", "voice").sum() > 20, "there are no latencies of the microphone")
    assert page.complaints == []


def test_everything_is_on_one_screen_in_light_and_dark(server: Server, browser: Any) -> None:
    page = Page(browser, server)
    page.shows("#mark", "somebody speaks", SPEECH_WITHIN_S)
    page.shows("#count", r"^[1-9]", SPEECH_WITHIN_S)
    papers = {}
    for scheme in ("light", "dark"):
        browser.emulate_media(color_scheme=scheme)
        for width, height in ((390, 844), (1440, 900)):
            browser.set_viewport_size({"width": width, "height": height})
            sizes = browser.evaluate("(({scrollWidth, scrollHeight}) => [scrollWidth, scrollHeight])(document.documentElement)")
            assert sizes[0] <= width, sizes
            assert sizes[1] <= height, sizes
            for canvas in ("#picture", "#timeline", "#plot"):
                box = browser.locator(canvas).bounding_box()
                assert min(box["width"] / width, 3.5 * box["height"] / height) > 0.3, (canvas, width, box)
            words = "[...document.querySelectorAll('h1, h2, button, th, td')]"
            cut = browser.evaluate(f"{words}.filter((at) => at.scrollWidth > at.clientWidth + 1).map((at) => at.innerText)")
            assert cut == [], (scheme, width)
            page.until(lambda: page.coloured("#timeline", "voice").sum() > 20, "the sound has other colours")
            page.until(lambda: page.coloured("#plot", "voice").sum() > 20, "the plot has other colours")
        papers[scheme] = page.pixels("body")[2, 2].mean()
        assert page.coloured("#plot", "panel").mean() > 0.5
    assert papers["light"] > 200, papers
    assert papers["dark"] < 60, papers
    assert page.complaints == []


def test_a_swap_and_a_death_leave_their_marks(tmp_path: Path, browser: Any) -> None:
    """With a server of its own, because a stage is swapped in once. The page's clock is so coarse that a death and the next driver's
    start are at the same place of the plot."""
    browser.add_init_script("const fine = performance.now.bind(performance); performance.now = () => 1000 * Math.floor(fine() / 1000);")
    server = Server(tmp_path / "stderr")
    try:
        page = Page(browser, server)
        page.shows("#camera-row .stage", "^onnxruntime$", SPEECH_WITHIN_S)
        page.until(lambda: page.coloured("#plot", "onnxruntime").any(), "there are no latencies of the camera")
        page.shows("#camera-row .stage", "^openvino$", SWAP_WITHIN_S)
        page.shows("#events", "camera: openvino serves", SPEECH_WITHIN_S)
        page.until(lambda: page.mark_at("swap") is not None, "the plot has no mark of the swap")
        assert browser.locator("#camera-row .recovered").inner_text() == "0", "a swap is not a death"
        assert page.mark_at("death") is None
        browser.click("#kill")
        page.shows("#events", r"onnxruntime: driver \d+ died \(signal 9\)", RECOVERED_WITHIN_S)
        page.until(lambda: page.mark_moves("death"), "the plot has no mark of the death, or stands still")
        page.shows("#events", r"died.*onnxruntime: driver \d+ ready after", RECOVERED_WITHIN_S)
        page.shows("#voice-row .recovered", "^1$", RECOVERED_WITHIN_S)
        page.shows("#camera-row .recovered", "^1$", RECOVERED_WITHIN_S)
        assert page.complaints == []
    finally:
        written = server.close()
    assert written == ""


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
                assert set(server.kill_driver()) - {"openvino"} == {"onnxruntime"}, "the camera of another test may have been swapped"
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


def test_boxes_come_with_the_number_of_their_picture(server: Server) -> None:
    """Pictures with text and without it, faster than they are looked at. So some are dropped, and numbers are left out."""
    pictures = []
    for text in ("", "PARCEL 0417"):
        file = io.BytesIO()
        image = Image.new("RGB", (320, 256), "white")
        ImageDraw.Draw(image).text((60, 110), text, "black", ImageFont.load_default(32))
        image.save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
    with server.stream("camera") as stream:
        for number in range(60):
            stream.send(pictures[number % 2])
        found = [answers(stream)]
        while found[-1]["number"] < 59:
            found.append(answers(stream))
    numbers = [answer["number"] for answer in found]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 60, "no picture was dropped"
    assert found[-1]["dropped"] == 60 - len(numbers)
    assert [bool(answer["boxes"]) for answer in found] == [number % 2 == 1 for number in numbers]


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
