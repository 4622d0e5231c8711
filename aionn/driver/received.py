"""What came with a control call: memories, cache files and files that options name. They are freed when the call is done with them.

A call that was cancelled or is late is abandoned while its thread still runs, and the client's descriptors are closed then. Their numbers
may already name other files when the thread uses them. So the thread gets duplicates (`LentDescriptors`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from aionn.errors import AionnError, CallerError, CompilationError
from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import PooledModel
from aionn.hal.options import EngineOptions
from aionn.hal.queues import MQDescriptor
from aionn.hal.types import IMemory, MemoryDescription, MemoryKind
from aionn.hal.values import from_messages
from aionn.loopless import ClosedByWith
from aionn.memory.descriptors import check_description, check_descriptor
from aionn.memory.memory import Memory
from aionn.memory.region import Access, MappingError, Region
from aionn.remote.calls import CacheMessage, EngineOptionsMessage, Fd, LentMemory, ModelMessage, MQMessage, OptionsMessage
from aionn.remote.connection import Descriptors


class Received(ClosedByWith):
    """The descriptors of one call, and the memories and files that they became."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._closed_with_call: list[Region | _OpenFile | Descriptors] = [descriptors]

    def close(self) -> None:
        while self._closed_with_call:
            self._closed_with_call.pop().close()

    def queue(self, message: MQMessage) -> MQDescriptor:
        """Return a queue, whose descriptors the caller owns from now on."""
        fds = tuple(map(self._descriptors.take, message.fds))
        return MQDescriptor(message.grantors, message.quantum, message.flavor, fds)

    def fence(self, fd: Fd) -> int:
        """Return the fence of an execution, and check that the dependencies have come, too. They are open until the call is done."""
        self._descriptors.check_arrived()
        return int(fd)

    def kept(self, lent: LentMemory) -> Region:
        """Map a memory that the caller owns from now on."""
        return self._descriptors.attach(lent)

    def memory(self, lent: LentMemory) -> Region:
        """Map a memory for an execution or a copy."""
        region = self.kept(lent)
        self._closed_with_call.append(region)
        return region

    def part(self, lent: LentMemory, offset: int, length: int | None) -> Memory:
        """Return the part of a memory that a copy names.

        Raises:
            CallerError: the part reaches beyond the memory. Nothing was mapped.
        """
        description = lent.description
        check_description(description)
        end = description.size_bytes if length is None else offset + length
        if not 0 <= offset < end <= description.size_bytes:
            raise CallerError(
                f"the copy names bytes {offset} to {end}, but the memory has {description.size_bytes} bytes; name a part inside the memory"
            )
        with Memory(self.memory(lent)) as whole:
            return whole[offset:end]

    def source(self, lent: LentMemory, offset: int, length: int | None) -> IMemory:
        """Return the part of a memory that is copied into a buffer.

        Memory that cannot be mapped fails only when the copy reads it. So the copy fails in the buffer, which then has no contents.
        """
        try:
            return self.part(lent, offset, length)
        except AionnError as error:
            return _Unmapped(lent.description, error)

    def cache(self, message: CacheMessage) -> CacheHandles:
        """Return the cache files as the HAL passes them: open until the call is done."""
        self._descriptors.check_arrived()
        return CacheHandles(message.model, message.data, message.token, message.keyring)

    def options(self, message: EngineOptionsMessage) -> EngineOptions:
        """Return options with the files that they name."""
        opened = {name: _OpenFile(self._descriptors.take(fd)) for name, (_, fd) in message.files.items()}
        self._closed_with_call.extend(opened.values())
        return EngineOptions(message.values, {name: digest for name, (digest, _) in message.files.items()}, opened)

    def prepare_options(self, message: OptionsMessage, device: str) -> PrepareOptions:
        """Return a message as the options for the device of that name, with the files as for `options`."""
        own = self.options(message.engine)
        return PrepareOptions(
            message.preference,
            message.priority,
            message.deadline_ns,
            message.threads,
            message.open_outputs,
            message.at_most,
            message.instances,
            ((device, own),) if own else (),
            message.batching,
        )

    def model(self, message: ModelMessage) -> PooledModel:
        """Return the client's model. Files with constants are not mapped, because another process may cut them off at any time.

        Other pools are mapped copy-on-write, so an engine can never write into the app's.

        Raises:
            CompilationError: memory with constants does not fit its description. Mostly a file has become shorter.
        """
        pools: list[IMemory] = []
        for lent in message.pools:
            pool: Region | _ConstantsFile
            try:
                if lent.description.kind is MemoryKind.MMAP_FD:
                    pool = _ConstantsFile(self._descriptors.take(lent.fd), lent.description)
                else:
                    pool = self._descriptors.attach(lent, Access.PRIVATE)
            except MappingError as error:
                why = f"the model's weights cannot be mapped: {error}. If their file was cut off, put it back and read the model again"
                raise CompilationError(why, reason=str(error)) from error
            self._closed_with_call.append(pool)
            pools.append(pool)
        return PooledModel(
            graph=message.graph,
            inputs=from_messages(message.inputs),
            outputs=from_messages(message.outputs),
            operations=message.operations,
            constants=message.constants,
            pools=tuple(pools),
            token=message.token,
            _contents=message.contents,
        )


def weights_of(model: PooledModel) -> int:
    """Return the bytes of the large constants."""
    return sum(constant.location.length for constant in model.constants)


def size_of(cache: CacheHandles) -> int:
    """Return the bytes of the files. A descriptor that is not open counts nothing, and is refused later."""
    size = 0
    for fd in (*cache.model, *cache.data):
        with suppress(OSError, OverflowError):
            size += os.fstat(fd).st_size
    return size


class _OpenFile:
    """A file that came with a call. Satisfies `IOptionFile`."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self._fd = fd

    def fileno(self) -> int:
        if self._fd < 0:
            raise CallerError("the files of a call are open during the call only; copy what must live longer")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _ConstantsFile(_OpenFile):
    """A file with constants, which are read from its descriptor. Satisfies `IMemory`, but has no view."""

    def __init__(self, fd: int, description: MemoryDescription) -> None:
        """Take over the descriptor, and check that it is the file that its description says.

        Raises:
            CallerError: the description can never be right (INVALID_ARGUMENT).
            MappingError: the descriptor does not fit the description. Mostly the file has become shorter.
        """
        super().__init__(fd)
        self.description = description
        self.size_bytes = description.size_bytes
        try:
            check_description(description)
            try:
                check_descriptor(fd, description, write_through=False)
            except CallerError as error:
                raise MappingError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def view(self) -> memoryview:
        raise CallerError("a model's constants in files are not mapped; read them with aionn.graph.constant_arrays")


class _Unmapped:
    """Memory that could not be mapped. Satisfies `IMemory`."""

    def __init__(self, description: MemoryDescription, error: AionnError) -> None:
        self.description = description
        self.size_bytes = description.size_bytes
        self._error = error

    def fileno(self) -> int:
        raise self._error

    def view(self) -> memoryview:
        raise self._error


T = TypeVar("T")


class LentDescriptors:
    """Duplicates of descriptors. The end of the act closes them, or `release` if the act has not begun."""

    def __init__(self, fds: Iterable[int]) -> None:
        """Duplicate the descriptors. One that is not open is -1 for the act, so that its use fails."""
        self._lock = threading.Lock()
        self._taken = False
        self._fds = tuple(map(_duplicate, fds))

    def _take(self) -> bool:
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken

    def during(self, act: Callable[[Sequence[int]], T]) -> T:
        """Run `act` with the duplicates, in the order of the originals.

        Raises:
            CallerError: the duplicates have been given up.
        """
        if not self._take():
            raise CallerError("the preparation was given up before it touched its files")
        try:
            return act(self._fds)
        finally:
            self._close()

    def release(self) -> None:
        """Prevent the act from beginning. An act that has begun goes on, and its end closes the duplicates."""
        if self._take():
            self._close()

    def _close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)


def _duplicate(fd: int) -> int:
    with suppress(OSError, OverflowError):
        return os.dup(fd)
    return -1
