"""Constants that ONNX Runtime uses where they lie, and how long they must live.

`add_external_initializers` copies constants into the session (its documentation says so), so they can go when the session is made.
`add_initializer` uses them in place. The session then drops its reference to each constant that it lays out anew for its kernels, and
keeps the others for its life. Where ONNX Runtime owns an array (DLPack), that reference is what keeps the array's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.engines.onnxruntime_artifact import WEIGHTS_DIRECTORY, WEIGHTS_FILE
from aionn.hal.model import Constant

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
