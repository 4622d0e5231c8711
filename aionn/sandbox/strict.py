"""What strict mode adds: a denied system call is named on stderr, with the stacks of all threads, before it ends the driver.

Only tests use strict mode, so only then is this module imported.
"""

from __future__ import annotations

import faulthandler
import signal
import sys

from aionn.sandbox._strict import watch
from aionn.sandbox.filter import ALLOWED, ANSWERED, CHECKED, DENIED, LAST_KNOWN

_NAME_BYTES = 32  # _strict.c


def name_denied_calls(column: int) -> None:
    """Handle SIGSYS from now on. The process still dies by it.

    Args:
        column: of the tables in `filter`, for this machine.
    """
    names = [b""] * (LAST_KNOWN + 1)
    for table in (ALLOWED, CHECKED, ANSWERED, DENIED):
        for name, numbers in table.items():
            if numbers[column] >= 0:
                names[numbers[column]] = name.encode()
    # The stacks come from faulthandler. The native handler calls it, because it is the handler that was there before.
    faulthandler.register(signal.SIGSYS, file=2 if sys.stderr is None else sys.stderr, all_threads=True)
    watch(b"".join(name.ljust(_NAME_BYTES, b"\0") for name in names))
