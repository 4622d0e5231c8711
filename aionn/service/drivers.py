"""The drivers of a service: a set of them for each combination of settings that apps ask for.

Invariants
    Settings that no driver has, and that no call uses, make room for others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from aionn.errors import CallerError
from aionn.hal.types import MAX_THREADS
from aionn.needs import Needs
from aionn.remote.calls import ConnectDriver
from aionn.runtime.health import checked_policy
from aionn.runtime.open_runtime import OpenRuntime
from aionn.runtime.processes.devices import Device, devices_of
from aionn.runtime.processes.spawning import DEFAULT_HANG_S, Settings, checked_driver_env, checked_sandbox
from aionn.runtime.processes.starter import Starter

MOST_SETTINGS = 16
"""How many sets of drivers with different settings a service has. Each set is one process for each device at least."""

MOST_ENVIRONMENT = 1 << 14
"""How many characters the variables of a driver have. What starts it takes one message of 128 KiB, with the service's own variables."""


class Drivers:
    """See the module. Use it in the service's loop."""

    def __init__(self, state_dir: str, starter: Starter | None) -> None:
        """`state_dir`, `starter`: as `Settings` has them."""
        self._state_dir, self.starter = state_dir, starter
        self._runtimes: dict[bytes, OpenRuntime] = {}
        self._uses: Counter[OpenRuntime] = Counter()  # calls that use one now
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def using(self, body: ConnectDriver) -> AsyncIterator[OpenRuntime]:
        """Yield the drivers of these settings, which are kept for the body.

        Raises:
            CallerError: the settings are not those of a driver, or too many different ones are in use.
        """
        wanted = _settings_of(body, self._state_dir, self.starter)
        key = msgspec.json.encode(
            (wanted.sandbox, wanted.threads, sorted(wanted.environment.items()), body.needs and body.device, body.needs)
        )
        async with self._opening:
            found = self._runtimes.get(key)
            if found is None:
                await self._make_room()
                found = OpenRuntime(asyncio.get_running_loop(), wanted, "service", checked_policy(None))
                await found.open()
                self._runtimes[key] = found
            self._uses[found] += 1
        try:
            yield found
        finally:
            self._uses[found] -= 1

    async def _make_room(self) -> None:
        """Give up settings that no driver has, if as many as may be are known.

        Raises:
            CallerError: all of them are in use.
        """
        if len(self._runtimes) < MOST_SETTINGS:
            return
        for key, opened in list(self._runtimes.items()):
            if not opened.devices.has_drivers and not self._uses[opened]:
                del self._runtimes[key], self._uses[opened]
                await opened.aclose()
                return
        raise CallerError(
            f"the apps of this service use drivers with {MOST_SETTINGS} different settings, which is the most; "
            "give the same sandbox, threads and driver_env to their runtimes"
        )

    def devices(self) -> list[tuple[OpenRuntime, Device]]:
        """Return every device that has been asked for, with its runtime."""
        return [(opened, device) for opened in self._runtimes.values() for device in devices_of(opened.devices)]

    async def aclose(self) -> None:
        """End all drivers."""
        for opened in self._runtimes.values():
            await opened.aclose()


def _settings_of(body: ConnectDriver, state_dir: str, starter: Starter | None) -> Settings:
    """Return what an app asks for as settings of drivers.

    Raises:
        CallerError: they are not settings of a driver.
    """
    if not 0 <= body.threads <= MAX_THREADS:
        raise CallerError(f"threads={body.threads}: expected a number from 0 to {MAX_THREADS}")
    try:
        needs = {body.device: msgspec.json.decode(body.needs, type=Needs)} if body.needs else {}
    except msgspec.DecodeError as error:
        raise CallerError(f"needs: {error}; expected the fields of aionn.hal.Needs") from error
    environment = checked_driver_env(body.environment)
    if (length := sum(map(len, [*environment, *environment.values()]))) > MOST_ENVIRONMENT:
        raise CallerError(f"driver_env has {length} characters, but a service takes {MOST_ENVIRONMENT}; leave out what no engine reads")
    sandbox = body.sandbox if body.sandbox == "strict" else checked_sandbox(body.sandbox)  # the environment of an app may ask for it
    return Settings(state_dir, DEFAULT_HANG_S, body.threads, sandbox, environment, needs, template=True, shared=True, starter=starter)
