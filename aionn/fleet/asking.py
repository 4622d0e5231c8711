"""`StoreBackend`: an artifact store that is asked for an artifact before a model is compiled (`CompileBackend`).

A store that is down costs one compile `patience_s` seconds. After that failure, the store is not asked for 30 seconds, and each kind of
failure is one WARNING in the log (`Pauses`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial

import anyio

from aionn.caching.keyring import read_keyring
from aionn.caching.manifest import StoredFile
from aionn.caching.offers import ArtifactRequest, Offered
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.statement import Statement
from aionn.fleet.artifact_store import ArtifactStore, statement_at
from aionn.fleet.folders import open_below
from aionn.fleet.places import StatementPlace, file_path, fingerprint
from aionn.fleet.requests import StoreError, open_address
from aionn.hal.trust import Keyring
from aionn.tasks import each, run_in_thread

PATIENCE_S = 2.0
_log = logging.getLogger("aionn.fleet")


class StoreBackend:
    """An artifact store as the backend of a runtime: what a trusted builder has compiled is fetched, and nothing is compiled.

    Only statements of the keys in the user's keyring are asked for. The driver checks what comes.

    Attributes:
        wait_s: how long a compile waits in all, in seconds. A store that does not answer is given up much earlier.
    """

    def __init__(self, address: str | os.PathLike[str], *, wait_s: float = 60.0, patience_s: float = PATIENCE_S) -> None:
        """Open a store.

        Args:
            address: a directory, `file:///path`, `s3://bucket/prefix`, or `memory://` for tests. Credentials, region and endpoint of a
                bucket come from the `AWS_*` variables.
            wait_s: as the attribute. Large artifacts on slow networks need more than the default.
            patience_s: seconds without an answer after which the store counts as down.

        Raises:
            CallerError: this kind of address is not supported.
            StoreError: there is no such directory, or the bucket's settings are wrong.
        """
        self.wait_s = wait_s
        self._store = ArtifactStore(open_address(address, patience_s=patience_s))
        self._pauses = Pauses(_log, "%s; models are compiled here meanwhile")

    async def compile(self, request: ArtifactRequest) -> Offered | None:
        """Return the artifact for a request, or None if the store has none or does not answer. The caller closes the artifact."""
        if self._pauses.paused("store"):
            return None
        found = await ask_store(self._store, request)
        if isinstance(found, Refusal):
            self._pauses.pause("store", "store", found.detail)
            return None
        return found


async def ask_store(store: ArtifactStore, request: ArtifactRequest) -> Offered | Refusal | None:
    """Return the artifact for a request, which the caller closes.

    Returns:
        None if the store has no artifact that a builder of the keyring has signed. A refusal if the store cannot be used, for the reason
        in its `detail`.
    """
    keyring = await anyio.to_thread.run_sync(read_keyring)
    of = fingerprint(request.device, request.device_version)
    try:
        found = await _first(store, [StatementPlace(request.key, of, key.id) for key in keyring.keys], keyring)
    except StoreError as error:
        return Refusal(MissReason.IO_ERROR, str(error))
    if found is None:
        return None
    artifact = await fetch_offer(store, *found)
    if isinstance(artifact, Refusal) and artifact.reason is not MissReason.IO_ERROR:
        _log.info("artifact %s is not taken: %s", request.key.hex()[:16], artifact)
        return None
    return artifact


async def _first(store: ArtifactStore, places: Sequence[StatementPlace], keyring: Keyring) -> tuple[bytes, Statement] | None:
    """Return the first statement that the store has and that a key of the keyring has signed, in the order of `places`."""
    found: dict[StatementPlace, bytes] = {}

    async def read(place: StatementPlace) -> None:
        signed = await store.statement(place)
        if signed is not None:
            found[place] = signed

    await each(partial(read, place) for place in places)
    for place in places:
        if place in found:
            statement = await anyio.to_thread.run_sync(statement_at, place, found[place], keyring)
            if isinstance(statement, Statement):
                return found[place], statement
            _log.info("a statement at %s is not taken: %s", place.path, statement)
    return None


async def fetch_offer(store: ArtifactStore, signed: bytes, statement: Statement) -> Offered | Refusal:
    """Fetch the files of a statement into memory, or open them where the store is a folder.

    A file of a folder is not read here. The driver reads it once, into a private copy, and compares that copy with the statement.

    Returns:
        The artifact, which the caller closes, or why it cannot be fetched, as `ArtifactStore.fetch`.
    """
    files: Sequence[StoredFile] = statement.files
    folder = store.requests.opened.folder
    fds: list[int] = []
    kept = False
    try:
        for file in files:
            if folder is None:
                fds.append(os.memfd_create("aionn-artifact", os.MFD_CLOEXEC))
            else:  # in a thread, because the folder may lie on a slow network
                fds.append(await run_in_thread(open_below, folder, file_path(file.digest), undo=os.close))
        refusal = None if folder is not None else await store.fetch(files, fds)
        if refusal is not None:
            return refusal
        kept = True
        return Offered(signed, fds[: len(statement.model)], fds[len(statement.model) :])
    except FileNotFoundError:
        return Refusal(MissReason.PARTIAL, f"artifact store {store.address} lacks a file of entry {statement.key.hex()[:16]}")
    except OSError as error:
        return refusal_of_os_error(error, f"artifact store {store.address}")
    finally:
        if not kept:
            for fd in fds:
                os.close(fd)


_PAUSE_S = 30.0
"""So long a service is left alone after a failure. Each compile in that time would wait for it in vain."""


class Pauses:
    """The failures of the services that a backend asks, such as an artifact store. In one event loop.

    Args:
        logger: for the failures. The first of each kind is a WARNING, and later ones are INFO.
        message: what is logged. It has one %s, which stands for the reason.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger, self._message = logger, message
        self._until: dict[str, float] = {}  # time.monotonic, by service
        self._warned: set[str] = set()

    def paused(self, *services: str) -> bool:
        """Return whether one of these services has failed within the last 30 seconds."""
        now = time.monotonic()
        return any(now < self._until.get(service, 0.0) for service in services)

    def pause(self, service: str, kind: str, why: str) -> None:
        """Note that a service has failed, and log it."""
        self._until[service] = time.monotonic() + _PAUSE_S
        self.log(kind, why)

    def log(self, kind: str, why: str) -> None:
        """Log a failure, after which the service may be asked again at once."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        self._logger.log(level, self._message, why)
