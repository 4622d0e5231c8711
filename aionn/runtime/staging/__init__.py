"""Better stages: made in the background, compared, swapped in, and left again if they fail.

swapping   the app's new version of a model
stages     which stage serves from the start, and the task that makes the others: compiled, loaded, compared, swapped in
way_back   from a stage that keeps failing to the one before
verdicts   what earlier comparisons found, kept with the cache
stage      `Stage` and `StagePolicy`: what an app sees and sets
comparing  whether a new stage is as right as the one that serves, and faster
measuring  how long a run takes while the app's stream goes on, and on which inputs
"""
