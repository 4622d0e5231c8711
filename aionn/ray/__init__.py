"""aionn on a Ray cluster. Optional (`pip install aionn[ray]`); nothing below imports it.

Frames stay on the machine that has them. Models, artifacts and control travel through Ray. The names are imported when they are first
asked for, and Ray when it is first needed.

    holder      `Holder`: the base of a Serve deployment whose replicas hold models
    serving     `deployment`, a ready deployment, and `serve_options`, the options of Serve that suit it
    models      `ModelSpec`: which model, with which digest, compiled in which way
    destructor  what Serve awaits at the end of a replica
    needed      imports Ray, or says how to install it
"""

from typing import TYPE_CHECKING

from aionn.lazy import imported_when_asked

if TYPE_CHECKING:
    from aionn.ray.holder import Holder
    from aionn.ray.models import ModelSpec
    from aionn.ray.serving import deployment, serve_options

_HOMES = {
    "Holder": "aionn.ray.holder",
    "ModelSpec": "aionn.ray.models",
    "deployment": "aionn.ray.serving",
    "serve_options": "aionn.ray.serving",
}

__all__ = ["Holder", "ModelSpec", "deployment", "serve_options"]

if not TYPE_CHECKING:
    __getattr__ = imported_when_asked(__name__, _HOMES)
