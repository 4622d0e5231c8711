"""A compile farm on Ray as the backend of a runtime: what no store has yet is compiled by a node of the cluster that has the same device.

    in the store already          fetched from there; Ray is not asked
    no node has the device        an answer within seconds: Ray itself would wait for such a node without a word
    compiled now, or just begun   one task for all apps that want it (`flights`)

The model goes to the nodes through the artifact store, by its digest. So does the artifact, with the signature of the node's key. The app's
driver checks that signature as it does for any artifact of another machine. The farm itself is not believed.

Each wait has a deadline. Calls of Ray that block run in threads which this process may leave behind at its end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import anyio

from aionn.caching.offers import CompileRequest, Offered
from aionn.caching.outcomes import Refusal
from aionn.caching.statement import Statement
from aionn.caching.token import decode_parts
from aionn.errors import CallerError, DeviceUnavailableError, text_of
from aionn.fleet.addresses import open_address
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.asking import PATIENCE_S, StoreBackend, fetch_offer
from aionn.fleet.errors import StoreError
from aionn.fleet.judging import statement_at
from aionn.fleet.models import object_size, put_model
from aionn.ray.flights import flights_actor
from aionn.ray.needed import connected_ray, needed_ray
from aionn.ray.orders import Made, Order, Word, decode_word, encode
from aionn.ray.resources import fingerprints_of, resource_name
from aionn.runtime.model import content_of
from aionn.tasks import call_soon_from_anywhere, checked_seconds

__all__ = ["Farm"]

T = TypeVar("T")
_log = logging.getLogger("aionn.ray")

WAIT_S = 600.0
_NODE_S = 3.0  # a node that has just joined is announced within seconds
_LOOK_S = 0.5
_RAY_S = 15.0  # a call of `follow` takes up to 5 s by itself
_NODES_AGAIN_S = 10.0
_LEFT_ALONE_S = 30.0
_JOINS = 3


class _FarmError(Exception):
    """Why the farm has no artifact for a request."""


class Farm:
    """A compile farm on the Ray cluster that this process is connected to. Use it with `aionn.fleet.use_backend`.

    A compile that finds nothing in its cache asks the artifact store first, then the farm, and goes on locally if neither has it. Errors
    of the farm are logged, one warning for each kind.

    Args:
        store_address: of the artifact store, as apps and nodes of the farm see it: `s3://bucket/prefix`, or a directory that all of them
            have mounted. The store holds models, artifacts and statements. Apps and nodes need the right to write to it.
        wait_s: how long a compile waits for the farm, in seconds. Then it goes on locally. None: without a limit.
        patience_s: seconds without an answer after which the store counts as down.
        runtime_env: Ray's environment for the tasks, such as `{"pip": ["aionn[ray,onnxruntime]"]}`. None: nodes have aionn installed.

    Attributes:
        wait_s: as the argument.

    Raises:
        ImportError: Ray is not installed.
        CallerError: this process is not connected to a cluster (`ray.init`), or the address is not supported or in memory only.
        StoreError: there is no such directory, or the bucket's settings are wrong.

    Examples:
        >>> ray.init(address="auto")
        >>> async with aionn.Runtime() as runtime:
        ...     aionn.fleet.use_backend(runtime, aionn.ray.Farm("s3://models/compiled"))
        ...     compilation = await runtime.compile(await runtime.load("detector.onnx"), cache_dir=cache_dir)
    """

    def __init__(
        self,
        store_address: str | os.PathLike[str],
        *,
        wait_s: float | None = WAIT_S,
        patience_s: float = PATIENCE_S,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if not needed_ray().is_initialized():
            raise CallerError("this process is not connected to a Ray cluster; call ray.init(address=...) before aionn.ray.Farm(...)")
        self.wait_s = checked_seconds("Farm: wait_s", wait_s) or math.inf
        self._asked = StoreBackend(store_address, wait_s=self.wait_s, patience_s=patience_s)
        opened = open_address(store_address, patience_s=patience_s)
        if opened.address.startswith("memory:"):
            raise CallerError("Farm: a store in memory is this process's own; give a directory or a bucket that the nodes see, too")
        self._store = ArtifactStore(opened)
        self._address = opened.address if opened.folder is None else os.fspath(opened.folder)  # nodes have other working directories
        self._runtime_env = runtime_env
        self._left_alone_until: dict[str, float] = {}
        self._warned: set[str] = set()

    # --- for a runtime ---------------------------------------------------------------------------------------------------

    async def compile(self, request: CompileRequest) -> Offered | None:
        """Return the artifact for a request, from the store or compiled now. None: the farm has none, which is logged."""
        offered = await self._asked.compile(request)
        if offered is not None:
            return offered
        resource = resource_name(request.device, request.device_version)
        for alone in ("", resource):
            if time.monotonic() < self._left_alone_until.get(alone, 0.0):
                return None
        try:
            return await self._compiled(request)
        except DeviceUnavailableError as error:
            self._leave_alone(resource, f"{resource}: no node", text_of(error))
        except TimeoutError:
            self._leave_alone("", "no answer", f"the Ray cluster has not answered for {_RAY_S:g} s")
        except StoreError as error:
            self._leave_alone("", "store", text_of(error))
        except needed_ray().exceptions.RayError as error:  # such as: this process is not connected any more
            self._leave_alone("", "ray", text_of(error).partition("\n")[0])
        except _FarmError as error:
            self._warn(text_of(error)[:40], text_of(error))
        return None

    def _leave_alone(self, what: str, kind: str, why: str) -> None:
        self._left_alone_until[what] = time.monotonic() + _LEFT_ALONE_S
        self._warn(kind, why)

    def _warn(self, kind: str, why: str) -> None:
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, "the compile farm has nothing: %s; models are compiled here meanwhile", why)

    async def _compiled(self, request: CompileRequest) -> Offered | None:
        files = await content_of(request.model)
        order = None if files is None else self._order(request, object_size(files))
        if files is None or order is None:
            _log.info("model %s cannot be sent to the farm, so it is compiled here", request.model_digest.hex()[:16])
            return None
        await self.require_node(request.device, request.device_version, memory_bytes=order.memory_bytes)
        request.report("farm: sending the model")
        await put_model(self._store, request.model_digest, files)
        made = await self._flown(order, request.report)
        if made.model_lost:
            await put_model(self._store, request.model_digest, files, anew=True)
            made = await self._flown(order, request.report)
        if made.refusal:
            raise _FarmError(made.refusal)
        request.report("farm: fetching the artifact")
        return await self._fetched(order, made)

    def _order(self, request: CompileRequest, model_bytes: int) -> Order | None:
        """Return what a task shall do, or None if it could not do the same."""
        parts, options = decode_parts(request.parts), request.options
        own = options.of(request.device)
        if parts.operations is not None or own.files:  # a step of a plan; options that name files of this machine
            return None
        return Order(
            key=request.key,
            device=request.device,
            device_version=request.device_version,
            model_digest=request.model_digest,
            store=self._address,
            token=parts.app_token,
            preference=options.preference.name.lower(),
            priority=options.priority.name.lower(),
            threads=options.threads,
            at_most=options.at_most,
            instances=options.instances,
            options=dict(own),
            model_bytes=model_bytes,
        )

    async def _fetched(self, order: Order, made: Made) -> Offered | None:
        """Fetch what a task has stored. It may be signed by a key that is not trusted here: the driver says so, and the outcome has it."""
        place = made.place(order)
        signed = await self._store.statement(place)
        statement = None if signed is None else statement_at(place, signed)
        if signed is None or not isinstance(statement, Statement):
            raise _FarmError(f"the artifact store has no statement at {place.path}, which a task has stored")
        found = await fetch_offer(self._store, signed, statement)
        if isinstance(found, Refusal):
            raise _FarmError(str(found))
        return found

    # --- nodes -----------------------------------------------------------------------------------------------------------

    async def require_node(self, device: str, device_version: str, *, memory_bytes: int = 0) -> None:
        """Return when a node of the cluster has a device in a version. A node that is about to join is waited for, up to 3 seconds.

        Args:
            memory_bytes: what the node must have in all.

        Raises:
            DeviceUnavailableError: no node has it. The text names the fingerprints that nodes have.
            TimeoutError: Ray does not answer.
        """
        give_up_at = time.monotonic() + _NODE_S
        wanted = resource_name(device, device_version)
        while True:
            nodes = [node["Resources"] for node in await _in_time(needed_ray().nodes, _NODE_S + 1) if node["Alive"]]
            having = [node for node in nodes if wanted in node and node.get("CPU", 0) >= 1]
            if any(node.get("memory", 0) >= memory_bytes for node in having):
                return
            if time.monotonic() >= give_up_at:
                raise DeviceUnavailableError(device, _without_node(device, wanted, nodes, having, memory_bytes))
            await anyio.sleep(_LOOK_S)

    # --- flights ---------------------------------------------------------------------------------------------------------

    async def _flown(self, order: Order, report: Callable[[str], None]) -> Made:
        """Have the order compiled once in the cluster, and wait for it.

        Raises:
            _FarmError: the actor is lost again and again.
            DeviceUnavailableError: the node that had the device is gone.
            TimeoutError: Ray does not answer.
        """
        errors = needed_ray().exceptions
        failure = ""
        for _ in range(_JOINS):
            try:
                return await self._followed(order, report)
            except errors.RayActorError as error:  # the actor or its node has died; Ray makes another one
                failure = text_of(error).partition("\n")[0]
            except errors.RayError as error:
                raise _FarmError(text_of(error).partition("\n")[0]) from error
        raise _FarmError(f"the actor that has the orders was lost {_JOINS} times: {failure}")

    async def _followed(self, order: Order, report: Callable[[str], None]) -> Made:
        actor = await _in_time(lambda: flights_actor(self._runtime_env), _RAY_S)
        waiter: int = await _answer(lambda: actor.join.remote(encode(order), self._runtime_env))
        word = Word(-1, "", False)
        looked_at = time.monotonic()
        try:
            while True:
                encoded = await _answer(lambda: actor.follow.remote(order.flight, waiter, word.number))  # noqa: B023 - called at once
                if encoded is None:
                    raise _FarmError("the farm does not know this order any more")
                before, word = word, decode_word(encoded)
                if word.made is not None:
                    return word.made
                if word.number != before.number:
                    report(f"farm: {word.text}")
                if time.monotonic() - looked_at > _NODES_AGAIN_S:  # the last such node may die under a task that runs
                    try:
                        await self.require_node(order.device, order.device_version)
                    except TimeoutError:
                        if not word.running:
                            raise
                    looked_at = time.monotonic()
        finally:
            if word.made is None:
                _aside(lambda: _leave(actor, order.flight, waiter))


def _without_node(device: str, wanted: str, nodes: Iterable[Mapping[str, float]], having: Sequence[object], memory_bytes: int) -> str:
    if having:
        return f"a node of the farm has device {device!r} ({wanted}), and none with {memory_bytes} bytes of memory and a CPU"
    there = ", ".join(dict.fromkeys(fingerprints_of(name for node in nodes for name in node)))
    return (
        f"no node of the farm has device {device!r} in this version ({wanted}); nodes have {there or 'no device'}; "
        'start one with ray start --resources="$(aionn ray node-resources --json)"'
    )


def _leave(actor: Any, flight: str, waiter: int) -> None:
    """Say that nobody waits here any more. Raises RaySystemError if this process is not connected any more."""
    connected_ray()
    actor.leave.remote(flight, waiter)


async def _answer(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask an actor, and wait for what it returns.

    Raises:
        ray.exceptions.RaySystemError: this process is not connected any more.
        TimeoutError: there is no answer.
    """
    connected_ray()
    with anyio.fail_after(_RAY_S):
        return await ask()


def _aside(act: Callable[[], object]) -> None:
    """Run an act in a thread that no caller waits for, and that ends with the process. Its error has no reader."""

    def run() -> None:
        with suppress(Exception):
            act()

    threading.Thread(target=run, name="aionn Ray call", daemon=True).start()


async def _in_time(act: Callable[[], T], seconds: float) -> T:
    """Run a blocking call of Ray in a thread. The thread is left behind if it takes too long; it ends with the process.

    Raises:
        TimeoutError: it takes longer than `seconds`.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if not answer.done():
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, Exception | None] = act(), None
        except Exception as error:
            outcome = None, error
        call_soon_from_anywhere(loop, settle, *outcome)

    _aside(run)
    with anyio.fail_after(seconds):
        return await answer
