"""A detector process as Frigate has one: a session of ONNX Runtime, pictures in shared memory, names through a queue.

It imports what it needs and no more, because its memory is compared.
"""

from __future__ import annotations

from multiprocessing import Event, Process, Queue, shared_memory
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS_BYTES = 20 * 6 * 4


def detect(model: str, shape: tuple[int, ...], asked: Any, names: list[str], done: list[Any], started: Any) -> None:
    """Answer until the queue gives None. A camera's memory holds its picture, and its rows behind it."""
    import onnxruntime

    from aionn.adapters.frigate.decoding import rows_of

    session = onnxruntime.InferenceSession(model)
    (entry,) = session.get_inputs()
    memories = [shared_memory.SharedMemory(name) for name in names]
    pictures = [np.ndarray(shape, np.float32, memory.buf) for memory in memories]
    answers = [np.ndarray((20, 6), np.float32, memory.buf, picture.nbytes) for memory, picture in zip(memories, pictures, strict=True)]
    started.set()
    while (camera := asked.get()) is not None:
        outputs = {"": session.run(None, {entry.name: pictures[camera]})[0]}
        answers[camera][:] = rows_of("yologeneric", outputs, shape[3], shape[2])
        done[camera].set()
    del pictures, answers
    for memory in memories:
        memory.close()


class DetectorProcess:
    """The process and its cameras. Leave its `with` to end it."""

    def __init__(self, model: str, shape: tuple[int, ...], cameras: int) -> None:
        size = int(np.prod(shape)) * 4
        self._memories = [shared_memory.SharedMemory(create=True, size=size + ROWS_BYTES) for _ in range(cameras)]
        self._shape, self._asked = shape, Queue()  # type: ignore[var-annotated]
        self._done = [Event() for _ in range(cameras)]
        started = Event()
        names = [memory.name for memory in self._memories]
        self.process = Process(target=detect, args=(model, shape, self._asked, names, self._done, started), daemon=True)
        self.process.start()
        started.wait()

    def __enter__(self) -> DetectorProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self._asked.put(None)
        self.process.join(30)
        self.process.kill()
        for memory in self._memories:
            memory.close()
            memory.unlink()

    def detect(self, camera: int, picture: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of one camera's picture."""
        buffer = self._memories[camera].buf
        np.ndarray(self._shape, np.float32, buffer)[:] = picture
        self._done[camera].clear()
        self._asked.put(camera)
        self._done[camera].wait()
        return np.ndarray((20, 6), np.float32, buffer, picture.nbytes).copy()
