"""`python -m aionn.driver NAME FD`: a driver process.

Each driver pays for its imports in the time of its start. So modules are imported only when they are needed. An engine's library is
imported when the engine is made, `onnx` when a model must be parsed, the integrity store when something is stored.
"""

import gc
import os
import sys
import traceback

if __name__ == "__main__":
    code = 1
    try:
        # NumPy's BLAS keeps its idle threads spinning for 2^26 cycles after it is loaded. At each start that takes 60 ms of CPU time
        # from other processes that are starting. So the threads sleep at once, unless the app says otherwise. (2^4 is OpenBLAS's least.)
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
        # The loop's library tries io_uring, which no sandbox allows.
        os.environ["UV_USE_IO_URING"] = "0"
        gc.disable()  # everything imported here stays, so looking for garbage in it is a waste of time
        from aionn.remote.orders import LEAVES_TEMPLATE

        arguments, templated = sys.argv[1:], sys.argv[-1].rstrip() == LEAVES_TEMPLATE
        if templated:
            from aionn.driver.template import leave_template, set_blas_threads

            arguments = leave_template(arguments)  # returns once in each driver
        from aionn.driver.beginning import begin, schedule_of, take_up

        take_up(schedule_of(arguments))
        begun = begin(arguments)  # confines the process, so nothing that needs more may be imported before
        if isinstance(begun, int):
            code = begun
        else:
            if templated:
                set_blas_threads()
            from aionn.driver.process import main

            code = main(begun)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip the interpreter's shutdown. It would wait for an engine thread that never returns, and keep a useless process.
        os._exit(code)
