"""`KeptBurst`: the burst that a compilation keeps for `Compilation.compute`.

What a burst's packets cannot carry goes over the control socket: memory of more than 4 GiB, and every execution of a model with strings,
sequences, maps or optionals. Places and turns are the same.

The first call opens the burst. A timer closes it when no call has come for a while, and the next call opens another one. The burst
follows swaps and driver deaths as every burst does. Results are copied out of their frames, so a frame is free when its call ends.

At most `DEPTH` calls are in the burst at once. Further calls wait in order, each with one future and without shared memory.

Invariants
    `_places` and the calls in the burst are `DEPTH` together. A call waits in `_turns` only while `_places` is 0. A call that ends
    gives its place to the first that waits, so no call overtakes another one.
    The timer closes the burst only while no call is in it and its driver has answered every request.
    The timer holds this object weakly, so a compilation that the app drops is collected.
    `_calls` holds the wait of each call that is over the control socket. `end` ends these waits, so that closing settles every caller.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import _get_running_loop  # as in `burst`
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from typing import Any

import anyio

from aionn import trace
from aionn.burst.packets import PacketError
from aionn.errors import CallerError
from aionn.hal.options import CallOptions
from aionn.loopless import deadline_of, time_left
from aionn.runtime.executing.arguments import Outputs, check_mapping
from aionn.runtime.executing.control import control_route, execution_of
from aionn.runtime.executing.execution import Call, Executor
from aionn.runtime.executing.link import CLOSE_S
from aionn.runtime.streaming.burst import Burst
from aionn.runtime.streaming.connection import BurstConnection, Connections
from aionn.tasks import bounded_shield, ending_by

DEPTH = 16
"""So many calls are in the burst at once, which keeps both ends and several executions busy. It bounds the frames, too."""

IDLE_S = 10.0
"""The burst is closed after 10 to 20 s without a call. To open one takes about 5 ms, so a call a second never pays for it."""

_LATE = "the call did not begin by the deadline, because too many calls wait for the driver; call again later"
CLOSED = "the compilation, or its runtime, was closed while this call waited"


class KeptBurst:
    """The burst behind `Compilation.compute`.

    Attributes:
        connection: of the burst that is open now, or None.
        last_inputs: of the last call before the burst was closed for idleness, or of the last call with values; or None.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._kept_model = connections.kept_model
        self._compiled = connections.kept_model.compiled
        self._loop = connections.kept_model.session.loop
        self.connection: BurstConnection | None = None
        self._burst: Burst | None = None
        self._large: Executor | None = None
        self._calls: set[anyio.CancelScope] = set()
        self._none_left: anyio.Event | None = None  # set once no call is over the control socket, for who closes
        self._places = DEPTH
        self._turns: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._used = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.last_inputs: Mapping[str, Any] | None = None

    async def compute(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any] | None, measure_timing: bool, timeout_s: float | None
    ) -> Outputs:
        """See `Compilation.compute`."""
        if self._burst is None or self._compiled.closed or _get_running_loop() is not self._loop:
            self._kept_model.check_usable()
        if type(inputs) is not dict:
            check_mapping(inputs)
            inputs = dict(inputs)  # the frame of a burst is a mapping, too; here it is one like any other
        deadline_ns = None if timeout_s is None else deadline_of(timeout_s)
        if self._places:
            self._places -= 1
        else:
            await self._turn(deadline_ns)
            timeout_s = time_left(deadline_ns)
        self._used = True
        try:
            burst = self._burst or self._begin()
            call = burst.compute(inputs, outputs=outputs, measure_timing=measure_timing, timeout_s=timeout_s)
            return _own(await (self._traced(call) if trace.active else call), outputs)
        except PacketError:
            return await self._without_packets(Call(dict(inputs), outputs or {}, CallOptions(measure_timing, deadline_ns), inputs))
        except CallerError:
            if self._closed:
                raise CallerError(CLOSED) from None
            raise
        finally:
            self._leave()

    async def _traced(self, call: Coroutine[Any, Any, Outputs]) -> Outputs:
        with trace.span("compute", device=self._kept_model.device, model=self._kept_model.record.name):
            return await call

    async def _without_packets(self, call: Call) -> Outputs:
        """Run what a burst's packets cannot carry over the control socket."""
        executor = self._large
        if executor is None:
            executor = self._large = self._connections.executor(DEPTH)
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                found = await execution_of(executor, control_route(self._kept_model), call).run()
            except BaseException as error:
                executor.ended(error)
                raise
            finally:
                self._calls.discard(scope)
                if not self._calls and self._none_left is not None:
                    self._none_left.set()
            if executor.shown is not None:
                executor.shown.on(self._kept_model.device, found.stage)
            if not executor.arguments.values:
                return _own(found, call.outputs)
            self.last_inputs = call.inputs
            return found
        raise CallerError(CLOSED)

    # --- who calls when --------------------------------------------------------------------------------------------------

    async def _turn(self, deadline_ns: int | None) -> None:
        """Wait for a place in the burst. First come, first served."""
        self._kept_model.check_usable()
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns[turn] = None
        try:
            with ending_by(deadline_ns, _LATE):
                await turn
            self._kept_model.check_usable()
        except BaseException as error:
            self.ended(error)
            self._turns.pop(turn, None)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # the place has come, so pass it on
            raise

    def ended(self, error: BaseException) -> None:
        """Count a call that ended with an error before it was in the burst."""
        executor = self._large if self.connection is None else self.connection.executor
        if executor is not None:
            executor.ended(error)

    def _leave(self) -> None:
        """Give a place to the first call that waits."""
        while self._turns:
            turn, _ = self._turns.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._places += 1

    # --- opening and closing ---------------------------------------------------------------------------------------------

    def _begin(self) -> Burst:
        """Open a burst, which connects at its first request.

        Raises:
            PacketError: no burst can carry what the model takes or makes.
        """
        if self._connections.arguments.values:
            raise PacketError("values have no place in a packet")
        connection = self._connections.new(DEPTH)
        connection.begin()
        self.connection, self._burst, self.last_inputs = connection, Burst(connection), None
        self._timer = self._loop.call_later(IDLE_S, _look, weakref.ref(self))
        return self._burst

    def close_if_idle(self) -> None:
        """Close the burst if no call has come since the last look, and nothing is under way. Else look again later."""
        connection = self.connection
        if connection is None or self._kept_model.session.inherited:
            return
        if self._used or self._places < DEPTH or (connection.link is not None and connection.link.in_flight):
            self._used = False
            self._timer = self._loop.call_later(IDLE_S, _look, weakref.ref(self))
            return
        self.last_inputs = connection.executor.frames.last_inputs()
        self._end()
        trace.count("compute.idle", model=self._kept_model.record.name)

    async def aclose(self) -> None:
        """Close for good. Calls that wait end with `CallerError`. Those under way are given `CLOSE_S` to be answered."""
        self.end_waiting()
        try:
            if self.connection is not None:
                with bounded_shield(CLOSE_S):
                    await self.connection.wait_idle()
            if self._calls:
                with bounded_shield(CLOSE_S):
                    self._none_left = anyio.Event()
                    await self._none_left.wait()
            if self.connection is not None:
                await self.connection.aclose()
        finally:
            self.end()

    def end_waiting(self) -> None:
        """End the calls that wait for a place, because the compilation is being closed."""
        self._closed = True
        turns, self._turns = self._turns, OrderedDict()
        for turn in turns:
            if not turn.done():
                turn.set_exception(CallerError(CLOSED))

    def end(self) -> None:
        """Close for good, without waiting."""
        self.end_waiting()
        for scope in self._calls:
            scope.cancel()
        self._end()
        if self._large is not None:
            self._large.frames.close()
            self._kept_model.session.page.release(self._large.counts)
            self._large = None

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.connection is not None:
            self.connection.end()
            self.connection = self._burst = None


def _own(found: Outputs, elsewhere: Mapping[str, Any] | None) -> Outputs:
    """Copy the arrays out of their frame, so that the next call finds it free."""
    for name, array in found.items():
        if not array.flags.owndata and not (elsewhere and name in elsewhere):
            found[name] = array.copy()
    return found


def _look(kept: weakref.ref[KeptBurst]) -> None:
    burst = kept()
    if burst is not None:
        burst.close_if_idle()
