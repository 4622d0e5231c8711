"""A compile farm on Ray as the backend of a runtime: a node of the cluster with the same device compiles what the artifact store lacks.

    the store has the artifact    it is fetched, and Ray is not asked
    no node has the device        the app gets that answer within seconds, but Ray itself would wait for such a node
    otherwise                     one task compiles it for all apps that want it (`flights`)

The model goes to the nodes through the artifact store, by its digest. The artifact comes back through the store, with the signature of the
node's key. The app's driver checks that signature as it does for any artifact of another machine. The farm itself is not trusted.

Each wait has a deadline. Blocking calls of Ray run in daemon threads, so a call that hangs does not keep the app from ending.
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

from aionn.caching.offers import ArtifactRequest, Offered
from aionn.caching.outcomes import Refusal
from aionn.caching.statement import Statement
from aionn.caching.token import decode_parts
from aionn.errors import CallerError, DeviceUnavailableError, text_of
from aionn.fleet.artifact_store import ArtifactStore, statement_at
from aionn.fleet.asking import PATIENCE_S, Pauses, ask_store, fetch_offer
from aionn.fleet.models import object_size, put_model
from aionn.fleet.requests import StoreError, open_address
from aionn.loopless import call_soon_from_anywhere, checked_seconds
from aionn.ray.flights import flights_actor
from aionn.ray.needed import connected_ray, first_line, needed_ray
from aionn.ray.orders import Order, OrderResult, OrderState, decode_state, encode
from aionn.ray.resources import device_resources, resource_name
from aionn.runtime.model import content_of

T = TypeVar("T")
_log = logging.getLogger("aionn.ray")

WAIT_S = 600.0
_NODE_WAIT_S = 3.0  # a node that has just joined is announced within seconds
_NODES_EVERY_S = 0.5  # pause between two looks at the list of nodes
_ANSWER_S = 15.0  # a call of `follow` takes up to 5 s by itself
_NODES_AGAIN_S = 10.0  # while an order waits for a node, that node may leave the cluster
_STORE, _CLUSTER = "store", "cluster"  # what `Pauses` knows beside the devices' resources
_JOINS = 3  # after so many losses of the actor an order is given up


class _FarmError(Exception):
    """Why the farm has no artifact for a request.

    Attributes:
        kind: the step that has failed, and the reason or class of error. It names no model, so it is equal for failures of the same kind.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(kind, why)  # both, so that it can be pickled
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[1])


class Farm:
    """A compile farm on the Ray cluster that this process is connected to. Use it with `aionn.fleet.use_backend`.

    A compile that misses its cache asks the artifact store first, then the nodes of the farm. If both fail, this machine compiles the
    model. Failures of the farm are logged: the first of each kind as a WARNING, later ones as INFO.

    Args:
        store_address: of the artifact store, as apps and nodes of the farm see it: `s3://bucket/prefix`, or a directory that all of them
            have mounted. The store holds models, artifacts and statements. Apps and nodes need the right to write to it.
        wait_s: how long a compile waits for the farm, in seconds. Then this machine compiles the model. None: without a limit.
        patience_s: seconds without an answer after which the store counts as down.
        runtime_env: Ray's environment for the tasks, such as `{"pip": ["aionn[ray,onnxruntime]"]}`. None: nodes have aionn installed.

    Attributes:
        wait_s: as the argument, in seconds.

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
        opened = open_address(store_address, patience_s=patience_s)
        if opened.address.startswith("memory:"):
            raise CallerError("Farm: a store in memory is this process's own; give a directory or a bucket that the nodes see, too")
        self._store = ArtifactStore(opened)
        self._address = opened.address if opened.folder is None else os.fspath(opened.folder)  # nodes have other working directories
        self._runtime_env = runtime_env
        self._pauses = Pauses(_log, "the compile farm has nothing: %s; models are compiled here meanwhile")

    # --- for a runtime ---------------------------------------------------------------------------------------------------

    async def compile(self, request: ArtifactRequest) -> Offered | None:
        """Return the artifact for a request, from the store or compiled now. Returns None if the farm has none, and logs why."""
        if self._pauses.paused(_STORE):
            return None
        found = await ask_store(self._store, request)
        if isinstance(found, Refusal):
            self._pauses.pause(_STORE, _STORE, found.detail)
            return None
        resource = resource_name(request.device, request.device_version)
        if found is not None or self._pauses.paused(_CLUSTER, resource):
            return found
        try:
            return await self._from_nodes(request)
        except DeviceUnavailableError as error:
            self._pauses.pause(resource, f"{resource}: no node", text_of(error))
        except TimeoutError:
            self._pauses.pause(_CLUSTER, "no answer", "the Ray cluster did not answer in time")
        except StoreError as error:  # a store that is full can still be read, so it is asked again
            self._pauses.pause(_CLUSTER, _STORE, text_of(error))
        except needed_ray().exceptions.RayError as error:  # such as: this process is not connected any more
            self._pauses.pause(_CLUSTER, "ray", first_line(error))
        except _FarmError as error:
            self._pauses.log(error.kind, text_of(error))
        return None

    async def _from_nodes(self, request: ArtifactRequest) -> Offered | None:
        """Have a node compile a model, and fetch the artifact. Returns None if the model cannot be sent to a farm."""
        files = await content_of(request.model)
        order = None if files is None else self._order(request, object_size(files))
        if files is None or order is None:
            _log.info("model %s cannot be sent to the farm, so it is compiled here", request.model_digest.hex()[:16])
            return None
        await self.require_node(request.device, request.device_version, memory_bytes=order.memory_bytes)
        request.report("farm: sending the model")
        await put_model(self._store, request.model_digest, files)
        result = await self._compile_once(order, request.report)
        if result.model_lost:
            await put_model(self._store, request.model_digest, files, anew=True)
            result = await self._compile_once(order, request.report)
        if result.refusal:
            raise _FarmError(f"node: {result.kind}", result.refusal)
        request.report("farm: fetching the artifact")
        return await self._fetch_artifact(order, result)

    def _order(self, request: ArtifactRequest, model_bytes: int) -> Order | None:
        """Return the order for a task, or None if a task could not make the same artifact."""
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

    async def _fetch_artifact(self, order: Order, result: OrderResult) -> Offered | None:
        """Fetch what a task has stored. The signature is not checked here. If its key is not trusted, the driver refuses the artifact."""
        place = result.place(order)
        signed = await self._store.statement(place)
        statement = None if signed is None else statement_at(place, signed)
        if signed is None or not isinstance(statement, Statement):
            raise _FarmError("statement", f"the artifact store has no statement at {place.path}, which a task has stored")
        found = await fetch_offer(self._store, signed, statement)
        if isinstance(found, Refusal):
            raise _FarmError(f"artifact: {found.reason.value}", str(found))
        return found

    # --- nodes -----------------------------------------------------------------------------------------------------------

    async def require_node(self, device: str, device_version: str, *, memory_bytes: int = 0) -> None:
        """Return when a node of the cluster has a device in a version, a CPU, and so much memory.

        A node may be about to join, so this waits for one, up to 3 seconds.

        Args:
            memory_bytes: the memory that the node must have in all, used or not.

        Raises:
            DeviceUnavailableError: no node has all of that. The text names the devices' resources of the nodes.
            TimeoutError: Ray does not answer within 4 seconds.
        """
        give_up_at = time.monotonic() + _NODE_WAIT_S
        wanted = resource_name(device, device_version)
        while True:
            nodes = [node["Resources"] for node in await _call_in_thread(needed_ray().nodes, _NODE_WAIT_S + 1) if node["Alive"]]
            having = [node for node in nodes if wanted in node and node.get("CPU", 0) >= 1]
            if any(node.get("memory", 0) >= memory_bytes for node in having):
                return
            if time.monotonic() >= give_up_at:
                raise DeviceUnavailableError(device, _without_node(device, wanted, nodes, having, memory_bytes))
            await anyio.sleep(_NODES_EVERY_S)

    # --- flights ---------------------------------------------------------------------------------------------------------

    async def _compile_once(self, order: Order, report: Callable[[str], None]) -> OrderResult:
        """Have the order compiled once in the cluster, and wait for the result.

        Raises:
            _FarmError: the actor was lost three times, or does not know the order any more.
            DeviceUnavailableError: the node that had the device is gone.
            TimeoutError: Ray does not answer.
        """
        errors = needed_ray().exceptions
        failure = ""
        for _ in range(_JOINS):
            try:
                return await self._join_and_follow(order, report)
            except errors.RayActorError as error:  # the actor or its node has died; Ray makes another one
                failure = first_line(error)
            except errors.RayError as error:
                raise _FarmError(f"ray: {type(error).__name__}", first_line(error)) from error
        raise _FarmError("actor lost", f"the farm's actor was lost {_JOINS} times: {failure}")

    async def _join_and_follow(self, order: Order, report: Callable[[str], None]) -> OrderResult:
        """Join the order's flight, and follow it to its end. Errors are as for `_compile_once`, and those of Ray."""
        actor = await _call_in_thread(lambda: flights_actor(self._runtime_env), _ANSWER_S)
        waiter: int = await _answer(lambda: actor.join.remote(encode(order), self._runtime_env))
        state = OrderState(-1, "", False)
        looked_at = time.monotonic()
        try:
            while True:
                encoded = await _answer(lambda: actor.follow.remote(order.flight, waiter, state.number))  # noqa: B023 - called at once
                if encoded is None:
                    raise _FarmError("order unknown", "the farm does not know this order any more")
                before, state = state, decode_state(encoded)
                if state.result is not None:
                    return state.result
                if state.number != before.number:
                    report(f"farm: {state.text}")
                if time.monotonic() - looked_at > _NODES_AGAIN_S:  # the last such node may die under a task that runs
                    try:
                        await self.require_node(order.device, order.device_version)
                    except TimeoutError:
                        if not state.running:
                            raise
                    looked_at = time.monotonic()
        finally:
            if state.result is None:
                _in_daemon_thread(lambda: _leave(actor, order.flight, waiter))


def _without_node(device: str, wanted: str, nodes: Iterable[Mapping[str, float]], having: Sequence[object], memory_bytes: int) -> str:
    if having:
        return f"no node of the farm that has device {device!r} ({wanted}) has {memory_bytes} bytes of memory"
    there = ", ".join(dict.fromkeys(device_resources(name for node in nodes for name in node)))
    return (
        f"no node of the farm has device {device!r} in this version ({wanted}); nodes have {there or 'no device'}; "
        'start one with ray start --resources="$(aionn ray node-resources --json)"'
    )


def _leave(actor: Any, flight: str, waiter: int) -> None:
    """Say that this app does not wait any more. Raises RaySystemError if this process is not connected any more."""
    connected_ray()
    actor.leave.remote(flight, waiter)


async def _answer(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask an actor, and wait for its answer.

    Raises:
        ray.exceptions.RaySystemError: this process is not connected any more.
        TimeoutError: the actor does not answer within 15 seconds.
    """
    connected_ray()
    with anyio.fail_after(_ANSWER_S):
        return await ask()


def _in_daemon_thread(act: Callable[[], object]) -> None:
    """Run a blocking function in a thread that ends with the process. No caller waits for it, and its error is dropped."""

    def run() -> None:
        with suppress(Exception):
            act()

    threading.Thread(target=run, name="aionn Ray call", daemon=True).start()


async def _call_in_thread(act: Callable[[], T], seconds: float) -> T:
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

    _in_daemon_thread(run)
    with anyio.fail_after(seconds):
        return await answer
