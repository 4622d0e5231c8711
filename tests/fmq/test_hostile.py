"""A peer may send any descriptor, poke any word, drain or fill any eventfd, or fork: it costs it its queue, and us nothing."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from aionn.errors import CallerError, MemoryAllocationError
from aionn.fmq import MessageQueue, MQDescriptor, MQFlavor, QueueClosedError, QueueCorruptedError, layout
from aionn.hal.queues import GrantorDescriptor
from tests.fmq.queues import both_ends, duplicated, open_fds, words_of

Twist = Callable[[MQDescriptor], MQDescriptor]


def with_part(index: int, **changes: int) -> Twist:
    def twist(d: MQDescriptor) -> MQDescriptor:
        parts = list(d.grantors)
        parts[index] = replace(parts[index], **changes)
        return replace(d, grantors=tuple(parts))

    return twist


def with_memory(make: Callable[[], int]) -> Twist:
    def twist(d: MQDescriptor) -> MQDescriptor:
        os.close(d.fds[0])
        return replace(d, fds=(make(), *d.fds[1:]))

    return twist


def memfd(size_bytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe_end() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def dropping(count: int) -> Twist:
    def twist(d: MQDescriptor) -> MQDescriptor:
        for fd in d.fds[len(d.fds) - count :]:
            os.close(fd)
        return replace(d, fds=d.fds[: len(d.fds) - count])

    return twist


def with_last_fd(make: Callable[[], int]) -> Twist:
    def twist(d: MQDescriptor) -> MQDescriptor:
        os.close(d.fds[-1])
        return replace(d, fds=(*d.fds[:-1], make()))

    return twist


HOSTILE: dict[str, tuple[Twist, str]] = {
    "no grantors": (lambda d: replace(d, grantors=()), "0 grantors"),
    "two grantors": (lambda d: replace(d, grantors=d.grantors[:2]), "2 grantors"),
    "quantum 0": (lambda d: replace(d, quantum=0), "quantum of 0"),
    "another quantum": (lambda d: replace(d, quantum=16), "quantum of 16"),
    "an unknown flavor": (lambda d: replace(d, flavor=3), "flavor 3"),
    "fd index past the memory": (with_part(layout.DATA, fd_index=1), "fd index 1"),
    "negative fd index": (with_part(layout.DATA, fd_index=-1), "fd index -1"),
    "an eventfd as memory": (with_part(layout.CONTROL, fd_index=2), "fd index 2"),
    "misaligned offset": (with_part(layout.WRITE_COUNTER, offset=68), "offset 68"),
    "negative offset": (with_part(layout.WRITE_COUNTER, offset=-64), "offset -64"),
    "control words off their line": (with_part(layout.CONTROL, offset=200), "offset 200"),
    "short counter": (with_part(layout.READ_COUNTER, extent=4), "4 bytes"),
    "short flag": (with_part(layout.EVENT_FLAG, extent=3), "3 bytes"),
    "short control words": (with_part(layout.CONTROL, extent=319), "319 bytes"),
    "no data": (with_part(layout.DATA, extent=0), "0 bytes"),
    "data that no element divides": (with_part(layout.DATA, extent=8 * 63 + 1), "expected a multiple of the quantum of 8 bytes"),
    "data past the memory": (with_part(layout.DATA, extent=8 * 4096), "of a file of"),
    "data past 2 GiB": (with_part(layout.DATA, extent=2**31), "a queue ends before"),
    "an extent of 2^64": (with_part(layout.DATA, extent=2**64), "a queue ends before"),
    "an offset of 2^63": (with_part(layout.DATA, offset=2**63), "a queue ends before"),
    "data over a counter": (with_part(layout.DATA, offset=0), "overlap"),
    "data over the control words": (with_part(layout.DATA, offset=448), "overlap"),
    "both counters in one place": (with_part(layout.WRITE_COUNTER, offset=0), "overlap"),
    "short memory": (with_memory(lambda: memfd(512, fcntl.F_SEAL_SHRINK)), "of a file of 512 bytes"),
    "memory that can shrink": (with_memory(lambda: memfd(8192, fcntl.F_SEAL_GROW)), "not sealed"),
    "memory that is a pipe": (with_memory(pipe_end), "pipe|regular file"),
    "memory that is not open": (with_memory(lambda: 10**6), "not open"),
    "no eventfds": (dropping(2), "1 file descriptors, 2 of them eventfds"),
    "one eventfd": (dropping(1), "2 file descriptors, 2 of them eventfds"),
    "no descriptors": (dropping(3), "0 file descriptors"),
    "a pipe as eventfd": (with_last_fd(pipe_end), "must be eventfds"),
    "an eventfd that is not open": (with_last_fd(lambda: 10**6), "not open"),
    "one descriptor twice": (lambda d: replace(dropping(1)(d), fds=(*d.fds[:2], d.fds[1])), "twice"),
    "memory that nothing uses": (
        lambda d: replace(d, fds=(d.fds[0], memfd(8, fcntl.F_SEAL_SHRINK), *d.fds[1:])),
        "no grantor uses",
    ),
}


@pytest.mark.parametrize(("twist", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_descriptor_is_refused_with_its_reason_and_leaks_nothing(twist: Twist, reason: str) -> None:
    queue = MessageQueue.create(8, 64)
    before = open_fds()
    with pytest.raises(CallerError, match=reason):
        MessageQueue.attach(twist(duplicated(queue.descriptor())), 8)
    assert open_fds() == before
    assert queue.write(bytes(8))
    queue.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("left", range(4))
def test_a_queue_for_which_no_descriptor_is_left_is_told_and_leaks_nothing(left: int) -> None:
    """It takes three: its memory and two eventfds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_fds()
    unused = [fd for fd in range(left + len(before) + 1) if not is_open(fd)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused[left], hard))
    try:
        if left < 3:
            with pytest.raises(MemoryAllocationError, match="none is left"):
                MessageQueue.create(8, 16)
        else:
            MessageQueue.create(8, 16).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_fds() == before


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two memories"])
def test_a_queue_without_the_descriptors_of_its_memory_works_on_and_refuses_further_peers(apart: bool) -> None:
    before = open_fds()
    queue = MessageQueue.create(8, 4, buffer_fd=memfd(32, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) if apart else None)
    peer = MessageQueue.attach(duplicated(queue.descriptor()), 8)
    for end in (queue, peer):
        for _ in range(2):
            end.forget_descriptor()
        with pytest.raises(CallerError, match="no further peer can attach"):
            end.descriptor()
    assert len(open_fds() - before) == 4  # two eventfds at each end
    for number in range(10):
        assert queue.write(bytes([number]) * 24)
        assert peer.read(3) == bytes([number]) * 24
    assert peer.arm_reader(1)
    assert queue.write(bytes(8))
    assert os.eventfd_read(peer.reader_fd) == 1
    queue.close()
    assert peer.read(1) == bytes(8)
    with pytest.raises(QueueClosedError):
        peer.read(1)
    peer.close()
    peer.forget_descriptor()
    with pytest.raises(CallerError, match="has been closed here"):
        peer.descriptor()
    assert open_fds() == before


def test_extra_grantors_are_ignored() -> None:
    queue = MessageQueue.create(8, 64)
    descriptor = duplicated(queue.descriptor())
    MessageQueue.attach(replace(descriptor, grantors=(*descriptor.grantors, GrantorDescriptor(7, 3, 2**40)))).close()
    queue.close()


def test_attached_descriptors_are_not_inherited() -> None:
    with both_ends(8, 64) as (_, peer):
        assert [os.get_inheritable(fd) for fd in peer.descriptor().fds] == [False] * 3


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_attaching_changes_nothing_in_a_queue_that_is_in_use() -> None:
    queue = MessageQueue.create(1, 64)
    assert queue.write(b"abc")
    assert queue.read(1) == b"a"
    assert queue.arm_reader(60)
    with words_of(queue) as words:
        before = (int(words.read[0]), int(words.written[0]), int(words.flag[0]), words.control.tolist())
        kept: list[MessageQueue] = []
        descriptor = duplicated(queue.descriptor())
        in_child(lambda: kept.append(MessageQueue.attach(descriptor)))  # it ends without closing, as a killed process does
        for fd in descriptor.fds:
            os.close(fd)
        assert (int(words.read[0]), int(words.written[0]), int(words.flag[0]), words.control.tolist()) == before
    assert queue.read(2) == b"bc"
    queue.close()


@pytest.fixture(params=[MQFlavor.SYNCHRONIZED, MQFlavor.UNSYNCHRONIZED], ids=["sync", "unsync"])
def flavor(request: pytest.FixtureRequest) -> MQFlavor:
    chosen: MQFlavor = request.param
    return chosen


@pytest.fixture
def poked(flavor: MQFlavor) -> Iterator[tuple[MessageQueue, Callable[..., None]]]:
    queue = MessageQueue.create(8, 64, flavor=flavor)
    with words_of(queue) as words:

        def poke(*, read: int = 0, written: int = 0) -> None:
            words.read[0] = read % 2**64
            words.written[0] = written % 2**64

        yield queue, poke
    queue.close()


IMPOSSIBLE = [{"written": 1}, {"written": 8 * 64 + 1}, {"written": -1}]
IMPOSSIBLE_SYNC = [{"read": 8}, {"read": 1}, {"written": 8 * 65}, {"written": 2**63}, {"read": -8}, {"read": 4, "written": 8}]


@pytest.mark.parametrize("counters", IMPOSSIBLE, ids=str)
def test_an_impossible_write_counter_is_told_at_every_use(
    poked: tuple[MessageQueue, Callable[..., None]], counters: dict[str, int]
) -> None:
    queue, poke = poked
    poke(**counters)
    every_use_is_refused(queue)
    poke()
    assert queue.write(bytes(8))  # nothing was changed by looking


@pytest.mark.parametrize("counters", IMPOSSIBLE_SYNC, ids=str)
def test_impossible_counters_are_told_at_every_use(counters: dict[str, int]) -> None:
    queue = MessageQueue.create(8, 64)
    with words_of(queue) as words:
        words.read[0] = counters.get("read", 0) % 2**64
        words.written[0] = counters.get("written", 0) % 2**64
        every_use_is_refused(queue)
        assert not queue.arm_reader()  # "look again", and then told
    queue.close()


def every_use_is_refused(queue: MessageQueue) -> None:
    uses: list[Callable[[], object]] = [
        lambda: queue.write(bytes(8)),
        lambda: queue.read(1),
        lambda: queue.peek(1),
        lambda: queue.begin_write(1),
        lambda: queue.begin_read(1),
        queue.available_to_read,
        queue.available_to_write,
    ]
    for use in uses:
        with pytest.raises(QueueCorruptedError, match="impossible"):
            use()


@pytest.mark.anyio
async def test_a_corrupted_queue_is_told_to_who_waits() -> None:
    queue = MessageQueue.create(8, 64)
    with words_of(queue) as words:
        words.written[0] = 3
        with pytest.raises(QueueCorruptedError):
            await queue.wait_readable()
        with pytest.raises(QueueCorruptedError):
            await queue.write_blocking(bytes(8))
    queue.close()


def test_a_drained_and_a_filled_eventfd_are_tolerated() -> None:
    with both_ends(1, 8) as (queue, peer):
        peer.clear_reader_event()  # nothing in it
        assert peer.arm_reader()
        os.eventfd_write(queue.reader_fd, 2**64 - 2)
        assert queue.write(b"x")  # cannot be filled further, and need not be
        assert peer.read(1) == b"x"
        peer.clear_reader_event()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(queue.reader_fd)


def test_a_peer_that_takes_off_nonblock_cannot_make_a_reader_block() -> None:
    with both_ends(1, 8) as (queue, peer):
        os.set_blocking(queue.reader_fd, True)  # the flag belongs to the file both have open
        peer.clear_reader_event()


def test_a_peer_that_fills_an_eventfd_and_takes_off_nonblock_cannot_make_a_writer_or_a_close_block() -> None:
    with both_ends(1, 8) as (queue, peer):
        for fd in (queue.reader_fd, queue.writer_fd):
            os.eventfd_write(fd, 2**64 - 2)
            os.set_blocking(fd, True)
        assert peer.arm_reader()
        assert queue.write(b"x")
        queue.close()


@pytest.mark.parametrize("use", ["read", "write", "arm_reader", "descriptor", "available_to_read"])
def test_a_closed_queue_is_the_callers_mistake(use: str) -> None:
    queue = MessageQueue.create(1, 8)
    queue.close()
    queue.close()
    arguments = {"read": (1,), "write": (b"x",)}.get(use, ())
    with pytest.raises(CallerError, match="closed here"):
        getattr(queue, use)(*arguments)


@pytest.mark.parametrize("count", [-1, -(2**70), 2**70])
def test_a_count_that_is_none_is_the_callers_mistake(count: int) -> None:
    with both_ends(1, 8) as (queue, _):
        for use in (queue.read, queue.peek, queue.begin_read, queue.begin_write, queue.arm_reader, queue.commit_read):
            with pytest.raises(CallerError, match="negative or too large"):
                use(count)


def test_who_waits_for_nothing_does_not_sleep() -> None:
    with both_ends(1, 8) as (queue, peer):
        assert not peer.arm_reader(0)
        assert not queue.arm_writer(0)


def test_half_an_element_is_the_callers_mistake() -> None:
    with both_ends(8, 8) as (queue, peer):
        with pytest.raises(CallerError, match="whole number of elements of 8 bytes"):
            queue.write(bytes(12))
        assert peer.available_to_read() == 0


def test_no_more_is_committed_than_was_begun() -> None:
    with both_ends(1, 8) as (queue, peer):
        with pytest.raises(CallerError, match="begun"):
            queue.commit_write(1)
        assert queue.begin_write(2)
        with pytest.raises(CallerError, match="begun"):
            queue.commit_write(3)
        assert queue.commit_write(1)
        with pytest.raises(CallerError, match="begun"):
            queue.commit_write(1)
        assert peer.available_to_read() == 1
        with pytest.raises(CallerError, match="begun"):
            peer.commit_read(1)


def test_transactions_read_only_where_they_read() -> None:
    with both_ends(1, 8) as (queue, peer):
        assert queue.write(b"abc")
        pieces = peer.begin_read(3)
        assert pieces is not None
        with pytest.raises(TypeError):
            pieces[0][0] = 1


def test_a_view_outlives_its_queue() -> None:
    queue = MessageQueue.create(1, 8)
    pieces = queue.begin_write(8)
    assert pieces is not None
    queue.close()
    pieces[0][:] = b"12345678"  # still mapped: nothing is unmapped under a view
    assert bytes(pieces[0]) == b"12345678"


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a fork and fail if it fails there. The child leaves without this process's clean-up."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, signal.strsignal(status & 127) if status & 127 else status


@pytest.mark.own_process("forks of test_hostile.py")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_inherited_queue_is_refused_in_the_child_and_unharmed_in_the_parent() -> None:
    with both_ends(1, 8) as (queue, peer):
        assert queue.write(b"a")

        def child() -> None:
            for use in (lambda: peer.read(1), lambda: queue.write(b"b"), peer.arm_reader, lambda: peer.spin_until_readable(0)):
                with pytest.raises(CallerError, match="fork"):
                    use()
            queue.close()
            peer.close()

        in_child(child)
        assert peer.read(1) == b"a"
        assert peer.read(1) is None  # neither written to nor closed
        assert queue.write(b"c")


@pytest.mark.own_process("forks of test_hostile.py")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_may_attach_and_make_its_own() -> None:
    with both_ends(1, 8) as (queue, peer):
        descriptor = duplicated(queue.descriptor())

        def child() -> None:
            attached = MessageQueue.attach(descriptor)
            assert attached.write(b"child")

        in_child(child)
        for fd in descriptor.fds:
            os.close(fd)
        assert peer.read(5) == b"child"


def test_close_tells_the_peer_who_first_reads_what_is_left() -> None:
    with both_ends(1, 8) as (queue, peer):
        assert queue.write(b"abc")
        queue.close()
        assert peer.read(2) == b"ab"
        with pytest.raises(QueueClosedError):
            peer.read(2)
        assert peer.read(1) == b"c"
        with pytest.raises(QueueClosedError):
            peer.read(1)
        with pytest.raises(QueueClosedError):
            peer.write(b"d")
        assert not peer.arm_reader()


def test_one_reader_of_many_that_leaves_does_not_close_an_unsynchronized_queue() -> None:
    with both_ends(1, 8, flavor=MQFlavor.UNSYNCHRONIZED) as (writer, reader):
        another = MessageQueue.attach(duplicated(writer.descriptor()))
        assert writer.write(b"a")
        another.close()
        assert writer.write(b"b")
        writer.close()
        assert reader.read(2) == b"ab"
        with pytest.raises(QueueClosedError):
            reader.read(1)


def test_end_lets_the_rest_be_read_and_then_tells_why() -> None:
    with both_ends(1, 8) as (queue, peer):
        assert queue.write(b"ab")
        peer.end(OSError("it died"))
        peer.end(OSError("said again"))
        assert peer.read(2) == b"ab"
        for _ in range(2):
            with pytest.raises(OSError, match="it died"):
                peer.read(1)
        with pytest.raises(OSError, match="it died"):
            peer.write(b"x")
        assert queue.write(b"c")  # local: it is not told to the other side


def test_a_libfmq_descriptor_without_our_words_can_be_attached() -> None:
    queue = MessageQueue.create(np.uint16, 64, futex_interop=True)
    descriptor = duplicated(queue.descriptor())
    for fd in descriptor.fds[1:]:
        os.close(fd)
    peer = MessageQueue.attach(replace(descriptor, grantors=descriptor.grantors[:4], fds=descriptor.fds[:1]), np.uint16)
    assert (peer.reader_fd, peer.writer_fd) == (-1, -1)
    assert queue.write(b"ab")
    assert peer.read_in_thread(1, 5) == b"ab"
    with words_of(queue) as words:
        assert int(words.flag[0]) & layout.NOT_FULL  # what a libfmq writer would sleep for
    with pytest.raises(CallerError, match="no eventfds"):
        peer.arm_reader()
    peer.close()
    queue.close()


@pytest.mark.parametrize("interop", [True, False])
def test_commits_set_the_flag_word_for_a_libfmq_peer_from_the_first_one_on(interop: bool) -> None:
    queue = MessageQueue.create(np.uint8, 8, futex_interop=interop)
    assert queue.write(b"a")
    assert queue.peek_flag() == (layout.NOT_EMPTY if interop else 0)
    assert queue.read(1) == b"a"
    assert queue.peek_flag() == (layout.NOT_EMPTY | layout.NOT_FULL if interop else 0)
    queue.close()


def test_a_libfmq_descriptor_without_flag_word_can_be_polled_only() -> None:
    queue = MessageQueue.create(np.uint16, 64)
    descriptor = duplicated(queue.descriptor())
    for fd in descriptor.fds[1:]:
        os.close(fd)
    peer = MessageQueue.attach(replace(descriptor, grantors=descriptor.grantors[:3], fds=descriptor.fds[:1]), np.uint16)
    assert queue.write(b"ab")
    assert peer.read(1) == b"ab"
    with pytest.raises(CallerError, match="no event flag word"):
        peer.read_in_thread(1, 5)
    peer.close()
    queue.close()
