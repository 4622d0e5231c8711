"""`aionn compile`: compile a model into a cache for each device asked for, and show the progress on stderr.

With stages, the model is first compiled for each stage, so each is stored whatever the comparison finds. Then a staged compilation
loads the stages and compares them on made-up inputs. The cache keeps what it measures for people to read. An app compares on its own
inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import aionn
from aionn.caching.outcomes import CacheOutcome, Refusal
from aionn.caching.store import CacheStore
from aionn.cli.printing import NotDoneError, digest, duration, error_console, print_json, print_table, size
from aionn.escapes import escaped
from aionn.events import CompileDone, CompileStep, CompileWaiting, Event, StageChanged

_WORTH_SAYING_S = 0.1
"""A step is shown with what it took the last time if that was so long."""


@contextmanager
def progress(what: str) -> Iterator[Callable[[Event], None]]:
    """Show on stderr what is being done: one moving line at a terminal, one line per step elsewhere.

    Yields what takes the events of a compilation: `compile(on_event=)`.
    """
    console, what = error_console(), escaped(what, one_line=True)
    if not console.is_terminal or console.is_dumb_terminal:
        last = [""]

        def print_step(event: Event) -> None:
            step = _step(event)
            if step is not None and step != last[0]:
                last[0] = step
                console.print(f"{what}: {step}", markup=False, soft_wrap=True)

        yield print_step
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what)

        def show(event: Event) -> None:
            step = _step(event)
            if step is not None:
                bar.reset(task, description=f"{what}: {step}")  # the seconds are those of the step

        yield show


def _step(event: Event) -> str | None:
    match event:
        case CompileStep(step=step, expected_s=expected_s):
            return step if expected_s is None or expected_s < _WORTH_SAYING_S else f"{step} ({duration(expected_s)} last time)"
        case CompileWaiting():
            return "waiting for another process that compiles the same"
        case StageChanged(stage=stage, state=state) if state != "waiting":
            return f"stage {stage!r} is {state}"
        case CompileDone(outcome=outcome, seconds=seconds):
            done = {"hit": "loaded", "failed": "failed"}.get(outcome, "compiled")
            return f"{done} in {duration(seconds)}"
    return None


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
class CompileArguments:
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


def compile_model(path: str, options: CompileArguments, *, as_json: bool) -> None:
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
                    one["key"][:16] if one["stored"] else "",
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


async def _compile(path: str, options: CompileArguments) -> list[dict[str, Any]]:
    cache_dir, devices = options.cache_dir, options.devices
    model = await aionn.Model.load(path)
    done = []
    names: Sequence[str | None] = devices or [None]
    async with aionn.Runtime(state_dir=options.state_dir, start=() if devices else None) as runtime:
        for name in names:
            began = time.monotonic()
            with progress(f"{Path(path).name} for {name or 'the best device'}") as show:
                chosen = None if name is None else (name,)
                compilation = await runtime.compile(model, devices=chosen, cache_dir=cache_dir, on_event=show, **options.of_engine)
            took_s = time.monotonic() - began
            for outcome in compilation.outcomes:  # of a model that was cut, one for each step
                done.append({"device": outcome.device, "took_s": took_s, **describe(outcome), **await _stored(cache_dir, outcome)})
            await compilation.aclose()
        if options.staged and devices:
            for one, stage in zip(done, await _stages(runtime, model, path, options, devices), strict=True):
                one["stage"] = stage
    return done


async def _stages(
    runtime: aionn.Runtime, model: aionn.Model, path: str, options: CompileArguments, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the outcome of each stage as JSON values."""
    with progress(f"{Path(path).name} in stages") as show:
        of_engine = options.of_engine
        compilation = await runtime.compile(model, mode="staged", stages=names, cache_dir=options.cache_dir, on_event=show, **of_engine)
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
