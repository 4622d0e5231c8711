"""What a device says of its speed and power, relative to a CPU (HAL 1.2: PerformanceInfo)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec

from aionn.errors import CallerError
from aionn.hal.types import ExecutionPreference, OperandType


class PerformanceInfo(msgspec.Struct, frozen=True):
    """How long a device takes, and how much power it uses, where a CPU has 1.0 (HAL 1.0: PerformanceInfo). Less is better."""

    execution_time: float = 1.0
    power_usage: float = 1.0

    def __post_init__(self) -> None:
        for name in ("execution_time", "power_usage"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
                raise CallerError(f"a performance has {name}={value!r}, but it is a positive number relative to a CPU, which has 1.0")


class Performance(msgspec.Struct, frozen=True):
    """What a device declares of its speed, for the plan that cuts a model over several devices (HAL 1.2: Capabilities).

    Attributes:
        default: for every element type that `by_type` lacks.
        by_type: by the element type of an operation's first input.
    """

    default: PerformanceInfo = PerformanceInfo()
    by_type: Mapping[OperandType, PerformanceInfo] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.default, PerformanceInfo):
            raise CallerError(f"a performance has default={self.default!r}, but it must be a PerformanceInfo")
        if not isinstance(self.by_type, Mapping):
            raise CallerError(f"a performance has by_type={self.by_type!r}, but it must be a mapping from OperandType to PerformanceInfo")
        for kind, info in self.by_type.items():
            if not isinstance(kind, OperandType) or not isinstance(info, PerformanceInfo):
                raise CallerError(f"a performance has by_type[{kind!r}]={info!r}, but it must map OperandType to PerformanceInfo")

    def cost(self, kind: OperandType | None, preference: ExecutionPreference) -> float:
        """Return what an operation costs here relative to a CPU: power for LOW_POWER, else time. `kind`: type of its first input."""
        info = self.default if kind is None else self.by_type.get(kind, self.default)
        return info.power_usage if preference is ExecutionPreference.LOW_POWER else info.execution_time
