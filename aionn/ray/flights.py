"""Each model is compiled once at a time in a cluster: a named, detached actor knows which compiles are under way.

An app joins the flight of its order, follows it, and leaves it. The first one to join has the actor submit the task, so a task outlives the
app that wanted it first, as long as another app waits. When no app waits any more, the task is cancelled. An app that has died does not
follow any more, so it is forgotten after a while.

If the actor dies, its tasks end with it, and the apps join again: Ray makes a new actor. At worst a model is compiled twice, and the
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

from aionn.ray.needed import connected_ray, needed_ray
from aionn.ray.orders import Made, Order, Word, decode_made, decode_order, encode
from aionn.ray.resources import SHARE, resource_name
from aionn.ray.tasks import compile_order

__all__ = ["NAME", "NAMESPACE", "Flights", "flights_actor"]

NAMESPACE = "aionn"
NAME = "flights-1"
"""The number counts versions of what app and actor say to each other."""

MAX_RETRIES = 2
_FOLLOW_S = 5.0  # a call of `follow` ends after so long, so that the app sees that the actor lives
_FORGOTTEN_S = 30.0
_LOOK_S = 5.0
_CLOSE_S = 10.0
_KEPT_S = 60.0


class _Flight:
    """One compile that is under way, or has just ended."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiters: dict[int, float] = {}  # when each was last heard
        self.word = Word(0, "waiting for a node of the farm", False)
        self.changed = asyncio.Event()
        self.attempts = 0
        self.ref: Any = None

    def say(self, text: str, made: Made | None = None) -> None:
        """Change the word, and wake all that follow."""
        self.word = Word(self.word.number + 1, text, self.attempts > 0, made)
        self.changed.set()
        self.changed = asyncio.Event()


class Flights:
    """The actor. Its methods run in one event loop."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, encoded: bytes, runtime_env: Mapping[str, Any] | None) -> int:
        """Wait for an order with all that want the same. Returns the number of the waiter."""
        order = decode_order(encoded)
        flight = self._flights.get(order.flight)
        if flight is None or flight.word.made is not None:
            flight = self._flights[order.flight] = _Flight(order)
            self._submit(flight, encoded, runtime_env)
        number = next(self._numbers)
        flight.waiters[number] = time.monotonic()
        return number

    async def follow(self, flight_name: str, waiter: int, seen: int) -> bytes | None:
        """Return how an order stands: at once if that is new to the waiter, else after a few seconds. None: the waiter is not known."""
        flight = self._flights.get(flight_name)
        if flight is None or waiter not in flight.waiters:
            return None
        flight.waiters[waiter] = time.monotonic()
        if flight.word.number <= seen and flight.word.made is None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(flight.changed.wait(), _FOLLOW_S)
        return encode(flight.word)

    async def leave(self, flight_name: str, waiter: int) -> None:
        """Wait no more. The last waiter of a flight takes its task along."""
        flight = self._flights.get(flight_name)
        if flight is not None and flight.waiters.pop(waiter, None) is not None and not flight.waiters:
            self._abandon(flight)

    async def started(self, flight_name: str) -> int:
        """Note that a task begins to work. Returns how many have begun for this flight."""
        flight = self._flights.get(flight_name)
        if flight is None or flight.word.made is not None:  # a cancelled task of an earlier flight may begin that late
            return 0
        flight.attempts += 1
        flight.say(_of_attempt("starting", flight.attempts))
        return flight.attempts

    async def report(self, flight_name: str, text: str) -> None:
        """Say what a task does."""
        flight = self._flights.get(flight_name)
        if flight is not None and flight.word.made is None:
            flight.say(_of_attempt(text, flight.attempts))

    def _submit(self, flight: _Flight, encoded: bytes, runtime_env: Mapping[str, Any] | None) -> None:
        ray, order = needed_ray(), flight.order
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_retries": MAX_RETRIES,  # by Ray, and only if the worker process has died
            "memory": order.memory_bytes,
            "resources": {resource_name(order.device, order.device_version): SHARE},
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
        """Wait for the task, and hand on what it says."""
        try:
            made = decode_made(await flight.ref)
        except Exception as error:  # the worker has died too often, the node is gone, or the task was cancelled
            made = Made(refusal=f"the task that compiles it has failed: {_first_line(error)}")
        flight.say("done", made)
        await asyncio.sleep(_KEPT_S)
        if self._flights.get(flight.order.flight) is flight:
            del self._flights[flight.order.flight]

    async def _watch(self, flight: _Flight) -> None:
        """Forget waiters that are not heard any more."""
        while flight.word.made is None:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            flight.waiters = {waiter: heard for waiter, heard in flight.waiters.items() if now - heard <= _FORGOTTEN_S}
            if not flight.waiters and flight.word.made is None:
                self._abandon(flight)
                return

    def _abandon(self, flight: _Flight) -> None:
        if flight.word.made is not None:
            return
        if self._flights.get(flight.order.flight) is flight:
            del self._flights[flight.order.flight]  # who comes now wants a new task
        self._start(_cancel(flight.ref))


async def _cancel(ref: Any) -> None:
    """End a task: by an interrupt, so that its runtime closes, and by force if that takes too long."""
    ray = needed_ray()
    for force in (False, True):
        ray.cancel(ref, force=force)
        done, _ = await asyncio.to_thread(ray.wait, [ref], timeout=_CLOSE_S)
        if done:
            return


def _of_attempt(text: str, attempt: int) -> str:
    return text if attempt < 2 else f"{text} (attempt {attempt})"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def flights_actor(runtime_env: Mapping[str, Any] | None = None) -> Any:
    """Return the actor of the cluster that this process is connected to, made if it is not there. Blocking.

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
