"""aionn on a Ray cluster. Optional (`pip install aionn[ray]`): no other package of aionn but the command `aionn ray` imports it.

Two things are here: replicas of Ray Serve that hold models, and a farm of nodes that compile models for apps. Models and artifacts of the
farm travel through an artifact store. Ray carries only orders and reports about them.

    holder      `Holder`: the base of a Serve deployment whose replicas hold models
    held        a model of a replica: its compiles, its upgrades, and what serves
    multiplexed `MultiplexedHolder`: the base of a deployment of many models, of which each replica keeps a few compiled
    leases      a limited number of open models, which requests lease. Knows nothing of Ray
    serving     `deployment`, a ready deployment, and `serve_options`, the options of Serve that suit it
    models      `ModelSpec`: which model, with which digest, compiled in which way

    farm        the farm as the compile backend of a runtime: the app's side
    flights     the actor that has each model compiled once, however many apps ask
    tasks       the Ray task that compiles one model, in a driver process like any other
    orders      the messages between app, actor and task
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
    from aionn.ray.multiplexed import MultiplexedHolder
    from aionn.ray.resources import node_resources
    from aionn.ray.serving import deployment, serve_options

__all__ = ["Farm", "Holder", "ModelSpec", "MultiplexedHolder", "deployment", "node_resources", "serve_options"]

if not _typing.TYPE_CHECKING:
    _HOMES = {
        "Farm": "aionn.ray.farm",
        "Holder": "aionn.ray.holder",
        "ModelSpec": "aionn.ray.models",
        "MultiplexedHolder": "aionn.ray.multiplexed",
        "deployment": "aionn.ray.serving",
        "node_resources": "aionn.ray.resources",
        "serve_options": "aionn.ray.serving",
    }
    __getattr__ = _imported_when_asked(__name__, _HOMES)
