"""The camera of one browser: JPEG pictures in, boxes around text out. The latest picture wins."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import count

import anyio
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from starlette.websockets import WebSocket, WebSocketDisconnect

import aionn

WIDTH, HEIGHT = 320, 256  # multiples of 32, as the detector wants them
MOST_PIXELS = 1 << 24  # a small file can hold a picture that needs all memory
TEXT_ABOVE = 0.3
CELL = 8  # text is looked for in cells of so many pixels
FEWEST_CELLS = 2

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""

Image.MAX_IMAGE_PIXELS = None  # `decoded` looks at the size by itself


async def show_boxes(websocket: WebSocket, runtime: aionn.Runtime, compilation: aionn.Compilation) -> None:
    """Answer the latest picture with boxes around text, again and again until the browser leaves."""
    recovered = 0
    numbers = count()  # of the pictures that the browser has sent
    pids: dict[str, int | None] = {}  # of each stage's driver; a better stage has a driver of its own
    async with compilation.burst(depth=2) as burst:
        try:
            while True:
                try:
                    async with aclosing(burst.map(pictures(websocket, numbers), policy="latest")) as results:
                        async for result in results:
                            (text,) = result.outputs.values()
                            pid = next(device.pid for device in runtime.devices if device.name == result.stage)
                            recovered += pids.get(result.stage, pid) != pid
                            pids[result.stage] = pid
                            answer = {
                                "number": result.tag,
                                "boxes": boxes_in(text[0, 0]),
                                "age_ms": result.age_s * 1e3,
                                "dropped": burst.statistics()["dropped"],
                                "stage": result.stage,
                                "recovered": recovered,
                            }
                            await websocket.send_json(answer)
                    return
                except aionn.DriverDiedError:
                    continue  # the pictures that it had are gone; the next one starts a new driver
        except WebSocketDisconnect:
            return
        except (OSError, KeyError):
            await websocket.close(code=1003, reason="send JPEG pictures")


async def pictures(websocket: WebSocket, numbers: Iterator[int]) -> AsyncIterator[aionn.Item]:
    """Yield the pictures of the browser as the detector wants them, each with its number. They are decoded in a thread."""
    async for jpeg in websocket.iter_bytes():
        number = next(numbers)
        yield aionn.Item({"x": await anyio.to_thread.run_sync(decoded, jpeg)}, tag=number)


def decoded(jpeg: bytes) -> NDArray[np.float32]:
    """Decode a picture into blue, green and red planes from -1 to 1.

    Raises:
        OSError: it is not a picture, or one with too many pixels.
    """
    with Image.open(io.BytesIO(jpeg), formats=("JPEG",)) as image:
        if image.width * image.height > MOST_PIXELS:
            raise OSError(f"the picture has {image.width} x {image.height} pixels, more than {MOST_PIXELS}")
        pixels = np.asarray(image.convert("RGB").resize((WIDTH, HEIGHT)), np.float32)
    planes = (pixels[:, :, ::-1] / 127.5 - 1).transpose(2, 0, 1)
    return np.ascontiguousarray(planes[np.newaxis])


def boxes_in(text: NDArray[np.float32]) -> list[Box]:
    """Return a box around each group of neighbouring cells with text. `text`: its probability per pixel."""
    rows, columns = text.shape[0] // CELL, text.shape[1] // CELL
    cells = text[: rows * CELL, : columns * CELL].reshape(rows, CELL, columns, CELL).max(axis=(1, 3)) > TEXT_ABOVE
    left = {(int(row), int(column)) for row, column in np.argwhere(cells)}
    boxes = []
    while left:
        group, edge = [], [left.pop()]
        while edge:
            row, column = edge.pop()
            group.append((row, column))
            near = {(row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)} & left
            left -= near
            edge.extend(near)
        if len(group) >= FEWEST_CELLS:
            at = np.array(group) * CELL
            (top, west), (bottom, east) = at.min(axis=0), at.max(axis=0) + CELL
            boxes.append((int(west), int(top), int(east), int(bottom)))
    return sorted(boxes)
