"""What the executions over one burst are counted as on the statistics page: under which texts, and how they ended.

Native code counts what happens to usual frames. The rest is rare, and counted here.
"""

from __future__ import annotations

from weakref import WeakSet

from aionn.errors import CallerError, DeadlineError, DriverDiedError, DriverHungError, ExecutionError, MemoryAllocationError
from aionn.pages.app_layout import DIED, HUNG, LATE, REFUSED, Kind
from aionn.pages.app_page import BurstSlot
from aionn.runtime.record import Record

_ENDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], int], ...] = (
    (DriverHungError, HUNG),
    (DriverDiedError, DIED),
    (DeadlineError, LATE),
    ((CallerError, ExecutionError, MemoryAllocationError), REFUSED),
)


class Shown:
    """A slot of the page for executions, and under which texts the page shows it.

    The device and the stage change with a swap. What was counted before then stays with the device and the stage before.

    Attributes:
        counts: the slot.
    """

    def __init__(self, record: Record, kind: Kind, compilation: BurstSlot, model: str, now: tuple[str, str], burst: str = "") -> None:
        """`kind`: BURST or SINGLE. `compilation`: the slot of its compilation. `model`: the compilation's name. `now`: device and stage."""
        page, self._runtime = record.page, record.name
        self._page = page
        self._past = Kind.PAST_BURSTS if kind is Kind.BURST else Kind.PAST_SINGLES
        self._model, self._burst = page.named("model", model, self._runtime), page.named("burst", burst, self._runtime)
        self._now = now
        self.counts = page.slot(kind, self._model, *now, self._burst, self._runtime, parent=compilation)
        self._count_with_past()

    def on(self, device: str, stage: str) -> None:
        """Count what comes from now on for this device and stage."""
        if self._now == (device, stage):
            return
        self._now = device, stage
        self._page.rename(self.counts, self._model, device, stage, self._burst, self._runtime)
        self._count_with_past()

    def _count_with_past(self) -> None:
        self._page.follow(self.counts, self._page.past(self._past, self._model, *self._now, self._burst, self._runtime))


def count_end(counts: BurstSlot, error: BaseException, counted: WeakSet[BaseException]) -> None:
    """Count an execution that ended with an error. `counted`: errors that were counted when the driver answered."""
    if error in counted:
        return
    for kinds, counter in _ENDS:
        if isinstance(error, kinds):
            counts.add(counter, 1)
            return
