"""aionn on a Ray cluster. Optional (`pip install aionn[ray]`); nothing below imports it.

Frames stay on the machine that has them. Models, artifacts and control travel through Ray.

    holder      `Holder`: the base of a Serve deployment whose replicas hold models
    serving     `deployment`, a ready deployment, and `serve_options`, the options of Serve that suit it
    models      `ModelSpec`: which model, with which digest, compiled in which way
    destructor  what Serve awaits at the end of a replica
    farm        a compile farm as the backend of a runtime: the app's side
    flights     the actor that has each model compiled once, however many apps ask
    tasks       the Ray task that compiles one model, in a driver process like any other
    orders      what app, actor and task say to each other
    resources   which devices a node of the cluster has
    needed      imports Ray, or says how to install it

Names are imported when they are first asked for, and Ray when a name that needs Ray is used.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.ray.farm import Farm
    from aionn.ray.holder import Holder
    from aionn.ray.models import ModelSpec
    from aionn.ray.resources import node_resources
    from aionn.ray.serving import deployment, serve_options

__all__ = ["Farm", "Holder", "ModelSpec", "deployment", "node_resources", "serve_options"]

if not _typing.TYPE_CHECKING:
    _HOMES = {
        "Farm": "aionn.ray.farm",
        "Holder": "aionn.ray.holder",
        "ModelSpec": "aionn.ray.models",
        "deployment": "aionn.ray.serving",
        "node_resources": "aionn.ray.resources",
        "serve_options": "aionn.ray.serving",
    }
    __getattr__ = _imported_when_asked(__name__, _HOMES)
