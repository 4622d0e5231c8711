"""`aionn run`: run a model on a device, once or repeatedly. Print its outputs in numbers and its speed.

`--shape` gives the shapes of inputs that are made up, here and by `aionn bench MODEL`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

import aionn
from aionn import trace
from aionn.cli.compiling import describe, progress
from aionn.cli.printing import NotDoneError, UsageError, duration, error_console, print_json, print_table, size
from aionn.cli.tracing import check_output
from aionn.errors import ExecutionError
from aionn.escapes import escaped
from aionn.runtime.executing.warming import made_up_array

Arrays = dict[str, NDArray[Any]]

_MOST_VALUES = 16
"""Outputs with up to so many elements are printed whole, as JSON."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How `aionn run` runs a model. The command line describes each option.

    Attributes:
        inputs: "NAME=FILE.npy" per given input.
        device: None means the best device that can run the model.
        trace: the file for the trace, or None.
        threads: None means that the engine chooses.
        shapes: "NAME=1x3x224x224" per input that is made up.
    """

    inputs: Sequence[str] = ()
    device: str | None = None
    repeat: int = 1
    burst: bool = False
    cache_dir: str | None = None
    state_dir: str | None = None
    trace: str | None = None
    threads: int | None = None
    instances: int | None = None
    shapes: Sequence[str] = ()


def run_model(path: str, options: RunOptions, as_json: bool) -> None:
    """Run a model and print its outputs and its speed.

    Raises:
        UsageError: `repeat` is not positive, or a file or a shape cannot be used.
        NotDoneError: the model does not run on inputs that were made up.
        AionnError: as `Runtime.compile` and `Compilation.compute`.
    """
    if options.repeat < 1:
        raise UsageError(f"--repeat is {options.repeat}, but a model runs at least once; give a number from 1 on")
    if options.trace is not None:
        check_output("--trace", options.trace)
    recording = trace.record() if options.trace is not None else nullcontext(None)
    with recording as recorded:
        report = aionn.run(_run, path, _given(options.inputs), parse_shapes(options.shapes), options)
    if recorded is not None and options.trace is not None:
        recorded.write_chrome(options.trace)
    if as_json:
        print_json(report)
    else:
        _print(report)


def _given(inputs: Sequence[str]) -> Arrays:
    arrays: Arrays = {}
    for text in inputs:
        # From the right: names of tensors may hold "=", which files seldom do.
        name, equals, file = text.rpartition("=")
        if not equals or not name:
            raise UsageError(f"--input {text!r} does not name an input and a file; give NAME=FILE.npy")
        try:
            with open(file, "rb") as opened:
                arrays[name] = np.load(opened, allow_pickle=False)
        except OSError as error:
            hint = "; " + ("for a shape give --shape" if set(file) <= set("0123456789x") else "write one with numpy.save")
            raise UsageError(f"the file {file!r} of --input {name} cannot be read as a .npy file ({error}){hint}") from error
        except (ValueError, EOFError, BadZipFile) as error:  # NumPy's own text recommends to load pickled objects
            raise UsageError(
                f"the file {file!r} of --input {name} cannot be read as a .npy file of numbers; write one with numpy.save"
            ) from error
        if not isinstance(arrays[name], np.ndarray):
            raise UsageError(f"the file {file!r} of --input {name} holds several arrays; give a .npy file with one")
    return arrays


def completed(given: Arrays, shapes: Mapping[str, Shape], model: aionn.Model) -> Arrays:
    """Return the inputs given, and random ones for the rest. `shapes` have passed `check_shapes`.

    Raises:
        UsageError: the model has no such input, or an input cannot be made up.
    """
    unknown = sorted(set(given) - set(model.inputs))
    if unknown:
        raise UsageError(f"the model has no input {unknown[0]!r}; its inputs are {', '.join(model.inputs)}")
    random = np.random.default_rng(0)
    inputs: Arrays = {}
    for name, operand in model.inputs.items():
        if name in given:
            inputs[name] = given[name]
            continue
        if operand.default is not None and name not in shapes:
            continue
        if not operand.in_frames:
            way = f"give --input {name}=FILE.npy with an array of texts" if operand.type.value == operand.word else "run it from Python"
            raise UsageError(f"input {name!r} is of type {operand.word}, and only numbers are made up; {way}")
        if operand.dimensions is None and name not in shapes:
            raise UsageError(
                f"input {name!r} has no shape in the model; give --shape {name}=1x3x224x224 with its shape, or --input {name}=FILE.npy"
            )
        shape = shapes[name] if name in shapes else tuple(extent or 1 for extent in operand.dimensions or ())
        inputs[name] = made_up_array(operand, shape, random)
        error_console().print(f"input {name!r}: random {operand.type.dtype} of shape {shape}", markup=False, soft_wrap=True)
    return inputs


async def _run(path: str, given: Arrays, shapes: Mapping[str, Shape], options: RunOptions) -> dict[str, Any]:
    device, repeat, cache_dir = options.device, options.repeat, options.cache_dir
    model = await aionn.Model.load(path)
    check_shapes(shapes, given, model)
    async with aionn.Runtime(state_dir=options.state_dir, start=() if device else None) as runtime:
        began = time.monotonic()
        with progress(f"{Path(path).name} for {device or 'the best device'}") as show:
            compilation = await runtime.compile(
                model,
                devices=None if device is None else (device,),
                threads=options.threads,
                instances=options.instances,
                cache_dir=cache_dir,
                on_event=show,
            )
        prepared_s = time.monotonic() - began
        inputs = completed(given, shapes, model)
        try:
            if options.burst:
                async with compilation.burst() as stream:
                    outputs, times_s = await _repeat(stream, inputs, repeat)
            else:
                outputs, times_s = await _repeat(compilation, inputs, repeat)
        except ExecutionError as error:
            made_up = [name for name in inputs if name not in given]
            if not made_up:
                raise
            way_out = (
                f"made up: {', '.join(made_up)}; the model may want other numbers or shapes, give --input {made_up[0]}=FILE.npy or --shape"
            )
            raise NotDoneError(f"{error} ({way_out})") from error
        return {
            "model": path,
            "device": compilation.device,
            "prepared_s": prepared_s,
            "cache": [describe(outcome) for outcome in compilation.outcomes],
            "burst": options.burst,
            "runs": repeat,
            "first_s": times_s[0],
            "p50_s": statistics.median(times_s),
            "p99_s": sorted(times_s)[min(repeat - 1, int(repeat * 0.99))],
            "outputs": {name: _summary(array) for name, array in outputs.items()},
        }


async def _repeat(runner: Any, inputs: Arrays, repeat: int) -> tuple[Arrays, list[float]]:
    """Return copies of the last outputs, and the seconds of each run."""
    times_s = []
    outputs: Mapping[str, NDArray[Any]] = {}
    for _ in range(repeat):
        began = time.perf_counter()
        outputs = await runner.compute(inputs)
        times_s.append(time.perf_counter() - began)
    return {name: np.array(array) if isinstance(array, np.ndarray) else array for name, array in outputs.items()}, times_s


def _summary(array: Any) -> dict[str, Any]:
    if not isinstance(array, np.ndarray) or array.dtype == object:
        return _summary_of_values(array)
    numbers = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    numbers = numbers if array.size else np.zeros(1)
    finite = bool(np.isfinite(numbers).all())
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        # JSON has no NaN and no infinity.
        "min": float(numbers.min()) if finite else None,
        "max": float(numbers.max()) if finite else None,
        "mean": float(numbers.mean()) if finite else None,
        "finite": finite,
        "values": (array if array.dtype.kind in "biuf" else numbers).ravel().tolist() if array.size <= _MOST_VALUES and finite else None,
    }


def _summary_of_values(value: Any) -> dict[str, Any]:
    """Summarize an output that is not a tensor of numbers, in the same fields."""
    kind: str = "optional"
    shape: tuple[int, ...] = ()
    if isinstance(value, np.ndarray):
        kind, shape = "string", value.shape
    elif isinstance(value, list | dict):
        kind, shape = "sequence" if isinstance(value, list) else "map", (len(value),)
    numbers = {"min": None, "max": None, "mean": None, "finite": True}
    return {"dtype": kind, "shape": list(shape), **numbers, "values": _json(value) if prod(shape) <= _MOST_VALUES else None}


def _json(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [_json(item) for item in value]
    return {str(key): _json(item) for key, item in value.items()} if isinstance(value, dict) else value


def _print(report: dict[str, Any]) -> None:
    cache = report["cache"][0]
    how = "" if cache["outcome"] == "no_cache" else f", cache {cache['outcome']}{' (' + cache['reason'] + ')' if cache['reason'] else ''}"
    print(f"{escaped(Path(report['model']).name, one_line=True)} on {report['device']}: prepared in {duration(report['prepared_s'])}{how}")
    rows = []
    for name, output in report["outputs"].items():
        found = [output[kind] for kind in ("min", "mean", "max")]
        numbers = ["not finite" if not output["finite"] else "" if number is None else f"{number:.6g}" for number in found]
        rows.append((name, output["dtype"], "x".join(map(str, output["shape"])) or "scalar", *numbers))
    print_table("", ["output", "type", "shape", "min>", "mean>", "max>"], rows)
    if report["runs"] > 1:
        way = "burst" if report["burst"] else "single executions"
        first, p50, p99 = (duration(report[name]) for name in ("first_s", "p50_s", "p99_s"))
        print(f"{report['runs']} runs ({way}): first {first}, p50 {p50}, p99 {p99}")
    else:
        print(f"ran in {duration(report['first_s'])}")


Shape = tuple[int, ...]

_MOST_EXTENT = 2**31 - 1


def parse_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """Read options of the form NAME=1x3x224x224, or NAME=scalar. Returns the shape of each input by its name.

    Raises:
        UsageError: a text has another form, or two of them name the same input.
    """
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, equals, extents = text.rpartition("=")  # from the right, because names of tensors may hold "="
        if not equals or not name:
            raise UsageError(f"--shape {text!r} does not name an input and a shape; give NAME=1x3x224x224")
        if name in shapes:
            raise UsageError(f"--shape names input {name!r} twice; give one shape for each input")
        shapes[name] = () if extents == "scalar" else tuple(_extent(text, part) for part in extents.split("x"))
    return shapes


def _extent(text: str, part: str) -> int:
    extent = int(part) if part.isascii() and part.isdigit() else 0
    if not 1 <= extent <= _MOST_EXTENT:
        raise UsageError(
            f"--shape {text!r}: {part!r} is not an extent; give whole numbers from 1 on with x between, as in NAME=1x3x224x224"
        )
    return extent


def check_shapes(shapes: Mapping[str, Shape], given: Collection[str], model: aionn.Model) -> None:
    """Check shapes against a model.

    Args:
        given: the inputs that a file gives, which have the shape of the file.

    Raises:
        UsageError: the model has no such input, or the input has another shape, or it would not fit into this machine's memory.
    """
    for name, shape in shapes.items():
        operand = model.inputs.get(name)
        if operand is None:
            raise UsageError(f"--shape: the model has no input {name!r}; its inputs are {', '.join(model.inputs)}")
        if name in given:
            raise UsageError(f"input {name!r} has both --input and --shape; a file brings its own shape, so leave out --shape")
        if not operand.in_frames:
            raise UsageError(f"input {name!r} is of type {operand.word}, which has no shape to make up; leave out --shape {name}=...")
        known = operand.dimensions
        if known is not None and (
            len(known) != len(shape) or any(extent not in (0, wanted) for extent, wanted in zip(known, shape, strict=True))
        ):
            wanted_shape = "x".join(str(extent or "?") for extent in known) or "scalar"
            raise UsageError(
                f"input {name!r} has shape {wanted_shape} in the model, and --shape gives {'x'.join(map(str, shape)) or 'scalar'}; "
                "give a number for each ? and the model's own extents elsewhere"
            )
        needed = prod(shape) * 8  # random numbers are made as float64
        if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise UsageError(f"--shape {name}={'x'.join(map(str, shape))} needs {size(needed)}, more than this machine's memory")
