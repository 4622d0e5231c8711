"""`ModelSpec`: which model a replica serves, and how it is compiled. `compile_model` compiles it.

A specification is pickled with a deployment, so it holds values only. The bytes of a model stay in its file, which every node must have.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread

import aionn
from aionn.errors import CallerError

logger = logging.getLogger("aionn.ray")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_GIVEN_ELSEWHERE = {"devices", "stages", "mode", "cache_dir", "required", "name", "model", "on_event"}
_UPGRADABLE = ("source", "digest")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of a deployment, and how its replicas compile it.

    Args:
        source: the path of an ONNX file that each node has, or its contents as bytes. Bytes travel with the deployment, so they suit small
            models only.
        digest: what `aionn.Model.digest` returns for the file, as 64 hexadecimal digits. A replica refuses any other file. So a file that
            is replaced changes nothing until it is deployed. None: any contents.
        devices: as for `aionn.Runtime.compile`.
        stages: devices from quick to best. A replica answers as soon as the first one serves.
        cache_dir: as for `aionn.Runtime.compile`, a folder on each node. Without a cache each replica compiles anew.
        required: whether a replica starts only with this model. If False, the model is compiled while the replica answers.
        warm_up: how often the model runs on made-up inputs before the replica answers.
        options: further options of `aionn.Runtime.compile`, by name.

    Raises:
        CallerError: a value is not as described.

    Examples:
        >>> aionn.ray.ModelSpec("/models/vad.onnx", devices=("onnxruntime",), cache_dir="/var/lib/voice/cache")
    """

    source: str | os.PathLike[str] | bytes
    digest: str | None = None
    devices: Sequence[str] | None = None
    stages: Sequence[str] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    required: bool = True
    warm_up: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | os.PathLike | bytes) or not self.source:
            raise CallerError(f"ModelSpec: source={_shown(self.source)}; give the path of an ONNX file, or its contents as bytes")
        if self.digest is not None and not (isinstance(self.digest, str) and _DIGEST.fullmatch(self.digest)):
            raise CallerError(
                f"ModelSpec: digest={self.digest!r}; give 64 hexadecimal digits, as (await model.digest()).hex() returns them"
            )
        if isinstance(self.warm_up, bool) or not isinstance(self.warm_up, int) or self.warm_up < 0:
            raise CallerError(f"ModelSpec: warm_up={self.warm_up!r}; give a whole number of runs, 0 for none")
        known = {name for name, one in inspect.signature(aionn.Runtime.compile).parameters.items() if one.kind is one.KEYWORD_ONLY}
        if not isinstance(self.options, Mapping) or (unknown := sorted(set(self.options) - (known - _GIVEN_ELSEWHERE))):
            what = f"has {unknown[0]!r}" if isinstance(self.options, Mapping) else "is not a dict"
            raise CallerError(f"ModelSpec: options {what}; give options that Runtime.compile has and that ModelSpec does not name")

    @property
    def compile_options(self) -> dict[str, Any]:
        """The keyword arguments for `aionn.Runtime.compile`."""
        asked: dict[str, Any] = {"devices": self.devices, "cache_dir": self.cache_dir, "required": self.required, **self.options}
        if self.stages is not None:
            asked |= {"mode": "staged", "stages": self.stages}
        return asked


def checked_specs(models: object, least: int = 1) -> dict[str, ModelSpec]:
    """Return the models of a deployment by name. A path becomes a `ModelSpec` of that file.

    Raises:
        CallerError: `models` is not a dict, has fewer than `least` models, or has a value that is not a model.
    """
    if not isinstance(models, Mapping) or len(models) < least:
        raise CallerError(f"models={_shown(models)}; give at least one model by name, as in models={{'vad': ModelSpec('vad.onnx')}}")
    found = {}
    for name, given in models.items():
        if not isinstance(name, str) or not name or not isinstance(given, ModelSpec | str | os.PathLike):
            raise CallerError(f"models: {name!r} is {_shown(given)}; give an aionn.ray.ModelSpec by name")
        found[name] = given if isinstance(given, ModelSpec) else ModelSpec(given)
    return found


def _shown(value: object) -> str:
    """Return a value for a sentence. Contents of a model have megabytes."""
    return type(value).__name__ if isinstance(value, bytes | bytearray | memoryview) and value else repr(value)


def upgraded_specs(user_config: object, specs: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return the specifications that a deployment's `user_config` asks for, by name. They are `specs` with another source and digest.

    Raises:
        CallerError: the config is not of the form `{"models": {"vad": {"source": ..., "digest": ...}}}`, or names a model that this
            deployment does not have.
    """
    models = user_config.get("models", {}) if isinstance(user_config, Mapping) else None
    if not isinstance(models, Mapping):
        raise CallerError(f"user_config={user_config!r}; give {{'models': {{'vad': {{'source': path, 'digest': digits}}}}}}")
    found = {}
    for name, given in models.items():
        if name not in specs:
            raise CallerError(f"user_config: this deployment has no model {name!r}; its models are {', '.join(map(repr, specs))}")
        if not isinstance(given, Mapping) or not given or set(given) - set(_UPGRADABLE) or not isinstance(given.get("source", ""), str):
            raise CallerError(f"user_config: model {name!r} is {given!r}; give its 'source' and 'digest', which are texts")
        # A new file has a new digest, so the digest of the old one is never kept with another source.
        found[name] = dataclasses.replace(specs[name], source=given.get("source", specs[name].source), digest=given.get("digest"))
    return found


async def open_model(name: str, spec: ModelSpec) -> aionn.Model:
    """Open the model of a specification.

    Raises:
        CallerError: there is no such file on this node, or its digest is not that of the specification.
    """
    if isinstance(spec.source, bytes):
        model = await anyio.to_thread.run_sync(aionn.Model.from_onnx, spec.source)
    else:
        model = await aionn.Model.load(spec.source)
    if spec.digest is not None and (found := (await model.digest()).hex()) != spec.digest:
        where = "its bytes" if isinstance(spec.source, bytes) else os.fspath(spec.source)
        raise CallerError(f"model {name!r}: {where} has the digest {found}, but the deployment asks for {spec.digest}")
    return model


async def compile_model(
    runtime: aionn.Runtime, name: str, spec: ModelSpec, *, model: aionn.Model | None = None, **options: Any
) -> tuple[aionn.Compilation, str]:
    """Compile the model of a specification, and warm it up. Nothing stays compiled after an error.

    Args:
        model: what `open_model` has returned for the specification. None: it is opened here.
        options: of `aionn.Runtime.compile`. They replace those of the specification.

    Returns:
        The compilation, and the model's digest as 64 hexadecimal digits.

    Raises:
        CallerError: as `open_model`.
        AionnError: as `aionn.Runtime.compile`.
    """
    model = model or await open_model(name, spec)
    compilation = await runtime.compile(model, name=name, **{**spec.compile_options, **options})
    try:
        if spec.warm_up:
            try:
                await compilation.warm_up(spec.warm_up)
            except CallerError as error:
                logger.warning("model %r is not warmed up, because inputs for it cannot be made up: %s", name, error)
        return compilation, (await model.digest()).hex()  # which reads the file if no cache did
    except BaseException:
        await compilation.aclose()
        raise
