"""A fresh process of `tests.bench.starts`: it does what a user's script does up to the first result, and prints a line then.

It is run as a script, and imports what its kind needs and nothing else. It goes on when its parent writes a line or closes the pipe.
aionn's scripts open the runtime before they import NumPy, as aionn's documentation advises.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

Given = dict[str, Any]
TICK_S = 0.001


def tell(**values: Any) -> None:
    """Print one line for the parent."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def arrays(given: Given) -> dict[str, Any]:
    """Return an array for each input: small whole numbers, or sevenths for floats."""
    import numpy as np

    found = {}
    for name, (dtype, shape) in given["inputs"].items():
        values = np.arange(np.prod(shape)).reshape(shape) % 7
        found[name] = (values / 7 if dtype.startswith("f") else values).astype(dtype)
    return found


def checksum(output: Any) -> float:
    """Return a number by which the parent sees that all kinds computed the same."""
    return float(abs(output).sum(dtype="float64"))


async def part(given: Given) -> None:
    """Do one part of aionn's start, and print how long it took."""
    import aionn

    began = given["began_ns"]

    async with aionn.Runtime(start=(), state_dir=given["state_dir"]) as runtime:
        if given["kind"] == "driver":
            (device,) = (device for device in runtime.devices if device.name == given["device"])
            began = time.monotonic_ns()
            await device.restart()  # none runs yet, so this only starts it
        tell(took_ms=(time.monotonic_ns() - began) / 1e6)
        await parent_goes_on()


def app_imports(given: Given) -> None:
    began = time.monotonic_ns()
    import anyio  # noqa: F401
    import numpy as np  # noqa: F401
    import uvloop  # noqa: F401

    tell(took_ms=(time.monotonic_ns() - began) / 1e6)
    sys.stdin.readline()


def driver_imports(given: Given) -> None:
    import subprocess

    command = [sys.executable, "-P", "-c", "import numpy, onnxruntime, uvloop; print(flush=True)"]
    began = time.monotonic_ns()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as imports:
        assert imports.stdout is not None
        imports.stdout.readline()
        tell(took_ms=(time.monotonic_ns() - began) / 1e6)
    sys.stdin.readline()


# ---- rivals ----------------------------------------------------------------------------------------------------------------


def onnxruntime_alone(given: Given) -> None:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = given["threads"]
    if given["kind"] == "ort, saved graph":
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(given["model"], settings, providers=["CPUExecutionProvider"])
    made = time.monotonic_ns()
    outputs = session.run(None, arrays(given))
    tell(checksum=checksum(outputs[0]), marks={"compile": made})
    sys.stdin.readline()


def save_graph(given: Given) -> None:
    """Save ONNX Runtime's optimised graph. The weights of a model of 500 MB or more go into a file beside it."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.optimized_model_filepath = given["saved"]
    if given["beside"]:
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", given["beside"])
        settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    onnxruntime.InferenceSession(given["model"], settings, providers=["CPUExecutionProvider"])
    tell()


def openvino_alone(given: Given) -> None:
    import openvino

    core = openvino.Core()
    if given["cache_dir"]:
        core.set_property({"CACHE_DIR": given["cache_dir"]})
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": given["threads"]}
    compiled = core.compile_model(given["model"], "CPU", settings)
    made = time.monotonic_ns()
    outputs = compiled(arrays(given))
    tell(checksum=checksum(outputs[0]), marks={"compile": made})
    sys.stdin.readline()


# ---- aionn -----------------------------------------------------------------------------------------------------------------


def runtime_of(given: Given) -> Any:
    """Return a runtime that starts the driver at once, or that asks a service for it."""
    import aionn

    service = {"service": given["service"]} if "service" in given else {}  # older releases have no service
    return aionn.Runtime(start=(given["device"],), state_dir=given["state_dir"], **service)


async def loaded(given: Given, runtime: Any) -> Any:
    import aionn

    return aionn.Model.from_onnx(given["model"]) if given["from_onnx"] else await runtime.load(given["model"])


async def compiled_with(given: Given, runtime: Any, model: Any, cache_dir: str | None) -> Any:
    if cache_dir is None:
        return await runtime.compile(model, devices=(given["device"],))
    if given["own_token"]:
        token = given["own_token"].encode().ljust(32)[:32]
    elif given["from_onnx"] or not hasattr(runtime, "load"):
        token = model.token
    else:
        return await runtime.compile(model, devices=(given["device"],), cache_dir=cache_dir)
    return await runtime.compile(model, devices=(given["device"],), cache_dir=cache_dir, token=token)


def outcome_of(compilation: Any) -> str:
    return ", ".join(sorted({outcome.kind.name for outcome in compilation.outcomes}))


async def parent_goes_on() -> None:
    """Wait for the parent, in a thread, so that the runtime's own tasks run meanwhile."""
    import asyncio

    await asyncio.to_thread(sys.stdin.readline)


async def first_result(given: Given) -> None:
    """Load, compile, compute, print. With `again`, do the same once more in the same driver. With `numpy_first`, import NumPy before."""
    if given.get("numpy_first"):
        import numpy  # noqa: F401
    imported = time.monotonic_ns()
    async with runtime_of(given) as runtime:
        opened = time.monotonic_ns()
        inputs = arrays(given)
        kept = []
        for _ in range(2 if given["again"] else 1):
            began = time.monotonic_ns()
            model = await loaded(given, runtime)
            read = time.monotonic_ns()
            compilation = await compiled_with(given, runtime, model, given["cache_dir"])
            made = time.monotonic_ns()
            outputs = await compilation.compute(inputs)
            marks = {"imports": imported, "open": opened, "numpy": began, "load": read, "compile": made}
            tell(checksum=checksum(next(iter(outputs.values()))), outcome=outcome_of(compilation), marks=marks)
            kept.append((model, compilation))
            del outputs
            await parent_goes_on()


async def warm_turns(given: Given) -> None:
    """Take turns of a hit and of no cache in one driver, from the file to the first result. The first turn of each is not counted."""
    taken: dict[str, list[tuple[int, int]]] = {"hit": [], "no cache": []}
    outcomes = set()
    async with runtime_of(given) as runtime:
        inputs = arrays(given)
        for turn in range(given["turns"] + 1):
            for name in sorted(taken, reverse=bool(turn % 2)):
                began = time.monotonic_ns()
                model = await loaded(given, runtime)
                read = time.monotonic_ns()
                compilation = await compiled_with(given, runtime, model, given["cache_dir"] if name == "hit" else None)
                made = time.monotonic_ns()
                await compilation.compute(inputs)
                done = time.monotonic_ns()
                if name == "hit":
                    outcomes.add(outcome_of(compilation))
                if turn:
                    taken[name].append((done - began, made - read))
                await compilation.aclose()
                del model, compilation
        tell(turns=taken, outcome=", ".join(sorted(outcomes)))
        await parent_goes_on()


class Lag:
    """The worst gap of a loop that sleeps a millisecond each time, in each phase."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int, int]] = []
        self._began = self._last = time.monotonic_ns()
        self._worst = 0

    async def watch(self) -> None:
        import asyncio

        while True:
            await asyncio.sleep(TICK_S)
            self._see()

    def end(self, phase: str) -> None:
        """End a phase. A gap that still runs belongs to it."""
        self._see()
        self.phases.append((phase, self._began, self._last, max(0, self._worst - int(TICK_S * 1e9))))
        self._began, self._worst = self._last, 0

    def _see(self) -> None:
        now = time.monotonic_ns()
        self._worst = max(self._worst, now - self._last)
        self._last = now


async def lag(given: Given) -> None:
    """Load, digest, compile without a cache, into one and from one, and close, while a task watches the loop."""
    import asyncio

    import aionn  # noqa: F401 -- so that no phase counts the import

    inputs = arrays(given)
    seen = Lag()
    watching = asyncio.ensure_future(seen.watch())
    await asyncio.sleep(0.02)
    seen.end("nothing")
    runtime = runtime_of(given)
    await runtime.open()
    seen.end("open")
    for name, cache_dir in (("no cache", None), ("miss", given["cache_dir"]), ("hit", given["cache_dir"])):
        model = await loaded(given, runtime)
        seen.end("load")
        if name == "miss" and hasattr(model, "digest"):
            await model.digest()
            seen.end("digest")
        compilation = await compiled_with(given, runtime, model, cache_dir)
        seen.end(f"compile, {name}")
        await compilation.compute(inputs)
        seen.end("first result")
        outcome = outcome_of(compilation)
        await compilation.aclose()
        del model, compilation
        await asyncio.sleep(TICK_S)
        seen.end(f"close, {name}")
    await runtime.aclose()
    seen.end("close the runtime")
    watching.cancel()
    tell(phases=seen.phases, outcome=outcome)


def attached(given: Given) -> None:
    """Get a burst from a service without an event loop, compute, print."""
    import aionn.blocking

    imported = time.monotonic_ns()
    with aionn.blocking.attach(given["model"], devices=(given["device"],), service=given["service"]) as burst:
        made = time.monotonic_ns()
        outputs = burst.compute(arrays(given))
        tell(checksum=checksum(next(iter(outputs.values()))), marks={"imports": imported, "attach": made})
        sys.stdin.readline()


def work(given: Given) -> None:
    alone = {"ort": onnxruntime_alone, "ort, saved graph": onnxruntime_alone, "save": save_graph}
    alone |= {"openvino": openvino_alone, "openvino, cached": openvino_alone}
    alone |= {"imports of an app": app_imports, "imports of a driver": driver_imports, "attach": attached}
    if given["kind"] in alone:
        alone[given["kind"]](given)
        return
    given["began_ns"] = time.monotonic_ns()
    import aionn

    aionn.run({"lag": lag, "warm": warm_turns, "open": part, "driver": part}.get(given["kind"], first_result), given)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
