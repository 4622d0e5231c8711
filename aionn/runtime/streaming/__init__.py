"""Bursts as an app uses them.

burst       `Burst`: a stream of executions to one driver. Its usual frame is one native call
blocking    `BlockingBurst`: a burst for threads that run no event loop
frame       `Frame`: shared memory for one request's inputs, to be written in place
item        `Item`: one frame of a stream's source with a tag, and `Entry`, what a running stream makes of it
source      the thread that iterates a source which may block
stream      `Burst.map`: a source of inputs in, results out, in order
kept_burst  `KeptBurst`: the burst behind `Compilation.compute`
recovering  `RecurrentStream`: a stream whose state stays in the driver and survives the driver's end
kept_state  the state of such a stream: in the driver, and as it was at the last snapshot
connection  what an open burst has in the driver that serves: link, frames, streams
"""
