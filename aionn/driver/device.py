"""An `IDevice` over any `Engine`: compiling, executions and bursts, written once for all engines.

Blocking calls of the engine run in threads, and the loop only orders them. A cancelled or late preparation sets the engine's cancel
flag and is abandoned. Its thread ends when the engine returns.

A device hands a blob cache to its engine with every compilation, for parity with Android's driver cache. The cache is opened when the
engine first uses it. An engine that keeps nothing there costs its driver neither a database nor the import of one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from aionn import trace
from aionn.burst import ExecutionBurstServer
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.private_folder import RecordsFolder
from aionn.driver.artifacts import Artifacts, LentHandles, Loaded
from aionn.driver.compiling import Tuning, compilation_error, compiled_model
from aionn.driver.lanes import Turns
from aionn.driver.memories import EngineBuffer, constants_of
from aionn.driver.options import OptionalFacts, runs_on
from aionn.driver.prepared_model import EnginePreparedModel
from aionn.driver.received import weights_of
from aionn.driver.sharing import CompiledIdentity, Shared, Sharing, digested, identity_of, identity_of_stored, instances_of, own_instances
from aionn.driver.threads import Threads, trim_arenas
from aionn.errors import CompilationError, DeadlineError
from aionn.hal.batching import RowAxes
from aionn.hal.engine import CancelFlag, CompileOptions, Engine, Executable
from aionn.hal.interfaces import CacheHandles, IPreparedModel, PrepareOptions
from aionn.hal.model import PooledModel, label
from aionn.hal.options import NO_OPTIONS, EngineOptions, OptionValue
from aionn.hal.types import BufferDesc, BufferRole, CacheFiles, DeviceType
from aionn.hal.values import from_messages
from aionn.loopless import seconds_until
from aionn.memory.device_buffers import DeviceBuffers
from aionn.memory.region import give_back, reserve
from aionn.pages.page import DriverPage, Slot, private_slot
from aionn.tasks import Tasks

if TYPE_CHECKING:
    from aionn.caching.blob_cache import BlobCache


T = TypeVar("T")
_Load = Callable[[CacheHandles, CompileOptions], Loaded]
logger = logging.getLogger("aionn.driver")

_COMPILES_AT_ONCE = 4


class EngineDevice:
    """Offers one engine. Satisfies `IDevice`.

    Args:
        engine: made once for this process.
        tasks: where burst listeners run. They end with it.
        state_directory: the folder for digests and the blob cache. None means the user's state directory.
        page: the statistics page that shows what the device does, or None.
        known_as: the name by which the app knows the device, if it is not the engine's.
        shared: apps that do not trust each other use the device; see `sharing`.

    Attributes:
        page: the statistics page that shows what the device does, or None.
        sharing: the executables that prepared models share.
        turns: lets runs of high priority go first. Every prepared model of the process shares them.
        optional: the facts that the engine may leave out.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Tasks,
        state_directory: str | os.PathLike[str] | RecordsFolder | None = None,
        page: DriverPage | None = None,
        known_as: str = "",
        shared: bool = False,
    ) -> None:
        self._engine = engine
        self.page = page
        self._tasks = tasks
        self._threads = Threads(f"{engine.name} compilation", _COMPILES_AT_ONCE)
        self.behind = self._threads.behind  # runs what no answer waits for
        self._artifacts = Artifacts(engine, state_directory, known_as)
        self._blobs = DeviceBlobs(engine.name, engine.version, state_directory)
        self.buffers = DeviceBuffers(reserve)
        self.turns = Turns()
        self.sharing = Sharing(shared, (lambda _: None) if page is None else page.show_preparing, lambda: self.behind(trim_arenas))
        self.optional = OptionalFacts(engine)
        self.name = engine.name
        self.version = engine.version
        self.type: DeviceType = getattr(engine, "device_type", DeviceType.CPU)
        self.priority_matters: bool = getattr(engine, "priority_matters", False)

    async def get_supported_operations(self, model: PooledModel, *, options: EngineOptions = NO_OPTIONS) -> Sequence[bool]:
        supported = await self.optional.with_files(
            options, lambda act: self._threads.run(lambda: self._shown(act)), lambda given: self._judge(model, given)
        )
        self.behind(trim_arenas)
        found, wanted = len(supported), len(model.operations)
        if found != wanted:
            raise CompilationError(
                f"device {self.name!r} judged {found} operations, but the model has {wanted}; the fault lies in its engine"
            )
        return supported

    def _judge(self, model: PooledModel, options: Mapping[str, OptionValue]) -> tuple[bool, ...]:
        asked = (options,) if options else ()
        try:
            return tuple(bool(fits) for fits in self._engine.supported_operations(model, *asked))
        except Exception as error:  # an engine's own exception types end here
            raise compilation_error(self.name, error) from error

    async def get_number_of_cache_files_needed(self) -> CacheFiles:
        return self._artifacts.files

    async def prepare_model(self, model: PooledModel, options: PrepareOptions, cache: CacheHandles | None = None) -> EnginePreparedModel:
        flag = CancelFlag()
        lent = None if cache is None else LentHandles(cache)
        may_export = lent is not None and self._artifacts.files.supported
        outcome, base, flight, stored = "", b"", None, list[Loaded]()
        try:
            compile_options = msgspec.structs.replace(await self._compile_options(options, flag), may_export=may_export)
            if self.sharing.by_contents:
                model, base = await self._blocking(lambda: digested(model), flag, options.deadline_ns)
            identity, contents = (None, b"") if may_export and not base else await self._identified(model, options, flag, base)
            if self.sharing.by_contents and identity is not None:
                self.sharing.check_allowed(identity.key)
                flight = await self.sharing.flight(identity, options.deadline_ns)
                self.sharing.check_allowed(identity.key)  # once more, since others may have been compiled meanwhile
            shared = None if may_export else self.sharing.find(identity)
            if shared is not None:
                executables = await self._instances(shared, options, flag, again=True)
            else:
                with trace.span("driver.compile", device=self.name):
                    compiled = await self._blocking(
                        lambda: compiled_model(self._engine, model, compile_options, not base),
                        flag,
                        options.deadline_ns,
                    )
                outcome, contents = compiled.outcome, compiled.contents
                identity = identity_of(model, compiled.contents, options, base)
                fresh = Shared(compiled.executable, None, identity.key if base and identity else 0, label(model), weights_of(model))
                # Before it is stored, since the number of instances may be refused.
                shared, executables = await self._executables(identity, fresh, options, flag)
                if options.batching is not None and shared.rows is None:
                    from aionn.driver.joining.probing import probed  # most models join nothing

                    batching, first = options.batching, executables[0]
                    with trace.span("driver.probe_rows", device=self.name):
                        shared.rows = await self._blocking(lambda: probed(first, model, batching), flag, options.deadline_ns)
                if lent is not None and not outcome:
                    outcome = await self._save(compiled.executable, model, lent, flag, options.deadline_ns, shared.rows, stored)
                if self.sharing.by_contents and stored:
                    shared.loaded = shared.loaded or msgspec.structs.replace(stored[0], executable=shared.executable)
                    self.sharing.offer(identity_of_stored(stored[0], options, by_contents=True), shared)
                self.behind(trim_arenas)  # after a compile of 7 MB of weights, 9 MB were free in the arenas
        finally:
            if lent is not None:
                lent.release()
            if flight is not None:
                flight.release()
        prepared = EnginePreparedModel(self, executables, model.inputs, model.outputs, options, outcome, constants_of(model), shared)
        prepared.contents, prepared.runs_on = contents, runs_on(shared.executable)
        prepared.tuning = Tuning(
            self.name, executables, self._threads, self._artifacts, (model.token, model.inputs, model.outputs, shared.rows)
        )
        return prepared

    async def _identified(
        self, model: PooledModel, options: PrepareOptions, flag: CancelFlag, base: bytes
    ) -> tuple[CompiledIdentity | None, bytes]:
        """Return the identity of a model that may have been prepared before, and what its constants that may change are now."""
        if not base and not self.sharing.may_have(model, options):
            return None, b""
        from aionn.graph.unchanged import changeable_contents  # most models have no such constants

        contents = await self._blocking(lambda: changeable_contents(model), flag, options.deadline_ns)
        return identity_of(model, contents, options, base), contents

    async def _executables(
        self, identity: CompiledIdentity | None, fresh: Shared, options: PrepareOptions, flag: CancelFlag, again: bool = False
    ) -> tuple[Shared, Sequence[Executable]]:
        """Return executables of the same model that is here already, so that the fresh one goes, or else offer the fresh one to others."""
        known = self.sharing.find(identity)
        executables = await self._instances(known or fresh, options, flag, again=again or known is not None)
        if known is None:
            self.sharing.offer(identity, fresh)
        return known or fresh, executables

    async def _compile_options(self, options: PrepareOptions, flag: CancelFlag) -> CompileOptions:
        own, given = options.of(self.name), dict[str, OptionValue]()
        if own:
            given = await self.optional.with_files(
                own, lambda act: self._blocking(act, flag, options.deadline_ns), lambda given: dict(given)
            )
        return CompileOptions(
            options.preference,
            options.priority,
            options.threads,
            flag,
            blob_cache=self._blobs,
            at_most=options.at_most,
            instances=max(1, options.instances),
            options=given,
        )

    async def _instances(self, shared: Shared, options: PrepareOptions, flag: CancelFlag, again: bool = False) -> Sequence[Executable]:
        """Return an executable for each instance. `again`: others than the prepared models have that share it."""
        count = options.instances or (1 if options.batching is not None else own_instances(shared.executable, options))
        if count == 1 and not again:
            return (shared.executable,)
        try:
            return await self._blocking(
                lambda: shared.executables(count) if again else instances_of(self.name, shared.executable, count),
                flag,
                options.deadline_ns,
            )
        except Exception as error:  # an engine's own exception types end here
            raise compilation_error(self.name, error) from error

    async def _save(
        self,
        executable: Executable,
        model: PooledModel,
        lent: LentHandles,
        flag: CancelFlag,
        deadline_ns: int | None,
        rows: RowAxes | None,
        stored: list[Loaded],
    ) -> str:
        """Store the model, add it to `stored`, and return the outcome.

        Half of the remaining time is left to the client, which publishes the entry.
        """

        def save(handles: CacheHandles) -> str:
            return self._artifacts.save(executable, model, handles, rows, stored.append)

        now_ns = time.monotonic_ns()
        save_by_ns = None if deadline_ns is None else now_ns + max(0, deadline_ns - now_ns) // 2
        try:
            with trace.span("driver.save", device=self.name):
                return await self._blocking(lambda: lent.during(save), flag, save_by_ns)
        except DeadlineError:
            return str(Refusal(MissReason.TOO_SLOW, "storing the model took longer than the deadline allows"))

    async def prepare_model_from_cache(self, options: PrepareOptions, cache: CacheHandles) -> EnginePreparedModel:
        known, check = self.sharing.loaded(options), self.sharing.check_files
        return await self._from_files(options, cache, lambda handles, how: self._artifacts.load(handles, how, known, check), known)

    async def adopt(self, options: PrepareOptions, cache: CacheHandles, model_digest: bytes, signed: bytes) -> EnginePreparedModel:
        return await self._from_files(
            options, cache, lambda handles, how: self._artifacts.adopt(handles, how, model_digest, signed, self.sharing.check_files)
        )

    async def _from_files(
        self, options: PrepareOptions, cache: CacheHandles, load: _Load, known: Mapping[bytes, Loaded] = MappingProxyType({})
    ) -> EnginePreparedModel:
        """Prepare what `load` makes of the files. `known`: what it may return without loading, as for `Artifacts.load`."""
        flag = CancelFlag()
        lent = LentHandles(cache)
        try:
            compile_options = msgspec.structs.replace(await self._compile_options(options, flag), give_back=give_back)
            with trace.span("driver.load", device=self.name):
                loaded = await self._blocking(
                    lambda: lent.during(lambda handles: load(handles, compile_options)),
                    flag,
                    options.deadline_ns,
                    loading=True,
                )
            identity = identity_of_stored(loaded, options, self.sharing.by_contents)
            key = identity.key if identity is not None and self.sharing.by_contents else 0
            fresh = Shared(loaded.executable, loaded, key, loaded.label, loaded.size_bytes)
            shared, executables = await self._executables(identity, fresh, options, flag, again=loaded.digests in known)
        finally:
            lent.release()
        self._threads.behind(self._artifacts.note_uses)  # the answer does not wait for this work
        if shared.executable is not loaded.executable:
            self._threads.behind(trim_arenas)
        stored = loaded.description
        prepared = EnginePreparedModel(
            self,
            executables,
            from_messages(stored.inputs),
            from_messages(stored.outputs),
            options,
            loaded.outcome,
            shared=shared,
        )
        prepared.runs_on = runs_on(shared.executable)
        if not loaded.key_id:  # what is made of an adopted executable must not outlive the trust in its builder
            description = stored.model_token, prepared.inputs, prepared.outputs, stored.rows
            prepared.tuning = Tuning(self.name, executables, self._threads, self._artifacts, description)
        return prepared

    async def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[IPreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> EngineBuffer:
        models = [
            prepared.info if isinstance(prepared, EnginePreparedModel) and prepared.device is self else None for prepared in prepared_models
        ]
        return EngineBuffer(self.buffers, self.buffers.allocate(desc, models, input_roles, output_roles))

    def _shown(self, work: Callable[[], T], loading: bool = False) -> T:
        """Run an engine's blocking call in this thread, and show it on the page."""
        if self.page is None:
            return work()
        with self.page.loading() if loading else self.page.compiling():
            return work()

    async def _blocking(self, call: Callable[[], T], flag: CancelFlag, deadline_ns: int | None, *, loading: bool = False) -> T:
        """Run an engine's blocking call. When cancelled or late, set the engine's cancel flag and stop waiting."""

        def work() -> T:
            return self._shown(call, loading)

        try:
            # `limit` knows whether the deadline ended the call. A clock does not know, because a loop's timers may be a millisecond early.
            async with asyncio.timeout(seconds_until(deadline_ns)) as limit:
                return await self._threads.run(work)
        except BaseException as error:
            flag.set()
            if isinstance(error, TimeoutError) and limit.expired():  # else it is the engine's
                raise DeadlineError(f"device {self.name!r} had not prepared the model by the deadline", transient=True) from None
            raise

    def close(self) -> None:
        """Close the store of digests and the blob cache. Later preparations neither save nor load."""
        self.sharing.evict()
        self._artifacts.close()
        self._blobs.close()
        self._threads.close()

    def slot(self, model: int, key: int = 0) -> Slot:
        """Return a slot that shows the executions of one lane of a prepared model."""
        return private_slot() if self.page is None else self.page.slot(model, key)

    def free_slot(self, slot: Slot) -> None:
        """Take back a slot."""
        if self.page is not None:
            self.page.release(slot)

    def serve(self, server: ExecutionBurstServer, ended: Callable[[ExecutionBurstServer], None]) -> None:
        """Run a burst's listener, and call `ended` when it is over. An error of the listener ends that burst and nothing else."""
        self._tasks.start_soon(_listen, self.name, server, ended, name="burst listener")


async def _listen(name: str, server: ExecutionBurstServer, ended: Callable[[ExecutionBurstServer], None]) -> None:
    try:
        await server.serve()
    except Exception:
        logger.exception("a burst of device %r ended by an error of its listener", name)
    finally:
        ended(server)


class DeviceBlobs:
    """The blob cache of one version of one device. Satisfies `IBlobCache`."""

    def __init__(self, device: str, version: str, state_directory: str | os.PathLike[str] | RecordsFolder | None) -> None:
        self._device, self._version, self._state_directory = device, version, state_directory
        self._lock = threading.Lock()
        self._cache: BlobCache | None = None
        self._closed = False

    def _opened(self) -> BlobCache | None:
        with self._lock:
            if self._cache is None and not self._closed:
                from aionn.caching.blob_cache import BlobCache  # brings a database, which few engines need

                self._cache = BlobCache(device=self._device, version=self._version, state_directory=self._state_directory)
            return self._cache

    def get(self, key: bytes) -> bytes | None:
        """Return the value that was set under `key`, or None."""
        cache = self._opened()
        return None if cache is None else cache.get(key)

    def set(self, key: bytes, value: bytes) -> bool:
        """Keep `value` under `key`; return whether it is kept."""
        cache = self._opened()
        return cache is not None and cache.set(key, value)

    def delete(self, key: bytes) -> None:
        """Forget `key`, if it is there."""
        cache = self._opened()
        if cache is not None:
            cache.delete(key)

    def close(self) -> None:
        """Close the cache. Later reads find nothing and later writes keep nothing."""
        with self._lock:
            cache, self._cache, self._closed = self._cache, None, True
        if cache is not None:
            cache.close()
