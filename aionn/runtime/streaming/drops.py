"""`Drops`: a summary of the frames that the streams of a compilation have dropped, once a second while there are any.

Invariant
    A burst that ends is summed up once more, so the summaries together have every frame that was dropped.
"""

from __future__ import annotations

import weakref
from collections import Counter

from aionn.events import DropsSummary
from aionn.pages.app_layout import ANSWERED, DROPPED
from aionn.pages.app_page import BurstSlot
from aionn.runtime.progress import CompilationReports
from aionn.runtime.reports import Reports

_BEATS = 2
"""There are two heartbeats a second."""


class Drops:
    """Sums up the drops of the bursts of one compilation."""

    def __init__(self, runtime: Reports, reports: CompilationReports) -> None:
        self._reports = reports
        self._bursts: list[tuple[str, BurstSlot, weakref.ref[object]]] = []
        self._seen: dict[int, tuple[int, int]] = {}
        self._beats = 0
        runtime.each_beat.append(weakref.WeakMethod(self._beat))

    def watch(self, name: str, counts: BurstSlot, burst: object) -> None:
        """Sum up a burst, as long as the object lives that stands for it. `name`: of the burst, or empty."""
        self._bursts.append((name, counts, weakref.ref(burst)))

    def _beat(self) -> None:
        self._beats += 1
        if self._beats % _BEATS == 0:
            self.publish()

    def publish(self) -> None:
        """Publish the drops since the last call, by the names of the bursts."""
        dropped: Counter[str] = Counter()
        frames: Counter[str] = Counter()
        for name, counts, _ in self._bursts:
            now = counts.get(DROPPED), counts.get(ANSWERED)
            before = self._seen.get(id(counts), (0, 0))
            self._seen[id(counts)] = now
            dropped[name] += max(0, now[0] - before[0])
            frames[name] += max(0, now[0] - before[0]) + max(0, now[1] - before[1])
        for name in dropped:
            if dropped[name]:
                event = DropsSummary(compilation=self._reports.named.name, burst=name, dropped=dropped[name], frames=frames[name])
                self._reports.publish(event)
        gone = [one for one in self._bursts if one[2]() is None]
        for one in gone:
            self._bursts.remove(one)
            del self._seen[id(one[1])]
