"""`completed` runs a coroutine in a thread without a loop."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from aionn.fmq import completed


class Yields:
    """An awaitable that yields given values, then has a result."""

    def __init__(self, *values: object) -> None:
        self._values = values

    def __await__(self) -> Generator[Any, None, str]:
        yield from self._values
        return "result"


@pytest.mark.parametrize("yields", [(), (None,), (None, None, None)])
def test_a_coroutine_goes_on_after_bare_yields_and_returns_its_result(yields: tuple[object, ...]) -> None:
    async def work() -> str:
        return await Yields(*yields)

    assert completed(work()) == "result"


@pytest.mark.parametrize("error", [KeyError("of the work"), StopAsyncIteration(), KeyboardInterrupt()])
def test_an_error_of_the_coroutine_is_raised(error: BaseException) -> None:
    async def work() -> None:
        await Yields(None)
        raise error

    with pytest.raises(type(error)) as raised:
        completed(work())
    assert raised.value is error


def test_a_coroutine_that_waits_for_a_loop_is_closed_and_reported() -> None:
    closed = []

    async def work() -> None:
        try:
            await Yields(None, object())
        finally:
            closed.append(True)

    held = work()  # so that its end does not come with its last reference
    with pytest.raises(RuntimeError, match="waits for an event loop; please report"):
        completed(held)
    assert closed == [True]


@pytest.mark.parametrize("misuse", [None, 5, object()])
def test_what_is_no_coroutine_is_refused(misuse: Any) -> None:
    with pytest.raises(AttributeError):
        completed(misuse)
