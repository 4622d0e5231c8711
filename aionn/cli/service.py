"""`aionn serve`, `aionn ps`: one service for all apps of a user."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop
from msgspec.structs import asdict

from aionn.caching.private_folder import user_state_directory
from aionn.cli.printing import NotDoneError, counted, duration, print_json, print_table, show_warnings, size
from aionn.errors import AionnError, CallerError
from aionn.memory.limits import raise_file_limit
from aionn.needs import Confinement
from aionn.remote.attaching import service_path
from aionn.remote.calls import Evict, HalCall, ReadService, TakeOver
from aionn.runtime.processes.handed import ServiceLink
from aionn.runtime.processes.spawning import checked_sandbox, checked_state_dir
from aionn.runtime.processes.starter import Starter
from aionn.sandbox.confining import SandboxError
from aionn.service.confinement import confine_service
from aionn.service.listening import Listening, inherited, listen
from aionn.service.units import write_units

T = TypeVar("T")
logger = logging.getLogger("aionn.service")


@dataclass(frozen=True, slots=True)
class ServeServiceOptions:
    """How `aionn serve` serves. The command line describes each option."""

    socket: str | None = None
    replace: bool = False
    state_dir: str | None = None
    systemd: str | None = None


def plain_options(words: Sequence[str]) -> ServeServiceOptions | None:
    """Return what the words after `aionn serve` say, or None if it takes the command line to read them, as for help or a mistake."""
    found: dict[str, Any] = {}
    left = iter(words)
    for word in left:
        if word == "--replace":
            found["replace"] = True
        elif word in ("--socket", "--state-dir", "--systemd") and (value := next(left, "")) and not value.startswith("-"):
            found[word[2:].replace("-", "_")] = value
        else:
            return None
    return ServeServiceOptions(**found)


def serve(options: ServeServiceOptions) -> None:
    """Serve apps until SIGINT or SIGTERM, or until another service has taken over and the last guest has gone.

    Raises:
        NotDoneError: the socket cannot be listened on.
    """
    show_warnings(logging.INFO)  # and what happens
    raise_file_limit()
    if options.systemd is not None:
        _write_units(options.systemd)
        return
    try:
        # Later this process may look up nothing about its user.
        state_dir = checked_state_dir(options.state_dir) or os.path.abspath(user_state_directory())
        listening, level = inherited(), checked_sandbox(None)
        path = "" if listening is not None else _path(options.socket)
        if options.replace and listening is None:
            listening = uvloop.run(_taken_over(path)) or listen(path, taken="it does not answer, so end its process first")
        listening = listening or listen(path)
        with _to_systemd() as systemd:
            # Before the loop is made, whose library would go on with what it has found.
            starter, sandbox = confine_service(level, state_dir, listening.path)
            uvloop.run(_serve(listening, state_dir, starter, sandbox, systemd))
    except (AionnError, SandboxError) as error:
        raise NotDoneError(str(error)) from error


def _write_units(folder: str) -> None:
    try:
        for path in write_units(folder):
            print(path)
    except OSError as error:
        raise NotDoneError(f"the units cannot be written to {folder} ({error.strerror}); give a folder of yours") from error
    print("Start it with: systemctl --user daemon-reload && systemctl --user enable --now aionn.socket")


async def _serve(listening: Listening, state_dir: str, starter: Starter | None, sandbox: Confinement, systemd: socket.socket) -> None:
    from aionn.service.server import Service

    service, loop = Service(listening, state_dir, starter, sandbox), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.end)
    logger.info("serving at %s", listening.sock.getsockname())
    if systemd.fileno() >= 0:
        systemd.send(b"READY=1")
        systemd.close()
    await service.serve()
    if service.leaves_drivers:
        logging.shutdown()
        os._exit(0)  # a usual end would close the runtimes, and kill drivers on which apps stream


async def _taken_over(path: str) -> Listening | None:
    """Return the socket of the service that listens at `path`, or None if none does."""
    link = ServiceLink(path)
    try:
        connection = await link.attach()
        taken, descriptors = await connection.call(TakeOver())
        return Listening(descriptors.take_socket(taken.listening), descriptors.take(taken.lock), path)
    except CallerError:
        raise
    except AionnError:
        return None  # none listens, or it has just ended
    finally:
        link.end()


def _to_systemd() -> socket.socket:
    """Return a socket to the service manager (sd_notify), or a closed one if the manager asks for no word."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        notify.connect("\0" + address[1:] if address.startswith("@") else address)
    except OSError:
        notify.close()
    return notify


def show(path: str | None, as_json: bool) -> None:
    """Show what the service holds.

    Raises:
        NotDoneError: no service can be asked.
    """
    try:
        facts = uvloop.run(_asked(_path(path), ReadService()))
    except AionnError as error:
        raise NotDoneError(str(error)) from error
    apps = [pid for pid in facts.apps if pid != os.getpid()]  # this command asks over a connection, too
    if as_json:
        print_json(
            {
                **asdict(facts),
                "apps": apps,
                "sandbox": asdict(facts.sandbox),
                "drivers": [
                    {**asdict(each), "guests": list(map(asdict, each.guests)), "models": list(map(asdict, each.models))}
                    for each in facts.drivers
                ],
            }
        )
        return
    rows = [
        (str(guest.guest or "?"), driver.device, str(driver.pid), str(guest.models), str(guest.bursts), str(guest.buffers))
        for driver in facts.drivers
        for guest in driver.guests
    ]
    title = f"service {facts.pid} (aionn {facts.release}), apps: {len(set(apps))}, connections: {len(apps)}, for {duration(facts.seconds)}"
    print_table(title, ("app", "device", "driver", "models", "bursts", "buffers"), rows)
    models = [
        (each.key, each.label, driver.device, size(each.size_bytes), str(len(each.apps)), str(each.executions), duration(each.idle_s))
        for driver in facts.drivers
        for each in driver.models
    ]
    print(f"the service is confined by: {', '.join(facts.sandbox.holds) or 'nothing'}")
    print_table("models", ("key", "model", "device", "size", "apps", "executions", "idle for"), models)


def evict(path: str | None, key: str, as_json: bool) -> None:
    """Free models that no app holds.

    Raises:
        NotDoneError: no service can be asked.
    """
    try:
        count = uvloop.run(_asked(_path(path), Evict(key)))
    except AionnError as error:
        raise NotDoneError(str(error)) from error
    if as_json:
        print_json({"freed": count})
    else:
        print(f"{counted(count, 'model')} freed")


def _path(path: str | None) -> str:
    return os.path.abspath(path) if path else service_path()


async def _asked(path: str, call: HalCall[T]) -> T:
    """Return the service's answer to a call."""
    link = ServiceLink(path)
    try:
        answer, _ = await (await link.attach()).call(call)
        return answer
    finally:
        link.end()
