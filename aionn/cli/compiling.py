"""`aionn compile`: compile a model into a cache for each device asked for, and show the progress on stderr.

With stages, the model is first compiled for each stage, so each is stored whatever the comparison finds. Then a staged compilation
loads the stages and compares them on made-up inputs. The cache keeps what it measures for people to read. An app compares on its own
inputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import aionn
from aionn import trace
from aionn.caching.outcomes import CacheOutcome, Refusal
from aionn.caching.store import CacheStore
from aionn.cli.printing import NotDoneError, digest, duration, error_console, print_json, print_table, size

__all__ = ["CompileOptions", "compile_model", "describe", "progress"]

# A call to a device shows which step begins.
_CALLS = {
    "GetSupportedOperations": "asking what the device can run",
    "PrepareModel": "compiling",
    "PrepareModelFromCache": "loading from the cache",
}
_SPANS = {"driver.start": "preparing", "cache.lookup": "looked up in the cache (if another process is compiling it, this one waits)"}


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show on stderr what is being done: one moving line at a terminal, one line per step elsewhere."""
    console = error_console()
    if not console.is_terminal or console.is_dumb_terminal:
        last = [""]

        def print_step(event: trace.Span | trace.Counter) -> None:
            step = _step(event)
            if step is not None and step != last[0]:
                last[0] = step
                console.print(f"{what}: {step}", markup=False, soft_wrap=True)

        with trace.listen(print_step):
            yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{what}: starting the driver")

        def show(event: trace.Span | trace.Counter) -> None:
            step = _step(event)
            if step is not None:
                bar.update(task, description=f"{what}: {step}")

        with trace.listen(show):
            yield


def _step(event: trace.Span | trace.Counter) -> str | None:
    if isinstance(event, trace.Counter):
        if event.name == "stage.entered":
            return f"stage {event.attributes['stage']!r} is {event.attributes['state']}"
        return _CALLS.get(event.attributes["call"]) if event.name == "control.call" else None
    if event.name == "prepare" and "error" not in event.attributes:
        return "compiled"
    return _SPANS.get(event.name)


def describe(outcome: CacheOutcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    return {
        "outcome": outcome.kind.value,
        "reason": outcome.reason.value if outcome.reason is not None else None,
        "detail": outcome.detail,
        "differs": list(outcome.differs),
        "key": outcome.key.hex(),
        "waited_s": outcome.waited_s,
        "saved_s": outcome.saved_s,
        "save_failure": str(outcome.save_failure) if outcome.save_failure is not None else None,
    }


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How `aionn compile` compiles a model. The command line describes each option.

    Attributes:
        devices: None means the best device that can run the model.
        staged: compare the devices as stages, from quick to best, and print which one is to serve.
        of_engine: the options that `Runtime.compile` takes as they are.
    """

    cache_dir: str
    devices: Sequence[str] | None
    staged: bool
    state_dir: str | None
    of_engine: Mapping[str, Any]


def compile_model(path: str, options: CompileOptions, *, as_json: bool) -> None:
    """Compile, and print what was stored.

    Raises:
        NotDoneError: nothing is stored for one of the devices.
    """
    cache_dir, staged = options.cache_dir, options.staged
    done = aionn.run(_compile, path, options)
    if as_json:
        print_json({"model": path, "cache_dir": cache_dir, "compilations": done})
    else:
        print_table(
            "",
            ["device", "outcome", "reason", "took>", "stored>", "a hit saves>", "entry", *(["stage"] if staged else [])],
            [
                (
                    one["device"],
                    one["outcome"],
                    (one["reason"] or "") + _differing(one["differs"]),
                    duration(one["took_s"]),
                    size(one["stored_bytes"]),
                    duration(one["compile_s"]),
                    one["key"][:16],
                    *([": ".join(filter(None, (one["stage"]["state"], one["stage"]["reason"])))] if staged else []),
                )
                for one in done
            ],
        )
    for one in done:
        if not one["stored"]:
            why = one["save_failure"] or one["detail"] or "the device does not cache this model"
            raise NotDoneError(f"nothing is stored for device {one['device']!r}: {why}")


def _differing(parts: Sequence[str]) -> str:
    # An entry of another device could never have been a hit for this one.
    return "" if "device" in parts else "".join(f", other {part}" for part in parts)


async def _compile(path: str, options: CompileOptions) -> list[dict[str, Any]]:
    cache_dir, devices = options.cache_dir, options.devices
    model = await aionn.Model.load(path)
    done = []
    names: Sequence[str | None] = devices or [None]
    async with aionn.Runtime(state_dir=options.state_dir, start=() if devices else None) as runtime:
        for name in names:
            began = time.monotonic()
            with progress(f"{Path(path).name} for {name or 'the best device'}"):
                compilation = await runtime.compile(
                    model, devices=None if name is None else (name,), cache_dir=cache_dir, **options.of_engine
                )
            took_s = time.monotonic() - began
            for outcome in compilation.outcomes:  # of a model that was cut, one for each step
                done.append({"device": outcome.device, "took_s": took_s, **describe(outcome), **await _stored(cache_dir, outcome)})
            await compilation.aclose()
        if options.staged and devices:
            for one, stage in zip(done, await _stages(runtime, model, path, options, devices), strict=True):
                one["stage"] = stage
    return done


async def _stages(
    runtime: aionn.Runtime, model: aionn.Model, path: str, options: CompileOptions, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the outcome of each stage as JSON values."""
    with progress(f"{Path(path).name} in stages"):
        compilation = await runtime.compile(model, mode="staged", stages=names, cache_dir=options.cache_dir, **options.of_engine)
        for name in names:
            with suppress(aionn.StageRejected):  # the table shows its reason
                await compilation.wait_for_stage(name)
    states = []
    for stage in compilation.stages:
        found = stage.comparison
        compared = None if found is None else {"before_s": found.before_s, "after_s": found.after_s, "worst": dict(found.worst)}
        states.append({"state": stage.state, "reason": stage.reason, "times_s": stage.times_s, "comparison": compared})
    await compilation.aclose()
    return states


async def _stored(cache_dir: str, outcome: CacheOutcome) -> dict[str, Any]:
    """Return what the cache holds under the outcome's key now, as JSON values."""
    nothing = {"stored": False, "stored_bytes": 0, "compile_s": 0.0, "model_digest": "", "generation": 0}
    if not outcome.key:
        return nothing
    async with CacheStore(cache_dir) as store:
        entries = await store.entries()
    if isinstance(entries, Refusal):
        return nothing
    for entry in entries:
        if entry.key == outcome.key and not entry.declined:
            return {
                "stored": outcome.save_failure is None,
                "stored_bytes": entry.size_bytes,
                "compile_s": entry.saves_s,
                "model_digest": digest(entry.model_digest),
                "generation": entry.generation,
            }
    return nothing
