"""An interpreter of classic BPF, as far as seccomp filters use it. It checks a program as the kernel does before it takes one."""

from __future__ import annotations

import struct
from dataclasses import dataclass

LOAD, AND, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
MOST_INSTRUCTIONS = 4096
DATA_BYTES = 64


@dataclass(frozen=True)
class Call:
    """A system call as a filter sees it (struct seccomp_data)."""

    number: int
    architecture: int
    arguments: tuple[int, ...] = ()

    def packed(self) -> bytes:
        arguments = (*self.arguments, 0, 0, 0, 0, 0, 0)[:6]
        return struct.pack("=IIQ6Q", self.number & 0xFFFF_FFFF, self.architecture, 0, *(value & (1 << 64) - 1 for value in arguments))


class Program:
    """A filter that can be asked."""

    def __init__(self, code: bytes) -> None:
        self.instructions = list(struct.iter_unpack("=HBBI", code))
        assert 0 < len(self.instructions) <= MOST_INSTRUCTIONS
        for at, (operation, then, otherwise, operand) in enumerate(self.instructions):
            assert operation in (LOAD, AND, EQUAL, ABOVE, ANY_BIT, RETURN), at
            if operation in (EQUAL, ABOVE, ANY_BIT):
                assert at + 1 + max(then, otherwise) < len(self.instructions), f"instruction {at} jumps out of the program"
            elif operation == LOAD:
                assert operand in range(0, DATA_BYTES, 4), at
        assert self.instructions[-1][0] == RETURN

    def answer(self, call: Call) -> int:
        """Return what the filter says of a call."""
        return int(self.instructions[self.path(call)[-1]][3])

    def path(self, call: Call) -> list[int]:
        """Return the numbers of the instructions that a call runs through."""
        data, loaded, at, path = call.packed(), 0, 0, []
        while True:
            operation, then, otherwise, operand = self.instructions[at]
            path.append(at)
            at += 1
            if operation == RETURN:
                return path
            if operation == LOAD:
                (loaded,) = struct.unpack_from("=I", data, operand)
            elif operation == AND:
                loaded &= operand
            else:
                holds = loaded == operand if operation == EQUAL else loaded > operand if operation == ABOVE else bool(loaded & operand)
                at += then if holds else otherwise
