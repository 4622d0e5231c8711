"""`Batching`: how requests of several callers are joined into one run, and `RowAxes`: along which axes a device found that possible.

A run of a tiny model costs little more with 16 rows than with one, since most of its time goes into the single nodes. A run of a
convolutional model costs as many times more as it has rows. So a device measures, and joins no more rows than pay.
"""

# No `from __future__ import annotations`: msgspec would have to evaluate each annotation, which takes 2 ms of a start.
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from aionn.errors import CallerError

__all__ = ["MOST_ROWS", "Batching", "RowAxes"]

MOST_ROWS = 64
"""The most rows of one joined run."""

_MAX_WAIT_US = 1_000_000
_MAX_VERIFY = 1_000_000_000
_MAX_WAITING = 1_000_000


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """How `Runtime.compile(batch=)` joins requests of several callers into one run.

    A free lane takes a lone request at once. Requests are joined only when all lanes are busy: the next free lane takes what has piled up.
    So a lone caller pays nothing. Joined are requests of bursts that have the same shapes and want the same outputs. A request over memory
    of the app runs alone, and so does one that goes over the control socket.

    Attributes:
        max_rows: how many rows a joined run may have, from 2 to 64. The driver measures runs of 1, 2, 4 and more rows, and joins no more
            than pay.
        max_wait_us: how many microseconds a request waits for others although its lane is free. It does not wait if every open burst
            has a request in the run, and never beyond its deadline.
        max_batch_ms: the milliseconds that a joined run may take. None: no limit.
        tolerance: "close" allows an element of a joined run to differ by 1e-5 + 1e-4 of its value from the same row alone. "exact" allows
            no difference, and makes the driver compare every size up to `max_rows` when it compiles.
        axes: the axis along which each input has its rows, by name, as in {"input": 0, "state": 1}. Inputs left out must be equal in all
            joined requests, as a sample rate is. None: the first open axis of each input.
        max_waiting: how many executions of the compilation may wait, over all bursts, calls and starts. One more gets `DeviceBusyError` at
            once. So does one whose deadline passes before those that wait can be over, by the times of the runs so far.
        verify_every: after so many joined runs, one row is run again alone and compared. If it differs, no more requests are joined.

    Examples:
        >>> batch = aionn.Batching(max_rows=8, max_batch_ms=5)
        >>> compilation = await runtime.compile(model, devices=("onnxruntime",), batch=batch)
        >>> compilation.batching.allowed
        False
    """

    max_rows: int = 16
    max_wait_us: int = 0
    max_batch_ms: float | None = None
    tolerance: Literal["close", "exact"] = "close"
    axes: tuple[tuple[str, int], ...] | dict[str, int] | None = None
    max_waiting: int = 256
    verify_every: int = 1000

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            msgspec.structs.force_setattr(self, name, _whole_number(name, getattr(self, name), least, most))
        limit: Any = self.max_batch_ms
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf):
            raise CallerError(f"Batching: max_batch_ms={limit!r}; give milliseconds above 0, or None for no limit")
        if self.tolerance not in ("close", "exact"):
            raise CallerError(f"Batching: tolerance={self.tolerance!r}; it is 'close' or 'exact'")
        if self.axes is not None:
            msgspec.structs.force_setattr(self, "axes", _checked_axes(self.axes))

    @property
    def encoded(self) -> bytes:
        """What a stored verdict of a device depends on, as bytes for a cache key."""
        return msgspec.msgpack.encode((self.max_rows if self.tolerance == "exact" else 0, self.tolerance, self.axes))


_RANGES = {"max_rows": (2, MOST_ROWS), "max_wait_us": (0, _MAX_WAIT_US), "max_waiting": (1, _MAX_WAITING), "verify_every": (1, _MAX_VERIFY)}


def _whole_number(name: str, value: Any, least: int, most: int) -> int:
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise CallerError(f"Batching: {name}={value!r}; give a whole number from {least} to {most}")
    return number


def _checked_axes(axes: Any) -> tuple[tuple[str, int], ...]:
    pairs = axes.items() if isinstance(axes, Mapping) else axes if isinstance(axes, tuple) else ()
    right = all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int and pair[1] >= 0 for pair in pairs
    )
    if not pairs or not right:
        raise CallerError(f"Batching: axes={axes!r}; give the axis of at least one input by its name, as in {{'input': 0, 'state': 1}}")
    if len(dict(pairs)) < len(pairs):
        raise CallerError(f"Batching: axes={axes!r} names an input twice; give one axis for each input")
    return tuple(sorted(pairs))


class RowAxes(msgspec.Struct, frozen=True, array_like=True):
    """Whether a device joins requests for a model, and along which axes.

    Attributes:
        reason: why it does not. Empty if it does.
        inputs, outputs: the axis of the rows by name. None: the input is equal in all joined requests.
    """

    reason: str = ""
    inputs: tuple[tuple[str, int | None], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
