"""A driver's process: everything that a device needs and no engine should write.

    registry   finds engines, and devices that an author has written without an engine, by name
    device     makes an `IDevice` of any engine, to which it hands the blob cache
    service    serves the device to the app over the control socket; everything that its client made is freed with the client
    received   the memories and files that came with a call, and duplicates of its descriptors for a thread
    prepared_model  a model on an engine: its lanes, executions and bursts
    memories   the memories of a request as the device sees them, and those of a burst, kept mapped
    execution  requests, bound to their bytes, as a lane runs them
    values     runs with strings, sequences, maps or optionals
    options    the facts that an engine may leave out, and the options that apps give it
    compiling  one compilation by an engine, and better artifacts that the engine offers while it runs
    sharing    the executables of prepared models: one per instance, shared by prepared models of the same model;
               and what each client of a driver has made and may use
    joining    requests of several callers in one run
    lanes      the threads of a prepared model, one per instance: each waits for requests natively, and runs them by priority
    threads    the threads for compiling and loading
    artifacts  stores what was compiled, and loads it verified
    engine_errors  what is a bug in an engine, where it lies, and which need would have allowed what the sandbox denied
    template   copies of this process that become drivers (`_sibling`)
    beginning  the first lines: bind the driver's life to its parent's, confine the process, drop output in excess (`_valve`)
    process    what `python -m aionn.driver NAME` does then: find its engine, greet, serve, send its log to the app's
    __main__   makes settings that must come before the imports, and calls `process`

Engines see arrays, and clients see HAL calls. No module here knows the runtime.

A name is imported when it is first asked for. The reason: `__main__` makes settings before NumPy is loaded, and Python imports this
package before `__main__`.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.driver.device import EngineDevice
    from aionn.driver.registry import find_engine

__all__ = ["EngineDevice", "find_engine"]

if not _typing.TYPE_CHECKING:
    _HOMES = {"EngineDevice": "aionn.driver.device", "find_engine": "aionn.driver.registry"}
    __getattr__ = _imported_when_asked(__name__, _HOMES)
