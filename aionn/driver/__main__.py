"""`python -m aionn.driver NAME FD`: a driver process.

What is imported before the driver greets is what its start costs, for each of them anew: an engine's library by the engine when
it is made, `onnx` when a model must be parsed, the integrity store when something is stored.
"""

import gc
import os
import sys
import traceback

if __name__ == "__main__":
    code = 1
    try:
        # NumPy's BLAS keeps its idle threads spinning for 2^26 cycles, from its load on: 60 ms of CPU time at each start, taken
        # from whoever else is starting. They sleep at once instead, unless the app says otherwise. (2^4 is OpenBLAS's least.)
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
        gc.disable()  # nothing that is imported here goes again, so looking for garbage in it finds none
        from aionn.driver.process import main

        code = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter shutdown: an engine thread that never returns must not keep a process that nobody needs.
        os._exit(code)
