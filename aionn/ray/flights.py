"""Each model is compiled once at a time in a cluster: a named, detached actor knows which compiles are under way.

A compile that is under way is a *flight*. An app joins the flight of its order, follows it, and leaves it. The actor submits the task when
the first app joins. So the task outlives that app as long as another app waits. When no app waits any more, the task is cancelled. An app
that has died does not follow any more, so the actor forgets it after a while.

If the actor dies, its tasks end with it. The apps join again, and Ray makes a new actor. At worst a model is compiled twice, and the
artifact store keeps the statement that comes first.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from blake3 import blake3

from aionn.ray.needed import connected_ray, first_line, needed_ray
from aionn.ray.orders import Order, OrderResult, OrderState, decode_order, decode_result, encode
from aionn.ray.resources import TASK_SHARE, resource_name
from aionn.ray.tasks import compile_order

NAMESPACE = "aionn"
NAME = "flights-2"
"""The number is the version of the messages between app and actor (`orders`)."""

MAX_RETRIES = 2
_FOLLOW_S = 5.0  # a call of `follow` ends after so long, so that the app sees that the actor lives
_FORGOTTEN_S = 30.0  # a waiter that has not called `follow` for so long is taken for dead
_WATCH_EVERY_S = 5.0
_CANCEL_S = 10.0  # what an interrupted task gets for closing its runtime
_KEPT_S = 60.0  # how long the result of a flight is kept for those that still follow it


class _Flight:
    """One compile that is under way, or has just ended."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiters: dict[int, float] = {}  # by number, when each has last called `follow` (time.monotonic)
        self.state = OrderState(0, "waiting for a node of the farm", False)
        self.changed = asyncio.Event()
        self.attempts = 0
        self.ref: Any = None  # of the Ray task

    def show(self, text: str, result: OrderResult | None = None) -> None:
        """Change the state of the order, and wake all that follow the flight."""
        self.state = OrderState(self.state.number + 1, text, self.attempts > 0, result)
        self.changed.set()
        self.changed = asyncio.Event()


class Flights:
    """The flights of a cluster, as a Ray actor. Apps call `join`, `follow` and `leave`, and tasks call `started` and `report`.

    All methods run in one event loop. Calls that name an unknown flight change nothing, because all its waiters may have left.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, encoded: bytes, runtime_env: Mapping[str, Any] | None) -> int:
        """Add a waiter to the flight of an encoded order. The first waiter has the task submitted. Return the waiter's number."""
        order = decode_order(encoded)
        flight = self._flights.get(order.flight)
        if flight is None or flight.state.result is not None:
            flight = self._flights[order.flight] = _Flight(order)
            self._submit(flight, encoded, runtime_env)
        number = next(self._numbers)
        flight.waiters[number] = time.monotonic()
        return number

    async def follow(self, flight_name: str, waiter: int, seen: int) -> bytes | None:
        """Return the encoded `OrderState` of a flight, at once or when it changes, but after 5 seconds at most.

        Args:
            seen: the number of the last state that the waiter has seen. Nothing is waited for if there is a newer one.

        Returns:
            The state, or None if the actor does not know the flight or the waiter.
        """
        flight = self._flights.get(flight_name)
        if flight is None or waiter not in flight.waiters:
            return None
        flight.waiters[waiter] = time.monotonic()
        if flight.state.number <= seen and flight.state.result is None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(flight.changed.wait(), _FOLLOW_S)
        return encode(flight.state)

    async def leave(self, flight_name: str, waiter: int) -> None:
        """Remove a waiter. The task is cancelled if no other waiter is left."""
        flight = self._flights.get(flight_name)
        if flight is not None and flight.waiters.pop(waiter, None) is not None and not flight.waiters:
            self._cancel_flight(flight)

    async def started(self, flight_name: str) -> int:
        """Note that a task begins to work. Return how many attempts have begun for this flight."""
        flight = self._flights.get(flight_name)
        if flight is None or flight.state.result is not None:  # a cancelled task of an earlier flight may begin that late
            return 0
        flight.attempts += 1
        flight.show(_of_attempt("starting", flight.attempts))
        return flight.attempts

    async def report(self, flight_name: str, text: str) -> None:
        """Show the waiters what a task does."""
        flight = self._flights.get(flight_name)
        if flight is not None and flight.state.result is None:
            flight.show(_of_attempt(text, flight.attempts))

    def _submit(self, flight: _Flight, encoded: bytes, runtime_env: Mapping[str, Any] | None) -> None:
        ray, order = needed_ray(), flight.order
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_retries": MAX_RETRIES,  # by Ray, and only if the worker process has died
            "memory": order.memory_bytes,
            "resources": {resource_name(order.device, order.device_version): TASK_SHARE},
            "name": f"aionn compile {order.key.hex()[:16]}",
        }
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        flight.ref = ray.remote(compile_order).options(**options).remote(encoded, ray.get_runtime_context().current_actor)
        self._start(self._fly(flight))
        self._start(self._watch(flight))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fly(self, flight: _Flight) -> None:
        """Wait for the task, and give its result to the waiters. The flight is forgotten a minute later."""
        try:
            result = decode_result(await flight.ref)
        except Exception as error:  # the worker has died too often, the node is gone, or the task was cancelled
            kind = f"task: {type(error).__name__}"
            result = OrderResult(refusal=f"the task that compiles it has failed: {first_line(error)}", kind=kind)
        flight.show("done", result)
        await asyncio.sleep(_KEPT_S)
        if self._flights.get(flight.order.flight) is flight:
            del self._flights[flight.order.flight]

    async def _watch(self, flight: _Flight) -> None:
        """Forget waiters that do not call `follow` any more, and cancel the task if no waiter is left."""
        while flight.state.result is None:
            await asyncio.sleep(_WATCH_EVERY_S)
            now = time.monotonic()
            flight.waiters = {waiter: heard for waiter, heard in flight.waiters.items() if now - heard <= _FORGOTTEN_S}
            if not flight.waiters and flight.state.result is None:
                self._cancel_flight(flight)
                return

    def _cancel_flight(self, flight: _Flight) -> None:
        if flight.state.result is not None:
            return
        if self._flights.get(flight.order.flight) is flight:
            del self._flights[flight.order.flight]  # an app that joins now needs a new task
        self._start(_cancel(flight.ref))


async def _cancel(ref: Any) -> None:
    """End a task: by an interrupt, so that its runtime closes, and by force if that takes too long."""
    ray = needed_ray()
    for force in (False, True):
        ray.cancel(ref, force=force)
        done, _ = await asyncio.to_thread(ray.wait, [ref], timeout=_CANCEL_S)
        if done:
            return


def _of_attempt(text: str, attempt: int) -> str:
    return text if attempt < 2 else f"{text} (attempt {attempt})"


def flights_actor(runtime_env: Mapping[str, Any] | None = None) -> Any:
    """Return a handle of the `Flights` actor of this process's cluster. The actor is started if the cluster lacks it. Blocking.

    Args:
        runtime_env: of the tasks. Where it brings aionn to a node, the actor needs it, too, and apps with the same one share an actor.
            Variables are for tasks only, because tasks of other apps would inherit them from the actor.

    Raises:
        ray.exceptions.RaySystemError: this process is not connected.
    """
    ray = connected_ray()
    options = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_concurrency": 1000}
    packages = {name: value for name, value in (runtime_env or {}).items() if name != "env_vars"}
    name = NAME
    if packages:
        options["runtime_env"] = packages
        name = f"{NAME}-{blake3(json.dumps(packages, sort_keys=True, default=str).encode()).hexdigest()[:16]}"
    return ray.remote(Flights).options(name=name, **options).remote()
