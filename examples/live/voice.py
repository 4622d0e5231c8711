"""The microphone of one browser: blocks of sound in, how likely it is that somebody speaks out."""

from __future__ import annotations

import time

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

import aionn

BLOCK_SAMPLES = 512  # 32 ms at 16 kHz
CONTEXT_SAMPLES = 64  # of the block before


async def show_speech(websocket: WebSocket, compilation: aionn.Compilation) -> None:
    """Answer each block with the probability of speech, until the browser leaves.

    The state of the voice stays in the driver. If the driver dies, the stream gives it to a new one and computes the block there.
    """
    window = np.zeros((1, CONTEXT_SAMPLES + BLOCK_SAMPLES), np.float32)
    async with compilation.recurrent({"state": "stateN"}) as voice:
        try:
            async for block in websocket.iter_bytes():
                arrived_ns = time.monotonic_ns()
                window[0, :CONTEXT_SAMPLES] = window[0, BLOCK_SAMPLES:]
                window[0, CONTEXT_SAMPLES:] = np.frombuffer(block, "<f4", BLOCK_SAMPLES)
                outputs = await voice.compute({"input": window})
                answer = {
                    "speech": float(outputs["output"][0, 0]),
                    "age_ms": (time.monotonic_ns() - arrived_ns) / 1e6,
                    "stage": outputs.stage,
                    "recovered": voice.recovered,
                }
                await websocket.send_json(answer)
        except WebSocketDisconnect:
            return  # the browser left while an answer was sent
        except (ValueError, KeyError):
            await websocket.close(code=1003, reason=f"send blocks of {BLOCK_SAMPLES} samples, float32")
