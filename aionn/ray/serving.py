"""`deployment`: a ready Ray Serve deployment for models. `serve_options`: options of Serve that suit replicas with an `aionn.Runtime`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aionn.errors import CallerError
from aionn.loopless import checked_count
from aionn.ray.holder import GRACEFUL_SHUTDOWN_S, Holder
from aionn.ray.models import checked_specs
from aionn.ray.multiplexed import ModelsById, MultiplexedHolder, checked_ids
from aionn.ray.needed import needed_ray

_PERIOD_S, _TIMEOUT_S = 0.5, 5.0
_BUSY_SHARE = 0.7


def serve_options(
    *, max_ongoing_requests: int = 16, max_queued_requests: int | None = None, autoscaling: Mapping[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """Return options for `serve.deployment`: health checks every 0.5 s that end after 5 s, and bounded queues.

    Serve notices by a health check that a replica has died. Its own defaults notice this after 10 s, find a hung driver only after 30 to
    90 s, and queue without bound.

    Args:
        max_ongoing_requests: how many calls a replica works on at once. A burst computes eight of them, and the others wait in order.
        max_queued_requests: how many further calls each handle or proxy keeps waiting. None: four times `max_ongoing_requests`. Calls
            beyond that are refused with `ray.serve.exceptions.BackPressureError`.
        autoscaling: Serve's `autoscaling_config`. `target_ongoing_requests` is 0.7 of `max_ongoing_requests`, unless it is given. None: the
            number of replicas is fixed.
        others: further options of `serve.deployment`. They replace those that this function chooses.

    Raises:
        CallerError: a number is wrong, or `target_ongoing_requests` is not below `max_ongoing_requests`, so that Serve would never add a
            replica.
    """
    most = checked_count("serve_options: max_ongoing_requests", max_ongoing_requests, 1)
    queued = 4 * most if max_queued_requests is None else checked_count("serve_options: max_queued_requests", max_queued_requests, 0)
    options: dict[str, Any] = {
        "max_ongoing_requests": most,
        "max_queued_requests": queued,
        "health_check_period_s": _PERIOD_S,
        "health_check_timeout_s": _TIMEOUT_S,
        "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_S,
    }
    if autoscaling is not None:
        scaling = {"target_ongoing_requests": _BUSY_SHARE * most, **autoscaling}
        target = scaling["target_ongoing_requests"]
        if not 0 < target < most or not math.isfinite(target):
            raise CallerError(
                f"serve_options: target_ongoing_requests={target!r}; give a number below max_ongoing_requests={most}, "
                "or Serve never adds a replica"
            )
        options["autoscaling_config"] = scaling
    return {**options, **others}


def deployment(
    models: Mapping[str, Any] | None = None,
    *,
    multiplexed: ModelsById | None = None,
    holder: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a Serve deployment whose replicas serve models by `Holder.infer` and `Holder.stream`.

    Args:
        models: by name, an `aionn.ray.ModelSpec` or the path of an ONNX file. Each replica serves all of them.
        multiplexed: models of which each replica keeps a few compiled, as for `aionn.ray.MultiplexedHolder`, which is the class of the
            replicas then. `models` may be left out.
        holder: further arguments of `aionn.ray.Holder` or `aionn.ray.MultiplexedHolder`, by name, such as `max_models`.
        options: arguments of `serve_options`, which takes those of `serve.deployment`, too, such as `name` and `num_replicas`.

    Returns:
        The deployment, for `serve.run(deployment.bind())`.

    Raises:
        ImportError: Ray is not installed.
        CallerError: the models or the options are wrong.

    Examples:
        >>> voice = aionn.ray.deployment({"vad": aionn.ray.ModelSpec("/models/vad.onnx")}, num_replicas=2)
        >>> handle = serve.run(voice.bind())
        >>> outputs = await handle.infer.remote({"x": x})
    """
    needed_ray()
    from ray import serve

    arguments = dict(holder or {})
    made = _models_class(models, arguments) if multiplexed is None else _multiplexed_class(models, multiplexed, arguments)
    return serve.deployment(**{"name": "Models", **serve_options(**options)})(made)


def _models_class(models: object, arguments: dict[str, Any]) -> type[Holder]:
    specs = checked_specs(models)

    class HolderOfModels(Holder):
        async def __init__(self) -> None:  # type: ignore[misc]  # as in `Holder`
            await super().__init__(specs, **arguments)

    return HolderOfModels


def _multiplexed_class(models: object, multiplexed: ModelsById, arguments: dict[str, Any]) -> type[Holder]:
    specs, ids = {} if models is None else checked_specs(models, 0), checked_ids(multiplexed)

    class HolderById(MultiplexedHolder):
        async def __init__(self) -> None:  # type: ignore[misc]  # as in `Holder`
            await super().__init__(ids, models=specs, **arguments)

    return HolderById
