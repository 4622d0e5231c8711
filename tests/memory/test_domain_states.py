"""The states of device buffers under any sequence of copies and executions, against a model of a few lines."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aionn.errors import CallerError, ExecutionError
from aionn.hal import BufferDesc, BufferRole, DataLocation, Operand, OperandType, RequestArgument
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.device_buffers import BufferRequest, BufferUse, DeviceBuffers
from aionn.memory.domain import ModelInfo

MODEL = ModelInfo(7, (Operand(OperandType.UINT8, (0, 2)),) * 2, (Operand(OperandType.UINT8, (0, 2)),) * 2)
BOTH = [BufferRole(0, 0), BufferRole(0, 1)]
rows = st.integers(1, 3)
values = st.integers(1, 255)


@dataclass
class Expected:
    """What a buffer must hold: nothing, or that many rows of one value."""

    buffer: DeviceBuffer
    holds: tuple[int, int] | None = None
    readers: int = 0
    written: bool = False


@dataclass
class InFlight:
    """One execution that has begun."""

    use: BufferUse
    reads: list[Expected]
    writes: list[tuple[Expected, int | None]] = field(default_factory=list)


class DeviceBufferStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buffers = DeviceBuffers()
        made = [self.buffers.allocate(BufferDesc(), [MODEL], BOTH, BOTH) for _ in range(3)]
        self.expected = [Expected(buffer) for buffer in made]
        self.running: list[InFlight] = []
        self.requests: dict[object, BufferRequest] = {}

    @rule(which=st.integers(0, 2), count=rows, value=values, right=st.booleans())
    def copy_from(self, which: int, count: int, value: int, right: bool) -> None:
        one = self.expected[which]
        busy = one.written or one.readers > 0
        try:
            one.buffer.copy_from(bytes([value]) * (2 * count + (not right)), (count, 2))
        except ExecutionError:
            assert busy
        except CallerError:
            assert not busy
            assert not right
            one.holds = None
        else:
            assert not busy
            assert right
            one.holds = (count, value)

    @rule(which=st.integers(0, 2), count=rows)
    def copy_to(self, which: int, count: int) -> None:
        one = self.expected[which]
        out = bytearray(2 * count)
        try:
            one.buffer.copy_to(out)
        except ExecutionError:
            assert one.written or one.holds is None
        except CallerError:
            assert one.holds is not None
            assert one.holds[0] != count
        else:
            assert not one.written
            assert one.holds is not None
            assert out == bytes([one.holds[1]]) * 2 * count

    @rule(
        reads=st.lists(st.integers(0, 2), max_size=2),
        writes=st.lists(st.integers(0, 2), max_size=2),
        count=st.none() | rows,
    )
    def begin(self, reads: list[int], writes: list[int], count: int | None) -> None:
        """An execution: its inputs as they are, its outputs with or without a shape."""
        omitted = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)
        shape = () if count is None else (count, 2)
        inputs = [RequestArgument(DataLocation(which, 0, 0), ()) for which in reads] + [omitted] * (2 - len(reads))
        outputs = [RequestArgument(DataLocation(which, 0, 0), shape) for which in writes] + [omitted] * (2 - len(writes))
        tokens = [one.buffer.token for one in self.expected]
        twice = len(set(writes)) < len(writes) or bool(set(writes) & set(reads))
        empty = any(self.expected[which].holds is None for which in reads)
        busy = any(self.expected[which].written for which in (*reads, *writes)) or any(self.expected[which].readers for which in writes)
        try:
            # A request that comes again, as in a burst, is the same one.
            key = (tuple(reads), tuple(writes), count)
            use = self.requests.setdefault(key, self.buffers.request(MODEL.id, inputs, outputs, tokens)).use()
        except CallerError:
            assert twice
            assert not empty
        except ExecutionError:
            assert empty or busy
        else:
            assert not twice
            assert not empty
            assert not busy
            flight = InFlight(use, [self.expected[which] for which in reads], [(self.expected[which], count) for which in writes])
            for one in flight.reads:
                one.readers += 1
            for one, _ in flight.writes:
                one.written = True
            self.running.append(flight)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["succeed", "fail", "undo"]), value=values, late_rows=rows)
    def end(self, data: st.DataObject, how: str, value: int, late_rows: int) -> None:
        flight = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how == "undo":
            flight.use.undo()
        else:
            with flight.use as use:
                if how == "succeed":
                    for array in use.outputs.values():
                        if array is not None:
                            array[...] = value
                    result = np.full((late_rows, 2), value, np.uint8)
                    use.succeed({index: result for index, array in use.outputs.items() if array is None})
        for one, count in flight.writes:
            one.written = False
            if how != "undo":
                one.holds = (count or late_rows, value) if how == "succeed" else None
        for one in flight.reads:
            one.readers -= 1

    @invariant()
    def each_buffer_is_as_expected(self) -> None:
        for one in self.expected:
            assert one.buffer.is_initialized == (one.holds is not None)
            assert one.buffer.dimensions == ((0, 2) if one.holds is None else (one.holds[0], 2))

    @invariant()
    def each_reader_sees_what_was_there_when_it_began(self) -> None:
        for flight in self.running:
            for index, one in enumerate(flight.reads):
                assert one.holds is not None
                assert (flight.use.inputs[index] == one.holds[1]).all()
                assert flight.use.inputs[index].shape == (one.holds[0], 2)

    def teardown(self) -> None:
        for flight in self.running:
            flight.use.close()
            flight.use.close()


TestDeviceBufferStates = DeviceBufferStates.TestCase
TestDeviceBufferStates.settings = settings(max_examples=80, stateful_step_count=30)
