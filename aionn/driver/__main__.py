"""`python -m aionn.driver NAME FD`: a driver process."""

import os
import sys
import traceback

from aionn.driver.process import main

if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter shutdown: an engine thread that never returns must not keep a process that nobody needs.
        os._exit(code)
