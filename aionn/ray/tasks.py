"""The Ray task that compiles one model: fetch the model, compile it in a driver process, sign the artifact, push it to the store.

A task runs on a node that has the device (`resources`), in a Ray worker process. It opens a runtime, whose driver compiles the model. The
cache and the driver's records live as long as the task. A crash of the engine ends the driver only, and the task returns the reason.

The private key is a file of the node, which the environment variable `AIONN_FARM_KEY` names. The key never travels through Ray.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aionn
from aionn.caching.outcomes import CacheOutcome, MissReason, Refusal
from aionn.caching.private_folder import free_folder, hold
from aionn.errors import AionnError, CallerError, text_of
from aionn.events import CompileStep, Event
from aionn.fleet.artifact_store import ArtifactStore, trusted_files
from aionn.fleet.keys import BuilderKey
from aionn.fleet.models import DAMAGED, fetch_model
from aionn.fleet.places import StatementPlace, file_path, fingerprint
from aionn.fleet.pulling import push_cache
from aionn.fleet.requests import open_address
from aionn.hal.trust import Keyring
from aionn.hal.types import Priority
from aionn.ray.needed import needed_ray
from aionn.ray.orders import Order, OrderResult, decode_order, encode
from aionn.runtime.runtime import opened_of

KEY_VARIABLE = "AIONN_FARM_KEY"
_PATIENCE_S = 30.0  # as `aionn fleet push`: a task may wait longer for a store than the start of an app
_ACTOR_ANSWER_S = 10.0  # for the announcement of an attempt
_REPORT_EVERY_S = 1.0  # at most one message a second
_FOLDER = "aionn-farm-"
_LOST = (MissReason.ABSENT, *DAMAGED)  # of the store's model, and not of this node's disk

Report = Callable[[str], None]


def compile_order(encoded: bytes, flights: Any) -> bytes:
    """Compile an encoded order, as a Ray task. Returns an encoded `OrderResult`, also if the model cannot be compiled.

    Ray repeats a task only if its worker process has died. Any other failure would come again, so it is the result.

    Args:
        flights: the handle of the actor that follows the task.
    """
    order = decode_order(encoded)
    step = "key"
    try:
        key = _builder_key()
        step = "compile"
        return encode(aionn.run(_compiled, order, key, _reporter(order, flights)))
    except (AionnError, OSError) as error:
        return encode(OrderResult(refusal=text_of(error), kind=f"{step}: {type(error).__name__}"))


def _builder_key() -> BuilderKey:
    path = os.environ.get(KEY_VARIABLE)
    if not path:
        raise CallerError(f"this node has no builder's key: {KEY_VARIABLE} is not set; start Ray with {KEY_VARIABLE}=/path/of/builder.key")
    return BuilderKey.load(path)


def _reporter(order: Order, flights: Any) -> Report:
    """Announce this attempt to the actor. Return a function that sends it a text, at most once a second. A lost text costs nothing."""
    ray, last = needed_ray(), [0.0]
    with suppress(Exception):  # the actor is gone: what is compiled is stored all the same
        ray.get(flights.started.remote(order.flight), timeout=_ACTOR_ANSWER_S)

    def report(text: str) -> None:
        now = time.monotonic()
        if now - last[0] >= _REPORT_EVERY_S:
            last[0] = now
            with suppress(Exception):
                flights.report.remote(order.flight, text)

    return report


async def _compiled(order: Order, key: BuilderKey, report: Report) -> OrderResult:
    """Compile an order, sign the artifact and store it. `report` shows the app what is done."""
    store = ArtifactStore(open_address(order.store, patience_s=_PATIENCE_S))
    if await _is_stored(store, order, key):
        return OrderResult(key.public.id)
    with _work_folder() as folder:
        report("fetching the model")
        model = await fetch_model(store, order.model_digest, order.memory_bytes, folder)
        if isinstance(model, Refusal):
            return OrderResult(refusal=str(model), kind=f"model: {model.reason.value}", model_lost=model.reason in _LOST)
        if (refused := await _compile(order, model, folder, report)) is not None:
            return refused
        report("storing the artifact")
        (pushed,) = await push_cache(folder / "cache", store, key, state_dir=folder / "state")
        if pushed.refusal is not None:
            return OrderResult(refusal=f"the artifact was not signed: {pushed.refusal}", kind=f"signature: {pushed.refusal.reason.value}")
    return OrderResult(key.public.id)


async def _is_stored(store: ArtifactStore, order: Order, key: BuilderKey) -> bool:
    """Return whether the store has the whole artifact of this builder: an attempt before has stored it, or a task for another app."""
    place = StatementPlace(order.key, fingerprint(order.device, order.device_version), key.public.id)
    signed = await store.statement(place)
    files = None if signed is None else trusted_files(Keyring((key.public,)))(place, signed)
    if files is None or isinstance(files, Refusal):
        return False
    for file in files:
        found = await store.requests.find(file_path(file.digest))
        if found is None or found.size_bytes != file.length:
            return False
    return True


async def _compile(order: Order, model: aionn.Model, folder: Path, report: Report) -> OrderResult | None:
    """Compile a model into the folder `cache` below `folder`. Return a refusal if that failed, or None."""

    def on_event(event: Event) -> None:
        if isinstance(event, CompileStep):
            report(event.step)

    preference: Any = order.preference  # `compile` checks both
    priority: Any = order.priority
    most = order.threads * max(1, order.instances) if order.at_most and order.threads else None
    async with aionn.Runtime(state_dir=folder / "state", threads=most, start=(), name="aionn farm") as runtime:
        opened = opened_of(runtime)
        assert opened is not None
        remote = await opened.devices.get(order.device, Priority[order.priority.upper()])
        if remote.version != order.device_version:
            why = (
                f"the node of the farm has device {order.device!r} in version {remote.version!r}, but {order.device_version!r} is asked "
                "for; announce the node's resources anew"
            )
            return OrderResult(refusal=why, kind="compile: other device version")
        compilation = await runtime.compile(
            model,
            devices=(order.device,),
            preference=preference,
            priority=priority,
            threads=order.threads if order.threads and not order.at_most else None,
            instances=order.instances or None,
            cache_dir=folder / "cache",
            token=order.token,
            options={order.device: order.options} if order.options else None,
            on_event=on_event,
        )
        return _fault(order, compilation.outcomes)


def _fault(order: Order, outcomes: tuple[CacheOutcome, ...]) -> OrderResult | None:
    """Return a refusal if what was compiled is not the order's artifact, or None."""
    if len(outcomes) != 1:
        return OrderResult(refusal="the model does not run whole on the device", kind="compile: not whole")
    (outcome,) = outcomes
    if outcome.save_failure is not None:
        return OrderResult(refusal=f"the node of the farm could not keep the artifact: {outcome.save_failure}", kind="compile: not kept")
    if outcome.key != order.key:
        why = f"the node of the farm has compiled entry {outcome.key.hex()[:16]}, but {order.key.hex()[:16]} was asked for"
        return OrderResult(refusal=why, kind="compile: other key")
    return None


# --- the folder of a task ----------------------------------------------------------------------------------------------


@contextmanager
def _work_folder() -> Iterator[Path]:
    """Make a folder for the body, and remove the folders of killed tasks of this account. A task holds its folder while it lives."""
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_FOLDER}*"):
        with free_folder(left) as fd:
            if fd >= 0:
                shutil.rmtree(left, ignore_errors=True)
    folder = place / f"{_FOLDER}{os.urandom(8).hex()}"
    held = hold(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
