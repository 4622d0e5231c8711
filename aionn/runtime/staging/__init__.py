"""Better stages: made in the background, compared, swapped in, and left again if they fail.

swapping   the app's new version of a model
first      which stage serves from the start
stages     the task that makes one stage after the other
making     one stage: compiled, loaded, compared, swapped in
way_back   from a stage that keeps failing to the one before
verdicts   what earlier comparisons found, kept with the cache
target     the parts of a compilation for which stages are made
stage      `Stage` and `StagePolicy`: what an app sees and sets
comparing  whether a new stage is as right as the one that serves, and faster
samples    the inputs on which stages are compared
measuring  how long a run takes while the app's stream goes on
"""
