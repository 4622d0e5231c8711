"""Engines that need more of their driver's sandbox than they state, and what they should state."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from typing import Any

from aionn.hal import CompileOptions, Model
from tests.conformance.storing_reference import StoringReference


def make_code() -> None:
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


class DeclaresInItsClass(StoringReference):
    makes_code = True


class DeclaresByAProperty(StoringReference):
    @property
    def reads(self) -> tuple[str, ...]:
        return ("/etc/passwd",)


class Needy(StoringReference):
    """Needs something in a driver, when it compiles. It needs nothing in the process of the test."""

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


class WritesByPath(Needy):
    def need(self) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"kernels")


class MakesCode(Needy):
    def need(self) -> None:
        make_code()


class OpensADevice(Needy):
    def need(self) -> None:
        os.close(os.open("/dev/full", os.O_RDWR))


class OpensASocket(Needy):
    def need(self) -> None:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


class Forks(Needy):
    def need(self) -> None:
        fork()


NEEDS: dict[type[Any], tuple[str, str]] = {
    DeclaresInItsClass: ("needs_are_declared", "DeclaresInItsClass declares makes_code in its class, where no driver reads it"),
    DeclaresByAProperty: ("needs_are_declared", "state needs in aionn-engine.toml in its package, in needy_engines.aionn-engine.toml"),
    ReadsAFile: ("works_in_its_sandbox", 'the sandbox of its driver allows it with reads = ["/etc/passwd"]'),
    WritesByPath: ("works_in_its_sandbox", "it works with writes_by_path = true in aionn-engine.toml"),
    MakesCode: ("works_in_its_sandbox", "it works with makes_code = true in aionn-engine.toml"),
    OpensADevice: ("works_in_its_sandbox", 'the sandbox of its driver allows it with devices = ["/dev/full"]'),
    OpensASocket: ("works_in_its_sandbox", "no need allows that call"),
    Forks: ("works_in_its_sandbox", "no need allows that call"),
}
"""The case that finds each fault, and what it says."""

STATED: dict[type[Any], str] = {
    ReadsAFile: 'reads = ["/etc/passwd"]',
    WritesByPath: "writes_by_path = true",
    MakesCode: "makes_code = true",
    OpensADevice: 'devices = ["/dev/ful*"]',
}
"""What an engine should state in its TOML file."""
