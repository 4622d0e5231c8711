"""dma-bufs: known by their name, sized by lseek, and used between the two calls that keep CPU and device in step.

Most kernels in clouds export none, so a memfd stands for one here, and the calls are recorded. One test uses the kernel's `udmabuf`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

import aionn
from aionn.errors import CallerError, ExecutionError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import BufferDesc, BufferRole, DataLocation, ErrorStatus, MemoryDescription, MemoryKind, Request, RequestArgument
from aionn.memory import descriptors
from aionn.memory.region import Region
from aionn.testing.models import identity_model
from tests.conformance.devices import in_process

PAGE = os.sysconf("SC_PAGE_SIZE")
SYNC = 0x40086200
READ, WRITE, END = 1, 2, 4
UDMABUF_CREATE = 0x40187542  # _IOW('u', 0x42, struct udmabuf_create), linux/udmabuf.h


class Kernel:
    """What the kernel was asked: the flags of each call, and the error that it answers once."""

    def __init__(self) -> None:
        self.flags: list[int] = []
        self.errors: list[int] = []

    def ioctl(self, fd: int, request: int, argument: bytes) -> int:
        assert request == SYNC
        if self.errors:
            raise OSError(self.errors.pop(), "refused by the exporter")
        self.flags.append(struct.unpack("=Q", argument)[0])
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that calls every memfd of the name "exported" a dma-buf, and knows no seals of it."""
    kernel, real_fcntl = Kernel(), fcntl.fcntl

    def is_dma_buf(fd: int) -> bool:
        return "exported" in os.readlink(f"/proc/self/fd/{fd}")

    def asked(fd: int, request: int, *arguments: int) -> int:
        if request == descriptors.F_GET_SEALS and is_dma_buf(fd):
            raise OSError(errno.EINVAL, "no memfd")
        return real_fcntl(fd, request, *arguments)

    monkeypatch.setattr("aionn.memory.descriptors.fcntl.fcntl", asked)
    for place in ("aionn.memory.descriptors", "aionn.memory.region"):
        monkeypatch.setattr(f"{place}.is_dma_buf", is_dma_buf)
    monkeypatch.setattr("aionn.memory.descriptors.fcntl.ioctl", kernel.ioctl)
    return kernel


@pytest.fixture
def exported() -> Iterator[int]:
    fd = os.memfd_create("exported", os.MFD_CLOEXEC)  # not sealed, as no dma-buf is
    os.ftruncate(fd, PAGE)
    yield fd
    os.close(fd)


def test_the_size_is_asked_of_lseek_and_a_larger_one_is_refused(kernel: Kernel, exported: int) -> None:
    with aionn.Memory.from_fd(exported, PAGE) as memory:
        assert memory.size_bytes == PAGE
    with pytest.raises(CallerError, match=f"a file of {PAGE} bytes; the file is shorter than claimed"):
        aionn.Memory.from_fd(exported, 2 * PAGE)


@pytest.mark.usefixtures("kernel")
def test_its_pages_are_not_reserved_and_its_size_needs_no_seal(exported: int) -> None:
    description = MemoryDescription(MemoryKind.MMAP_FD, PAGE)
    Region.attach(os.dup(exported), description).close()
    assert os.fstat(exported).st_blocks == 0
    descriptors.check_sealed(exported, description)


def test_sealed_memory_is_not_asked_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for place in ("aionn.memory.descriptors", "aionn.memory.region"):
        monkeypatch.setattr(f"{place}.is_dma_buf", asked.append)
    sealed = Region.allocate(PAGE)
    Region.attach(os.dup(sealed.fileno()), sealed.description).close()
    descriptors.check_sealed(sealed.fileno(), sealed.description)
    sealed.close()
    assert asked == []


def test_without_a_name_of_a_dma_buf_such_a_descriptor_is_refused(exported: int) -> None:
    with pytest.raises(CallerError, match="its size is not sealed"):
        aionn.Memory.from_fd(exported, PAGE)


def test_an_app_uses_the_bytes_between_the_two_calls(kernel: Kernel, exported: int) -> None:
    with aionn.Memory.from_fd(exported, PAGE) as memory:
        with memory.in_use() as view:
            assert kernel.flags == [READ | WRITE]
            view[0] = 7
        assert kernel.flags == [READ | WRITE, READ | WRITE | END]
        assert memory.flush() is False
    assert os.pread(exported, 1, 0) == b"\x07"


def test_a_use_ends_also_when_its_body_fails_or_closes_the_memory(kernel: Kernel, exported: int) -> None:
    memory = aionn.Memory.from_fd(exported, PAGE, mmap.PROT_READ)
    with pytest.raises(ZeroDivisionError), memory.in_use():
        memory.close()
        raise ZeroDivisionError
    assert kernel.flags == [READ, READ | END]


def test_other_memory_is_used_without_any_call(kernel: Kernel) -> None:
    with aionn.Memory.allocate(64) as memory, memory.in_use() as view:
        assert len(view) == 64
    assert kernel.flags == []


def test_a_call_that_a_signal_interrupts_is_made_again(kernel: Kernel, exported: int) -> None:
    kernel.errors = [errno.EINTR, errno.EAGAIN]
    with aionn.Memory.from_fd(exported, PAGE) as memory, memory.in_use():
        assert kernel.flags == [READ | WRITE]


def test_a_refusal_is_one_sentence(kernel: Kernel, exported: int) -> None:
    kernel.errors = [errno.ENOTTY]
    with (
        aionn.Memory.from_fd(exported, PAGE) as memory,
        pytest.raises(ExecutionError, match="the exporter of the dma-buf refused its use"),
        memory.in_use(),
    ):
        pass


@pytest.mark.anyio
async def test_a_driver_uses_it_between_the_two_calls_in_success_and_failure(kernel: Kernel, exported: int) -> None:
    os.pwrite(exported, np.arange(4, dtype=np.float32).tobytes(), 0)
    memory = aionn.Memory.from_fd(exported, PAGE)
    argument = RequestArgument(DataLocation(0, 0, 16), (4,))
    request = Request((argument,), (RequestArgument(DataLocation(0, 64, 16), ()),))
    async with in_process("reference") as device:
        prepared = await device.prepare_model(aionn.Model.from_onnx(identity_model({"x": [4]})), PrepareOptions())
        result = await prepared.execute(request, [memory.pool])
        assert result.status is ErrorStatus.NONE
        assert kernel.flags == [READ | WRITE, READ | WRITE | END]
        assert os.pread(exported, 16, 64) == os.pread(exported, 16, 0)
        kernel.flags.clear()
        kernel.errors = [errno.EIO]
        result = await prepared.execute(request, [memory.pool])
        assert result.status is ErrorStatus.GENERAL_FAILURE
        assert "the exporter of the dma-buf refused its use" in result.message
        assert kernel.flags == []  # a use that did not begin does not end
        await prepared.aclose()
    memory.close()


@pytest.mark.anyio
async def test_copies_of_device_memory_use_it_between_the_two_calls(kernel: Kernel, exported: int) -> None:
    memory = aionn.Memory.from_fd(exported, PAGE)
    async with in_process("reference") as device:
        prepared = await device.prepare_model(aionn.Model.from_onnx(identity_model({"x": [PAGE // 4]})), PrepareOptions())
        buffer = await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
        await buffer.copy_from(memory, ())
        assert kernel.flags == [READ | WRITE, READ | WRITE | END]
        await buffer.copy_to(memory)
        assert len(kernel.flags) == 4
        kernel.errors = [errno.EIO]
        with pytest.raises(ExecutionError, match="refused its use"):
            await buffer.copy_from(memory, ())
        assert len(kernel.flags) == 4
        await prepared.aclose()
    memory.close()


@pytest.mark.skipif(not os.path.exists("/dev/udmabuf"), reason="this kernel has no /dev/udmabuf")
def test_a_dma_buf_of_the_kernel_is_read_and_written_in_place() -> None:
    memfd = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, PAGE)
    fcntl.fcntl(memfd, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
    with open("/dev/udmabuf", "rb") as device:
        fd = fcntl.ioctl(device.fileno(), UDMABUF_CREATE, bytearray(struct.pack("=IIQQ", memfd, 1, 0, PAGE)))
    try:
        assert descriptors.is_dma_buf(fd)
        with aionn.Memory.from_fd(fd, PAGE) as memory:
            with memory.in_use() as view:
                view[:4] = b"seen"
            assert os.pread(memfd, 4, 0) == b"seen"
    finally:
        os.close(fd)
        os.close(memfd)
