"""What a device stores of a compilation and loads again, verified: the engine's artifact and a description of the model.

The description (operands, digest of the model) lets a device prepare a model that it was not sent. It stands at the end of the
first file, so a device asks for exactly the files that its engine asks for.

    first file    the engine's bytes, description (MessagePack), length of the description u64 little-endian

Everything goes through `caching.integrity`, which writes the digests before the files. An engine only ever gets verified bytes.
Saving never fails a compilation. It ends with a word for the client: "saved", "declined" or a reason.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.private_folder import RecordsFolder
from aionn.driver.engine_errors import report_bug, way_out
from aionn.driver.received import LentDescriptors
from aionn.errors import AionnError, CallerError, CompilationError, text_of
from aionn.hal.batching import RowAxes
from aionn.hal.engine import Artifact, CompileOptions, Engine, Executable
from aionn.hal.interfaces import CacheHandles
from aionn.hal.model import PooledModel
from aionn.hal.types import CacheFiles, Operand
from aionn.hal.values import Border, as_messages

if TYPE_CHECKING:
    from aionn.caching.integrity import IntegrityStore

T = TypeVar("T")
Operands = Mapping[str, Operand]

FORMAT = 2
_LENGTH = struct.Struct("<Q")


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The operands of the stored model, in order, and its token. `rows`: what is known of its rows, if that was asked for."""

    format: int
    model_token: bytes
    inputs: tuple[tuple[str, Border], ...]
    outputs: tuple[tuple[str, Border], ...]
    rows: RowAxes | None = None


class Loaded(msgspec.Struct, frozen=True):
    """An executable that was made of verified cache files.

    Attributes:
        digests: lengths and digests of the files, as `caching.integrity.Verified` has them.
        key_id: of the builder's key that signed them, or empty for what this driver has stored.
        outcome: "saved" if files with these digests are believed from now on, or why not. Empty where that is not the question.
    """

    executable: Executable
    description: Description
    digests: bytes
    key_id: bytes = b""
    outcome: str = ""

    @property
    def label(self) -> str:
        """A short name of the model, which its app has given."""
        return self.description.model_token.hex()[:16]

    @property
    def size_bytes(self) -> int:
        """The bytes of the files."""
        from aionn.caching.artifact_files import lengths_of  # a load has imported it

        return sum(lengths_of(self.digests))


class LentHandles:
    """Duplicates of a client's cache files for one blocking act; see `lent`. The integrity store refuses a file that is not open."""

    def __init__(self, handles: CacheHandles) -> None:
        self._models, self._given = len(handles.model), handles
        self._lent = LentDescriptors((*handles.model, *handles.data))

    def during(self, act: Callable[[CacheHandles], T]) -> T:
        """Run `act` with the duplicates.

        Raises:
            CallerError: the duplicates have been given up.
        """
        models = self._models
        return self._lent.during(lambda fds: act(msgspec.structs.replace(self._given, model=tuple(fds[:models]), data=tuple(fds[models:]))))

    def release(self) -> None:
        """Prevent the act from beginning. An act that has begun goes on, and its end closes the duplicates."""
        self._lent.release()


class Artifacts:
    """Stores and loads one engine's artifacts. Every method blocks, so call it in a thread. Several may run at once."""

    def __init__(self, engine: Engine, state_directory: str | os.PathLike[str] | RecordsFolder | None = None, known_as: str = "") -> None:
        """`known_as`: the name by which the app knows the device, if it is not the engine's."""
        self._engine = engine
        self._state_directory = state_directory
        self._known_as = known_as or engine.name
        self.files: CacheFiles = engine.cache_files
        self._lock = threading.Lock()
        self._store: IntegrityStore | None = None
        self._closed = False

    def _integrity(self) -> IntegrityStore | Refusal:
        # Opened at the first use, so a driver that never caches touches no state directory.
        with self._lock:
            if self._closed:  # an engine may finish an export long after its caller has left
                return Refusal(MissReason.IO_ERROR, "the device is closed")
            if self._store is None:
                from aionn.caching.integrity import IntegrityStore  # brings a database and locks, which only caching needs

                name, version, state_directory = self._engine.name, self._engine.version, self._state_directory
                self._store = IntegrityStore(name, version, self.files, state_directory=state_directory, known_as=self._known_as)
            return self._store

    def save(
        self,
        executable: Executable,
        model: PooledModel,
        handles: CacheHandles,
        rows: RowAxes | None = None,
        stored: Callable[[Loaded], object] = lambda _: None,
    ) -> str:
        """Store a compiled model. Return "saved", "declined", or the reason why the model was not stored.

        `stored` is called with what a load of the stored files would return.
        Errors of the engine and of the file system are reasons, and are never raised.
        """
        if not self.files.supported:
            return str(Refusal(MissReason.WRONG_FILES, "this device does not cache"))
        if refusal := self._wrong_number(handles):
            return str(refusal)  # before the engine exports anything for it
        try:
            artifact = self._engine.export(executable)
        except Exception as error:  # an engine that cannot export has compiled all the same
            report_bug(error, self._engine.name, "export")
            why = f"{type(error).__name__}: {text_of(error)}{way_out(error)}"
            return str(Refusal(MissReason.IO_ERROR, f"the engine's export failed ({why})"))
        if artifact is None:
            return "declined"
        description = Description(FORMAT, model.token, as_messages(model.inputs), as_messages(model.outputs), rows)
        return self.store(artifact, handles, description, lambda digests: stored(Loaded(executable, description, digests)))

    def store_again(
        self, artifact: Artifact, handles: CacheHandles, token: bytes, inputs: Operands, outputs: Operands, rows: RowAxes | None
    ) -> str:
        """Store a better artifact of a prepared model. Return "saved", or the reason why it was not stored."""
        if refusal := self._wrong_number(handles):
            return str(refusal)
        return self.store(artifact, handles, Description(FORMAT, token, as_messages(inputs), as_messages(outputs), rows))

    def store(
        self, artifact: Artifact, handles: CacheHandles, description: Description, stored: Callable[[bytes], object] | None = None
    ) -> str:
        """Store an artifact with that description at its end. Return "saved", or the reason why it was not stored."""
        store, encoded = self._integrity(), msgspec.msgpack.encode(description)
        trailer = encoded + _LENGTH.pack(len(encoded))
        refusal = store if isinstance(store, Refusal) else store.save(handles, artifact, trailer, stored)
        return "saved" if refusal is None else str(refusal)

    def load(
        self,
        handles: CacheHandles,
        options: CompileOptions,
        known: Mapping[bytes, Loaded] = MappingProxyType({}),
        check: Callable[[bytes], None] = lambda _: None,
    ) -> Loaded:
        """Verify and load. The files are verified also where their executable is known.

        Args:
            known: what has been loaded with the same options, by `Loaded.digests`. If the files are one of these, that one is returned,
                and the engine loads nothing.
            check: called with the digests before the engine loads the files. It may raise.

        Raises:
            CallerError: the number of files is not the one that the device asks for.
            CompilationError: the files cannot be used for any other reason. `.reason` begins with the `MissReason`.
        """
        if not self.files.supported:
            raise _refused(Refusal(MissReason.WRONG_FILES, f"device {self._engine.name!r} does not cache"))
        if refusal := self._wrong_number(handles):
            raise CallerError(refusal.detail)
        store = self._integrity()
        verified = store if isinstance(store, Refusal) else store.verify(handles, known)
        if isinstance(verified, Refusal):
            raise _refused(verified)
        check(verified.digests)
        if verified.artifact is None:
            return known[verified.digests]
        try:
            artifact, description = _without_description(verified.artifact)
        except Exception as error:
            raise self._not_loaded(error) from error
        return Loaded(self._load(artifact, options), description, verified.digests, verified.key_id)

    def adopt(
        self,
        handles: CacheHandles,
        options: CompileOptions,
        model_digest: bytes,
        signed: bytes,
        check: Callable[[bytes], None] = lambda _: None,
    ) -> Loaded:
        """Verify and load what another machine has compiled, and record it as adopted. No file is written to.

        An artifact that cannot be recorded is loaded all the same: `Loaded.outcome` says why.

        Args:
            handles: descriptors that are open for reading, the entry's key as the token, and the keyring.
            model_digest: of the model that the client wants.
            signed: the signed statement.
            check: as for `load`.

        Raises:
            CompilationError: the files cannot be used. `.reason` begins with the `MissReason`.
        """
        from aionn.caching.adopting import Expected, verify_offer  # few drivers adopt
        from aionn.caching.token import device_token

        if not self.files.supported:
            raise _refused(Refusal(MissReason.WRONG_FILES, f"device {self._engine.name!r} does not cache"))
        expected = Expected(handles.token, model_digest, self._known_as, self._engine.version, self.files)
        offer = verify_offer(signed, handles, expected, time.time())
        if isinstance(offer, Refusal):
            raise _refused(offer)
        try:
            artifact, description = _without_description(offer.artifact)
        except Exception as error:
            raise _refused(Refusal(MissReason.UNREADABLE, text_of(error))) from error
        if description.model_token != model_digest:
            raise _refused(Refusal(MissReason.OTHER_MODEL, f"the artifact is that of model {description.model_token.hex()[:16]}"))
        check(offer.digests)
        executable, key_id = self._load(artifact, options), offer.statement.key_id
        token, store = device_token(handles.token, model_digest), self._integrity()
        refusal = store if isinstance(store, Refusal) else store.note_adopted(token, offer.digests, key_id)
        return Loaded(executable, description, offer.digests, key_id, "saved" if refusal is None else str(refusal))

    def _load(self, artifact: Artifact, options: CompileOptions) -> Executable:
        try:
            return self._engine.load(artifact, options)
        except Exception as error:
            raise self._not_loaded(error) from error

    def _not_loaded(self, error: Exception) -> AionnError:
        """Return the error of a load. The bytes are verified, so the fault lies in the engine."""
        report_bug(error, self._engine.name, "load")
        why = error.reason if isinstance(error, CompilationError) else f"{type(error).__name__}: {text_of(error)}{way_out(error)}"
        return _refused(Refusal(MissReason.REFUSED_BY_DEVICE, why))

    def _wrong_number(self, handles: CacheHandles) -> Refusal | None:
        given = CacheFiles(len(handles.model), len(handles.data))
        if given == self.files:
            return None
        return Refusal(
            MissReason.WRONG_FILES,
            f"{given.model} model and {given.data} data cache files were given, but device {self._engine.name!r} asks for "
            f"{self.files.model} and {self.files.data}",
        )

    def note_uses(self) -> None:
        """Do what `load` has left for the time after its caller has the answer."""
        with self._lock:
            store = self._store
        if store is not None:
            store.note_uses()

    def close(self) -> None:
        """Close the store. Later saves and loads are refused."""
        with self._lock:
            self._closed = True
            if self._store is not None:
                self._store.close()
                self._store = None


def _without_description(stored: Artifact) -> tuple[Artifact, Description]:
    """Split the first file without copying it.

    Raises:
        ValueError, msgspec.MsgspecError: the file has no description of this format.
    """
    files = [*stored.model, *stored.data]
    first = memoryview(files[0])
    if len(first) < _LENGTH.size:
        raise ValueError("the first cache file has no description")
    end = len(first) - _LENGTH.size
    (length,) = _LENGTH.unpack_from(first, end)
    if length > end:
        raise ValueError(f"the first cache file announces a description of {length} bytes, but has only {end} bytes for it")
    description = msgspec.msgpack.decode(first[end - length : end], type=Description)
    if description.format != FORMAT:
        raise ValueError(f"the first cache file has a description of format {description.format}, but this release reads {FORMAT}")
    files[0] = first[: end - length]
    return Artifact(tuple(files[: len(stored.model)]), tuple(files[len(stored.model) :])), description


def _refused(refusal: Refusal) -> AionnError:
    return CompilationError(f"the cached compilation cannot be used: {refusal}", reason=str(refusal))
