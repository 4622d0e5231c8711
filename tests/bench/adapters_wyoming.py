"""Satellites of Home Assistant at `aionn serve-wyoming`, beside the package `pyopen-wakeword`. Row D3 of `tests.bench.adapters`."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from wyoming.audio import AudioChunk, AudioStop
from wyoming.event import Event, async_read_event, async_write_event
from wyoming.wake import NotDetected

import aionn
from aionn.adapters.wyoming.opening import open_models
from aionn.adapters.wyoming.wake_words import WakeStream
from tests.adapters.wyoming.rival import Stream
from tests.adapters.wyoming.satellites import RATE, Satellite, satellite, serve_wyoming, spoken
from tests.bench.machine import process_cpu_ns
from tests.bench.real_report import Options, Report

SATELLITES = 16
WORD = "okay_nabu"
CHUNK = 1280
STEP_S = CHUNK / RATE

Sound = NDArray[np.int16]
Hear = Callable[[Sound], Awaitable[object]]


def sound_of(frames: int, number: int) -> Sound:
    """The sound of a satellite: it begins at a place of its own in the recording."""
    return np.roll(np.resize(spoken(40), max(frames * CHUNK, 40 * RATE)), -number * 2 * RATE)[: frames * CHUNK]


async def paced(hear: Hear, sound: Sound, number: int) -> None:
    """Give a satellite's sound to `hear` as a microphone does. The satellites are not in step."""
    began = time.monotonic() + number * STEP_S / SATELLITES
    for start in range(0, len(sound), CHUNK):
        await asyncio.sleep(max(0.0, began + (start + CHUNK) / RATE - time.monotonic()))
        await hear(sound[start : start + CHUNK])


# ---- the rivals, each in a process of its own ------------------------------------------------------------------------------


def in_process(pipe: Connection, frames: int) -> None:
    """Hear all satellites in this process without any socket. Sends the CPU time of it, and the scores of each satellite."""
    streams = [Stream((WORD,)) for _ in range(SATELLITES)]
    for stream in streams:
        stream.hear(np.zeros(CHUNK, np.int16))  # computes the silence before a stream, which is not measured

    async def hear(number: int, found: list[float]) -> None:
        async def one(samples: Sound) -> None:
            found.extend(score[WORD] for score in streams[number].hear(samples))

        await paced(one, sound_of(frames, number), number)

    async def all_of_them() -> list[list[float]]:
        found: list[list[float]] = [[] for _ in range(SATELLITES)]
        await asyncio.gather(*(hear(number, scores) for number, scores in enumerate(found)))
        return found

    pipe.send("ready")
    pipe.recv()
    began = time.process_time_ns()
    found = asyncio.run(all_of_them())
    pipe.send((time.process_time_ns() - began, found))


def behind_wyoming(pipe: Connection, _frames: int) -> None:
    """Serve satellites with the package on the event loop, a stream for each client, as `wyoming-openwakeword` does. Sends its port."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream((WORD,))
        while (event := await async_read_event(reader)) is not None:
            if AudioChunk.is_type(event.type):
                stream.hear(np.frombuffer(AudioChunk.from_event(event).audio, np.int16))
            elif AudioStop.is_type(event.type):
                await async_write_event(NotDetected().event(), writer)
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(converse, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


class Rival:
    """A process of one of the two functions above."""

    def __init__(self, work: Callable[[Connection, int], None], frames: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, frames), daemon=True)
        self.process.start()
        self.first: Any = self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


# ---- the row -----------------------------------------------------------------------------------------------------------------


async def satellites(report: Report, options: Options) -> None:
    """D3: 16 satellites that speak at the rate of their microphones, for each of which one word is listened for."""
    differences, alone, served = [], [], []
    for _ in range(options.rounds):
        rival = Rival(in_process, options.frames)
        try:
            rival.pipe.send("go")
            spent_ns, scores = await asyncio.to_thread(rival.pipe.recv)
        finally:
            rival.end()
        ours_ns = await _ours(options.frames)
        package_ns = await _package(options.frames)
        differences.append(1e6 * await _difference(options.frames, scores))
        alone.append(ours_ns / spent_ns)
        served.append(ours_ns / package_ns)
        each = options.frames * SATELLITES * 1e3
        report.say(
            f"\nCPU of 80 ms of a satellite, in microseconds: aionn serve-wyoming with its drivers {ours_ns / each:.0f}, "
            f"the package in process {spent_ns / each:.0f}, the package behind Wyoming {package_ns / each:.0f}"
        )
    report.check("D3", "largest difference of a score from that of pyopen-wakeword, in millionths", differences, 100.0)
    report.check("D3", "16 satellites, CPU: aionn serve-wyoming / the package in process", alone, 1.0)
    report.check("D3", "16 satellites, CPU: aionn serve-wyoming / the package behind Wyoming", served, 1.0)


async def _ours(frames: int) -> int:
    with serve_wyoming() as server:
        pids = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))]
        spent_ns = await _spent(server.uri, pids, frames)
        server.end()
    return spent_ns


async def _package(frames: int) -> int:
    rival = Rival(behind_wyoming, frames)
    try:
        assert rival.process.pid is not None
        return await _spent(f"tcp://127.0.0.1:{rival.first}", [rival.process.pid], frames)
    finally:
        rival.end()


async def _spent(uri: str, pids: list[int], frames: int) -> int:
    """Return the CPU time that processes take for the sound of all satellites. A first chunk of each is not measured."""
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(satellite(uri)) for _ in range(SATELLITES)]
        await asyncio.gather(*(_begun(client) for client in clients))
        before = sum(map(process_cpu_ns, pids))
        await asyncio.gather(*(_spoken(client, sound_of(frames, number), number) for number, client in enumerate(clients)))
        return sum(map(process_cpu_ns, pids)) - before


async def _begun(client: Satellite) -> None:
    await client.begin([WORD])
    await client.say(np.zeros(CHUNK, np.int16))
    await client.client.write_event(Event("audio-stop"))
    await client.until("not-detected")
    await client.begin([WORD])


async def _spoken(client: Satellite, sound: Sound, number: int) -> None:
    await paced(partial(client.say, chunk=CHUNK), sound, number)
    await client.stop()
    await client.until("not-detected", "detection")


async def _difference(frames: int, right: list[list[float]]) -> float:
    """Return the largest difference of a score, over the streams of all satellites at once."""
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack() as opened:
        heard = await open_models(runtime, opened, (), None, 0.5)
        assert heard.features is not None
        features = heard.features

        async def one(number: int) -> float:
            stream = WakeStream(features, [heard.words[WORD]])
            sound = np.concatenate((np.zeros(CHUNK, np.int16), sound_of(frames, number)))
            found = [scores[WORD] for _, scores in await stream.scores(sound.astype(np.float32))]
            return float(np.abs(np.array(found[1:]) - right[number]).max())

        return max(await asyncio.gather(*map(one, range(SATELLITES))))
