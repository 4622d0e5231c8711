"""Groups inside, plain exceptions outside; shields that end; answers that are set once."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time

import anyio
import anyio.lowlevel
import pytest
import sniffio

from aionn.errors import CallerError, DriverDiedError, again
from aionn.loopless import Answer, deadline_of
from aionn.tasks import OwnedTasks, bounded_shield, ungrouped

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


async def test_the_one_error_of_a_group_comes_out_as_itself() -> None:
    with pytest.raises(KeyError, match="gone"), ungrouped():
        async with anyio.create_task_group():
            raise KeyError("gone")


async def test_none_of_several_errors_is_lost() -> None:
    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(BaseExceptionGroup) as caught, ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail, KeyError("one"))
            tasks.start_soon(fail, ValueError("two"))
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_a_group_that_the_body_raised_stays_one() -> None:
    with pytest.raises(ExceptionGroup, match="the app's own"), ungrouped():
        async with anyio.create_task_group():
            raise ExceptionGroup("the app's own", [KeyError("x")])


async def test_a_bounded_shield_holds_cancellation_off_and_then_ends() -> None:
    reached = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        with bounded_shield(30):
            await anyio.lowlevel.checkpoint()
            reached.append("shielded")
        with bounded_shield(0):
            await anyio.sleep_forever()
        reached.append("past the bound")
        await anyio.lowlevel.checkpoint()
        reached.append("never")
    assert reached == ["shielded", "past the bound"]


async def test_an_answer_is_set_once_and_may_come_after_its_caller_has_left() -> None:
    answer: Answer[int] = Answer(asyncio.get_running_loop())
    answer.set(1)
    answer.set(2)
    answer.fail(KeyError())
    assert await answer.wait() == 1

    left: Answer[int] = Answer(asyncio.get_running_loop())
    left.cancel()
    left.set(3)
    assert left.done
    assert left.result is None


async def test_a_timeout_becomes_a_deadline_and_nonsense_a_sentence() -> None:
    assert deadline_of(None) is None
    now_ns = time.monotonic_ns()
    deadline_ns = deadline_of(10)
    assert deadline_ns is not None
    assert now_ns + 10 * 10**9 <= deadline_ns <= time.monotonic_ns() + 10 * 10**9
    for far in (1e12, 1e300):
        assert deadline_of(far) == 2**63 - 1
    for nonsense in (math.nan, "soon", "10", True, -1, 10**400):
        with pytest.raises(CallerError, match="timeout"):
            deadline_of(nonsense)  # type: ignore[arg-type]


async def test_each_caller_gets_an_error_of_its_own() -> None:
    first = DriverDiedError("npu", -9)
    second = again(first)
    assert isinstance(second, DriverDiedError)
    assert (second is first, str(second), second.device, second.exit_code) == (False, str(first), "npu", -9)
    own = KeyError()
    assert again(own) is own


async def test_a_callback_of_the_loop_starts_a_task_where_the_app_has_sniffio() -> None:
    begun = asyncio.Event()
    tasks = OwnedTasks(anyio.lowlevel.checkpoint, "tasks of a test")
    await tasks.open()
    found: list[object] = []

    async def work() -> None:
        begun.set()

    def callback() -> None:
        try:
            with pytest.raises(sniffio.AsyncLibraryNotFoundError):
                sniffio.current_async_library()
            tasks.start_soon(work)
            found.append(sniffio.current_async_library_cvar.get())
        except BaseException as error:
            found.append(error)

    asyncio.get_running_loop().call_soon(callback, context=contextvars.Context())
    await anyio.lowlevel.checkpoint()
    assert found == [None]
    with anyio.fail_after(60):
        await begun.wait()
    await tasks.aclose(60)
