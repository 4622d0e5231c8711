"""aionn on a Ray cluster. Optional (`pip install aionn[ray]`); nothing below imports it.

Frames stay on the machine that has them. Models, artifacts and control travel through Ray.
"""
