"""What came with a control call: memories, cache files and files that options name. They are freed when the call is done with them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from aionn.errors import AionnError, CallerError, CompilationError
from aionn.hal.interfaces import CacheHandles, IDevice, IPreparedModel, PrepareOptions
from aionn.hal.model import Model
from aionn.hal.options import EngineOptions, OptionValue
from aionn.hal.types import IMemory, MemoryDescription, MemoryKind
from aionn.hal.values import from_messages
from aionn.memory.descriptors import check_description, check_descriptor, check_reserved
from aionn.memory.memory import Memory
from aionn.memory.region import Access, MappingError, Region
from aionn.remote.channel import Descriptors
from aionn.remote.control import Adopt, PrepareModelFromCache
from aionn.remote.parts import CacheMessage, ModelMessage, OptionsMessage
from aionn.tasks import ClosedByWith


class Received(ClosedByWith):
    """Memories that came with a call. They are unmapped when the call is done with them."""

    def __init__(self) -> None:
        self._regions: list[Region | _File | _OptionFile] = []

    def close(self) -> None:
        for region in self._regions:
            region.close()

    def memory(self, fd: int, description: MemoryDescription) -> Region:
        """Map a memory for an execution or a copy. Takes over the descriptor."""
        region = attached(fd, description)
        self._regions.append(region)
        return region

    def part(self, descriptors: Descriptors, description: MemoryDescription, offset: int, length: int | None) -> Memory:
        """Return the part of a memory that a copy names.

        Raises:
            CallerError: the part reaches beyond the memory. Nothing was mapped.
        """
        check_description(description)
        end = description.size_bytes if length is None else offset + length
        if not 0 <= offset < end <= description.size_bytes:
            raise CallerError(
                f"the copy names bytes {offset} to {end}, but the memory has {description.size_bytes} bytes; name a part inside the memory"
            )
        with Memory(self.memory(descriptors.take(), description)) as whole:
            return whole[offset:end]

    def source(self, descriptors: Descriptors, description: MemoryDescription, offset: int, length: int | None) -> IMemory:
        """Return the part of a memory that is copied into a buffer.

        Memory that cannot be mapped fails only when the copy reads it. So the copy fails in the buffer, which then has no contents.
        """
        try:
            return self.part(descriptors, description, offset, length)
        except AionnError as error:
            return _Unmapped(description, error)

    def options(self, values: Mapping[str, OptionValue], files: Mapping[str, bytes], descriptors: Descriptors) -> EngineOptions:
        """Return options with the files that they name, which are closed with what else was received."""
        opened = {name: _OptionFile(fd) for name, fd in zip(files, descriptors.take_many(len(files)), strict=True)}
        self._regions.extend(opened.values())
        return EngineOptions(values, files, opened)

    def prepare_options(self, message: OptionsMessage, device: str, descriptors: Descriptors) -> PrepareOptions:
        """Return a message as the options for the device of that name, with the files as for `options`."""
        own = self.options(message.options, message.files, descriptors)
        return PrepareOptions(
            message.preference,
            message.priority,
            message.deadline_ns,
            message.threads,
            message.open_outputs,
            message.at_most,
            message.instances,
            ((device, own),) if own else (),
        )

    def model(self, message: ModelMessage, descriptors: Descriptors) -> Model:
        """Return the client's model. Files with constants are not mapped, because another process may cut them off at any time.

        Other pools are mapped copy-on-write, so an engine can never write into the app's.

        Raises:
            CompilationError: memory with constants does not fit its description. Mostly a file has become shorter.
        """
        pools: list[IMemory] = []
        for description in message.pools:
            try:
                if description.kind is MemoryKind.MMAP_FD:
                    pools.append(self._file(descriptors.take(), description))
                    continue
                region = attached(descriptors.take(), description, Access.PRIVATE)
            except MappingError as error:
                why = f"the model's weights cannot be mapped: {error}. If their file was cut off, put it back and read the model again"
                raise CompilationError(why, reason=str(error)) from error
            self._regions.append(region)
            pools.append(region)
        return Model(
            graph=message.graph,
            inputs=from_messages(message.inputs),
            outputs=from_messages(message.outputs),
            operations=message.operations,
            constants=message.constants,
            pools=tuple(pools),
            token=message.token,
            _contents=message.contents,
        )

    def _file(self, fd: int, description: MemoryDescription) -> _File:
        file = _File(fd, description)
        self._regions.append(file)
        file.check()
        return file


class _File:
    """A file with constants, which are read from its descriptor. Satisfies `IMemory`, but has no view."""

    def __init__(self, fd: int, description: MemoryDescription) -> None:
        """Take over the descriptor."""
        self._fd = fd
        self.description = description
        self.size_bytes = description.size_bytes

    def check(self) -> None:
        """Check that the descriptor is the file that its description says.

        Raises:
            CallerError: the description can never be right (INVALID_ARGUMENT).
            MappingError: the descriptor does not fit the description. Mostly the file has become shorter.
        """
        check_description(self.description)
        try:
            check_descriptor(self._fd, self.description, write_through=False)
        except CallerError as error:
            raise MappingError(str(error)) from error

    def fileno(self) -> int:
        if self._fd < 0:
            raise CallerError("this file has been closed")
        return self._fd

    def view(self) -> memoryview:
        raise CallerError("a model's constants in files are not mapped; read them with aionn.graph.constant_arrays")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _OptionFile:
    """A file that an option names. Satisfies `IOptionFile`."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self._fd = fd

    def fileno(self) -> int:
        if self._fd < 0:
            raise CallerError("the files that options name are open during the call that brought them only; copy what must live longer")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


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


class Handles:
    """Cache files that came with a call, as the HAL passes them. They are closed when the call is done."""

    def __init__(self, message: CacheMessage, descriptors: Descriptors) -> None:
        self._model = descriptors.take_many(message.model)
        self._data = descriptors.take_many(message.data)
        self._token, self._keyring = message.token, message.keyring

    def __enter__(self) -> CacheHandles:
        return CacheHandles(self._model, self._data, self._token, self._keyring)

    def __exit__(self, *_: object) -> None:
        Descriptors((*self._model, *self._data)).close()


async def from_files(
    device: IDevice, options: PrepareOptions, message: PrepareModelFromCache | Adopt, files: CacheHandles
) -> IPreparedModel:
    """Let a device load, or adopt, the cache files that came with a call.

    Raises:
        CompilationError: the device refuses them, or adopts nothing.
    """
    if isinstance(message, PrepareModelFromCache):
        return await device.prepare_model_from_cache(options, files)
    if not hasattr(device, "adopt"):  # one that is written by hand
        why = f"device {device.name!r} adopts no compilation of another machine"
        raise CompilationError(why, reason=f"refused_by_device: {why}")
    return await device.adopt(options, files, message.model_digest, message.signed)


def attached(fd: int, description: MemoryDescription, access: Access | None = None, *, reserved: bool = False) -> Region:
    """Map the peer's memory, read-only where the description says so. Takes over `fd`.

    Args:
        reserved: refuse memory that its sender has not reserved. So a driver cannot make its app pay for memory.

    Raises:
        CallerError: the description can never be right (INVALID_ARGUMENT), or the memory is not reserved.
        MappingError: the descriptor does not fit the description, or cannot be mapped (GENERAL_FAILURE).
        MemoryAllocationError: as `Region.attach`.
    """
    if access is None:
        access = Access.WRITE if description.writable else Access.READ
    try:
        check_description(description)
        if reserved:
            check_reserved(fd, description)
    except BaseException:
        os.close(fd)
        raise
    try:
        return Region.attach(fd, description, access)
    except CallerError as error:
        raise MappingError(str(error)) from error
