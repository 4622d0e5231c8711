"""Fuzzing of everything that a peer or a file controls.

A target is a plain function of bytes that returns, or raises what is not documented: that is a finding.

    python -m tests.fuzz                       the targets
    python -m tests.fuzz TARGET --runs 100000  one of them, guided by coverage where atheris is installed
    pytest -m soak tests/fuzz                  all of them, more than a million inputs
    pytest tests/fuzz                          some thousand inputs by the plain loop, in the normal suite

`pip install atheris` brings the coverage guidance. Without it every command runs the plain loop of `mutation`, and says so.
"""
