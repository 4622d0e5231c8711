"""Clients of `aionn serve-wyoming` that send nonsense: one line in the log, an error event, and no harm to others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import psutil
import pytest
from wyoming.event import Event
from wyoming.ping import Pong

from aionn.adapters.wyoming import events
from tests.adapters.wyoming.satellites import Recording, Satellite, Server, detected_ms, satellite, serve_wyoming, types, words_of

pytestmark = pytest.mark.anyio
CHUNK = {"rate": 16000, "width": 2, "channels": 1}
GROWTH_BYTES = 30e6


@pytest.fixture(scope="module")
def server(recording: Recording) -> Iterator[Server]:
    with serve_wyoming(*words_of(recording)) as served:
        yield served
        assert served.end() == 0
        assert "Traceback" not in "\n".join(served.printed)


def event(kind: str, data: Any = None, payload: bytes = b"", **lengths: Any) -> bytes:
    head = {"type": kind, "data": data or {}, **({"payload_length": len(payload)} if payload else {}), **lengths}
    return json.dumps(head).encode() + b"\n" + payload


async def send(one: Satellite, content: bytes) -> None:
    assert one.client._writer is not None
    one.client._writer.write(content)
    await one.client._writer.drain()


async def logged(server: Server, one: Satellite) -> str:
    """What the log says of a satellite."""
    return await anyio.to_thread.run_sync(server.until, rf"satellite 127\.0\.0\.1:{one.port}: (.*)")


NONSENSE = {
    "no JSON": (b"GET / HTTP/1.1\r\n", "not an event of Wyoming"),
    "bytes": (b"\xff\xfe\x00\n", "not an event of Wyoming"),
    "no object": (b"[1, 2]\n", "Expected `object`"),
    "no type": (b"{}\n", "missing required field `type`"),
    "a type that is no text": (b'{"type": 5}\n', "Expected `str`, got `int` - at `$.type`"),
    "deep JSON": (b'{"type": "x", "data": {"a": ' + b"[" * 30_000 + b"\n", "not an event of Wyoming"),
    "a line without end": (b"{" * 200_000, "a line is longer than 65536 bytes"),
    "2 GB announced": (event("audio-chunk", CHUNK, payload_length=2_000_000_000), "<= 262144 - at `$.payload_length`"),
    "2 GB of data announced": (event("detect", data_length=2_000_000_000), "<= 262144 - at `$.data_length`"),
    "a negative length": (event("audio-chunk", CHUNK, payload_length=-1), ">= 0 - at `$.payload_length`"),
    "a length that is no number": (event("audio-chunk", CHUNK, payload_length="5"), "Expected `int | null`, got `str`"),
    "a huge number": (b'{"type": "x", "payload_length": 1e400}\n', "not an event of Wyoming"),
    "data that is no JSON": (event("detect", data_length=4) + b"none", "not an event of Wyoming"),
    "data that is no object": (event("detect", data_length=4) + b"[{}]", "Expected `object`, got `array`"),
    "another rate": (event("audio-start", {**CHUNK, "rate": 44100}), "Invalid enum value 44100 - at `$.rate`"),
    "another rate, without a pause": (
        event("audio-start", {**CHUNK, "rate": 44100}) + 4000 * event("audio-chunk", {**CHUNK, "rate": 44100}, bytes(2048)),
        "Invalid enum value 44100 - at `$.rate`",
    ),
    "another width": (event("audio-chunk", {**CHUNK, "width": 4}, b"1234"), "sound has 16000 Hz, 16 bits and 1 channel"),
    "two channels": (event("audio-chunk", {**CHUNK, "channels": 2}, b"1234"), "sound has 16000 Hz, 16 bits and 1 channel"),
    "no format": (event("audio-chunk", {}, b"1234"), "missing required field `rate`"),
    "half a sample": (event("audio-chunk", CHUNK, b"123"), "a chunk has 3 bytes, but a sample has 2"),
    "a time that is no number": (event("audio-chunk", {**CHUNK, "timestamp": "now"}, b"1234"), "at `$.timestamp`"),
    "names that are no list": (event("detect", {"names": 7}), "at `$.names`"),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_is_answered_with_an_error_and_ends_its_connection_only(server: Server, recording: Recording, what: str) -> None:
    content, sentence = NONSENSE[what]
    async with satellite(server.uri) as good, satellite(server.uri) as one:
        await good.begin()
        await good.say(recording.samples[:32_000])
        await send(one, content)
        errors = await one.until_end()
        assert [sentence in error.data["text"] for error in errors] == [True]
        await good.say(recording.samples[32_000:48_000], from_sample=32_000)
        assert (await good.until("detection")).data["timestamp"] == recording.detected_ms()
    assert sentence in await logged(server, one)


@pytest.mark.parametrize(
    "half", [b'{"type": "audio', event("audio-chunk", CHUNK, payload_length=2048) + b"half", event("detect", data_length=9) + b"{"]
)
async def test_half_a_message_is_one_line_in_the_log(server: Server, half: bytes) -> None:
    async with satellite(server.uri) as one:
        await send(one, half)
        assert one.client._writer is not None
        one.client._writer.write_eof()
        assert types(await one.until_end()) == ["error"]
    line = await logged(server, one)
    assert line.startswith(("the connection ended in the middle of an event", "the bytes are not an event"))


async def test_two_hundred_that_stall_cost_others_nothing_and_memory_stays(server: Server, recording: Recording) -> None:
    """Each has a stream, and holds back half of a chunk or half of a line. One more asks again and again, and reads no answer."""
    process = psutil.Process(server.process.pid)
    assert await detected_ms(server.uri, recording) == recording.detected_ms()
    before = process.memory_info().rss
    async with AsyncExitStack() as opened:
        for number in range(200):
            one = await opened.enter_async_context(satellite(server.uri))
            await send(one, event("audio-start", CHUNK) + event("audio-chunk", CHUNK, bytes(4000)))
            await send(one, event("audio-chunk", CHUNK, payload_length=200_000) + bytes(4000) if number % 2 else b'{"type": "audio')
        deaf = await opened.enter_async_context(satellite(server.uri))
        asking = asyncio.create_task(send(deaf, event("describe") * 200_000))
        assert await detected_ms(server.uri, recording) == recording.detected_ms()
        assert not asking.done(), "the server reads no more than it can answer"
        assert process.memory_info().rss - before < GROWTH_BYTES
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert deaf.client._writer is not None
        deaf.client._writer.transport.abort()
    assert await detected_ms(server.uri, recording) == recording.detected_ms()


async def test_the_rest_of_an_event_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MESSAGE_S", 0.01)
    reader = asyncio.StreamReader()
    reader.feed_data(event("audio-chunk", CHUNK, payload_length=8) + b"half")
    with pytest.raises(events.EventError, match="the rest of an event did not come within"):
        await events.read_event(reader)


async def test_a_client_that_does_not_receive_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MESSAGE_S", 0.01)
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with pytest.raises(events.EventError, match="the client received nothing"):
                for _ in range(10):
                    await events.write_event(writer, Pong("x" * 1_000_000))
        finally:
            writer.transport.abort()


async def test_one_satellite_too_many_is_refused(server: Server) -> None:
    async with AsyncExitStack() as opened:
        for _ in range(1000):
            one = await opened.enter_async_context(satellite(server.uri))
        await one.client.write_event(Event("ping"))
        await one.until("pong")
        more = await opened.enter_async_context(satellite(server.uri))
        (error,) = await more.until_end()
        assert error.data["text"] == "the server has 1000 satellites already; try again later"
    async with satellite(server.uri) as one:
        await one.client.write_event(Event("ping"))
        await one.until("pong")
