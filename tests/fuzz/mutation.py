"""The plain loop: seeds, mutated at random. It sees no coverage; it needs nothing but Python."""

from __future__ import annotations

import random

from tests.fuzz.choices import EDGES, Target


class Finding(AssertionError):
    """A target raised what is not documented.

    Attributes:
        data: the input, to be run again with `python -m tests.fuzz TARGET --input HEX`.
    """

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(f"python -m tests.fuzz {name} --input {data.hex()}")
        self.data = data


def mutated(chance: random.Random, seeds: list[bytes], max_bytes: int) -> bytes:
    """One of the seeds with up to 8 changes: bits, bytes, whole fields, pieces doubled, cut, moved or taken from another."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(data) + 1)
        act = chance.randrange(9)
        if act == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif act == 1 and data:
            data[at % len(data)] = chance.randrange(256)
        elif act == 2:
            width = chance.choice((1, 2, 4, 8))
            value = (chance.choice(EDGES) + chance.randrange(-2, 3)) % 2 ** (8 * width)
            data[at : at + width] = value.to_bytes(width, chance.choice(("little", "big")))
        elif act == 3:
            del data[at : at + chance.choice((1, 4, 24, len(data)))]
        elif act == 4:
            data[at:at] = data[at : at + chance.choice((1, 8, 24, len(data)))]
        elif act == 5:
            data[at:at] = chance.randbytes(chance.randrange(1, 33))
        elif act == 6:
            other = chance.choice(seeds)
            start = chance.randrange(len(other) + 1)
            data[at:] = other[start:]
        elif act == 7:
            data[at : at + 8] = chance.randbytes(8)
        else:
            data = bytearray(chance.randbytes(chance.randrange(1, 257)))
    return bytes(data[:max_bytes])


def run_plainly(name: str, target: Target, runs: int, seed: int) -> None:
    """Every seed as it is, then mutated ones.

    Raises:
        Finding: with the input, caused by what the target raised.
    """
    chance = random.Random(seed)
    seeds = list(target.seeds())
    for number in range(runs):
        data = seeds[number] if number < len(seeds) else mutated(chance, seeds, target.max_bytes)
        try:
            target.one(data)
        except Exception as error:
            raise Finding(name, data) from error
