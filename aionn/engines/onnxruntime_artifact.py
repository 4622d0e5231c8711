"""ONNX Runtime's artifact: the two files that it writes while it compiles, and the notes that a load needs of them.

model file    ORT's optimised graph, notes (MessagePack), length of the notes u64 little-endian
data file     the weights, in the layout that this CPU wants

ONNX Runtime uses some constants where they lie, so these must live as long as the session.

`add_external_initializers` copies constants into the session (its documentation says so), so they can go when the session is made.
`add_initializer` uses them in place. The session then drops its reference to each constant that it lays out anew for its kernels, and
keeps the others for its life. Where ONNX Runtime owns an array (DLPack), that reference is what keeps the array's memory.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BufferedReader
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.hal.engine import Artifact
from aionn.hal.model import Constant

_PIECE_BYTES = 16 << 20
ARTIFACT_FORMAT = 2
_NOTES_LENGTH = struct.Struct("<Q")
WEIGHTS_DIRECTORY, WEIGHTS_FILE = "/dev", "null"
"""The file that an artifact's graph names for its weights. ORT checks that the file exists and does not read it, because each weight is
given by name. If ORT did read it, this file would fail, while the bytes of another file would be taken for weights."""

_NO_WEIGHTS = b"aionn: this graph has no weights outside"  # an empty cache file would look as if it was never written


class Notes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Facts that a load would otherwise have to search in the graph. They are the end of the model file.

    Attributes:
        work: the upper bound of a run's work, as the engine counts it for its choice of threads.
        weights: the constants in the data file.
        by_name: whether ORT will look for exactly these constants by these names, in nested graphs too.
    """

    work: int
    weights: tuple[Constant, ...]
    by_name: bool


class WrittenArtifact:
    """The two files that ORT writes while it compiles. They have no names, so a driver that is killed leaves nothing of them.

    ORT opens the files by path, as entries of `/proc/self/fd`. Its graph names the weights' file by the number of the descriptor, and
    `artifact` renames it.
    """

    def __init__(self, work: int) -> None:
        self._work = work
        self._graph, self._weights = _nameless("aionn-graph"), _nameless("aionn-weights")
        self._finalizer = weakref.finalize(self, _close, self._graph, self._weights)
        self.graph_path = f"/proc/self/fd/{self._graph.fileno()}"
        self.weights_file = str(self._weights.fileno())

    def artifact(self) -> Artifact:
        """Return the artifact, and close the files."""
        from aionn.graph.constants import settle_exported

        graph, weights = self._graph.read(), _taken_out(self._weights) or _NO_WEIGHTS
        self._finalizer()
        # ORT does not look in memory for weights of nested graphs, and does not read a name that it made twice.
        graph, constants, by_name = settle_exported(graph, self.weights_file, weights, renamed=WEIGHTS_FILE)
        return Artifact((_with_notes(graph, Notes(self._work, constants, by_name)),), (weights,))


def _nameless(name: str) -> BufferedReader:
    """Open a new file in memory. `/proc` shows it as `name`."""
    return open(os.memfd_create(name, os.MFD_CLOEXEC), "rb")


def _taken_out(file: BufferedReader) -> memoryview:
    """Move the bytes of a file in memory into a buffer. Moving piece by piece from the end never needs twice the memory."""
    size = os.fstat(file.fileno()).st_size
    content = np.empty(size, np.uint8).data
    for begin in reversed(range(0, size, _PIECE_BYTES)):
        file.seek(begin)
        file.readinto(content[begin : begin + _PIECE_BYTES])
        os.ftruncate(file.fileno(), begin)
    return content


def _close(*files: BufferedReader) -> None:
    for file in files:
        file.close()


def _with_notes(graph: bytes, notes: Notes) -> bytes:
    packed = msgspec.msgpack.encode(notes)
    return b"".join((graph, packed, _NOTES_LENGTH.pack(len(packed))))


def without_notes(model: memoryview) -> tuple[bytes, Notes]:
    """Return the graph and the notes of a model file.

    Raises:
        ValueError, msgspec.MsgspecError: the file has no such notes.
    """
    end = len(model) - _NOTES_LENGTH.size
    length = _NOTES_LENGTH.unpack_from(model, end)[0] if end >= 0 else 0
    if not 0 < length <= end:
        raise ValueError(f"the model file of {len(model)} bytes does not end with its notes")
    return bytes(model[: end - length]), msgspec.msgpack.decode(model[end - length : end], type=Notes)


GiveBack = Callable[[memoryview], None]


class InPlace:
    """Constants for `add_initializer`. Keep this object until the session is made, and then what `kept` returns.

    Read-only arrays cannot be owned by ONNX Runtime, so `kept` has them.
    """

    def __init__(self, onnxruntime: Any, native: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._lent: list[NDArray[Any]] = []
        self._owned: dict[str, weakref.ref[NDArray[Any]]] = {}
        self._named: dict[str, Any] = {}
        own = getattr(native.OrtValue, "from_dlpack", None)
        for name, array in arrays.items():
            if own is None or not array.flags.writeable:
                self._lent.append(array)
                self._named[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
                continue
            mine, value = _owned(own, array)
            self._owned[name] = weakref.ref(mine)
            self._named[name] = onnxruntime.OrtValue(value)

    def give(self, settings: Any) -> None:
        """Let the session of `settings` use the constants."""
        for name, value in self._named.items():
            settings.add_initializer(name, value)

    def watch(self, weights: memoryview, constants: Sequence[Constant], give_back: GiveBack) -> Sequence[object]:
        """Give the memory of each array back when ONNX Runtime drops it. The arrays lie in `weights`. Keep what this returns."""
        watches: list[object] = []
        for constant in constants:
            array = self._owned[constant.name]() if constant.name in self._owned else None
            if array is not None:
                place = constant.location
                watches.append(weakref.ref(array, partial(_gone, give_back, weights[place.offset : place.offset + place.length])))
        return watches

    def kept(self) -> Sequence[object]:
        """Drop what the session owns by now, and return what must live as long as the session."""
        self._named.clear()
        return self._lent


def _gone(give_back: GiveBack, part: memoryview, _: object) -> None:
    """Give the memory of weights back, because nothing refers to their array any more. This may happen in any thread."""
    give_back(part)


def with_weights_outside(graph: bytes, names: Collection[str]) -> bytes:
    """Return a graph whose constants of these names are said to lie in a file that ONNX Runtime finds, and fails to read."""
    import onnx

    whole = onnx.ModelProto.FromString(graph)
    for tensor in whole.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and tensor.name in names:
                entry.value = WEIGHTS_FILE
    outside: bytes = whole.SerializeToString()
    return outside


def outside_folder(settings: Any) -> None:
    """Let the session of `settings` look for the file of such constants."""
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", WEIGHTS_DIRECTORY)


def _owned(own: Callable[..., Any], array: NDArray[Any]) -> tuple[NDArray[Any], Any]:
    """Return a view of the array, and the value that has the only reference to it."""
    if array.dtype == bool:
        mine: NDArray[Any] = array.view(np.uint8)
        with suppress(TypeError):  # from ONNX Runtime 1.32 on it takes no second argument, and a bool is a bool
            return mine, own(mine.__dlpack__(), True)
    mine = array.view()
    return mine, own(mine.__dlpack__())
