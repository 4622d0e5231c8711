"""What an engine may say of itself, and options: checked against what the engine takes, with private copies of the files they name.

The app opens such a file and sends its descriptor, because a confined driver opens no path of the app's. The file is copied into memory
that no other process can write to, and its digest is compared with the app's. The engine gets the path of that copy. So what an engine
loads is what the cache key names. Two versions of a library at one path are two files here, although the C library would take a path that
it has loaded before for the same library. A copy lives as long as this process, like a loaded library.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from blake3 import blake3

from aionn.driver.received import LentDescriptors
from aionn.errors import CallerError
from aionn.hal.engine import Engine, Executable
from aionn.hal.options import EngineOptions, OptionValue
from aionn.hal.types import Performance

T = TypeVar("T")

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

_PIECE_BYTES = 16 << 20

_WORDS: Mapping[type, str] = {str: "a text", int: "an integer", float: "a float", bool: "True or False", Path: "the path of a file"}


class OptionalFacts:
    """The facts that an engine may leave out (see `hal.Engine`).

    Attributes:
        providers, runs_on: as the engine says, or empty. performance: as it says, or that of a CPU.
    """

    def __init__(self, engine: Engine) -> None:
        self.providers: tuple[str, ...] = tuple(getattr(engine, "providers", ()))
        self.runs_on: str = getattr(engine, "runs_on", "")
        self.performance: Performance = getattr(engine, "performance", Performance())
        self._name = engine.name
        self._kinds: Mapping[str, type | tuple[type, ...]] = getattr(engine, "options", {})
        self._lock = threading.Lock()
        self._copies: dict[bytes, str] = {}

    def given(self, options: EngineOptions, fds: Mapping[str, int] = MappingProxyType({})) -> Mapping[str, OptionValue]:
        """Return options as the engine gets them. Blocks, and may be called in several threads.

        Args:
            fds: descriptors of the files that options name. A file without one is opened by its path, in a device that shares the
                process with its client.

        Raises:
            CallerError: the engine has no such option, or a value has another type; or a file was changed since the app asked.
        """
        for name, value in options.items():
            self._check(name, value, name in options.files)
        named = {name: digest for name, digest in options.files.items() if name in options}
        return {**options, **{name: self._copy(name, str(options[name]), digest, fds.get(name)) for name, digest in named.items()}}

    async def with_files(
        self,
        options: EngineOptions,
        run: Callable[[Callable[[], T]], Awaitable[T]],
        act: Callable[[Mapping[str, OptionValue]], T],
    ) -> T:
        """Let `run` run `act` in a thread, with options as the engine gets them. The thread has duplicates of the files that they name."""
        lent = LentDescriptors(file.fileno() for file in options.opened.values())

        def work(fds: Sequence[int]) -> T:
            return act(self.given(options, dict(zip(options.opened, fds, strict=True))))

        try:
            return await run(lambda: lent.during(work))
        finally:
            lent.release()

    def _check(self, name: str, value: OptionValue, is_file: bool) -> None:
        kinds = self._kinds.get(name) or self._kinds.get("*")
        if kinds is None:
            known = ", ".join(repr(known) for known in self._kinds)
            has = f"its options are {known}" if known else "it has none"
            raise CallerError(f"device {self._name!r} has no option {name!r}; {has}")
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if (Path if is_file else type(value)) not in kinds:
            wanted = " or ".join(_WORDS[kind] for kind in kinds)
            found = "the path of a file" if is_file else f"{value!r} ({type(value).__name__})"
            raise CallerError(f"option {name!r} of device {self._name!r} is {found}; it must be {wanted}")

    def _copy(self, name: str, path: str, digest: bytes, fd: int | None) -> str:
        with self._lock:
            copy = self._copies.get(digest)
            if copy is None:
                copy = self._copies[digest] = self._copied(name, path, digest, fd)
        return copy

    def _copied(self, name: str, path: str, digest: bytes, source: int | None) -> str:
        try:
            content = Path(path).read_bytes() if source is None else _content(source)
        except OSError as error:
            raise CallerError(f"option {name!r}: the file {path!r} cannot be read ({error.strerror}); compile the model again") from error
        if blake3(content).digest() != digest:
            raise CallerError(f"option {name!r}: the file {path!r} has changed since the model was compiled; compile the model again")
        fd = os.memfd_create("aionn-option", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(fd, "wb", closefd=False) as copy:
                copy.write(content)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return f"/proc/self/fd/{fd}"


def _content(fd: int) -> bytes:
    """Return what a file holds from its beginning. A pipe has no such place, so reading it is an error and waits for no writer."""
    pieces, offset = [], 0
    while piece := os.pread(fd, _PIECE_BYTES, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def runs_on(executable: Executable) -> str:
    """Return what computes an executable, if its engine says so."""
    found = getattr(executable, "runs_on", "")
    return found if isinstance(found, str) else ""
