"""What tests of replicas in Ray Serve share: an application whose drivers carry a mark, and its end."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from tests.leaks import ended, processes_with

MARK = "AIONN_TEST_MARK"


class Application:
    """An application of Serve. `delete` must follow.

    Attributes:
        name: of the application. mark: in the environment of all its drivers, as MARK.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"app-{uuid.uuid4().hex[:8]}"
        self.mark = uuid.uuid4().hex
        self.folder = folder

    async def launch(self, bound: Any) -> Any:
        """Run a bound deployment as this application, and return its handle once it is ready."""
        from ray import serve

        return await anyio.to_thread.run_sync(partial(serve.run, bound, name=self.name, route_prefix=None))

    async def delete(self) -> None:
        """Delete the application. None of its drivers may be left."""
        from ray import serve

        await anyio.to_thread.run_sync(serve.delete, self.name)
        with anyio.move_on_after(30) as limit:  # a replica that has begun late ends a moment after the deletion
            while left := processes_with(MARK, self.mark):
                await ended(int(left[0].split()[1].rstrip(":")), 30)
        assert not limit.cancelled_caught, left
