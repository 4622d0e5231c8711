"""Check what `Runtime.compile` is asked for, and turn it into `PrepareOptions`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aionn.errors import CallerError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import CACHE_TOKEN_BYTES, MAX_INSTANCES, MAX_THREADS, ExecutionPreference, Priority
from aionn.tasks import checked_count, deadline_of

_PREFERENCES = {member.name.lower(): member for member in ExecutionPreference}
_PRIORITIES = {member.name.lower(): member for member in Priority}


def options_of(preference: str, priority: str, timeout_s: float | None) -> PrepareOptions:
    if not isinstance(preference, str) or preference not in _PREFERENCES:
        raise CallerError(f"preference {preference!r}: it is one of {sorted(_PREFERENCES)}")
    if not isinstance(priority, str) or priority not in _PRIORITIES:
        raise CallerError(f"priority {priority!r}: it is one of {sorted(_PRIORITIES)}")
    return PrepareOptions(_PREFERENCES[preference], _PRIORITIES[priority], deadline_of(timeout_s))


def with_threads(options: PrepareOptions, threads: int | None, instances: int, most: int) -> PrepareOptions:
    """Return the options with the threads of a run. `most` is the bound of the runtime, or 0.

    Raises:
        CallerError: a number is wrong, or they ask for more threads than `most`.
    """
    instances = checked_count("compile: instances", instances, 1, MAX_INSTANCES)
    chosen = None if threads is None else checked_count("compile: threads", threads, 1, MAX_THREADS)
    wanted = (chosen or 1) * instances
    if most and wanted > most:
        raise CallerError(
            f"compile: threads={chosen} with instances={instances} needs {wanted} engine threads, but this runtime allows {most}; "
            f"ask for fewer, or allow more with Runtime(threads=)"
        )
    if chosen is not None:
        return dataclasses.replace(options, threads=chosen, instances=instances)
    return dataclasses.replace(options, threads=most // instances, at_most=True, instances=instances)


def shown_name(name: str, model: Model) -> str:
    """Return how a compilation is shown: by the name that the app gave, the model's file without its suffix, or the model's token."""
    return name or Path(getattr(model, "name", "")).stem or model.known_token.hex()[:16] or "model"


def check_modes(
    model: Any,
    cache_dir: str | Path | None,
    token: bytes | None,
    mode: str,
    stages: Sequence[str] | None,
    devices: Sequence[str] | None,
) -> None:
    if not isinstance(model, Model):
        raise CallerError(f"compile takes an aionn.Model, not {type(model).__name__}; open one with await aionn.Model.load(path)")
    if mode not in ("eager", "jit", "staged"):
        raise CallerError(f"mode {mode!r}: it is one of 'eager', 'jit', 'staged'")
    if (stages is not None) != (mode == "staged"):
        raise CallerError(f"stages={stages!r} with mode={mode!r}: give stages with mode='staged', and with no other mode")
    if cache_dir is None and token is not None:
        raise CallerError("a token without cache_dir has no use; give both, or neither for no caching")
    if token is not None and not isinstance(token, bytes):
        raise CallerError(f"token of type {type(token).__name__}: a token is {CACHE_TOKEN_BYTES} bytes, as model.token")
    if token is not None and len(token) != CACHE_TOKEN_BYTES:
        raise CallerError(f"token of {len(token)} bytes: a token has {CACHE_TOKEN_BYTES}, as model.token")
    if not isinstance(cache_dir, str | os.PathLike | None):
        raise CallerError(f"cache_dir of type {type(cache_dir).__name__}: give a path, or None for no caching")
    if cache_dir is not None and not os.fspath(cache_dir):
        raise CallerError("cache_dir is an empty path; give a directory, or None for no caching")
    if mode == "staged" and devices is not None:
        raise CallerError(f"devices={devices!r} with mode='staged': the stages name the devices; leave devices out")
