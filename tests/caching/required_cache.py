"""Caches that cannot be used, asked for in every mode. Run as `python -m tests.caching.required_cache FAULT DIRECTORY`.

A process of its own, because some faults need a mount. It prints one line per mode, for an app that requires the cache and for one that
does not. The line says where the app heard of the fault, and the sentence. The place is "compile", "compute", "stage" or "health", or
"served" if there is no fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aionn
from aionn.testing import identity_model
from tests.caching.unprivileged import NotPossibleError, mount_read_only
from tests.caching.unusable_state import _fill, _give_away, _mount_small
from tests.runtime.operator_engines import AddEngine, MulEngine, drivers, three_step_model

DEVICE = "onnxruntime"


def none(cache: Path) -> None:
    """Nothing is wrong."""


def file(cache: Path) -> None:
    cache.write_bytes(b"")


def symlink(cache: Path) -> None:
    (cache.parent / "elsewhere").mkdir()
    cache.symlink_to(cache.parent / "elsewhere")


def loose(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)


def of_another_user(cache: Path) -> None:
    cache.mkdir()
    _give_away(cache)


def nowhere(cache: Path) -> None:
    cache.symlink_to("/proc/no such folder/cache")


def read_only(cache: Path) -> None:
    cache.mkdir()
    mount_read_only(cache)


def read_only_without_entries(cache: Path) -> None:
    (cache / "entries").mkdir(parents=True)
    mount_read_only(cache)


def read_only_with_another_model(cache: Path) -> None:
    _store(cache, 8)
    mount_read_only(cache)


def read_only_with_the_model(cache: Path) -> None:
    _store(cache, 16)
    mount_read_only(cache)


def full(cache: Path) -> None:
    _mount_small(cache)
    cache.chmod(0o700)
    _fill(cache)


def full_with_another_model(cache: Path) -> None:
    _mount_small(cache)
    cache.chmod(0o700)
    _store(cache, 8)
    _fill(cache)


def records_of_another_user(cache: Path) -> None:
    """The cache is sound. The driver can keep no digests of what it stores there, and would refuse it at each start."""
    state = cache.parent / "state"
    state.mkdir()
    _give_away(state)


FAULTS: dict[str, Callable[[Path], None]] = {
    fault.__name__: fault
    for fault in (
        *(none, file, symlink, loose, of_another_user, nowhere, read_only, read_only_without_entries, read_only_with_another_model),
        *(read_only_with_the_model, full, full_with_another_model, records_of_another_user),
    )
}
MODES = ("eager", "jit", "staged", "plan")


def _model(features: int) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (1, features)}, outputs=["y"]))


def _store(cache: Path, features: int) -> None:
    async def store() -> None:
        async with aionn.Runtime(state_dir=cache.parent / "state", start=()) as runtime:
            compilation = await runtime.compile(_model(features), devices=(DEVICE,), cache_dir=cache)
            assert compilation.outcomes[0].save_failure is None, compilation.outcomes

    aionn.run(store)


async def heard(cache: Path, mode: str, required: bool, devices: tuple[str, ...]) -> str:
    """Use the cache as an app does. Return where the app hears of the fault, and the sentence."""
    model = aionn.Model.from_onnx(three_step_model()) if mode == "plan" else _model(16)
    options: dict[str, Any] = {"devices": devices if mode == "plan" else (DEVICE,)}
    if mode == "jit":
        options["mode"] = "jit"
    if mode == "staged":
        options = {"mode": "staged", "stages": ("reference", DEVICE), "stage_policy": aionn.StagePolicy(min_gain=None)}
    x = {"x": np.ones((1, 64 if mode == "plan" else 16), np.float32)}
    async with aionn.Runtime(state_dir=cache.parent / "state", start=()) as runtime:
        try:
            compilation = await runtime.compile(model, cache_dir=cache, cache_required=required, name="door", **options)
        except aionn.CallerError as error:
            return f"compile: {error}"
        try:
            await compilation.compute(x)
        except aionn.CallerError as error:
            return f"compute: {error}"
        if mode == "plan":
            assert len(compilation.plan) == 3
        if mode == "staged":
            try:
                await compilation.wait_for_stage(DEVICE, timeout_s=60)
            except aionn.StageRejected as error:
                return f"stage: {error}"
        await compilation.compute(x)
        health = runtime.health()
        return f"health: {'; '.join(health.reasons)}" if health.state == "degraded" else f"served: {health}"


def main(fault: str, directory: str) -> None:
    cache = Path(directory, "home", "cache")
    cache.parent.mkdir()
    FAULTS[fault](cache)
    with drivers(AddEngine, MulEngine) as fakes:
        for mode in MODES:
            for required in (False, True):
                print(mode, "required" if required else "wanted", aionn.run(heard, cache, mode, required, tuple(one.name for one in fakes)))
                if fault == "none":
                    break  # the cache holds the model then


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NotPossibleError as error:
        print(error, file=sys.stderr)
        sys.exit(77)
