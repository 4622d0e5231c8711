"""What comparisons of stages measured, kept with the cache, and what the present policy makes of that at a later start.

The cache remembers measurements. A verdict is made when one is read: the same measurement lets a stage serve under one policy and not
under another. A measurement answers for one model, one better stage and one stage before it, each in one version of its device, on one
number of threads, and for a week. Where it leaves anything open, the stage is compared again.

Without a verdict a stored stage does not serve from the start: the app that stored it may have ended before it had compared anything.
The stage is then loaded, compared and swapped in behind the stream like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from blake3 import blake3

from aionn.caching import OutputDifference, StageMeasurement
from aionn.engines.processor import usable_cpus
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.runtime.preparing.cached import CacheChoice
from aionn.runtime.staging.comparing import TOLERANCES, Comparison, Tolerance, not_faster
from aionn.runtime.staging.stage import StagePolicy

APPROVED = "it may serve"
_ROUNDING = 1e-9
"""The gain of a pair that has just won is computed in another order of operations than the pair was judged by."""


def scope(cache: CacheChoice, model: Model, options: PrepareOptions, stage: str) -> bytes:
    """The name under which the cache keeps measurements of one stage: app's token, model, options, device."""
    content = b"".join((cache.token, model.token, bytes((options.preference.value, options.priority.value)), stage.encode()))
    return blake3(content, derive_key_context="aionn 1 measurements of a stage").digest()


def threads_of(options: PrepareOptions) -> int:
    """The threads that an engine has for a run: as asked for, or as many as this process may use CPUs."""
    return options.threads or usable_cpus()


def measurement(
    model: Model, stage: str, version: str, base: str, base_version: str, threads: int, comparison: Comparison
) -> StageMeasurement:
    """A comparison as the cache keeps it."""
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


def verdict(found: StageMeasurement, model: Model, policy: StagePolicy) -> str | None:
    """`APPROVED`, or why the stage must not serve; None if the measurement does not answer that under this policy.

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
    """The verdict on one output."""
    output = found.outputs.get(name)
    if output is None:
        return None  # another output differed before this one was looked at
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
    """Whether nothing has changed that the measurement depends on; the cache itself forgets those that are too old."""
    return (found.version, found.base_version, found.threads) == (version, base_version, threads)


def judged(found: list[StageMeasurement], model: Model, policy: StagePolicy) -> str | None:
    """The verdict of several measurements of one stage: a refusal outweighs an approval, and what leaves it open says nothing."""
    verdicts = [answer for one in found if (answer := verdict(one, model, policy)) is not None]
    return next((answer for answer in verdicts if answer != APPROVED), verdicts[0] if verdicts else None)
