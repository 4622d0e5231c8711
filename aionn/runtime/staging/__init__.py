"""Better stages: made in the background, compared, swapped in, and left again if they fail.

stage      `Stage` and `StagePolicy`: what an app sees and sets
stages     the task that makes one stage after the other
comparing  whether a new stage is as right as the one that serves, and faster
measuring  how long a run takes while the app's stream goes on
verdicts   what earlier comparisons found, kept with the cache
frequency  whether a model is used often enough to warrant a stage
way_back   from a stage that keeps failing to the one before
swapping   the app's own new version of a model
"""
