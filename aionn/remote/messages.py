"""What the app sends, as messages: models, options, cache files and queues. Their descriptors travel beside them."""

from __future__ import annotations

from aionn.hal.interfaces import CacheHandles, PrepareOptions
from aionn.hal.model import Model, known_contents, known_token
from aionn.hal.queues import MQDescriptor
from aionn.hal.values import as_messages
from aionn.remote.parts import CacheMessage, ModelMessage, MQMessage, OptionsMessage


def model_message(model: Model) -> ModelMessage:
    """Return a model as a message. The descriptors of `pool_fds` travel beside it."""
    return ModelMessage(
        model.graph,
        as_messages(model.inputs),
        as_messages(model.outputs),
        model.operations,
        model.constants,
        tuple(pool.description for pool in model.pools),
        known_token(model),
        known_contents(model),
    )


def pool_fds(model: Model) -> list[int]:
    """Return the descriptors of a model's pools, which the model keeps owning."""
    return [pool.fileno() for pool in model.pools]


def options_message(options: PrepareOptions, device: str) -> OptionsMessage:
    """Return the options as a message for the device of that name."""
    own = options.of(device)
    return OptionsMessage(
        options.preference,
        options.priority,
        options.deadline_ns,
        options.threads,
        options.open_outputs,
        options.at_most,
        options.instances,
        dict(own),
        dict(own.files),
    )


def cache_message(cache: CacheHandles) -> CacheMessage:
    return CacheMessage(len(cache.model), len(cache.data), cache.token, cache.keyring)


def cache_fds(cache: CacheHandles | None) -> tuple[int, ...]:
    return () if cache is None else (*cache.model, *cache.data)


def queue_message(descriptor: MQDescriptor) -> MQMessage:
    return MQMessage(descriptor.grantors, descriptor.quantum, descriptor.flavor, len(descriptor.fds))
