"""`DeviceState`: what uses a device memory now, and how the memory moves to another driver.

Invariants
    An execution that reads and writes the memory has it to itself (`Uses.advancing`). Another use would see the state before, or be
    lost when the two buffers change places. For the same reason the memory cannot be advanced while it is being filled
    (`Uses.filling`).
    `Uses.executions` counts the executions that may still be touching it, also those whose callers have left. Only `end` ends one.
    `Uses.left_copies` counts the copies that the driver may still be busy with and whose callers have left; `ready` waits for them.
    `emptied` is set by a copy into it that failed before it was sent. What the driver holds then is not to be read.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import _get_running_loop  # as in `burst`
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import anyio

from aionn.errors import CallerError, ExecutionError, again, lost_with
from aionn.hal.types import ErrorStatus
from aionn.loopless import call_soon_from_anywhere
from aionn.memory.memory import Memory
from aionn.memory.region import Region
from aionn.remote.device import RemoteBuffer
from aionn.runtime.executing.device_buffers import BufferPair, losing
from aionn.runtime.serving.serving import NotNowError, Rest, Serving
from aionn.runtime.session import Session

if TYPE_CHECKING:
    from aionn.runtime.serving.planned_model import Prepared


IN_USE_S = 0.25
"""So long a swap waits for an execution that uses device memory. Other executions are held back meanwhile."""


class Uses:
    """What uses a device memory now.

    Attributes:
        executions: in flight. begun: so many have begun. advancing: whether one of them reads and writes it.
        filling: copies into it that have begun. left_copies: copies whose callers have left.
    """

    __slots__ = ("_caller_left", "_ended", "advancing", "begun", "executions", "filling", "left_copies")

    def __init__(self) -> None:
        self.executions = 0
        self.begun = 0
        self.advancing = False
        self.filling = 0
        self.left_copies = 0
        self._caller_left = False
        self._ended: tuple[asyncio.Event, asyncio.AbstractEventLoop] | None = (
            None  # made by those who wait: at the end of most executions no caller does
        )

    @property
    def abandoned(self) -> bool:
        """Whether something uses it whose caller has left."""
        return self.left_copies > 0 or (self.advancing and self._caller_left)

    def begin(self, *, advance: bool) -> None:
        """Count an execution that is about to be sent.

        Raises:
            CallerError: it would advance what is being filled.
        """
        if advance:
            if self.filling:
                raise CallerError("this device memory is being filled; await that before an execution advances it")
            self.advancing, self._caller_left = True, False
        self.executions += 1
        self.begun += 1

    def leave(self) -> None:
        """Note that the execution's caller has gone, answered or not."""
        self._caller_left = True

    def end(self, *, advancing: bool) -> None:
        """Count an execution that is over, or was never sent."""
        if advancing:
            self.advancing = False
        self.executions -= 1
        if self._ended is not None:
            self.notify()

    def notify(self) -> None:
        """Wake those who wait for the end of an execution or of a copy."""
        if self._ended is not None:
            (ended, loop), self._ended = self._ended, None
            if _get_running_loop() is loop:
                ended.set()
            else:  # an execution of a blocking face has ended
                call_soon_from_anywhere(loop, ended.set)

    async def next_end(self) -> None:
        """Return when an execution or a copy that uses it has ended."""
        if self._ended is None:
            self._ended = asyncio.Event(), asyncio.get_running_loop()
        await self._ended[0].wait()


class DeviceState:
    """The state of one device memory. It follows a swap of each compilation that it belongs to (`Holding`).

    Attributes:
        buffers, uses: its parts.
        shape: of the last tensor that the memory was filled with; None while that is open.
        fills: how often the app has filled it, or begun to.
        emptied: whether the last `copy_from` was refused.
        closed: whether the app has closed it.
    """

    def __init__(self, session: Session, buffers: BufferPair) -> None:
        self._session = session
        self.buffers = buffers
        self.uses = Uses()
        self.shape = buffers.roles.shape
        self.fills = 0
        self.emptied = False
        self.closed = False
        self._finalizer = weakref.finalize(self, _release_soon, session.loop, buffers.all)
        self._finalizer.atexit = False

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the tensor; None while its shape is open."""
        return None if self.shape is None else prod(self.shape) * self.buffers.roles.operand.type.element_bytes

    def close(self) -> bool:
        """Note that the app has closed it. Returns whether it is the caller's to free the buffers now."""
        if self.closed or self._session.inherited:
            return False
        self._session.check_loop()
        self.closed = True
        self._finalizer.detach()
        return True

    # --- checks --------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Return if it can still be used.

        Raises:
            CallerError: it has been closed, or the runtime has.
            DeviceMemoryLostError: its driver has ended.
        """
        if self.closed:
            raise CallerError("this device memory has been closed; allocate it again")
        ended_by = self.buffers.ended_by
        if isinstance(ended_by, CallerError):
            raise again(ended_by)
        if ended_by is not None:
            raise lost_with(self.buffers.device, ended_by) from ended_by

    def is_ready(self, *, advance: bool = False) -> bool:
        """Return whether it can be used, or advanced, until the next await. If not, `ready` waits, or raises why."""
        uses, buffers = self.uses, self.buffers
        busy = self.closed or uses.advancing or uses.left_copies or (advance and buffers.back is None)
        return not busy and buffers.ended_by is None

    async def ready(self, *, advance: bool = False) -> None:
        """Return when it can be used, or advanced. Wait only for executions and copies whose callers have left, and for a second buffer.

        Raises:
            CallerError: as `check_alive`; or an execution that advances it is in flight, and its caller awaits that.
            DeviceMemoryLostError: its driver has ended.
            MemoryAllocationError: the driver cannot have the second buffer now.
        """
        self._session.check_loop()
        self.check_alive()
        while self.uses.abandoned:
            await self.uses.next_end()
            self.check_alive()
        if self.uses.advancing:
            raise CallerError("an execution that advances this device memory is in flight; await it before the next use")
        if advance:
            await self.buffers.complete(lambda: self.closed)

    def check_filled(self) -> None:
        """Raise as the driver does for a memory without contents, if the last copy into it was refused before it was sent."""
        if self.emptied:
            raise ExecutionError(
                "this device memory is not initialized: the last copy_from was refused; fill it again", status=ErrorStatus.GENERAL_FAILURE
            )

    # --- executions ----------------------------------------------------------------------------------------------------

    def end(self, *, advanced: bool | None) -> None:
        """Count an execution that is over, or was never sent.

        `advanced`: whether the buffers change places, or None if it only used one.
        """
        if advanced:
            self.buffers.turn()
        self.uses.end(advancing=advanced is not None)

    def written(self, shape: tuple[int, ...]) -> None:
        """Note that an execution has written it, in that shape. A shape that it cannot have is ignored as a false answer."""
        roles = self.buffers.roles
        if not roles.operand.accepts(shape) and roles.bound.accepts(shape):
            roles.operand = roles.bound
        if roles.operand.accepts(shape) and min(shape, default=1) > 0:
            self.shape = shape

    # --- copies --------------------------------------------------------------------------------------------------------

    def refused(self) -> None:
        """Note that a copy into it failed before it was sent. It then holds nothing, unless an execution uses it now."""
        if not self.uses.executions:
            self.emptied, self.shape = True, self.buffers.roles.shape

    async def fill(self, source: Memory, shape: tuple[int, ...]) -> None:
        """Let the driver copy a tensor of that shape into it."""

        def note_filled(filled: bool) -> None:
            self.uses.filling -= 1
            if filled:  # also where no caller waits for it any more
                self.shape = shape
                self.emptied = False

        self.uses.filling += 1
        self.fills += 1
        with self.copying(note_filled) as settled:
            await self.buffers.front.copy_from(source, shape, settled)

    @contextmanager
    def copying(self, over: Callable[[bool], None] | None = None) -> Iterator[Callable[[BaseException | None], None]]:
        """Count a copy that the driver makes. The driver's call gets what is yielded as `settled`.

        `over` is called once, when the copy is over, with whether it was made.
        """
        answered = left = False

        def settle(error: BaseException | None) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if over is not None:
                over(error is None)
            if left:
                self.uses.left_copies -= 1
                self.uses.notify()

        try:
            with losing(self.buffers.device):
                yield settle
        except Exception as error:
            settle(error)  # unless the driver has answered, nothing was sent
            raise
        finally:
            if not answered:  # the caller has been cancelled; the driver goes on
                left = True
                self.uses.left_copies += 1

    # --- a swap ----------------------------------------------------------------------------------------------------------

    def rest(self) -> Rest | None:
        """Return None while the app can use it, because its contents lie in the driver alone."""
        return Rest(0, lambda: None) if self.closed or self.buffers.ended_by is not None else None

    async def wait_idle(self) -> None:
        """Return at once: `Serving.users` counts the executions that use it."""

    def count_from_now(self) -> None:
        """Do nothing: executions that use it are always counted."""

    async def prepare(self, part: int, better: Serving) -> DeviceChange | None:
        """Copy it into the driver of `better`, under the same roles. Returns None if it is closed or lost already.

        Args:
            part: the number of the compilation that is swapped. The memory must lie in one driver for all its compilations.

        A memory that is empty stays empty: its next use is refused there as it would have been here, and never sees zeros.

        Raises:
            NotNowError: it is in use.
            AionnError: the other driver cannot have it.
        """
        if self.closed or self.buffers.ended_by is not None:
            return None
        with anyio.move_on_after(IN_USE_S):
            while self.uses.executions or self.uses.filling:
                await self.uses.next_end()  # a thread does not see at once that the gate is closed
        if self.uses.executions or self.uses.filling:
            raise NotNowError("a device memory is in use")
        prepared = [*self.buffers.prepared]
        prepared[part] = better.prepared
        begun = self.uses.begun
        copy = await self.buffers.roles.allocate(prepared)
        change = DeviceChange(self, prepared, copy, begun)
        try:
            shape, size_bytes = self.shape, self.size_bytes
            if shape is not None and size_bytes:
                with Memory(Region.allocate(size_bytes)) as contents:
                    try:
                        await self.buffers.front.copy_to(contents)
                    except ExecutionError:
                        return change  # it has never been filled, or an execution failed to write it
                    await copy.copy_from(contents, shape)
        except BaseException:
            change.release_new()
            raise
        return change


class Holding:
    """A device memory as one compilation holds it (`Member`). `part` is the number of the compilation in the memory's roles."""

    needs_gap = True

    def __init__(self, state: DeviceState, part: int) -> None:
        self._state = state
        self._part = part
        self.rest = state.rest
        self.wait_idle = state.wait_idle
        self.count_from_now = state.count_from_now

    async def prepare(self, better: Serving) -> DeviceChange | None:
        """See `DeviceState.prepare`."""
        return await self._state.prepare(self._part, better)

    def end(self) -> None:
        """Do nothing: the contents ended with the driver, and so did the calls that waited for it. `DeviceState.check_alive` says so."""


class DeviceChange:
    """A copy of a device memory in another driver, not yet in use."""

    def __init__(self, state: DeviceState, prepared: Sequence[Prepared], copy: RemoteBuffer, begun: int) -> None:
        self._state = state
        self._prepared = prepared
        self._copy = copy
        self._fills, self._begun = state.fills, begun
        self._before: list[RemoteBuffer] = []

    def check(self) -> None:
        """Raise if the app has filled the memory, or is filling it, or another compilation has used it, since the copy was made."""
        if self._state.fills != self._fills or self._state.uses.filling:
            raise NotNowError("device memory was filled during the swap")
        if self._state.uses.begun != self._begun:
            raise NotNowError("another compilation used the device memory during the swap")

    def commit(self) -> None:
        self._before = self._state.buffers.replace(self._prepared, self._copy)
        if self._state.closed:
            self._copy.release()

    async def release_old(self) -> None:
        for buffer in self._before:
            buffer.release()

    def release_new(self) -> None:
        self._copy.release()


def _release_soon(loop: asyncio.AbstractEventLoop, buffers: list[RemoteBuffer]) -> None:
    """Free the buffers of a collected device memory."""
    for buffer in buffers:
        call_soon_from_anywhere(loop, buffer.release)
