"""What serves a compilation now, and how another prepared model takes its place.

compiled_model  the prepared model of the moment, its users, the gate that holds executions back, and the swap
"""
