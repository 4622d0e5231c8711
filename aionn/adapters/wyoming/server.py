"""The conversation with one satellite, and all of them.

    describe                             info: the wake words
    detect {names}, audio-start, audio-chunk ...
                                         detection {name, timestamp}, at most one of a word in 2 s; voice-started and voice-stopped
    audio-stop                           not-detected, if no word was detected
    ping                                 pong; other events are ignored, as the protocol wants it

Without `detect`, every wake word is listened for. What cannot be served is answered with `error`, logged with one line, and ends the
connection. So does a driver that dies again and again.

Invariants
    A connection's task belongs to the task group of `serve`. No client can end it, or another client's.
    A satellite that sends faster than it is computed waits in its socket: the next event is read when the one before is done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal

import anyio
import msgspec
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Attribution, Info, WakeModel, WakeProgram
from wyoming.ping import Pong
from wyoming.vad import VoiceStarted, VoiceStopped
from wyoming.wake import Detection, NotDetected

from aionn.adapters.wyoming.events import MOST_LINE_BYTES, EventError, read_event, write_event
from aionn.adapters.wyoming.models import SharedBurst, samples_of
from aionn.adapters.wyoming.voice import VoiceStream
from aionn.adapters.wyoming.wake_words import Features, WakeStream, WakeWord
from aionn.errors import AionnError

logger = logging.getLogger("aionn.wyoming")

MOST_SATELLITES = 1000
LINGER_S = 2.0
"""How long a client that goes on sending may take to read why its connection ends."""
PER_MS = 16
REFRACTORY_SAMPLES = 2000 * PER_MS
"""After a detection a word is not detected again for so long. Its score stays high for some windows."""


class Heard(msgspec.Struct, frozen=True):
    """What a server listens for.

    Attributes:
        words: wake words by name; with them, `features` makes what their models take.
        voice: the model of voice activity, or None.
        threshold: a score above it is a detection.
    """

    words: Mapping[str, WakeWord]
    features: Features | None
    voice: SharedBurst | None
    threshold: float

    def info(self) -> Info:
        """Return what Home Assistant lists."""
        shared: dict[str, Any] = {"attribution": Attribution("aionn", ""), "installed": True}
        models = [
            WakeModel(name=name, description=name.replace("_", " "), version=None, languages=[], phrase=None, **shared)
            for name in self.words
        ]
        program = WakeProgram(name="aionn", description="wake words in driver processes", version=version("aionn"), models=models, **shared)
        return Info(wake=[program] if models else [])


class _Detect(msgspec.Struct):
    names: list[str] | None = None


class _Format(msgspec.Struct):
    """What a chunk says of its sound. Home Assistant sends nothing else."""

    rate: Literal[16000]
    width: Literal[2]
    channels: Literal[1]
    timestamp: int | None = None


class Satellite:
    """The conversation with one client."""

    def __init__(self, heard: Heard, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._heard = heard
        self._reader, self._writer = reader, writer
        self._names = list(heard.words)
        self._wake: WakeStream | None = None
        self._voice: VoiceStream | None = None
        self._begun = False
        self._samples = 0
        self._began_ms = 0
        self._detected: dict[str, int] = {}

    async def serve(self) -> None:
        """Answer events until the client leaves, or sends what cannot be served."""
        try:
            while (event := await read_event(self._reader)) is not None:
                await self._answer(event)
        except AionnError as error:
            logger.warning("%s: %s", self._peer, error)
            await write_event(self._writer, Error(str(error), type(error).__name__))
            if not self._writer.is_closing():
                self._writer.write_eof()
            with anyio.move_on_after(LINGER_S):  # a connection that is closed with unread bytes loses what was written last
                while await self._reader.read(MOST_LINE_BYTES):
                    pass

    @property
    def _peer(self) -> str:
        peer = self._writer.get_extra_info("peername")
        return f"satellite {peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a satellite"

    async def _answer(self, event: Event) -> None:
        match event.type:
            case "describe":
                await write_event(self._writer, self._heard.info())
            case "ping":
                await write_event(self._writer, Pong(event.data.get("text")))
            case "detect":
                await self._choose(_read(_Detect, event).names)
            case "audio-start":
                self._begin(_read(_Format, event))
            case "audio-chunk":
                await self._hear(_read(_Format, event), event.payload or b"")
            case "audio-stop":
                await self._sound_is_over()

    async def _choose(self, names: list[str] | None) -> None:
        words = self._heard.words
        self._names = [name for name in words if not names or name in names]
        if unknown := sorted(set(names or ()) - words.keys()):
            text = f"there is no wake word {unknown[0]!r}; the server has {', '.join(map(repr, words)) or 'none'}"
            logger.warning("%s: %s", self._peer, text)
            await write_event(self._writer, Error(text, "unknown-wake-word"))

    def _begin(self, form: _Format) -> None:
        heard = self._heard
        words = [heard.words[name] for name in self._names]
        self._wake = WakeStream(heard.features, words) if words and heard.features is not None else None
        self._voice = VoiceStream(heard.voice) if heard.voice is not None else None
        self._begun, self._samples, self._began_ms = True, 0, form.timestamp or 0
        self._detected.clear()

    async def _hear(self, form: _Format, sound: bytes) -> None:
        if not self._begun:
            self._begin(form)
        if len(sound) % form.width:
            raise EventError(f"a chunk has {len(sound)} bytes, but a sample has {form.width}; send whole samples")
        if form.timestamp is not None:
            self._began_ms = form.timestamp - self._samples // PER_MS
        samples = samples_of(sound)
        self._samples += len(samples)
        if self._voice is not None:
            for at, speaks in await self._voice.changes(samples):
                await write_event(self._writer, (VoiceStarted if speaks else VoiceStopped)(self._ms(at)))
        if self._wake is not None:
            for at, scores in await self._wake.scores(samples):
                for name, score in scores.items():
                    await self._judge(name, score, at)

    async def _judge(self, name: str, score: float, at: int) -> None:
        if score <= self._heard.threshold or at < self._detected.get(name, -REFRACTORY_SAMPLES) + REFRACTORY_SAMPLES:
            return
        self._detected[name] = at
        logger.info("%s: %s was said (%.2f)", self._peer, name, score)
        await write_event(self._writer, Detection(name, self._ms(at)))

    async def _sound_is_over(self) -> None:
        if self._voice is not None and self._voice.speaking:
            await write_event(self._writer, VoiceStopped(self._ms(self._samples)))
        if self._begun and not self._detected and self._heard.words:
            await write_event(self._writer, NotDetected())
        self._begun, self._wake, self._voice = False, None, None

    def _ms(self, at: int) -> int:
        """Return the time of a sample, by the clock of the satellite."""
        return self._began_ms + at // PER_MS


def _read(kind: type[Any], event: Event) -> Any:
    try:
        return msgspec.convert(event.data, kind)
    except msgspec.ValidationError as error:
        raise EventError(f"the data of {event.type!r} cannot be served ({error}); sound has 16000 Hz, 16 bits and 1 channel") from error


async def serve(heard: Heard, listening: socket.socket) -> None:
    """Serve satellites until the task is cancelled. The connections end then."""
    open_now: set[Satellite] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        satellite = Satellite(heard, reader, writer)
        open_now.add(satellite)
        try:
            if len(open_now) > MOST_SATELLITES:
                await write_event(writer, Error(f"the server has {MOST_SATELLITES} satellites already; try again later", "busy"))
                return
            await satellite.serve()
        except (OSError, EventError):
            pass  # the client has gone, or does not receive
        except Exception:
            logger.exception("the conversation with a satellite ended by a defect")
        finally:
            open_now.discard(satellite)
            writer.close()

    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    listen = asyncio.start_unix_server if listening.family == socket.AF_UNIX else asyncio.start_server
    async with anyio.create_task_group() as tasks:
        server = await listen(lambda *streams: arrived.put_nowait(streams), sock=listening, limit=MOST_LINE_BYTES)
        try:
            while True:
                tasks.start_soon(converse, *await arrived.get())
        finally:
            server.close()
