"""An app on a kernel without Landlock: `python -m tests.sandbox.old_kernel_app DEVICE FOLDER` prints what became of all attacks, as JSON.

A filter of its own answers Landlock's calls as an older kernel does. Drivers inherit it.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path

import anyio
import msgspec

from aionn.sandbox.confining import no_new_privileges
from tests.sandbox.asking import ask, attacked, targets
from tests.sandbox.evil_calls import ATTACKS
from tests.sandbox.evil_engine import Question

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def without_landlock() -> None:
    """Answer calls 444 to 446 with ENOSYS (38) from now on."""
    code = (
        struct.pack("=HBBI", 0x20, 0, 0, 0)  # load the number
        + struct.pack("=HBBI", 0x35, 0, 2, 444)  # below: go on to the last line
        + struct.pack("=HBBI", 0x25, 1, 0, 446)  # above: as well
        + struct.pack("=HBBI", 0x06, 0, 0, 0x0005_0026)
        + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF_0000)
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    no_new_privileges()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), head, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


async def main(device: str, folder: Path) -> None:
    with targets(folder) as target:
        async with attacked(device, "auto", target) as (runtime, compilation, aim):
            answer = await ask(compilation, Question(tuple(ATTACKS), aim))
            holds = [entry.sandbox.holds for entry in runtime.devices if entry.name == device and entry.sandbox is not None]
    print(msgspec.json.encode((answer.outcomes, holds[0])).decode())


if __name__ == "__main__":
    without_landlock()
    anyio.run(main, sys.argv[1], Path(sys.argv[2]))
