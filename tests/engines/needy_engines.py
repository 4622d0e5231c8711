"""Engines that need more of their driver's sandbox than they declare, and each beside it one that declares what it needs."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

from aionn.hal import Artifact, CompileOptions, Executable, Model
from tests.conformance.storing_reference import StoringReference


def make_code() -> None:
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


class DeclaresNothing:
    """Has no base that declares something."""

    name, version, cache_files = "declares-nothing", "1", StoringReference.cache_files

    def __init__(self) -> None:
        self.engine = StoringReference()

    def need(self) -> None:
        pass

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return self.engine.supported_operations(model)

    def compile(self, model: Model, options: CompileOptions) -> Any:
        if options.blob_cache is not None:
            self.need()
        return self.engine.compile(model, options)

    def export(self, executable: Executable) -> Artifact | None:
        return self.engine.export(executable)

    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        return self.engine.load(artifact, options)


class DeclaresNothingAndMakesCode(DeclaresNothing):
    def need(self) -> None:
        make_code()


class DeclaresNothingAndForks(DeclaresNothing):
    def need(self) -> None:
        fork()


class DeclaresByCode(DeclaresNothing):
    def __init__(self) -> None:
        super().__init__()
        self.reads = ()


class DeclaresTheWrongType(StoringReference):
    reads = "/etc/passwd"  # type: ignore[assignment]  # the fault


class ComputesWhatItDeclares(StoringReference):
    reads = tuple(f"/etc/{name}" for name in ("passwd", "group"))


class ChangesWhatItDeclares(StoringReference):
    makes_code = False

    def __init__(self) -> None:
        super().__init__()
        self.makes_code = True


class Needy(StoringReference):
    """Needs something in a driver, when it compiles. It needs nothing in the process of the test."""

    reads: tuple[str, ...] = ()

    def need(self) -> None:
        raise NotImplementedError

    def compile(self, model: Model, options: CompileOptions) -> Any:
        if options.blob_cache is not None:
            self.need()
        return super().compile(model, options)


class ReadsAFile(Needy):
    def need(self) -> None:
        with open("/etc/passwd", "rb") as file:
            file.read()


class ReadsADeclaredFile(ReadsAFile):
    reads = ("/etc/passwd",)


class WritesByPath(Needy):
    def need(self) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"kernels")


class WritesByPathAndSaysSo(WritesByPath):
    writes_by_path = True


class MakesCode(Needy):
    def need(self) -> None:
        make_code()


class MakesCodeAndSaysSo(MakesCode):
    makes_code = True


class OpensADevice(Needy):
    def need(self) -> None:
        os.close(os.open("/dev/full", os.O_RDWR))


class OpensADeclaredDevice(OpensADevice):
    devices = ("/dev/ful*",)


class OpensASocket(Needy):
    def need(self) -> None:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


class Forks(Needy):
    def need(self) -> None:
        fork()


NEEDS: dict[type[Any], tuple[str, str]] = {
    DeclaresNothing: ("needs_are_declared", "it works with reads = () in the body of the class"),
    DeclaresNothingAndMakesCode: ("needs_are_declared", "it works with makes_code = True in the body of the class"),
    DeclaresNothingAndForks: ("needs_are_declared", "with reads = () it does not work: "),
    DeclaresByCode: ("needs_are_declared", "a driver does not see reads"),
    DeclaresTheWrongType: ("needs_are_declared", "reads must be a tuple of absolute paths"),
    ComputesWhatItDeclares: ("needs_are_declared", "literal"),
    ChangesWhatItDeclares: ("needs_are_declared", "makes_code is True, but a driver reads False"),
    ReadsAFile: ("works_in_its_sandbox", "Permission denied: '/etc/passwd'"),
    WritesByPath: ("works_in_its_sandbox", "writes_by_path = True"),
    MakesCode: ("works_in_its_sandbox", "it works with makes_code = True"),
    OpensADevice: ("works_in_its_sandbox", "Permission denied: '/dev/full'"),
    OpensASocket: ("works_in_its_sandbox", "socket"),
    Forks: ("works_in_its_sandbox", "clone"),
}
"""The case that finds each fault, and what it says."""

DECLARED = (ReadsADeclaredFile, WritesByPathAndSaysSo, MakesCodeAndSaysSo, OpensADeclaredDevice)
"""Engines that need more, and declare it."""
