"""Everything that is fuzzed, by name. Each target and what it may raise stands in the module of its kind."""

from __future__ import annotations

from tests.fuzz import server, shared_memory, signed, stored, wire
from tests.fuzz.choices import Target

TARGETS: dict[str, Target] = {
    "requests": Target(wire.requests, wire.request_seeds, 1024, 1000, 300_000),
    "results": Target(wire.results, wire.result_seeds, 1024, 1000, 300_000),
    "counters": Target(shared_memory.counters, shared_memory.counter_seeds, 512, 400, 300_000),
    "descriptors": Target(shared_memory.descriptors, shared_memory.descriptor_seeds, 256, 600, 200_000),
    "frames": Target(wire.frames, wire.frame_seeds, 4096, 1000, 300_000),
    "channel": Target(wire.channel, wire.channel_seeds, 4096, 300, 50_000),
    "memory_requests": Target(wire.memory_requests, wire.memory_seeds, 256, 1000, 300_000),
    "manifests": Target(stored.manifests, stored.manifest_seeds, 2048, 1000, 200_000),
    "keys": Target(stored.keys, stored.key_seeds, 512, 1000, 200_000),
    "keyrings": Target(signed.keyrings, signed.keyring_seeds, 1024, 1000, 200_000),
    "public_keys": Target(signed.public_keys, signed.public_key_seeds, 1024, 1000, 200_000),
    "statements": Target(signed.statements, signed.statement_seeds, 1024, 600, 100_000),
    "options": Target(signed.options, signed.option_seeds, 256, 1000, 200_000),
    "artifacts": Target(stored.artifacts, stored.artifact_seeds, 512, 200, 50_000),
    "integrity_databases": Target(stored.integrity_databases, stored.database_seeds, 128, 40, 5_000),
    "blob_databases": Target(stored.blob_databases, stored.database_seeds, 128, 40, 5_000),
    "index_databases": Target(stored.index_databases, stored.database_seeds, 128, 40, 5_000),
    "onnx_files": Target(stored.onnx_files, stored.onnx_seeds, 1 << 18, 60, 20_000),
    "burst_server": Target(server.burst_server, server.server_seeds, 4096, 150, 50_000),
}


def let_go() -> None:
    """What the targets keep from one input to the next: a server, a loop."""
    server.let_go_of_server()
    wire.let_go_of_loop()
