"""Artifacts that travel: the store, its sweep, and the commands of `aionn fleet`."""
