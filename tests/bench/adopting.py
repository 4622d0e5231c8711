"""F3's figure: what adopting from a folder costs, beside loading the same bytes unverified and beside a plain hit.

python -m tests.bench.adopting [MODEL] [ROUNDS]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aionn
from aionn.fleet import BuilderKey, StoreBackend, encode_public_key, use_backend
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.pulling import push_cache
from aionn.fleet.requests import open_address
from aionn.remote.device import RemoteDevice
from tests.real_models import carried

DEVICE = "onnxruntime"


async def compiled(runtime: aionn.Runtime, model_path: Path, cache: Path) -> tuple[float, aionn.CacheOutcome]:
    """Compile once; return the seconds that it took, and the outcome."""
    model = await runtime.load(model_path)
    began = time.perf_counter()
    compilation = await runtime.compile(model, devices=[DEVICE], cache_dir=cache)
    took = time.perf_counter() - began
    (outcome,) = compilation.outcomes
    await compilation.aclose()
    return took, outcome


@contextmanager
def timed(call: str) -> Iterator[list[float]]:
    """Collect how long calls of a device's method take, in seconds: what the driver does for them, and the way there and back."""
    took: list[float] = []
    original = getattr(RemoteDevice, call)

    async def measured(self: RemoteDevice, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return await original(self, *arguments)
        finally:
            took.append(time.perf_counter() - began)

    setattr(RemoteDevice, call, measured)
    try:
        yield took
    finally:
        setattr(RemoteDevice, call, original)


async def measure(model_path: Path, rounds: int, folder: Path) -> None:
    builder, store = BuilderKey.generate("bench"), folder / "store"
    (folder / "keys").mkdir(mode=0o700)
    (folder / "keys" / "bench.pub").write_bytes(encode_public_key(builder.public))
    (folder / "keys" / "bench.pub").chmod(0o600)
    os.environ["AIONN_TRUSTED_BUILDERS"] = os.fspath(folder / "keys")
    async with aionn.Runtime(state_dir=folder / "a", start=()) as runtime:
        await compiled(runtime, model_path, folder / "cache")
        objects = ArtifactStore(open_address(store, patience_s=30.0, make=True))
        await push_cache(folder / "cache", objects, builder, state_dir=folder / "a")
    hits, adopted = [], []
    async with (
        aionn.Runtime(state_dir=folder / "a", start=()) as there,
        aionn.Runtime(state_dir=folder / "b", start=()) as here,
    ):
        use_backend(here, StoreBackend(store))
        await compiled(there, model_path, folder / "cache")  # starts the driver
        await compiled(here, model_path, folder / "first")
        # In turn, so that another load of the machine is in both.
        with timed("prepare_model_from_cache") as loads, timed("adopt") as adoptions:
            for number in range(rounds):
                took, outcome = await compiled(there, model_path, folder / "cache")
                assert outcome.reason is None
                hits.append(took)
                took, outcome = await compiled(here, model_path, folder / f"cache {number}")
                assert outcome.detail == "compiled by builder 'bench'", outcome
                adopted.append(took)
    assert len(loads) == len(adoptions) == rounds, (loads, adoptions)
    size = sum(path.stat().st_size for path in store.glob("blake3/*"))
    hit, whole, load, adopt = (statistics.median(each) * 1e3 for each in (hits, adopted, loads, adoptions))
    print(
        f"{model_path.name}, {size / 1e6:.1f} MB: the driver verifies and loads {load:.1f} ms, adopts and loads {adopt:.1f} ms "
        f"(F3: {adopt:.1f} <= {1.3 * load + 5:.1f}: {'kept' if adopt <= 1.3 * load + 5 else 'missed'}); "
        f"whole compile: hit {hit:.1f} ms, adopted and stored {whole:.1f} ms; {rounds} rounds in turn, load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else carried("silero")
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    with tempfile.TemporaryDirectory() as folder:
        aionn.run(measure, model, rounds, Path(folder))


if __name__ == "__main__":
    main()
