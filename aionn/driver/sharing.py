"""Executables of prepared models: one per instance, over one copy of the weights.

A model that is prepared again with the same options needs no new weights, because its prepared models share them.

Each prepared model gets other executables (`Executable.share`), which may run beside those of the first. The weights go with the last of
them. Only an engine whose executables have `share` takes part.

What makes two preparations the same
    Every option except the deadline, and the model's identity: its token, and the digest of the constants that may change, if they are
    not what the token names. A model without a token is known by its graph, its sealed constants and that digest. A model from a cache
    has the token that its verified files carry.

A driver that several apps share believes no token, because an app could claim that of another app's model. There the identity is what
the driver has digested itself: all that the engine reads of the model, or the bytes of the verified cache files. `digested` makes sure
that no app can change these bytes afterwards.

`ClientTables` holds what a client of a driver has made, and counts what the client's app uses (`Quotas`).

Use all of this from the loop, except `digested` and `Shared.executables`, which block, and `check_quota`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from aionn.driver.artifacts import Loaded
from aionn.driver.received import Received
from aionn.errors import CallerError, CompilationError, DeadlineError, ModelQuarantinedError, QuotaError
from aionn.file_ranges import digest_of, private_memory
from aionn.fmq import Listener
from aionn.hal.batching import RowAxes
from aionn.hal.engine import Executable
from aionn.hal.interfaces import IBuffer, IBurstContext, IPreparedModel, PrepareOptions
from aionn.hal.model import PooledModel, known_contents, may_change
from aionn.hal.types import NO_LANES, ErrorStatus, IMemory, MemoryKind
from aionn.hal.values import as_messages
from aionn.loopless import seconds_until
from aionn.memory.region import Region
from aionn.remote.calls import ModelMessage

T = TypeVar("T")
logger = logging.getLogger("aionn.driver")

IDLE_S = 300.0
"""How long a shared driver keeps an executable that no app holds. A setting of the service that owns the driver."""

MOST_BYTES = 4 << 30
"""So many bytes of weights may be here before a shared driver frees executables that no app holds."""

MOST_IDLE = 64
"""So many executables that no app holds stay in a shared driver. A model without weights takes memory, too, and each preparation looks at
all that are here."""

MOST_IDLE_THREADS = 512
"""So many threads that apps have asked for may belong to executables that no app holds. Threads are bounded for the whole machine."""

_SEALED_BYTES = 16 << 20
"""A model without a token whose sealed constants are larger is not recognised: the loop would take too long to digest them."""


class Quotas(NamedTuple):
    """How much of a shared driver one process may use, with all of its clients together. The units are in the names."""

    prepared_models: int = 32
    weights_bytes: int = 2 << 30
    engine_threads: int = 512
    mapped_bytes: int = 512 << 20
    mapped_memories: int = 4096
    buffers: int = 1024
    buffer_bytes: int = 256 << 20
    bursts: int = 64
    clients: int = 64
    requests_in_flight: int = 256
    messages_per_second: int = 1000


QUOTAS = Quotas()


class CompiledIdentity(msgspec.Struct, frozen=True):
    """What was compiled, and how.

    Attributes:
        base: the model's token, or the digest of its graph and of its sealed constants. Of a model from cache files that apps share:
            the record of these files.
        contents: the digest of the constants that may change; empty where they are what the token names.
        options: without the deadline.
        key_id: of the builder's key that signed it, or empty. So what was adopted serves no preparation that does not trust the key.
    """

    base: bytes
    contents: bytes
    options: PrepareOptions
    key_id: bytes = b""

    @property
    def key(self) -> int:
        """The first 8 bytes of the digest of what was compiled, whatever the options are. Pages and quarantine name a model by it."""
        return int.from_bytes(blake3(self.base + self.contents).digest()[:8], "big")


def _base_of(model: PooledModel) -> bytes:
    """Return what names a model, or nothing if a second preparation of it cannot be recognised.

    Constants in memory that the app may write to are used in place, so they may differ at each preparation. Sealed constants are named
    by the token alone.
    """
    used = {constant.location.pool_index for constant in model.constants}
    pools = [pool for index, pool in enumerate(model.pools) if index in used]
    if any(may_change(pool) and pool.description.kind is not MemoryKind.MMAP_FD for pool in pools):
        return b""
    if model.token:
        return model.token
    if not model.graph:
        return b""  # the bytes of a model of another format do not say which border was declared for them
    sealed = [constant for constant in model.constants if not may_change(model.pools[constant.location.pool_index])]
    if sum(constant.location.length for constant in sealed) > _SEALED_BYTES:
        return b""
    digest = blake3(model.graph)  # which says where each constant lies
    for constant in sealed:
        place = constant.location
        digest.update(model.pools[place.pool_index].view()[place.offset : place.offset + place.length])
    return digest.digest()


def digested(model: PooledModel) -> tuple[PooledModel, bytes]:
    """Return a model of an app that is not trusted, and the digest of all that an engine reads of it but the constants that may change.

    A pool is copied if it is called sealed and its app may still write to it. Blocks.
    """
    from aionn.graph.unchanged import PrivateMemory  # only drivers that apps share need it

    def fixed(pool: IMemory) -> IMemory:
        if may_change(pool) or fcntl.fcntl(pool.fileno(), fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            return pool
        copy = private_memory(pool.size_bytes)
        copy[:] = pool.view()
        return PrivateMemory(copy)

    own = PooledModel(
        graph=model.graph,
        inputs=model.inputs,
        outputs=model.outputs,
        operations=model.operations,
        constants=model.constants,
        pools=tuple(map(fixed, model.pools)),
        token=model.token,
        _contents=known_contents(model),
    )
    facts = own.operations, own.constants, as_messages(own.inputs), as_messages(own.outputs), [may_change(pool) for pool in own.pools]
    whole = blake3(digest_of(own.graph) + digest_of(msgspec.msgpack.encode(facts)))
    for constant in own.constants:
        place, pool = constant.location, own.pools[constant.location.pool_index]
        if not may_change(pool):
            whole.update(digest_of(pool.view()[place.offset : place.offset + place.length]))
    return own, whole.digest()


def identity_of(model: PooledModel, contents: bytes, options: PrepareOptions, base: bytes = b"") -> CompiledIdentity | None:
    """Return the identity of a model whose constants that may change have these contents, or None if it cannot be recognised.

    `base`: of `digested`, in a driver that apps share.
    """
    if base:
        return CompiledIdentity(base, contents, _shaping(options))
    base = _base_of(model)
    if not base:
        return None
    told = bool(model.token) and contents == known_contents(model)
    return CompiledIdentity(base, b"" if told else contents, _shaping(options))


class Shared:
    """An executable that others are made of. Every prepared model that uses it keeps this object alive.

    Attributes:
        loaded: the executable with the description and the digests of its cache files, if it comes from a cache.
        rows: what was found out about the model's rows, if that was asked for.
        key: of its identity, in a driver that apps share, or 0. label: a short name. size_bytes: of its weights or its cache files.
        holders: how many prepared models use it. executions: how many those have finished that have been released.
        idle_since: when the last of them was released, in seconds of the loop's clock.
    """

    def __init__(self, executable: Executable, loaded: Loaded | None = None, key: int = 0, label: str = "", size_bytes: int = 0) -> None:
        self.executable = executable
        self.key, self.label, self.size_bytes = key, label, size_bytes
        self.holders = self.executions = 0
        self.idle_since = 0.0
        self.loaded = loaded
        self.rows: RowAxes | None = None if loaded is None else loaded.description.rows

    def executables(self, count: int) -> Sequence[Executable]:
        """Return `count` more executables over the same weights. Blocks, and passes on what the engine raises."""
        return tuple(self.executable.share() for _ in range(count))  # type: ignore[attr-defined]


class Sharing:
    """The executables of one device that can be shared, for as long as a prepared model uses them.

    With `by_contents`, apps that do not trust each other use the device. It believes no token, and compiles equal models of theirs once.
    An executable then stays for a while after its last prepared model (`IDLE_S`). Those that have been idle for longest go first if all
    of them have more than `MOST_BYTES`, or if there are more than `MOST_IDLE`, or with more than `MOST_IDLE_THREADS`.

    Attributes:
        quarantined: when models may be prepared again, in CLOCK_MONOTONIC, by key.
    """

    def __init__(
        self, by_contents: bool = False, show: Callable[[int], None] = lambda _: None, freed: Callable[[], None] = lambda: None
    ) -> None:
        """Make an empty table.

        Args:
            show: called with the key of a model before an engine compiles or loads it.
            freed: called when an idle executable has gone.
        """
        self.by_contents = by_contents
        self.quarantined: Mapping[int, int] = {}
        self._show, self._freed = show, freed
        self._idle: dict[Shared, asyncio.TimerHandle] = {}  # the one that has been idle for longest first
        self._live: weakref.WeakValueDictionary[CompiledIdentity, Shared] = weakref.WeakValueDictionary()
        self._flights: weakref.WeakValueDictionary[CompiledIdentity, asyncio.Lock] = weakref.WeakValueDictionary()

    async def flight(self, identity: CompiledIdentity, deadline_ns: int | None) -> asyncio.Lock:
        """Wait until no other preparation of that identity compiles, and take its place. The caller releases what is returned.

        Raises:
            DeadlineError: another one still compiles at the deadline.
        """
        flight = self._flights.setdefault(identity, asyncio.Lock())
        try:
            async with asyncio.timeout(seconds_until(deadline_ns)):
                await flight.acquire()
        except TimeoutError:
            why = "the device had not compiled the same model for another app by the deadline"
            raise DeadlineError(why, transient=True) from None
        return flight

    def find(self, identity: CompiledIdentity | None) -> Shared | None:
        """Return the executable of that identity, or None."""
        return None if identity is None else self._live.get(identity)

    def may_have(self, model: PooledModel, options: PrepareOptions) -> bool:
        """Return whether an executable of this model and these options may be here. Its contents tell."""
        shaping = _shaping(options)
        bases = {known.base for known in list(self._live.keys()) if known.options == shaping}
        return bool(bases) and _base_of(model) in bases  # a first compilation digests nothing

    def loaded(self, options: PrepareOptions) -> dict[bytes, Loaded]:
        """Return what has been loaded with these options, by the digests of its files."""
        shaping = _shaping(options)
        live = [shared for known, shared in list(self._live.items()) if known.options == shaping]
        return {shared.loaded.digests: shared.loaded for shared in live if shared.loaded is not None}

    def offer(self, identity: CompiledIdentity | None, shared: Shared) -> None:
        """Offer an executable to later preparations, if its engine can share it."""
        if identity is not None and hasattr(shared.executable, "share"):
            self._live.setdefault(identity, shared)
            self._make_room()

    def hold(self, shared: Shared) -> None:
        """Note that a prepared model uses an executable."""
        shared.holders += 1
        if (timer := self._idle.pop(shared, None)) is not None:
            timer.cancel()

    def release(self, shared: Shared, executions: int) -> None:
        """Note that a prepared model with so many finished executions uses an executable no more."""
        shared.holders -= 1
        shared.executions += executions
        if self.by_contents and not shared.holders and shared in self.all():
            loop = asyncio.get_running_loop()
            shared.idle_since = loop.time()
            self._idle[shared] = loop.call_later(IDLE_S, self._evict_one, shared)
            self._make_room()

    def all(self) -> list[Shared]:
        """Return every executable that is here."""
        return list(dict.fromkeys(self._live.values()))

    def evict(self, key: str = "") -> int:
        """Free the idle executables with that key in 16 hexadecimal digits, or all of them. Returns how many there were."""
        chosen = [shared for shared in self._idle if key in ("", f"{shared.key:016x}")]
        for shared in chosen:
            self._evict_one(shared)
        return len(chosen)

    def _evict_one(self, shared: Shared) -> None:
        self._idle.pop(shared).cancel()
        self._freed()

    def _make_room(self) -> None:
        total = sum(shared.size_bytes for shared in self.all())
        asked = [(shared, identity.options) for identity, shared in list(self._live.items())]
        threads = {shared: options.threads * (options.instances or 1) for shared, options in asked}
        for shared in list(self._idle):
            if total <= MOST_BYTES and len(self._idle) <= MOST_IDLE and sum(map(threads.__getitem__, self._idle)) <= MOST_IDLE_THREADS:
                return
            self._evict_one(shared)
            total -= shared.size_bytes

    def check_allowed(self, key: int) -> None:
        """Check that an engine may prepare the model with that key, and show the key. Any thread may call this.

        Raises:
            ModelQuarantinedError: it is in quarantine.
        """
        left_s = (self.quarantined.get(key, 0) - time.monotonic_ns()) / 1e9
        if left_s > 0:
            raise ModelQuarantinedError(
                f"the model has ended its driver several times, so the service does not prepare it for another {left_s:.0f} s; use another "
                "model or device, or try again later",
                until_s=left_s,
            )
        self._show(key)

    def check_files(self, digests: bytes) -> None:
        """As `check_allowed`, for the model of cache files with this record, if apps share the device."""
        if self.by_contents:
            self.check_allowed(CompiledIdentity(digests, b"", PrepareOptions()).key)


def identity_of_stored(loaded: Loaded, options: PrepareOptions, by_contents: bool = False) -> CompiledIdentity | None:
    """Return the identity of a model from verified cache files. `by_contents`: by their bytes, and not by the token in them."""
    token = loaded.digests if by_contents else loaded.description.model_token
    return CompiledIdentity(token, b"", _shaping(options), loaded.key_id) if token else None


def _shaping(options: PrepareOptions) -> PrepareOptions:
    return msgspec.structs.replace(options, deadline_ns=None)


def own_instances(executable: Executable, options: PrepareOptions) -> int:
    """Return how many executables serve many callers best, as the engine says, within the app's bound for threads."""
    wanted: int = getattr(executable, "best_instances", 1) if hasattr(executable, "lanes") else 1
    return max(1, min(wanted, options.threads) if options.at_most and options.threads else wanted)


def instances_of(device: str, executable: Executable, count: int) -> Sequence[Executable]:
    """Return `count` executables that may run beside each other. Blocks, and passes on what the engine raises.

    Raises:
        CompilationError: the engine cannot run the model in so many instances. The reason is `NO_LANES` if it offers no lanes.
    """
    lanes = getattr(executable, "lanes", None)
    if lanes is None:
        why = f"cannot run {count} instances of a model, because {NO_LANES}; compile the model with instances=1"
        raise CompilationError(f"device {device!r} {why}", reason=NO_LANES)
    made = tuple(lanes(count))
    if len(made) != count:
        raise CompilationError(f"device {device!r} made {len(made)} lanes, but {count} were asked for; the fault lies in its engine")
    return made


class SharedModel:
    """A prepared model, held by one client or more. `aclose` gives up one hold. `size`: bytes of its weights, and its threads."""

    def __init__(self, prepared: IPreparedModel, size: tuple[int, int]) -> None:
        self.prepared = prepared
        self.size = size
        self._holds = 1

    def hold(self) -> SharedModel:
        self._holds += 1
        return self

    async def aclose(self) -> None:
        self._holds -= 1
        if not self._holds:
            await self.prepared.aclose()


class ClientTables:
    """What one client has made in the driver, by the numbers that the client names. `brought_by`: those of the client that brought it."""

    def __init__(self, brought_by: ClientTables | None = None, guest: int = 0) -> None:
        self.app: int = guest or (0 if brought_by is None else brought_by.app)  # 0 for the owner
        self._brought_by = None if guest else brought_by
        self.of_all: set[ClientTables] = set() if brought_by is None else brought_by.of_all
        self.preparing: dict[object, tuple[int, int]] = {}  # the size of each, by call
        self.mapped: dict[object, int] = {}  # bytes, by region
        self.in_flight = 0
        self.prepared: dict[int, SharedModel] = {}
        self.bursts: dict[int, IBurstContext] = {}
        self.listeners: dict[int, Listener] = {}
        self.buffers: dict[int, IBuffer] = {}

    def model(self, number: int) -> IPreparedModel:
        return known(self.prepared, number, "prepared model").prepared

    def buffer(self, token: int) -> IBuffer:
        return known(self.buffers, token, "device buffer")

    def may_use(self, token: int) -> bool:
        """Return whether executions of this client may use that buffer."""
        return token in self.buffers or (self._brought_by is not None and token in self._brought_by.buffers)

    def used(self) -> Quotas:
        """Return what the app of this client uses now, in any thread. Only `check_quota` knows the rate of messages."""
        own = [tables for tables in list(self.of_all) if tables.app == self.app]  # the loop changes all of it meanwhile
        models = {id(model): model for tables in own for model in list(tables.prepared.values())}.values()
        sizes = [model.size for model in models] + [size for tables in own for size in list(tables.preparing.values())]
        return Quotas(
            prepared_models=len(sizes),
            weights_bytes=sum(weights_bytes for weights_bytes, _ in sizes),
            engine_threads=sum(threads for _, threads in sizes),
            mapped_bytes=sum(size for tables in own for size in list(tables.mapped.values())),
            mapped_memories=sum(len(tables.mapped) for tables in own),
            buffers=sum(len(tables.buffers) for tables in own),
            buffer_bytes=sum(getattr(buffer, "size_bytes", 0) for tables in own for buffer in list(tables.buffers.values())),
            bursts=sum(len(tables.bursts) for tables in own),
            clients=len(own),
            requests_in_flight=sum(tables.in_flight for tables in own),
        )

    def check_quota(self, **more: int) -> None:
        """Check that the app may use so much more of fields of `Quotas`. The owner of the driver has no quota.

        Raises:
            QuotaError: it would be over its quota.
        """
        if self.app == 0:
            return
        used = self.used()
        for what, count in more.items():
            now, limit, name = getattr(used, what), getattr(QUOTAS, what), what.replace("_", " ")
            if now + count > limit:
                raise QuotaError(
                    f"this app would use {now + count} {name} of a shared driver, but one app may use {limit}; release some first, or "
                    "give this app its own driver with Runtime(service='off')",
                    status=ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
                    what=name,
                    limit=limit,
                    used=now,
                )

    def model_of(self, received: Received, message: ModelMessage) -> PooledModel:
        """Return the client's model, whose pools are mapped only within the quota."""
        self.check_quota(weights_bytes=sum(lent.description.size_bytes for lent in message.pools))
        return received.model(message)

    async def keep_buffer(self, buffer: IBuffer) -> int:
        """Keep a buffer for the client, within its quota. Returns the buffer's token."""
        try:
            self.check_quota(buffers=1, buffer_bytes=getattr(buffer, "size_bytes", 0))
        except QuotaError:
            await buffer.aclose()
            raise
        if self.app and hasattr(buffer, "bound"):  # where its extents are open, it grows in the engine's threads
            buffer.bound(lambda more: self.check_quota(buffer_bytes=more))
        self.buffers[buffer.token] = buffer
        return buffer.token

    def note_mapped(self, region: Region) -> None:
        """Count a region for the app until it is closed."""
        if self.app:
            self.mapped[id(region)] = region.size_bytes
            region.when_closed(partial(_remove, self.mapped, id(region)))

    async def aclose(self) -> None:
        """Free everything. Until then it counts for the app's quotas."""
        try:
            for table in (self.bursts, self.buffers, self.prepared):
                while table:
                    try:
                        await table.popitem()[1].aclose()
                    except Exception:
                        logger.exception("something of a client could not be freed")
        finally:
            self.of_all.discard(self)


def _remove(table: dict[object, int], key: object) -> None:
    table.pop(key, None)


def known(table: Mapping[int, T], number: int, what: str) -> T:
    """Return the entry of a client's table with that number.

    Args:
        what: the kind of entry, for the error.

    Raises:
        CallerError: the table has no such entry.
    """
    try:
        return table[number]
    except KeyError:
        raise CallerError(f"{what} {number} does not exist in this driver process, or has been released; use one that is open") from None
