"""The messages of Frigate's detector type `zmq`, read and written without any I/O.

A client sends one request at a time and waits for its answer. The first frame of a request is JSON:

    model_request   does the server have the model of that name?   answered with JSON
    model_data      here is its file, in the second frame          answered with JSON
    neither         a tensor, in the second frame                  answered with 480 bytes: float32 (20, 6)

A tensor that cannot be computed has no answer: the protocol has none for it, and zeros would mean that the picture is empty.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MOST_HEADER_BYTES = 65_536
DTYPES = {"uint8": np.uint8, "float32": np.float32}


class RefusedRequestError(Exception):
    """A request that cannot be served. Its text is one sentence for the log."""


class Header(msgspec.Struct, frozen=True):
    """The first frame of a request."""

    model_request: bool = False
    model_data: bool = False
    model_name: str = ""
    model_type: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


def parsed(frames: Sequence[memoryview]) -> tuple[Header, memoryview | None]:
    """Return the header of a request, and its second frame.

    Args:
        frames: of one message, without the client's identity. The first is the empty one that a REQ socket sends.

    Raises:
        RefusedRequestError: they are not a request.
    """
    if len(frames) not in (2, 3) or frames[0].nbytes:
        sizes = ", ".join(str(frame.nbytes) for frame in frames[:4])
        raise RefusedRequestError(
            f"a client sent {len(frames)} frames ({sizes} bytes); expected what a REQ socket sends: JSON, and at most one more"
        )
    try:
        if frames[1].nbytes > MOST_HEADER_BYTES:
            raise ValueError(f"it has {frames[1].nbytes} bytes, and at most {MOST_HEADER_BYTES} are read")
        header = msgspec.json.decode(frames[1], type=Header)
    except (ValueError, RecursionError) as error:
        raise RefusedRequestError(f"a client sent a first frame that is not the JSON of a request: {error}") from error
    return header, frames[2] if len(frames) == 3 else None


def tensor_of(header: Header, data: memoryview | None, types: Collection[str]) -> tuple[NDArray[Any], int, int]:
    """Return the tensor of a request as a view of its bytes, and the picture's width and height in pixels.

    Raises:
        RefusedRequestError: it is not one, or its model type is not among `types`.
    """
    dtype = DTYPES.get(header.dtype)
    if data is None or dtype is None or header.model_type not in types:
        raise RefusedRequestError(
            f"a client sent a request with dtype={header.dtype!r}, model_type={header.model_type!r} and {int(data is not None)} tensors; "
            f"expected 1 tensor, a dtype of {', '.join(DTYPES)}, and a model_type of {', '.join(types)}"
        )
    wanted = math.prod(header.shape) * np.dtype(dtype).itemsize
    if len(header.shape) != 4 or min(header.shape) < 1 or wanted != data.nbytes:
        raise RefusedRequestError(
            f"a client sent {data.nbytes} bytes for {header.dtype} of shape {header.shape}; "
            "expected 4 extents from 1 on that give this number of bytes"
        )
    tensor = np.frombuffer(data, dtype).reshape(header.shape)
    height, width = header.shape[2:] if header.shape[1] <= 4 < header.shape[3] else header.shape[1:3]  # channels first, or last
    return tensor, width, height


def model_answer(first: str, available: bool, loaded: bool) -> bytes:
    """Return the JSON that answers `model_request` and `model_data`. `first`: the name of the first field."""
    return msgspec.json.encode({first: available, "model_loaded": loaded})
