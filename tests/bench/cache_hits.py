"""A cold compilation, a verified hit, and the engine's own load of the same artifact by path: `python -m tests.bench cache_hits`.

    python -m tests.bench cache_hits [--repeat 7] [--models NAME...] [--engines NAME...] [--directory DIR] [--json]

All through the public face with a driver that is up; milliseconds, median of the repeats. For each model and engine
    cold    runtime.compile into an empty cache: ask, compile, export, authenticate, write, sync, publish
    hit     runtime.compile from the cache: look up, lock, send descriptors, read, hash, compare, load
    first   the first such hit of a driver, whose memory is still the kernel's to give
    own     the engine's load of the same artifact from files by path, in a process of its own, with the same options: no check at all
    read    reading the artifact's bytes once; hash: BLAKE3 of them; load: the engine's load of those bytes; rest: hit less these three
A hit and its rivals take turns: each hit is followed by the own load, then by the others, in a second process, which like a driver waits
for its next task meanwhile: each finds the processor's caches as the other process left them. The ratio is of each hit to its own turn's
rivals (median), and of the least to the least.
What a hit adds, two processes' turns and SQLite, is about 2 ms whatever the model: silero's own load takes as long on ONNX Runtime.
A hit is to cost at most 1.6 x (read + own), and to be 5 times faster than cold where `own` is 8 times faster than cold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np

import aionn
from aionn.engines.onnxruntime_artifact import WEIGHTS_FILE, without_notes
from aionn.file_ranges import digest_of
from aionn.hal import Artifact, CompileOptions
from aionn.testing import identity_model
from tests.bench.resnet import resnet50
from tests.real_models import carried

MODELS = ("silero", "silero_branching", "orientation", "detector", "magika", "resnet50")
ENGINES = {"onnxruntime": "aionn.engines.onnxruntime:OnnxRuntimeEngine", "openvino": "aionn.engines.openvino:OpenVINOEngine"}
CANNOT = {("silero_branching", "openvino")}
"""OpenVINO does not convert that model: a branch of it has tensors of unknown rank."""

RIVALS = ("read", "hash", "load", "own")
WARM_UP = 3
"""Turns that are not counted: the first pay for memory and code that later ones find in place, on both sides."""
HIT_LIMIT, COLD_LIMIT, OWN_LIMIT = 1.6, 5.0, 8.0


def engine_of(name: str) -> Any:
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


def own_load(name: str, engine: Any, directory: Path, threads: int) -> Any:
    """What an app without aionn would do with these files, on as many threads as aionn's engine takes for them."""
    options = CompileOptions()
    if name == "onnxruntime":
        # As `load` does, except for the weights, which ORT finds beside the graph and maps by itself.
        settings = engine._settings(options, threads)
        settings.graph_optimization_level = engine._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return engine._ort.InferenceSession(str(directory / "own"), settings, providers=["CPUExecutionProvider"])
    blob = np.memmap(directory / "own", np.uint8, "c")
    return engine._core.import_model(engine._ov.Tensor(blob, shared_memory=True), "CPU", engine._chosen.settings(options))


def rivals(name: str, directory: Path) -> None:
    """Run in a process of its own: at each line on stdin the own load, or read, hash and load; their milliseconds on stdout."""
    engine = engine_of(name)
    paths = [directory / "model", directory / WEIGHTS_FILE]
    contents = [path.read_bytes() for path in paths]
    loaded = engine.load(Artifact((contents[0],), (contents[1],)), CompileOptions())
    threads = loaded._session.get_session_options().intra_op_num_threads if name == "onnxruntime" else 0
    del loaded, contents

    def own() -> dict[str, float]:
        before = time.perf_counter()
        own = own_load(name, engine, directory, threads)
        after = time.perf_counter()
        del own
        return {"own": (after - before) * 1e3}

    # In a worker thread, as a program with an event loop does it: its memory is another heap's than the main thread's.
    with ThreadPoolExecutor(1) as worker:
        for line in sys.stdin:
            work = worker.submit(own) if line == "own\n" else worker.submit(parts, engine, paths)
            print(json.dumps(work.result()), flush=True)


def parts(engine: Any, paths: list[Path]) -> dict[str, float]:
    began = time.perf_counter()
    contents = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        contents.append(os.pread(fd, os.fstat(fd).st_size, 0))
        os.close(fd)
    read = time.perf_counter()
    for content in contents:
        digest_of(content)
    hashed = time.perf_counter()
    loaded = engine.load(Artifact((contents[0],), (contents[1],)), CompileOptions())
    done = time.perf_counter()
    del loaded, contents
    return {"read": (read - began) * 1e3, "hash": (hashed - read) * 1e3, "load": (done - hashed) * 1e3}


def artifact_of(name: str, model: aionn.Model, directory: Path) -> int:
    """Write the engine's artifact as plain files; their bytes."""
    engine = engine_of(name)
    artifact = engine.export(engine.compile(model, CompileOptions()))
    (directory / "model").write_bytes(artifact.model[0])
    # ONNX Runtime itself knows nothing of what our engine notes at the end of a graph.
    graph = without_notes(memoryview(artifact.model[0]))[0] if name == "onnxruntime" else artifact.model[0]
    (directory / "own").write_bytes(graph)
    (directory / WEIGHTS_FILE).write_bytes(artifact.data[0])
    return sum((directory / file).stat().st_size for file in ("model", WEIGHTS_FILE))


async def cold_compiles(model: aionn.Model, engine: str, directory: Path, repeat: int) -> list[float]:
    """Milliseconds of each compilation into a cache of its own; the driver has compiled before."""
    async with aionn.Runtime() as runtime:
        return [await _compiled(runtime, model, engine, directory / f"cache{turn}", "MISS") for turn in range(repeat + 1)][1:]


async def hits(model: aionn.Model, engine: str, directory: Path, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of each hit in a new driver that is up and has loaded another model, and of its rivals after each."""
    command = [sys.executable, "-m", "tests.bench.cache_hits", "--rivals", engine, str(directory)]
    times: dict[str, list[float]] = {what: [] for what in ("hit", *RIVALS)}
    with subprocess.Popen(  # noqa: ASYNC220 -- nothing else runs on this loop
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        async with aionn.Runtime() as runtime:
            other = aionn.Model.from_onnx(identity_model())
            await runtime.compile(other, devices=(engine,))
            for _ in range(repeat + WARM_UP):
                times["hit"].append(await _compiled(runtime, model, engine, directory / f"cache{repeat}", "HIT"))
                for work in ("own", "parts"):
                    process.stdin.write(f"{work}\n")
                    process.stdin.flush()
                    for what, spent in json.loads(await anyio.to_thread.run_sync(process.stdout.readline)).items():
                        times[what].append(spent)
        process.stdin.close()
    return times


async def _compiled(runtime: aionn.Runtime, model: aionn.Model, engine: str, cache_dir: Path, kind: str) -> float:
    began = time.perf_counter()
    compilation = await runtime.compile(model, devices=(engine,), cache_dir=cache_dir, token=model.token)
    took_ms = (time.perf_counter() - began) * 1e3
    assert compilation.outcomes[0].kind.name == kind, compilation.outcomes
    await compilation.aclose()
    return took_ms


def measure(name: str, engine: str, directory: Path, repeat: int) -> dict[str, Any]:
    os.environ["XDG_STATE_HOME"] = str(directory / "state")
    model = aionn.Model.from_onnx(resnet50() if name == "resnet50" else carried(name))
    cold = aionn.run(cold_compiles, model, engine, directory, repeat)
    artifact_bytes = artifact_of(engine, model, directory)
    taken = aionn.run(hits, model, engine, directory, repeat)
    times = {"cold": cold, **{what: values[WARM_UP:] for what, values in taken.items()}}
    row: dict[str, Any] = {"model": name, "engine": engine, "artifact_mb": artifact_bytes / 1e6, "first": taken["hit"][0]}
    row.update({what: statistics.median(values) for what, values in times.items()})
    row["rest"] = row["hit"] - row["read"] - row["hash"] - row["load"]
    plain = [read + own for read, own in zip(times["read"], times["own"], strict=True)]
    row["hit_over_plain"] = statistics.median(mine / theirs for mine, theirs in zip(times["hit"], plain, strict=True))
    row["hit_over_plain_least"] = min(times["hit"]) / min(plain)
    row["cold_over_hit"] = row["cold"] / row["hit"]
    row["cold_over_own"] = row["cold"] / row["own"]
    return row


def show(rows: list[dict[str, Any]]) -> None:
    names = ("cold", "first", "hit", "own", "read", "hash", "load", "rest")
    print(f"{'model':18}{'engine':13}{'MB':>7}" + "".join(f"{name:>9}" for name in names) + "  hit/(read+own)   cold/hit  cold/own")
    for row in rows:
        verdict = "" if row["hit_over_plain"] <= HIT_LIMIT else f"  over {HIT_LIMIT}"
        if row["cold_over_own"] >= OWN_LIMIT and row["cold_over_hit"] < COLD_LIMIT:
            verdict += f"  below {COLD_LIMIT} x cold"
        print(
            f"{row['model']:18}{row['engine']:13}{row['artifact_mb']:7.1f}"
            + "".join(f"{row[name]:9.1f}" for name in names)
            + f"  {row['hit_over_plain']:5.2f} (least {row['hit_over_plain_least']:.2f})"
            + f" {row['cold_over_hit']:9.1f}{row['cold_over_own']:10.1f}{verdict}"
        )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench cache_hits", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rivals", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rivals:
        rivals(options.rivals[0], Path(options.rivals[1]))
        return
    rows = []
    for name in options.models:
        for engine in options.engines:
            if (name, engine) in CANNOT:
                continue
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                rows.append(measure(name, engine, Path(directory), options.repeat))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, ms, medians of {options.repeat}")
    show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
