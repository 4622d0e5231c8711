"""Tests of `aionn.ray`. They need Ray, and run on one node that the tests start (`tests.ray.cluster`).

Those that spend most of their time in timers and starts of Ray are soaks: together they take more than two minutes. What aionn does in them
is tested without a cluster, too (`test_holder_in_process`, `test_multiplexed_in_process`, `test_farm_alone`).
"""
