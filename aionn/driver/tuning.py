"""`Tuning`: an engine that tunes while it runs offers a better artifact, which takes the place of the stored one.

The app asks when a burst has ended, and before it releases the model. It owns the cache, so it opens the entry's files under the entry's
lock only when there is an offer. An offer is kept until it is stored, or until a later one takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aionn.driver.artifacts import Artifacts, LentHandles
from aionn.driver.compiling import compilation_error
from aionn.driver.threads import Threads
from aionn.errors import CallerError
from aionn.hal.engine import Artifact, Executable
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import Operand


class Tuning:
    """The offers of one prepared model.

    Args:
        device: its name.
        executables: of the prepared model.
        description: the model's token, inputs and outputs, which are stored with an artifact.

    Attributes:
        possible: whether its engine may ever offer anything.
    """

    def __init__(
        self,
        device: str,
        executables: Sequence[Executable],
        threads: Threads,
        artifacts: Artifacts,
        description: tuple[bytes, Mapping[str, Operand], Mapping[str, Operand]],
    ) -> None:
        self._device = device
        self._ask: Callable[[], Any] | None = next(
            (executable.export_again for executable in executables if hasattr(executable, "export_again")), None
        )
        self.possible = self._ask is not None
        self._threads, self._artifacts, self._description = threads, artifacts, description
        self._offer: Artifact | None = None
        self._lock = threading.Lock()

    async def export_again(self, cache: CacheHandles | None) -> str:
        """Ask the engine for a better artifact, or store the one that it has offered.

        Args:
            cache: where to store the offer. None asks for one.

        Returns:
            "offered" or "" to a question; "saved", or the reason why nothing was stored.

        Raises:
            CallerError: there is no offer to store.
            CompilationError: the engine raised an error.
        """
        if cache is None:
            try:
                return "offered" if await self._threads.run(self._offered) else ""
            except Exception as error:  # an engine's own exception types end here
                raise compilation_error(self._device, error) from error
        offer, self._offer = self._offer, None
        if offer is None:
            raise CallerError("the prepared model has offered no artifact; ask for one first")
        lent = LentHandles(cache)
        try:
            return await self._threads.run(
                lambda: lent.during(lambda handles: self._artifacts.store_again(offer, handles, *self._description))
            )
        finally:
            lent.release()

    def _offered(self) -> bool:
        with self._lock:
            offer = None if self._ask is None else self._ask()
            self._offer = offer or self._offer
            return self._offer is not None
