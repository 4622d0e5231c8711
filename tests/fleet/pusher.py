"""A process that pushes: one artifact for each line on stdin, with contents that only this process has. It may be killed at any moment.

python -m tests.fleet.pusher ADDRESS NUMBER
stdin   the name of a model          stdout  what became of the push, as "added"
"""

from __future__ import annotations

import sys

import aionn
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.requests import open_address
from tests.fleet.entries import artifact, some_bytes

FILE_BYTES = 300_000


async def main() -> None:
    number = int(sys.argv[2])
    store = ArtifactStore(open_address(sys.argv[1], patience_s=60.0, make=True))
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        own = [some_bytes(number * 1000 + index, FILE_BYTES) for index in range(3)]
        pushed = await artifact(name, *own, name.encode()).push(store)
        print(pushed.value, flush=True)


if __name__ == "__main__":
    aionn.run(main)
