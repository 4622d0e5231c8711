"""Statistics pages: what a process is doing, in shared memory, readable by another process without a message.

    layout  where each number lies, and what it means (sans-IO)
    page    a page as its process writes it, and as another one reads it; maps memory
    _page   native: begin and end of an execution in a model's slot, at the cost of the clock

A page is one sealed memfd of 256 KiB, of which a process touches what it uses. It has no name in a file system, so it goes
with its last descriptor. A driver makes one and sends its descriptor with `Ready`; the app maps it read-only.

    header      magic, layout version, role, pid, start time (field 22 of /proc/PID/stat), sizes
    activity    heartbeat of the loop; how many loads and compiles have begun and ended, and since when
    slots       one per prepared model: executions begun and finished, since when, when the last one ended, a histogram
    stacks      room for the stacks of all threads, as `faulthandler` writes them when it is asked by a signal

Each number has one writer and is stored whole. A reader may see a number of one moment beside another one of the next: who
draws conclusions looks twice. A later version of the layout may add numbers to the unused room behind those of today.
"""

from aionn.pages.layout import Activity, Execution, LayoutError
from aionn.pages.page import BEAT_S, DriverPage, PageReader, Slot, private_slot, start_time_of

__all__ = ["BEAT_S", "Activity", "DriverPage", "Execution", "LayoutError", "PageReader", "Slot", "private_slot", "start_time_of"]
