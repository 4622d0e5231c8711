"""Tests of `aionn.sources`. Files of a few frames are made in a temporary directory."""
