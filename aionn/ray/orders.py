"""The messages between an app of the farm, the actor and a task, encoded as bytes (msgpack). No I/O.

    Order        from the app by way of the actor to the task: what to compile
    OrderState   from the actor to the app: how far the order is
    OrderResult  from the task by way of the actor to the app: which key has signed the artifact, or why the task has none

Ray carries only bytes, texts and numbers for aionn. So it pickles no object of aionn.
"""

from __future__ import annotations

import msgspec

from aionn.fleet.places import StatementPlace, fingerprint


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a task compiles.

    Attributes:
        key: of the cache entry, 32 bytes. The task makes the key anew from what it has compiled. If the keys differ, it signs nothing.
        device, device_version: of the app's device. The node must have the same.
        model_digest: the model's token, 32 bytes, by which it lies in the store.
        store: the address of the artifact store.
        token: the token in the key, 32 bytes: that of `compile(token=)`, or else the model's.
        preference, priority: names, as for `Runtime.compile`.
        threads, at_most, instances: as in `PrepareOptions`.
        options: of the device's engine, by name.
        model_bytes: size of the model's object in the store.
    """

    key: bytes
    device: str
    device_version: str
    model_digest: bytes
    store: str
    token: bytes
    preference: str
    priority: str
    threads: int
    at_most: bool
    instances: int
    options: dict[str, str | int | float | bool]
    model_bytes: int

    @property
    def flight(self) -> str:
        """The name of the flight. Orders for the same artifact in the same store have the same name."""
        return f"{self.key.hex()} {fingerprint(self.device, self.device_version)} {self.store}"

    @property
    def memory_bytes(self) -> int:
        """The memory that a task for the order asks Ray for: four times the model, at least 100 MiB."""
        return max(4 * self.model_bytes, _LEAST_MEMORY_BYTES)


_LEAST_MEMORY_BYTES = 100 << 20


class OrderResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a task returns.

    Attributes:
        builder: the id of the key that has signed the artifact in the store. Empty if there is no artifact.
        refusal: why the task has no artifact. Empty otherwise.
        kind: of the refusal: the step that was refused, and the reason or the class of error. It names no model and no file, so it is equal
            for refusals whose texts differ in these only.
        model_lost: the store does not have the model, or has other bytes under its name. Sending it again may help.
    """

    builder: bytes = b""
    refusal: str = ""
    kind: str = ""
    model_lost: bool = False

    def place(self, order: Order) -> StatementPlace:
        """Return where the statement of this result lies in the store."""
        return StatementPlace(order.key, fingerprint(order.device, order.device_version), self.builder)


class OrderState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far an order is.

    Attributes:
        number: grows with each change.
        text: what is done for the order now, in a few words.
        running: whether a task has begun. Before, the order waits for a node.
        result: of the task. None until the task has ended.
    """

    number: int
    text: str
    running: bool
    result: OrderResult | None = None


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_result = msgspec.msgpack.Decoder(OrderResult).decode
decode_state = msgspec.msgpack.Decoder(OrderState).decode
