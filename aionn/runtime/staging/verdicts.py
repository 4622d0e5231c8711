"""What comparisons of stages measured, kept with the cache, and what the present policy makes of that at a later start.

The cache remembers measurements. A verdict is made when a measurement is read, because the same measurement lets a stage serve under one
policy and not under another. A measurement answers for one model, for one better stage and for one stage before it. Both stages are in one
version of their devices, with one number of threads. It is valid for a week. Where it leaves anything open, the stage is compared again.

A stored stage without a verdict does not serve from the start, because the app that stored it may have ended before the comparison.
The stage is then loaded, compared and swapped in behind the stream like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import anyio
from blake3 import blake3

from aionn.caching import OutputDifference, StageMeasurement
from aionn.engines.processor import run_threads
from aionn.errors import DeadlineError
from aionn.hal.model import PooledModel
from aionn.runtime.preparing.compile_acts import CompileRequest
from aionn.runtime.serving.serving import Serving
from aionn.runtime.staging.comparing import TOLERANCES, Comparison, Tolerance, not_faster
from aionn.runtime.staging.measuring import Target
from aionn.runtime.staging.stage import StagePolicy

APPROVED = "it may serve"
_ROUNDING = 1e-9
"""The gain of a pair is computed in another order of operations than the verdict on the pair, so a pair may win by a rounding error."""


class Verdicts:
    """What the cache knows of the stages of one compilation. Without a cache, nothing is known and nothing is kept."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._request = target.request
        self._threads = run_threads(target.request.options)

    async def known(self, stage: str, policy: StagePolicy) -> str | None:
        """Return the verdict of earlier starts on a stage, beside the stage that serves. Returns None if there is no verdict.

        Raises:
            DeadlineError: the stage's device did not start within `policy.timeout_s`, or the cache is slow.
        """
        target, base, cache = self._target, self._target.compiled.serving, self._request.cache
        if cache is None or base is None:
            return None
        with anyio.move_on_after(policy.timeout_s):
            found = await cache.store.remembered.measurements(scope(self._request, stage))
            if not found:
                return None
            version, base_version = (await target.devices.get(stage, self._request.options.priority)).version, base.prepared.device.version
            valid = [one for one in found if one.base == base.stage and holds(one, version, base_version, self._threads)]
            return judged(valid, self._request.model, policy)
        raise DeadlineError(
            f"device {stage!r} did not make the stage within {policy.timeout_s} s: its driver does not start, or its cache is slow"
        )

    async def remember(self, comparison: Comparison, better: Serving, base: Serving) -> None:
        """Keep a comparison of two stages with the cache."""
        if (cache := self._request.cache) is not None:
            versions = better.stage, better.prepared.device.version, base.stage, base.prepared.device.version
            found = measurement(self._request.model, *versions, self._threads, comparison)
            await cache.store.remembered.remember(scope(self._request, better.stage), found)

    def remember_failure(self, bad: Serving, base: Serving, reason: str) -> None:
        """Keep with the cache, in the background, that a stage has failed while it served, so that `base` serves again."""
        if (cache := self._request.cache) is not None:
            found = StageMeasurement(
                model_digest=self._request.model.token,
                stage=bad.stage,
                version=bad.prepared.device.version,
                base=base.stage,
                base_version=base.prepared.device.version,
                threads=self._threads,
                detail=reason,
                failed=True,
                measured_s=time.time(),
            )
            cache.store.remembered.remember_later(scope(self._request, bad.stage), found)


def scope(request: CompileRequest, stage: str) -> bytes:
    """Return the name under which the cache keeps measurements of one stage. It is made of app's token, model, options and device."""
    model, options, cache = request.model, request.options, request.cache
    assert cache is not None  # without one nothing is kept
    lanes = options.instances.to_bytes(2, "big") if options.instances > 1 else b""
    # Those of the stage before count as well, because a stage is compared with it.
    asked = repr(options.encoded).encode() if options.options else b""
    content = b"".join((cache.token, model.token, bytes((options.preference.value, options.priority.value)), lanes, asked, stage.encode()))
    return blake3(content, derive_key_context="aionn 1 measurements of a stage").digest()


def measurement(
    model: PooledModel, stage: str, version: str, base: str, base_version: str, threads: int, comparison: Comparison
) -> StageMeasurement:
    """Return a comparison as the cache keeps it."""
    outputs = {}
    for name, operand in model.outputs.items():
        tolerance = comparison.tolerances[name]
        if name in comparison.worst or name == comparison.differs:
            outputs[name] = OutputDifference(
                operand.type.value, tolerance.absolute, tolerance.relative, comparison.worst.get(name), name != comparison.differs
            )
    return StageMeasurement(
        model_digest=model.token,
        stage=stage,
        version=version,
        base=base,
        base_version=base_version,
        threads=threads,
        made_up=comparison.made_up,
        outputs=outputs,
        gain=comparison.gain,
        before_s=comparison.before_s,
        after_s=comparison.after_s,
        detail=comparison.refused,
        measured_s=time.time(),
    )


def verdict(found: StageMeasurement, model: PooledModel, policy: StagePolicy) -> str | None:
    """Return `APPROVED`, or why the stage must not serve. Returns None if the measurement leaves that open under this policy.

    The caller has checked versions and threads (`holds`).
    """
    if found.failed:
        return found.detail
    if found.made_up:
        return None
    allowed = {**TOLERANCES, **policy.tolerances}
    answers = [_within(found, name, allowed) for name in model.outputs]
    if refusals := [answer for answer in answers if answer not in (None, APPROVED)]:
        return refusals[0]
    if None in answers:
        return None
    if policy.min_gain is None:
        return APPROVED
    if found.gain is None:
        return None
    return APPROVED if found.gain + _ROUNDING >= policy.min_gain else not_faster(policy.min_gain, found.before_s, found.after_s)


def _within(found: StageMeasurement, name: str, allowed: Mapping[str, Tolerance]) -> str | None:
    """Return the verdict on one output."""
    output = found.outputs.get(name)
    if output is None:
        return None  # another output differed before this one was compared
    now = allowed.get(output.type, Tolerance())
    if not output.within:
        return found.detail if now.absolute <= output.absolute and now.relative <= output.relative else None
    if now.absolute >= output.absolute and now.relative >= output.relative:
        return APPROVED
    if output.largest is None:
        return None
    if output.largest <= now.absolute:
        return APPROVED
    return None if now.relative else f"output {name!r}: elements are off by up to {output.largest:.3g}, allowed are {now.absolute:g}"


def holds(found: StageMeasurement, version: str, base_version: str | None, threads: int) -> bool:
    """Return whether the versions and the threads are those of the measurement. The cache itself forgets old measurements."""
    return (found.version, found.base_version, found.threads) == (version, base_version, threads)


def judged(found: list[StageMeasurement], model: PooledModel, policy: StagePolicy) -> str | None:
    """Return the verdict of several measurements of one stage. A refusal outweighs an approval. Returns None if all leave it open."""
    verdicts = [answer for one in found if (answer := verdict(one, model, policy)) is not None]
    return next((answer for answer in verdicts if answer != APPROVED), verdicts[0] if verdicts else None)
