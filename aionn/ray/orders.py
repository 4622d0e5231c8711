"""What app, actor and task say to each other, as bytes (msgpack). No I/O. Ray carries bytes, texts and numbers for aionn, never objects."""

from __future__ import annotations

import msgspec

from aionn.fleet.places import StatementPlace, fingerprint

__all__ = ["Made", "Order", "Word", "decode_made", "decode_order", "decode_word", "encode"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a task shall compile.

    Attributes:
        key: of the entry. The task makes the key anew, and compiles nothing if it is another one.
        device, device_version: the device that shall run it.
        model_digest: names the model in the store.
        store: the address of the artifact store.
        token: the app's token in the key.
        preference, priority: names, as for `Runtime.compile`.
        threads, at_most, instances: as in `PrepareOptions`.
        options: of the device's engine.
        model_bytes: bytes of the model's files.
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
        """Return what orders for the same artifact in the same store share."""
        return f"{self.key.hex()} {fingerprint(self.device, self.device_version)} {self.store}"

    @property
    def memory_bytes(self) -> int:
        """Return the memory that a task for the order asks Ray for."""
        return max(4 * self.model_bytes, _LEAST_MEMORY_BYTES)


_LEAST_MEMORY_BYTES = 100 << 20


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a task has to say at its end.

    Attributes:
        builder: the id of the key that has signed the artifact in the store. Empty if there is no artifact.
        refusal: why the task has no artifact. Empty otherwise.
        model_lost: the store does not have the model, or has other bytes under its name. Sending it again may help.
    """

    builder: bytes = b""
    refusal: str = ""
    model_lost: bool = False

    def place(self, order: Order) -> StatementPlace:
        """Return where the statement lies."""
        return StatementPlace(order.key, fingerprint(order.device, order.device_version), self.builder)


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an order stands.

    Attributes:
        number: grows with each change.
        text: what is done for it, in a few words.
        running: a task has begun. Otherwise it waits for a node.
        made: what became of it, once that is known.
    """

    number: int
    text: str
    running: bool
    made: Made | None = None


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_made = msgspec.msgpack.Decoder(Made).decode
decode_word = msgspec.msgpack.Decoder(Word).decode
