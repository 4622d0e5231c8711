"""The files of a model, as they are sent to another machine. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["ModelFile"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of an ONNX model.

    Attributes:
        name: where the graph looks for the file, relative to the model's own file. Empty for the model's own file.
        size_bytes: of the whole file.
        chunks: reads the file from its beginning to its end, a few megabytes at a time. It blocks, so call it in a thread. It raises
            `CallerError` if the file cannot be read, or was written to since the model was loaded.
    """

    name: str
    size_bytes: int
    chunks: Callable[[], Iterator[bytes | memoryview]]
