/* The ring: counters, bytes, the armed words, the event flag word. Pure C11 without Python. tests/fmq/native runs this
 * file under ASan, UBSan and TSan.
 *
 * One writer and one reader share a ring, in two processes that need not trust each other. The unsynchronized flavor, with
 * many readers, exists for parity with libfmq. Counters are bytes since the queue was made and never wrap back (libfmq).
 * So with sane peers this holds at every moment, in both processes:
 *     0 <= written - read <= capacity,  and both are multiples of the quantum.
 * A peer shares the counters, so each use loads them once into locals and checks those. A queue that breaks the rule is
 * reported (RING_CORRUPT). No byte outside the data part is ever touched, because every offset is a local counter
 * modulo the *local* capacity.
 *
 * Wake protocol in one direction, which the other mirrors. W is the side that makes progress, S the side that sleeps.
 *     S1 armed := mask      S2 seq_cst fence    S3 look again (counters, closed)     S4 sleep on the eventfd
 *     W1 counter := new     W2 seq_cst fence    W3 armed? swap it to 0: was it set?  W4 write the eventfd
 * Store buffering needs both fences. With them, S3 sees W1 or W3 sees S1, so a sleeper never misses a commit. A system
 * call is made only for a sleeper. A wake may be stale (W3 loaded an arming that is over), so a sleeper that wakes
 * goes back to S1, never straight to S4.
 *
 * tests/fmq/test_weak_memory.py runs this file under a weak memory model in all interleavings. It finds the hang or the
 * race when a fence, an order or S3 is left out. tests/fmq/wake_model.py does so for the tasks that share one sleep. */
#ifndef AIONN_FMQ_RING_H
#define AIONN_FMQ_RING_H

#ifndef _GNU_SOURCE
#error "sched_getcpu and RWF_NOWAIT: compile with _GNU_SOURCE defined before any include"
#endif

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RING_NOT_FULL 0x1u  /* libfmq: FMQ_NOT_FULL */
#define RING_NOT_EMPTY 0x2u /* libfmq: FMQ_NOT_EMPTY */
/* No waiter asks for these bits. They change the word at the queue's end, so that no thread falls asleep on the old word. */
#define RING_FLIP_CLOSED 0x80000000u
#define RING_FLIP_LOCAL 0x40000000u

enum ring_status { RING_OK, RING_LESS, RING_CLOSED, RING_CORRUPT };

/* aionn's words, grantor 4, which libfmq peers ignore. layout.py mirrors them, and test_layout.py compares the two.
 * Each storing side has a cache line, because its store would stall the other side's loads from the same line. */
struct ring_control {
    _Alignas(64) _Atomic uint32_t reader_armed; /* event bits the reading side sleeps for; 0 means awake */
    _Alignas(64) _Atomic uint32_t writer_armed; /* the same for the writing side */
    _Alignas(64) _Atomic uint32_t closed;       /* 1 once a side has closed; never back */
    _Atomic uint32_t futex_bits;                /* bits that a thread or libfmq peer has ever waited for by futex; only grows */
    _Alignas(64) _Atomic uint64_t write_intent; /* unsynchronized: the writer may be overwriting bytes up to here */
    _Atomic uint32_t writer_cpu;                /* CPU number + 1, or 0 if unknown */
    _Alignas(64) _Atomic uint32_t reader_cpu;
    _Atomic uint64_t claimed; /* the reader may have looked for the last time at bytes up to here, which the writer had amended by then */
};
_Static_assert(offsetof(struct ring_control, reader_armed) == 0, "layout.py: READER_ARMED_OFFSET");
_Static_assert(offsetof(struct ring_control, writer_armed) == 64, "layout.py: WRITER_ARMED_OFFSET");
_Static_assert(offsetof(struct ring_control, closed) == 128, "layout.py: CLOSED_OFFSET");
_Static_assert(offsetof(struct ring_control, futex_bits) == 132, "layout.py: FUTEX_BITS_OFFSET");
_Static_assert(offsetof(struct ring_control, write_intent) == 192, "layout.py: WRITE_INTENT_OFFSET");
_Static_assert(offsetof(struct ring_control, writer_cpu) == 200, "layout.py: WRITER_CPU_OFFSET");
_Static_assert(offsetof(struct ring_control, reader_cpu) == 256, "layout.py: READER_CPU_OFFSET");
_Static_assert(offsetof(struct ring_control, claimed) == 264, "layout.py: CLAIMED_OFFSET");
_Static_assert(sizeof(struct ring_control) == 320, "layout.py: CONTROL_BYTES");
/* A peer with another compiler shares the words, but would not share a hidden lock. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "shared counters must be lock-free");
_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4, "shared words have no hidden parts");

struct ring_span { /* a range of the ring: two pieces where it wraps */
    uint8_t *first, *second;
    uint64_t first_bytes, second_bytes;
    uint64_t at; /* the counter value of its first byte */
};

struct ring { /* one process's handle; only the pointees are shared */
    _Atomic uint64_t *read, *written;
    uint8_t *data;
    _Atomic uint32_t *flag;      /* NULL for a libfmq queue without event flag word */
    struct ring_control *control; /* NULL for a libfmq queue, without aionn's words */
    uint64_t capacity, quantum;  /* bytes; quantum divides capacity */
    uint64_t cursor;             /* unsynchronized: the read counter of this reader */
    uint64_t write_at, writable; /* an open write transaction: the counter of its first byte, its length */
    uint64_t read_at, readable;
    _Atomic uint32_t ended;      /* local: whether the peer is known to be gone */
    int reader_fd, writer_fd;    /* eventfds, or -1 */
    bool synchronized;
    bool wrote; /* whether this handle has committed elements */
};

/* ---- counters ------------------------------------------------------------------------------------------------ */

static inline bool ring_is_closed(const struct ring *r)
{
    /* Acquire pairs with the release in ring_close. A side that sees the end sees all that was written before. */
    return atomic_load_explicit(&r->ended, memory_order_acquire) ||
           (r->control && atomic_load_explicit(&r->control->closed, memory_order_acquire));
}

/* Load both counters and check them. The acquire of `written` pairs with the release in ring_commit_write: the bytes are
 * there. The acquire of `read` pairs with the release in ring_commit_read: the bytes have been copied and may be overwritten. */
static inline enum ring_status ring_counters(const struct ring *r, uint64_t *read, uint64_t *written)
{
    /* An observer on neither side may load the two around a step of both. A true corruption stays. */
    for (int attempt = 0; attempt < 64; attempt++) {
        uint64_t w = atomic_load_explicit(r->written, memory_order_acquire);
        uint64_t c = r->synchronized ? atomic_load_explicit(r->read, memory_order_acquire) : r->cursor;
        if (w % r->quantum || c % r->quantum)
            return RING_CORRUPT;
        *read = c;
        *written = w;
        if (c <= w && (!r->synchronized || w - c <= r->capacity))
            return RING_OK;
        if (!r->synchronized)
            break;
    }
    return RING_CORRUPT;
}

static inline enum ring_status ring_available(const struct ring *r, uint64_t *readable, uint64_t *writable)
{
    uint64_t c, w;
    enum ring_status status = ring_counters(r, &c, &w);
    uint64_t used = status != RING_OK ? 0 : w - c > r->capacity ? r->capacity : w - c;
    *readable = used;
    *writable = status != RING_OK ? 0 : r->capacity - used;
    return status;
}

static inline void ring_place(const struct ring *r, uint64_t at, uint64_t bytes, struct ring_span *span)
{
    uint64_t offset = at % r->capacity;
    uint64_t to_end = r->capacity - offset;
    span->at = at;
    span->first = r->data + offset;
    span->first_bytes = bytes < to_end ? bytes : to_end;
    span->second = r->data;
    span->second_bytes = bytes - span->first_bytes;
}

/* ---- the event flag word: libfmq's semantics, with aionn's armed words beside it -------------------------------- */

static inline void ring_signal(int fd)
{
    uint64_t one = 1;
    struct pollfd room = {fd, POLLOUT, 0};
    /* Without room, a peer has filled the counter. It is readable then, which is all that a wake needs. The call to poll
     * comes first, because the peer shares O_NONBLOCK and could clear it. An eventfd knows RWF_NOWAIT for reads alone.
     * One risk remains: a peer that drains and fills the counter again between these two calls. */
    if (fd >= 0 && poll(&room, 1, 0) > 0 && (room.revents & POLLOUT))
        while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
}

static inline void ring_clear(int fd)
{
    uint64_t count;
    struct iovec into = {&count, sizeof count};
    /* RWF_NOWAIT, because the peer shares O_NONBLOCK and could clear it between this side's epoll and read. EAGAIN: it is drained. An old
     * kernel, an emulator or an outer sandbox may refuse the call. Called by its number, for musl has the function since 1.2.5 only. */
    if (fd >= 0 && syscall(SYS_preadv2, fd, &into, 1, -1L, -1L, RWF_NOWAIT) < 0 && errno != EAGAIN)
        (void)!read(fd, &count, sizeof count);
}

/* W3 and W4. The caller has fenced (W2). The swap is atomic, so only one of two wakers writes. */
static inline void ring_wake_armed(_Atomic uint32_t *armed, uint32_t bits, int fd)
{
    if ((atomic_load_explicit(armed, memory_order_relaxed) & bits) && atomic_exchange(armed, 0))
        ring_signal(fd);
}

/* libfmq: EventFlag::wake. The read-modify-write pairs with those in ring_flag_wait. The kernel compares the word under
 * a lock, so a waiter sleeps only on a word that this call has not yet changed. */
static inline void ring_flag_raise(const struct ring *r, uint32_t bits)
{
    if (r->flag && (~atomic_fetch_or(r->flag, bits) & bits))
        syscall(SYS_futex, r->flag, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

/* Wake every waiter for one of `bits` by the flag: threads and libfmq peers by futex, aionn sleepers by eventfd. */
static inline void ring_flag_wake(const struct ring *r, uint32_t bits)
{
    if (!bits)
        return;
    ring_flag_raise(r, bits);
    atomic_thread_fence(memory_order_seq_cst); /* W2: pairs with the fence in ring_arm */
    if (r->control) {
        ring_wake_armed(&r->control->reader_armed, bits, r->reader_fd);
        ring_wake_armed(&r->control->writer_armed, bits, r->writer_fd);
    }
}

/* Give a hint, on which nothing depends: raise `bits` if the reader sleeps and awaits one of them. */
static inline void ring_nudge_reader(const struct ring *r, uint32_t bits)
{
    if (r->control && (atomic_load_explicit(&r->control->reader_armed, memory_order_relaxed) & bits))
        ring_flag_wake(r, bits);
}

/* libfmq: EventFlag::wait without retry. Returns 0 with the bits taken, or ETIMEDOUT, EAGAIN (look again), EINTR. */
static inline int ring_flag_wait(const struct ring *r, uint32_t mask, const struct timespec *deadline, uint32_t *taken)
{
    uint32_t old = atomic_fetch_and(r->flag, ~mask); /* seq_cst; pairs with the fetch_or in ring_flag_raise */
    *taken = old & mask;
    if (*taken)
        return 0;
    if (ring_is_closed(r)) /* between the two looks at the word; see ring_wake_threads */
        return EAGAIN;
    if (syscall(SYS_futex, r->flag, FUTEX_WAIT_BITSET, old & ~mask, deadline, NULL, mask) < 0)
        return errno;
    *taken = atomic_fetch_and(r->flag, ~mask) & mask;
    return *taken ? 0 : EINTR;
}

/* Make every thread that sleeps on the word look again, after the end has been stored. A thread that took `old` before
 * the flip does not fall asleep, because the word differs. A thread that took it after the flip sees the end: the flip is
 * a read-modify-write after that store, and the fetch_and in ring_flag_wait reads from it. */
static inline void ring_wake_threads(const struct ring *r, uint32_t flip)
{
    if (r->flag) {
        atomic_fetch_xor(r->flag, flip);
        syscall(SYS_futex, r->flag, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, FUTEX_BITSET_MATCH_ANY);
    }
}

/* Announce a thread that is about to wait for `bits` by futex. From now on commits touch the flag word as well. The fence
 * pairs with the one in ring_progress. The caller looks at the queue after this call, so either it sees the commit or the
 * committer sees the bit. */
static inline void ring_expect_futex(const struct ring *r, uint32_t bits)
{
    if (r->control && (~atomic_load_explicit(&r->control->futex_bits, memory_order_relaxed) & bits))
        atomic_fetch_or(&r->control->futex_bits, bits);
    atomic_thread_fence(memory_order_seq_cst);
}

static inline void ring_publish_cpu(_Atomic uint32_t *word)
{
    uint32_t cpu = (uint32_t)(sched_getcpu() + 1); /* sched_getcpu fails with -1, which gives 0 (unknown) */
    /* Relaxed: a hint, ordered with nothing. It is stored only when it changes, to keep the cache line still. */
    if (atomic_load_explicit(word, memory_order_relaxed) != cpu)
        atomic_store_explicit(word, cpu, memory_order_relaxed);
}

/* W2 to W4 after a commit, in the direction of `bit`. Without a sleeper it costs one fence and two loads. */
static inline void ring_progress(const struct ring *r, uint32_t bit)
{
    if (!r->synchronized)
        return; /* readers of an unsynchronized queue never sleep on it */
    atomic_thread_fence(memory_order_seq_cst); /* W2: pairs with the fences in ring_arm and ring_expect_futex */
    if (!r->control) {
        ring_flag_raise(r, bit); /* a libfmq peer sleeps on the word alone */
        return;
    }
    if (bit == RING_NOT_EMPTY) {
        ring_publish_cpu(&r->control->writer_cpu);
        ring_wake_armed(&r->control->reader_armed, bit, r->reader_fd);
    } else {
        ring_publish_cpu(&r->control->reader_cpu);
        ring_wake_armed(&r->control->writer_armed, bit, r->writer_fd);
    }
    if (atomic_load_explicit(&r->control->futex_bits, memory_order_relaxed) & bit)
        ring_flag_raise(r, bit);
}

/* S1 to S3 for the reading side (`reads`) or the writing side. The caller may sleep only if this returns true. `bytes` is
 * what the sleeper needs of the queue, 0 if it waits for the flag alone. `mask` is what it awaits of the flag word. */
static inline bool ring_arm(const struct ring *r, bool reads, uint64_t bytes, uint32_t mask)
{
    _Atomic uint32_t *armed = reads ? &r->control->reader_armed : &r->control->writer_armed;
    uint32_t bits = mask | (!bytes ? 0 : reads ? RING_NOT_EMPTY : RING_NOT_FULL);
    uint64_t readable, writable;
    atomic_store_explicit(armed, bits, memory_order_relaxed); /* S1 */
    atomic_thread_fence(memory_order_seq_cst);                /* S2: pairs with the fences in ring_progress and ring_flag_wake */
    bool corrupt = ring_available(r, &readable, &writable) != RING_OK; /* S3 */
    if (bits && !corrupt && !ring_is_closed(r) && (!bytes || (reads ? readable : writable) < bytes) &&
        !(mask && (atomic_load_explicit(r->flag, memory_order_acquire) & mask)))
        return true;
    /* A waker may have swapped it already. Its token is in flight then and costs one look too many. */
    atomic_exchange(armed, 0);
    return false;
}

static inline void ring_disarm(const struct ring *r, bool reads)
{
    atomic_exchange(reads ? &r->control->reader_armed : &r->control->writer_armed, 0);
}

/* ---- reading and writing ---------------------------------------------------------------------------------------- */

/* Returns RING_OK with the place to write in `span`; commit at most as much. Returns RING_LESS if there is less room. */
static inline enum ring_status ring_begin_write(struct ring *r, uint64_t bytes, struct ring_span *span)
{
    uint64_t c, w;
    enum ring_status status = ring_counters(r, &c, &w);
    r->writable = 0;
    if (status != RING_OK)
        return status;
    if (ring_is_closed(r))
        return RING_CLOSED;
    if (bytes > (r->synchronized ? r->capacity - (w - c) : r->capacity))
        return RING_LESS;
    if (!r->synchronized && r->control) {
        atomic_store_explicit(&r->control->write_intent, w + bytes, memory_order_relaxed);
        /* Pairs with the acquire fence in ring_overrun. A reader that copies a byte of the coming write sees the intent. */
        atomic_thread_fence(memory_order_release);
    }
    ring_place(r, w, bytes, span);
    r->write_at = w;
    r->writable = bytes;
    return RING_OK;
}

static inline enum ring_status ring_commit_write(struct ring *r, uint64_t bytes)
{
    if (bytes > r->writable)
        return RING_LESS;
    r->writable = 0;
    /* Release makes the bytes visible no later than the counter. It pairs with the acquire in ring_counters. */
    atomic_store_explicit(r->written, r->write_at + bytes, memory_order_release);
    r->wrote |= bytes > 0;
    if (bytes)
        ring_progress(r, RING_NOT_EMPTY);
    return RING_OK;
}

/* Return whether the writer may have begun to overwrite bytes from `at` on. Call it after the copy: the acquire fence
 * pairs with the release fence in ring_begin_write. A libfmq writer has no intent word, so its counter must do, as there. */
static inline bool ring_overrun(const struct ring *r, uint64_t at)
{
    atomic_thread_fence(memory_order_acquire);
    uint64_t w = atomic_load_explicit(r->written, memory_order_relaxed);
    uint64_t intent = r->control ? atomic_load_explicit(&r->control->write_intent, memory_order_relaxed) : w;
    return w - at > r->capacity || (intent > w && intent - at > r->capacity);
}

/* Go on with the newest half, because the writer has lapped this reader (libfmq `main`). */
static inline void ring_skip_to_newest_half(struct ring *r)
{
    uint64_t w = atomic_load_explicit(r->written, memory_order_acquire);
    uint64_t half = r->capacity / r->quantum / 2 * r->quantum;
    r->cursor = w - (w < half ? w : half);
    r->cursor -= r->cursor % r->quantum;
}

static inline enum ring_status ring_begin_read(struct ring *r, uint64_t bytes, struct ring_span *span)
{
    uint64_t c, w;
    r->readable = 0;
    for (bool last = false;; last = true) {
        enum ring_status status = ring_counters(r, &c, &w);
        if (status != RING_OK)
            return status;
        if (!r->synchronized && w - c > r->capacity) {
            ring_skip_to_newest_half(r);
            return RING_LESS;
        }
        if (bytes <= w - c)
            break;
        if (last)
            return RING_CLOSED;
        if (!ring_is_closed(r))
            return RING_LESS;
        /* Closed after the counter was loaded, maybe after a last commit. What was written before stays readable. */
    }
    ring_place(r, c, bytes, span);
    r->read_at = c;
    r->readable = bytes;
    return RING_OK;
}

static inline enum ring_status ring_commit_read(struct ring *r, uint64_t bytes)
{
    if (bytes > r->readable)
        return RING_LESS;
    r->readable = 0;
    if (!r->synchronized) {
        if (ring_overrun(r, r->read_at)) {
            ring_skip_to_newest_half(r);
            return RING_LESS;
        }
        r->cursor = r->read_at + bytes;
        return RING_OK;
    }
    /* Release: this side's copy is done before the writer may overwrite. It pairs with the acquire in ring_counters. */
    atomic_store_explicit(r->read, r->read_at + bytes, memory_order_release);
    if (bytes)
        ring_progress(r, RING_NOT_FULL);
    return RING_OK;
}

/* Claim the bytes up to `end` for this reader, which looks at them once more and then takes them. With the fence of ring_unclaimed, either
 * that look sees what the writer has changed there before, or the writer sees the claim. */
static inline void ring_claim(const struct ring *r, uint64_t end)
{
    if (!r->control)
        return;
    atomic_store_explicit(&r->control->claimed, end, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in ring_unclaimed */
}

/* Return whether the reader has not claimed the byte at `at`, so that it will see what this writer has changed there before this call. */
static inline bool ring_unclaimed(const struct ring *r, uint64_t at)
{
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in ring_claim */
    return r->control && atomic_load_explicit(&r->control->claimed, memory_order_relaxed) <= at;
}

/* An unsynchronized writer may overwrite the bytes during the copy. The copy is thrown away then, but only atomic
 * accesses give such a copy a meaning in C. */
static inline void ring_copy_relaxed(uint8_t *to, const uint8_t *from, uint64_t bytes, bool to_ring)
{
    for (uint64_t i = 0; i < bytes;) {
        if (bytes - i >= 8 && !((uintptr_t)(to_ring ? to + i : from + i) & 7)) {
            uint64_t word;
            if (to_ring) {
                memcpy(&word, from + i, 8);
                __atomic_store_n((uint64_t *)(void *)(to + i), word, __ATOMIC_RELAXED);
            } else {
                word = __atomic_load_n((const uint64_t *)(const void *)(from + i), __ATOMIC_RELAXED);
                memcpy(to + i, &word, 8);
            }
            i += 8;
        } else {
            __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
            i++;
        }
    }
}

static inline void ring_copy_in(const struct ring *r, const struct ring_span *span, const uint8_t *from)
{
    if (r->synchronized) {
        memcpy(span->first, from, span->first_bytes);
        memcpy(span->second, from + span->first_bytes, span->second_bytes);
    } else {
        ring_copy_relaxed(span->first, from, span->first_bytes, true);
        ring_copy_relaxed(span->second, from + span->first_bytes, span->second_bytes, true);
    }
}

static inline void ring_copy_out(const struct ring *r, const struct ring_span *span, uint8_t *to)
{
    if (r->synchronized) {
        memcpy(to, span->first, span->first_bytes);
        memcpy(to + span->first_bytes, span->second, span->second_bytes);
    } else {
        ring_copy_relaxed(to, span->first, span->first_bytes, false);
        ring_copy_relaxed(to + span->first_bytes, span->second, span->second_bytes, false);
    }
}

/* ---- end of life ------------------------------------------------------------------------------------------------ */

/* End the queue for both sides, which look again however they sleep. Without control words a peer cannot be notified. */
static inline void ring_close(const struct ring *r)
{
    /* An unsynchronized queue has many handles, and only the writer's ends it. */
    if (!r->control || !(r->synchronized || r->wrote))
        return;
    /* seq_cst contains the release that pairs with the acquire in ring_is_closed. What was written stays readable. */
    if (atomic_exchange(&r->control->closed, 1))
        return;
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in ring_expect_futex */
    ring_signal(r->reader_fd); /* unconditional, because it happens once and so needs no fence */
    ring_signal(r->writer_fd);
    if (atomic_load_explicit(&r->control->futex_bits, memory_order_relaxed))
        ring_wake_threads(r, RING_FLIP_CLOSED);
}

/* End the queue for this handle alone, because the peer is gone. `threads`: threads of this process may sleep on the word. */
static inline void ring_end(struct ring *r, bool threads)
{
    atomic_store_explicit(&r->ended, 1, memory_order_release); /* pairs with the acquire in ring_is_closed */
    ring_signal(r->reader_fd);
    ring_signal(r->writer_fd);
    if (threads)
        ring_wake_threads(r, RING_FLIP_LOCAL);
}

#endif
