"""A model on an engine: its lanes, its executions and its bursts.

`StreamHints` lets executables know when the first burst of their prepared model opens, and when the last one has ended. A burst's lifetime
is the hint to stay in a high-performance state (HAL 1.2: IBurstContext). Most engines have no such state, so both methods of an executable
are optional: `stream_began()` and `stream_ended()`.

Invariant
    Per executable, `stream_began` and `stream_ended` take turns, beginning with `stream_began`. They are never called at the same time.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from aionn import trace
from aionn.burst import ExecutionBurstServer
from aionn.burst.executors import result_of
from aionn.driver.compiling import Tuning
from aionn.driver.execution import BoundExecution, BoundModel, BoundPool, bind
from aionn.driver.lanes import Lane, Lanes, Turns
from aionn.driver.memories import BurstMemories, bound_pool
from aionn.driver.sharing import Shared, Sharing
from aionn.driver.threads import trim_arenas
from aionn.errors import AionnError, CallerError
from aionn.hal.batching import RowAxes
from aionn.hal.engine import Executable
from aionn.hal.interfaces import IBuffer, IBurstCallback, PrepareOptions
from aionn.hal.queues import MQDescriptor
from aionn.hal.types import Dependency, ExecutionPreference, FencedResult, IMemory, Operand, Request, Result
from aionn.hal.values import ValuesResult
from aionn.memory.device_buffers import DeviceBuffers
from aionn.memory.domain import ModelInfo
from aionn.memory.requests import Extent, check_request
from aionn.pages.layout import FINISHED
from aionn.pages.page import DriverPage, Slot
from aionn.remote.fences import Waits, execute_fenced_by

if TYPE_CHECKING:
    from aionn.driver.joining.joined_runs import Joining

LANES = os.environ.get("AIONN_LANES", "1") != "0"
"""Whether bursts are lent to lanes. For tests: without lanes the listener serves every packet, slower and in the same order."""

_prepared_numbers = itertools.count(1)


class Host(Protocol):
    """What a prepared model needs of its device."""

    name: str
    page: DriverPage | None
    buffers: DeviceBuffers
    turns: Turns
    sharing: Sharing

    @property
    def behind(self) -> Callable[[Callable[[], None]], None]: ...

    def slot(self, model: int, key: int = 0) -> Slot: ...

    def free_slot(self, slot: Slot) -> None: ...

    def serve(self, server: ExecutionBurstServer, ended: Callable[[ExecutionBurstServer], None]) -> None: ...


class EnginePreparedModel:
    """A model on an engine. Satisfies `IPreparedModel`.

    Attributes:
        contents: what `known_contents` is for the constants that were compiled.
        runs_on: what computes the model, if the engine says so.
        tuning: better artifacts that the engine offers. None once the model is released.
        joining: joins requests of bursts, if that was asked for.
    """

    contents = b""
    runs_on = ""
    tuning: Tuning | None = None
    joining: Joining | None = None

    def __init__(
        self,
        device: Host,
        executables: Sequence[Executable],
        inputs: Mapping[str, Operand],
        outputs: Mapping[str, Operand],
        options: PrepareOptions,
        save_outcome: str = "",
        constants: Sequence[Extent] = (),
        shared: Shared | None = None,
    ) -> None:
        self.device: Host = device
        self._executables = executables  # one per instance; empty once the model has been released
        self._shared = shared  # kept for later preparations of the same model, as long as this one is not released
        self._options = options
        self.inputs = MappingProxyType(dict(inputs))
        self.outputs = MappingProxyType(dict(outputs))
        self.save_outcome = save_outcome
        number = next(_prepared_numbers)
        self._slots = [device.slot(number, shared.key if shared else 0) for _ in executables]
        try:
            if options.batching is not None:
                from aionn.driver.joining.joined_runs import Joining  # most models join nothing

                rows = (shared and shared.rows) or RowAxes("the device has not looked at its rows; remove the entry from the cache")
                rows = rows if LANES else RowAxes("this driver serves bursts without lanes (AIONN_LANES=0), and only lanes join requests")
                words = None if device.page is None else device.page.words_of(self._slots[0])
                self.joining = Joining(options.batching, rows, device.name, words)
            lanes = [Lane(*each) for each in zip(executables, self._slots, strict=True)]
            self._lanes = Lanes(f"{device.name} lane", lanes, device.turns, options.priority, self.joining)
        except BaseException:
            self._free_slots()
            raise
        self._bound = BoundModel(
            number,
            list(inputs.items()),
            list(outputs.items()),
            self._lanes,
            device.buffers,
            constants,
            disproved=set(options.open_outputs),
            device=device.name,
            joining=self.joining,
        )
        self._bursts: set[ExecutionBurstServer] = set()
        self._hints = StreamHints(executables, device.behind)
        self._waits = Waits()
        if shared is not None:
            device.sharing.hold(shared)

    @property
    def number(self) -> int:
        """By which the page shows the model."""
        return self._bound.id

    @property
    def executions(self) -> int:
        """How many executions have finished, as the page shows them."""
        shown = [] if self.device.page is None else [self.device.page.words_of(slot) for slot in self._slots]
        return sum(words[FINISHED] for words in shown if words is not None)

    @property
    def shared(self) -> Shared | None:
        """What other prepared models may share, or None once the model has been released."""
        return self._shared

    @property
    def instances(self) -> int:
        """How many executions may run beside each other."""
        return len(self._slots)

    @property
    def info(self) -> ModelInfo:
        """The operands that device buffers may stand for. An output whose declared shape has proven wrong may have any shape."""
        disproved = self._bound.disproved
        outputs = [Operand(operand.type, None) if name in disproved else operand for name, operand in self.outputs.items()]
        return ModelInfo(self._bound.id, tuple(self.inputs.values()), tuple(outputs))

    async def execute(
        self, request: Request, pools: Sequence[IMemory | IBuffer], measure_timing: bool = False, deadline_ns: int | None = None
    ) -> Result:
        try:
            execution = self.bind(request, [bound_pool(pool, self.device.buffers) for pool in pools])
        except AionnError as error:
            return result_of(error)
        with trace.span("driver.execute", device=self.device.name):
            return await execution.execute(measure_timing, deadline_ns)

    async def execute_values(self, inputs: Mapping[str, Any], measure_timing: bool = False, deadline_ns: int | None = None) -> ValuesResult:
        """Execute with values of the model's types. Returns the outputs as the engine gives them."""
        from aionn.driver.values import run_values  # few models have such values

        with trace.span("driver.execute", device=self.device.name):
            return await run_values(self._lanes, self.device.name, inputs, measure_timing, deadline_ns)

    async def execute_fenced(
        self,
        request: Request,
        pools: Sequence[IMemory | IBuffer],
        after: Sequence[Dependency],
        fence: int,
        measure_timing: bool = False,
        deadline_ns: int | None = None,
    ) -> FencedResult:
        return await execute_fenced_by(self, request, pools, after, fence, measure_timing, deadline_ns, self._waits)

    def wrong_with(self, request: Request, pool_sizes: Sequence[int]) -> str | None:
        """Return what is wrong with a request over pools of those sizes, or None. Needs no mapped pool. See `check_request`."""
        return check_request(self._bound.inputs, self._bound.outputs, request, pool_sizes)

    def bind(self, request: Request, pools: Sequence[BoundPool]) -> BoundExecution:
        """Check a request and make its arrays; see `execution.bind`."""
        if not self._executables:
            raise CallerError("the request names a prepared model that has been released; prepare the model again")
        return bind(self._bound, request, pools)

    async def configure_execution_burst(
        self, callback: IBurstCallback, request_channel: MQDescriptor, result_channel: MQDescriptor, anticipate: bool = False
    ) -> ExecutionBurstServer:
        low_power = self._options.preference is ExecutionPreference.LOW_POWER
        executor = BurstMemories(self, self.device.buffers, getattr(callback, "may_use", None))
        lanes = self._lanes if LANES else None
        server = ExecutionBurstServer.create(
            callback, request_channel, result_channel, executor, lanes=lanes, low_power=low_power, anticipate=anticipate
        )
        self._bursts.add(server)
        self._hints.opened()
        self.device.serve(server, self._burst_ended)
        return server

    def _burst_ended(self, server: ExecutionBurstServer) -> None:
        self._bursts.discard(server)
        self._hints.ended()

    async def aclose(self) -> None:
        self._waits.close()
        for burst in list(self._bursts):
            await burst.aclose()
        await self._lanes.aclose()
        if self.joining is not None:
            self.joining.leave_page()
        self._executables = ()
        shared, self._shared = self._shared, None
        if shared is not None:
            self.device.sharing.release(shared, self.executions)
        self.tuning = None
        self._free_slots()
        self.device.behind(trim_arenas)  # an engine's weights are freed now; the C library would keep much of their memory

    def _free_slots(self) -> None:
        for slot in self._slots:
            self.device.free_slot(slot)
        self._slots.clear()


logger = logging.getLogger("aionn.driver")


class StreamHints:
    """The open bursts of one prepared model.

    Args:
        executables: of the prepared model.
        behind: runs a job in a thread, which no answer waits for.
    """

    def __init__(self, executables: Sequence[Executable], behind: Callable[[Callable[[], None]], None]) -> None:
        self._hinted = [
            executable for executable in executables if hasattr(executable, "stream_began") or hasattr(executable, "stream_ended")
        ]
        self._behind = behind
        self._open = 0
        self._began = False
        self._lock = threading.Lock()

    def opened(self) -> None:
        """Note that a burst is open."""
        self._open += 1
        if self._open == 1 and self._hinted:
            self._behind(self._apply)

    def ended(self) -> None:
        """Note that a burst has ended."""
        self._open -= 1
        if not self._open and self._hinted:
            self._behind(self._apply)

    def _apply(self) -> None:
        with self._lock:  # jobs may change places, so each looks at what holds now
            began = self._open > 0
            if began is self._began:
                return
            self._began = began
            for executable in self._hinted:
                try:
                    getattr(executable, "stream_began" if began else "stream_ended", _nothing)()
                except Exception:  # a hint that fails costs nothing but this line
                    logger.exception("an executable raised an error when a stream %s", "began" if began else "ended")


def _nothing() -> None:
    """Stand for a method that an executable does not have."""
