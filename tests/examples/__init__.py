"""Tests of examples that are more than one file."""
