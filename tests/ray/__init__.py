"""Tests of `aionn.ray`. They need Ray, and run on one node that the tests start (`tests.ray.cluster`)."""
