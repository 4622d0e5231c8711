"""Statistics pages: what a process is doing, in shared memory that another process reads without a message.

    layout  where each number lies, and what it means (sans-IO)
    page    a page as its process writes it and as another process reads it; maps memory
    _page   native: begin and end of an execution in a model's slot, at the cost of reading the clock

A page is one sealed memfd of 256 KiB, of which a process touches only what it uses. The page has no name in a file system, so it
vanishes with its last descriptor. A driver makes a page and sends its descriptor with `Ready`. The app maps the page read-only.

    header      magic, layout version, role, pid, start time (field 22 of /proc/PID/stat), sizes
    activity    heartbeat of the loop; how many loads and compiles have begun and ended, and since when
    slots       one per prepared model: executions begun and finished, since when, when the last one ended, a histogram
    stacks      room for the stacks of all threads, as `faulthandler` writes them when it is asked by a signal

Each number has one writer and is stored whole. A reader may see one number of this moment beside another of the next, so a reader
that draws conclusions looks twice. A later version of the layout may add numbers in the unused room behind those of today.
"""

from aionn.pages.layout import Activity, Execution, LayoutError
from aionn.pages.page import BEAT_S, DriverPage, PageReader, Slot, private_slot, start_time_of

__all__ = ["BEAT_S", "Activity", "DriverPage", "Execution", "LayoutError", "PageReader", "Slot", "private_slot", "start_time_of"]
