"""libfmq's fuzzer, as a property: whatever descriptor or counter comes, the answer is data, "nothing", or one of our errors."""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aionn.errors import AionnError, CallerError
from aionn.fmq import MessageQueue, MQDescriptor, MQFlavor
from aionn.hal.queues import GrantorDescriptor
from tests.fmq.queues import duplicated, open_fds, words_of

EDGES = [0, 1, 3, 4, 7, 8, 15, 16, 63, 64, 65, 128, 192, 320, 511, 512, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, -1, -8]
numbers = st.one_of(st.sampled_from(EDGES), st.integers(-(2**64), 2**64))
grantors = st.builds(GrantorDescriptor, st.one_of(st.integers(-1, 3), numbers), numbers, numbers)


@given(st.lists(grantors, max_size=7), numbers, st.sampled_from(list(MQFlavor)), st.booleans())
@settings(max_examples=300)
def test_any_descriptor_is_attached_or_refused_and_leaks_nothing(
    parts: list[GrantorDescriptor], quantum: int, flavor: MQFlavor, with_events: bool
) -> None:
    queue = MessageQueue.create(8, 64)
    fds = duplicated(queue.descriptor()).fds
    if not with_events:
        os.close(fds[1])
        os.close(fds[2])
        fds = fds[:1]
    before = open_fds(collect=False)  # collecting 600 times would take most of the test's time
    with contextlib.suppress(CallerError):
        MessageQueue.attach(MQDescriptor(tuple(parts), quantum, flavor, fds)).close()
    assert len(open_fds(collect=False)) == len(before) - len(fds)
    queue.close()


@given(st.data())
@settings(max_examples=300)
def test_a_valid_descriptor_with_one_number_changed_never_harms(data: st.DataObject) -> None:
    queue = MessageQueue.create(8, 64)
    descriptor = duplicated(queue.descriptor())
    parts = [[part.fd_index, part.offset, part.extent] for part in descriptor.grantors]
    parts[data.draw(st.integers(0, 4))][data.draw(st.integers(0, 2))] = data.draw(numbers)
    twisted = MQDescriptor(tuple(GrantorDescriptor(*part) for part in parts), descriptor.quantum, descriptor.flavor, descriptor.fds)
    try:
        peer = MessageQueue.attach(twisted)
    except CallerError:
        pass
    else:
        use(peer, random.Random(data.draw(st.integers(0, 2**32))), 20)
        peer.close()
    queue.close()


def use(queue: MessageQueue, chance: random.Random, steps: int) -> None:
    """Any calls, in any order."""
    for _ in range(steps):
        count = chance.choice([0, 1, 2, 63, 64, 65, chance.randrange(70)])
        calls: list[Any] = [
            lambda count=count: queue.write(bytes(queue.quantum * count)),
            lambda count=count: queue.read(count),
            lambda count=count: queue.peek(count),
            lambda count=count: queue.begin_write(count),
            lambda count=count: queue.begin_read(count),
            lambda count=count: queue.commit_write(count),
            lambda count=count: queue.commit_read(count),
            lambda count=count: queue.arm_reader(count),
            lambda count=count: queue.arm_writer(count),
            queue.available_to_read,
            queue.available_to_write,
            queue.clear_reader_event,
            lambda: queue.spin_until_readable(0),
            lambda: queue.reader_flag.wake(1),
        ]
        try:
            chance.choice(calls)()
        except AionnError:
            continue


def poked(chance: random.Random, mutations: int) -> None:
    """One queue of each flavour, used while its shared words are overwritten with anything."""
    for flavor in MQFlavor:
        queue = MessageQueue.create(chance.choice([1, 3, 8, 24]), chance.randrange(1, 70), flavor=flavor)
        with words_of(queue) as words:
            for _ in range(mutations // 2):
                counter = words.read if chance.random() < 0.5 else words.written
                near = int(counter[0])
                capacity = queue.capacity * queue.quantum
                close_by = [0, near + 1, near - 1, near + capacity, near - capacity]
                value = chance.choice([*close_by, chance.getrandbits(64), chance.choice(EDGES)])
                if chance.random() < 0.2:
                    words.control[chance.randrange(len(words.control))] = chance.getrandbits(32)
                    words.flag[0] = chance.getrandbits(32)
                counter[0] = value % 2**64
                use(queue, chance, 2)
        queue.close()


@given(st.integers(0, 2**64))
@settings(max_examples=40)
def test_poked_words_never_harm(seed: int) -> None:
    poked(random.Random(seed), 100)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_million_pokes_never_harm() -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    chance = random.Random(seed)
    before = open_fds()
    for _ in range(1000):
        poked(chance, 1000)
    assert open_fds() == before
