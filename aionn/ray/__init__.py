"""aionn on a Ray cluster. Optional (`pip install aionn[ray]`); nothing below imports it.

Frames stay on the machine that has them. Models, artifacts and control travel through Ray.

    farm       a compile farm as the backend of a runtime: the app's side
    flights    the actor that has each model compiled once, however many apps ask
    tasks      the Ray task that compiles one model, in a driver process like any other
    orders     what app, actor and task say to each other
    resources  which devices a node of the cluster has
    needed     imports Ray, or says how to install it

Names are imported when they are first asked for, and Ray when a name that needs Ray is used.
"""

import typing as _typing

from aionn.lazy import imported_when_asked as _imported_when_asked

if _typing.TYPE_CHECKING:
    from aionn.ray.farm import Farm
    from aionn.ray.resources import node_resources

__all__ = ["Farm", "node_resources"]

if not _typing.TYPE_CHECKING:
    _HOMES = {
        "Farm": "aionn.ray.farm",
        "node_resources": "aionn.ray.resources",
    }
    __getattr__ = _imported_when_asked(__name__, _HOMES)
