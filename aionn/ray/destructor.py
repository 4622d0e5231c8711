"""The destructor of a `Holder`: Serve awaits it, and Python calls it when the object is collected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Protocol


class _ClosedOnce(Protocol):
    @property
    def closed(self) -> bool: ...

    async def aclose(self) -> None: ...


class Destructor:
    """`Holder.__del__`, which is `aclose` while the holder is open.

    Python calls `__del__` without awaiting it, and would warn of a coroutine. So the destructor of a closed holder makes no coroutine.
    """

    def __get__(self, holder: _ClosedOnce | None, owner: type[_ClosedOnce]) -> Callable[..., Awaitable[None]]:
        if holder is None:
            return owner.aclose
        return _nothing if holder.closed else holder.aclose


class _EndedAtOnce:
    def __await__(self) -> Generator[None, None, None]:
        yield from ()


def _nothing() -> _EndedAtOnce:
    return _EndedAtOnce()
