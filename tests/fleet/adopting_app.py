"""An app for `test_adopting`: adopts one artifact, and is killed meanwhile.

    python -m tests.fleet.adopting_app FOLDER STATE_DIR CACHE_DIR

FOLDER has the signed statement and the artifact's files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import aionn
from aionn import fleet
from aionn.testing import FakeDevice


async def main(folder: str, state_dir: str, cache_dir: str) -> None:
    names = sorted(name for name in os.listdir(folder) if name != "signed")
    data, model = (os.open(Path(folder, name), os.O_RDONLY) for name in names)
    async with aionn.Runtime(state_dir=state_dir) as runtime:
        await fleet.adopt(runtime, cache_dir, fleet.Offered(signed_in(folder), (model,), (data,)), device=FakeDevice.name)


def signed_in(folder: str) -> bytes:
    return Path(folder, "signed").read_bytes()


if __name__ == "__main__":
    aionn.run(main, *sys.argv[1:])
