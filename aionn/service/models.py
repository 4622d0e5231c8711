"""The models of clients without an event loop (`aionn.blocking.attach`), which the service prepares for them.

Such a client passes an open descriptor of a model's file: who can open it, may have it computed. The file is known by its number on its
disk, its size and its times, so a second client of an unchanged file waits for nothing. The service reads the graph, and the driver the
weights. Compilations are kept in one folder of the user.

Invariants
    One preparation of a file at a time, however many clients ask for it.
    The service keeps `MOST_MODELS` compilations, and gives the least recently used one up for another. A driver frees the model when no
    client has it any more either.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from aionn.errors import CallerError, DriverDiedError
from aionn.remote.calls import OpenModel
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.compilation import CompilationParts, parts_of
from aionn.runtime.model import Model
from aionn.runtime.open_runtime import Asked, OpenRuntime

MOST_MODELS = 64
IDLE_S = 300.0
"""A model that no client has asked for in so long is given back by its driver. The next client loads it from the cache."""

OPTIONS = ("preference", "priority", "threads", "instances")
"""What a client may say about how its model is prepared, as `Runtime.compile` takes it."""


_O_PATH = 0o10000000  # such a descriptor proves no right to read, and the service would open the file by its own rights


def cache_folder() -> str:
    """Return where compilations for clients without a loop are kept."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "aionn", "service")


class KeptModels:
    """The compilations of one service. Use it in the service's loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], CompilationParts] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[Any, ...], asyncio.Lock] = WeakValueDictionary()  # while a caller has it

    async def prepared(self, opened: OpenRuntime, asked: OpenModel, file: int) -> RemotePreparedModel:
        """Return the model of an open file, prepared in a driver of `opened`. The caller keeps owning the descriptor.

        Raises:
            CallerError: the descriptor is not of a file that can be read, or an option is wrong; or no single device runs the model.
            AionnError: as `Runtime.compile`.
        """
        found = os.fstat(file)
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if not stat.S_ISREG(found.st_mode) or flags & _O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
            raise CallerError("the descriptor of the model is not of a file that can be read; open the model's file for reading")
        how = _checked(asked.options)
        which = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        key = (opened, which, asked.devices, tuple(sorted(how.items())))
        async with self._locks.setdefault(key, asyncio.Lock()):
            parts = self._kept.get(key)
            if parts is None:
                model = await Model.load(f"/proc/self/fd/{file}")
                parts = self._kept[key] = parts_of(await opened.compile(_request(model, asked, how)))
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_MODELS:
                self._kept.popitem(last=False)
            serving = await parts.kept_model.live()
        prepared = serving.prepared
        if not isinstance(prepared, RemotePreparedModel):
            raise CallerError(
                "this model runs on several devices, which a client without an event loop cannot use; compile it in a Runtime"
            )
        if prepared.device.connection.ended_by is not None:
            raise DriverDiedError(prepared.device.name, None)
        return prepared


def _checked(options: bytes) -> dict[str, Any]:
    try:
        how = msgspec.msgpack.decode(options, type=dict[str, str | int]) if options else {}
    except msgspec.DecodeError as error:
        raise CallerError(f"options: {error}; expected a mapping of {', '.join(OPTIONS)}") from error
    for name in how:
        if name not in OPTIONS:
            raise CallerError(f"options has {name!r}; expected some of {', '.join(OPTIONS)}")
    return how


def _request(model: Model, asked: OpenModel, how: dict[str, Any]) -> Asked:
    return Asked(
        model=model,
        devices=asked.devices or None,
        preference=how.get("preference", "fast_single_answer"),
        priority=how.get("priority", "medium"),
        threads=how.get("threads"),
        instances=how.get("instances"),
        cache_dir=cache_folder(),
        cache_required=False,
        token=None,
        mode="eager",
        stages=None,
        stage_policy=None,
        options=None,
        batch=None,
        idle_s=IDLE_S,
        timeout_s=None,
        name=asked.name or None,
        required=False,
        on_event=None,
    )
