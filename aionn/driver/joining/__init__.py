"""Joining: requests of several callers as the rows of one run, where the device has found that their rows stay apart.

    probing      finds the axes of the rows, and runs the model on made-up rows when it is compiled
    joined_runs  gathers the rows of requests, runs them once, and scatters the outputs, in the thread of a lane
    sizes        how many rows pay, from the times of the runs

A lane (`driver.lanes`) takes a lone request as always. It joins requests only of a model that was compiled with `PrepareOptions.batching`.
"""
