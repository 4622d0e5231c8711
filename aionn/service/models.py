"""The models of clients without an event loop (`aionn.blocking.attach`), which the service prepares for them.

Such a client passes open descriptors of a model's file and of those beside it: who can open them, may have them computed. A file is known
by its number on its disk, its size and its times, so a second client of an unchanged file waits for nothing. The service reads the graph,
and the driver the weights. Compilations are kept in one folder of the user.

An app with an event loop prepares its models itself, and gets digests of large files from here.

Invariants
    One preparation of a file at a time, however many clients ask for it.
    The service keeps `MOST_MODELS` compilations, and gives the least recently used one up for another. A driver frees the model when no
    client has it any more either. A compilation counts for the app that has asked first, so an app pushes out its own ones before others.
    An app that waits for its turn holds up no other one, also where both ask for the same file.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from aionn.errors import CallerError, DriverDiedError, QuotaError
from aionn.hal.types import ErrorStatus
from aionn.remote.calls import DigestModel, OpenModel
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.runtime import TO_PREPARE, import_needed
from aionn.tasks import run_in_thread

if TYPE_CHECKING:  # imported for the first client without a loop, since an idle service should take little memory
    from aionn.file_ranges import Identity
    from aionn.graph.files import Beside, OpenFile
    from aionn.runtime.model import Model
    from aionn.runtime.open_runtime import OpenRuntime
    from aionn.runtime.preparing.kept_model import KeptModel

MOST_MODELS = 64
MOST_OF_AN_APP, MOST_BYTES_OF_AN_APP = 16, 2 << 30
"""How many compilations the service keeps for one app, and of how large files together."""

MOST_BESIDE = 64
"""How many files may lie beside a model. The service keeps them open as long as the compilation."""

MOST_NAME = 4096

MOST_AT_ONCE = 2
"""How many models the service prepares for one app at a time."""

MOST_THREADS = 64

IDLE_S = 300.0
"""A model that no client has asked for in so long is given back by its driver. The next client loads it from the cache."""

OPTIONS = ("preference", "priority", "threads", "instances")
"""What a client may say about how its model is prepared, as `Runtime.compile` takes it."""


def cache_folder(user: str = "service") -> str:
    """Return where compilations for clients without a loop are kept. Another command than `aionn serve` gives its name."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "aionn", user)


@dataclass(slots=True)
class _Compiled:
    """A compilation.

    Attributes:
        model: what is kept.
        app: has asked for it first.
        size_bytes: of its files.
        for_asked_s: until then a client may have asked for it. One that asks later has the files read again, unless they show all changes.
        used_s: when a client last asked for it.
    """

    model: KeptModel
    app: int
    size_bytes: int
    for_asked_s: float
    used_s: float


class KeptModels:
    """The compilations of one service. Use it in the service's loop."""

    def __init__(self) -> None:
        self._folder = cache_folder()
        self._kept: OrderedDict[tuple[Any, ...], _Compiled] = OrderedDict()
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()  # by app, while it waits
        self._locks: WeakValueDictionary[tuple[Any, ...], asyncio.Lock] = WeakValueDictionary()  # while a caller has it

    async def prepared(self, opened: OpenRuntime, asked: OpenModel, app: int) -> RemotePreparedModel:
        """Return the model of an open file for an app, prepared in a driver of `opened`. The caller keeps owning the descriptor.

        Raises:
            CallerError: the descriptor is not of a file that can be read, or an option is wrong; or no single device runs the model.
            QuotaError: the file is larger than all that an app may have prepared.
            AionnError: as `Runtime.compile`.
        """
        files, which, named = _checked_files(asked)
        how = _checked(asked.options)
        import_needed(TO_PREPARE)
        from aionn.file_ranges import shows_changes
        from aionn.runtime.asked import Asked
        from aionn.runtime.preparing.kept_model import KeptModel

        key, asked_s = (opened, which, asked.devices, tuple(sorted(how.items()))), time.monotonic()
        if (kept := self._kept.get(key)) is None or kept.for_asked_s < asked_s:
            async with self._turn(app), self._locks.setdefault(key, asyncio.Lock()):
                if (kept := self._kept.get(key)) is None or kept.for_asked_s < asked_s:
                    began_s, began_ns = time.monotonic(), time.time_ns()
                    model = await run_in_thread(_loaded, files, asked.name)
                    devices, folder, name = asked.devices or None, self._folder, asked.name or None
                    request = Asked(model=model, devices=devices, cache_dir=folder, name=name, required=False, **how)
                    size_bytes = sum(identity.size for _, identity in which)
                    what, found, *_ = await request.prepare(opened)
                    for_asked_s = math.inf if shows_changes((identity for _, identity in which), began_ns) else began_s
                    kept = _Compiled(KeptModel(opened.session, what, found), app, size_bytes, for_asked_s, began_s)
                    opened.health.watch(kept.model)
        kept.used_s = time.monotonic()
        if named:  # else no other client can ask for it; the driver has it until this one has gone
            self._kept[key] = kept
            self._kept.move_to_end(key)
            self._make_room(app)
        prepared = (await kept.model.live()).prepared
        if not isinstance(prepared, RemotePreparedModel):
            raise CallerError(
                "this model runs on several devices, which a client without an event loop cannot use; compile it in a Runtime"
            )
        if prepared.device.connection.ended_by is not None:
            raise DriverDiedError(prepared.device.name, None)
        return prepared

    async def digests(self, asked: DigestModel, app: int) -> tuple[tuple[str | None, int, int, bytes], ...]:
        """Return the digest of each range of a model's files for an app. They are remembered while the files stay as they are.

        Raises:
            CallerError: a descriptor is not of a file that can be read, or the model's file cannot be a model.
            QuotaError: the files are larger than all that an app may have prepared.
        """
        files, which, _ = _checked_files(asked)
        async with self._turn(app), self._locks.setdefault(which, asyncio.Lock()):
            return await run_in_thread(_digests, files)

    def give_up_unused(self) -> None:
        """Give up what no client has asked for in `IDLE_S`, with the files, whose memory may be that of an app that has ended."""
        while self._kept and time.monotonic() - next(iter(self._kept.values())).used_s >= IDLE_S:
            self._kept.popitem(last=False)

    def _turn(self, app: int) -> asyncio.Semaphore:
        return self._turns.setdefault(app, asyncio.Semaphore(MOST_AT_ONCE))

    def _make_room(self, app: int) -> None:
        """Give up what that app has used least recently, and then what any app has."""
        own = [key for key, kept in self._kept.items() if kept.app == app]
        while len(own) > MOST_OF_AN_APP or sum(self._kept[key].size_bytes for key in own) > MOST_BYTES_OF_AN_APP:
            del self._kept[own.pop(0)]
        if len(self._kept) > MOST_MODELS:
            self._kept.popitem(last=False)


def _checked_files(asked: OpenModel | DigestModel) -> tuple[dict[str, int], tuple[tuple[str, Identity], ...], bool]:
    """Return the descriptors that a call has passed, by location, the model's own under "", and by what each file is known.

    Also return whether every file has a name. One without (a memfd, or a file that was deleted) is gone with the processes that have it.

    Raises:
        CallerError: one gives no right to read a file, or there are too many.
        QuotaError: the files are larger than all that an app may have prepared.
    """
    from aionn.file_ranges import Identity

    longest = max(map(len, [getattr(asked, "name", ""), *(location for location, _ in asked.beside)]))
    if longest > MOST_NAME:
        raise CallerError(f"the model or a file has a name of {longest} characters, but the service takes {MOST_NAME}; rename it")
    if len(asked.beside) > MOST_BESIDE:
        raise CallerError(f"the model has {len(asked.beside)} files beside it, but the service takes {MOST_BESIDE}; save it in fewer files")
    files: dict[str, int] = {"": asked.file, **dict(asked.beside)}
    statuses = [_checked_file(fd) for fd in files.values()]
    found = tuple(zip(files, map(Identity.of, statuses), strict=True))
    size_bytes = sum(identity.size for _, identity in found)
    if size_bytes > MOST_BYTES_OF_AN_APP:
        raise QuotaError(
            f"the model's files have {size_bytes} bytes, but the service prepares {MOST_BYTES_OF_AN_APP} bytes for one app; compile it in "
            "a Runtime(service='off')",
            status=ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
            what="weights bytes",
            limit=MOST_BYTES_OF_AN_APP,
            used=0,
        )
    return files, found, all(status.st_nlink for status in statuses)


def _checked_file(fd: int) -> os.stat_result:
    """Return what the system says of the file of a model, or of one beside it.

    Raises:
        CallerError: the descriptor gives no right to read a file.
    """
    found, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    # One with O_PATH proves no right to read, and the service would open the file by its own rights.
    if not stat.S_ISREG(found.st_mode) or flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
        raise CallerError("the descriptor of the model is not of a file that can be read; open the model's file for reading")
    return found


def _loaded(files: Mapping[str, int], name: str) -> Model:
    """Return the model in these open files."""
    from aionn.runtime.model import model_of_files

    return model_of_files(*_opened(files, name))


def _digests(files: Mapping[str, int]) -> tuple[tuple[str | None, int, int, bytes], ...]:
    from aionn.graph.digest import digest_file

    file, beside = _opened(files, "")
    try:
        return tuple((*place, digest) for place, digest in digest_file(file, beside).digests.items())
    finally:
        for each in (file, *beside.files.values()):
            each.close()  # the traceback of an error would keep it open until the next collection of garbage


def _opened(files: Mapping[str, int], name: str) -> tuple[OpenFile, Beside]:
    """Return a model's files. The service opens no other ones, since its rights are not those of the app."""
    from pathlib import Path

    from aionn.graph.files import Beside, OpenFile, open_model

    where = f"model {name!r}"
    # A confined service may open no other file, and no file of an app once more. A driver gets no right to write to one.
    given = {
        location: (Path(f"/proc/self/fd/{fd}"), where, fd if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY else -1)
        for location, fd in files.items()
    }
    opened, beside = open_model(*given.pop(""))[0], Beside(where, (), {})
    beside.files.update({location: OpenFile(*each) for location, each in given.items()})
    return opened, beside


def _checked(options: bytes) -> dict[str, Any]:
    try:
        how = msgspec.msgpack.decode(options, type=dict[str, str | int]) if options else {}
    except msgspec.DecodeError as error:
        raise CallerError(f"options: {error}; expected a mapping of {', '.join(OPTIONS)}") from error
    for name in how:
        if name not in OPTIONS:
            raise CallerError(f"options has {name!r}; expected some of {', '.join(OPTIONS)}")
    wanted = math.prod(count for name in ("threads", "instances") if isinstance(count := how.get(name, 1), int))
    if wanted > MOST_THREADS:
        raise CallerError(f"options ask for {wanted} engine threads, but the service gives one model {MOST_THREADS}; ask for fewer")
    return how
