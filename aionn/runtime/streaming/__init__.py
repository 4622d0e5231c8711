"""Bursts as an app uses them.

burst       `Burst`: a stream of executions to one driver. Its usual frame is one native call
blocking    `BlockingBurst`: a burst for threads that run no event loop
blocking_runtime  such a burst to a driver of the app's runtime
frame       `Frame`: shared memory for one request's inputs, to be written in place
item        `Item`: one frame of a source with a tag; `Entry`, what a running stream makes of it; and the thread of a source that may block
stream      `Burst.map`: a source of inputs in, results out, in order
kept_burst  `KeptBurst`: the burst behind `Compilation.compute`
starting    `Starts`: the executions that an app has started; no task waits for them
recovering  `RecurrentStream`: a stream whose state stays in the driver and survives the driver's end, by its last snapshot
any_connection  what an open burst has in the driver that serves: link and frames
connection  the same for a burst of a loop, and what the bursts of one compilation share
"""
