/* Looking at a ring for a bounded time without sleeping. The rule that decides when this pays is below. */
#ifndef AIONN_FMQ_SPIN_H
#define AIONN_FMQ_SPIN_H

#include "ring.h"

static inline int64_t ring_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* So long a thread sleeps at most before it looks for signals. One that came just before the sleep, or in another thread, does not end it. */
#define RING_SIGNAL_LOOK_NS INT64_C(100000000)

/* Sleep until a descriptor can be read, or it is that time (0: without end). Return 0 or an error number. */
static inline int ring_sleep_on(int fd, int64_t until_ns)
{
    int64_t left_ns = until_ns ? until_ns - ring_now_ns() : 0;
    left_ns = left_ns < 0 ? 0 : left_ns;
    struct timespec left = {.tv_sec = (time_t)(left_ns / 1000000000), .tv_nsec = (long)(left_ns % 1000000000)};
    struct pollfd polled = {fd, POLLIN, 0};
    return ppoll(&polled, 1, until_ns ? &left : NULL, NULL) < 0 ? errno : 0;
}

static inline void ring_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Return whether a reader that sleeps would wake: so many bytes are there, or the queue is closed or corrupt. */
static inline bool ring_would_wake(const struct ring *r, uint64_t bytes)
{
    uint64_t readable, writable;
    return ring_available(r, &readable, &writable) != RING_OK || readable >= bytes || ring_is_closed(r);
}

/* Look for `bytes` to read until `deadline_ns`. Return true as soon as a sleeper would wake. A writer on the same core
 * cannot make progress while this thread spins there, so this thread looks once only then. */
static inline bool ring_spin(const struct ring *r, uint64_t bytes, int64_t deadline_ns)
{
    _Atomic uint32_t *mine = r->control ? &r->control->reader_cpu : NULL;
    _Atomic uint32_t *peers = r->control ? &r->control->writer_cpu : NULL;
    for (unsigned turn = 0;; turn++) {
        if (ring_would_wake(r, bytes))
            return true;
        if (turn % 32 == 0) {
            if (mine) {
                ring_publish_cpu(mine);
                if (atomic_load_explicit(mine, memory_order_relaxed) == atomic_load_explicit(peers, memory_order_relaxed))
                    return false;
            }
            if (ring_now_ns() >= deadline_ns)
                return false;
        }
        ring_pause();
    }
}

/* Return whether a side of this queue may arm and sleep. A libfmq queue has no words for that. */
static inline bool ring_can_sleep(const struct ring *r) { return r->control != NULL; }

/* Publish this CPU as the writer's of `sent`. Return whether the writer of `taken`, the peer, was last seen on another one. An
 * unknown CPU counts as the same. Both can sleep. */
static inline bool ring_apart(const struct ring *sent, const struct ring *taken)
{
    ring_publish_cpu(&sent->control->writer_cpu);
    uint32_t own = atomic_load_explicit(&sent->control->writer_cpu, memory_order_relaxed); /* hints, ordered with nothing */
    uint32_t peers = atomic_load_explicit(&taken->control->writer_cpu, memory_order_relaxed);
    return peers && peers != own;
}

/* The rule for how long an end looks before it sleeps. burst/spin_policy.py explains it and has the windows. */
struct spin_policy {
    int64_t window_ns; /* 0: never look */
    double average_ns; /* moving average of recent waits */
    unsigned waits;
    bool brisk;
};

#define SPIN_PROBE_EVERY 64 /* while the average says sleep, one wait in so many is watched for twice the window */

#define SPIN_FEW 4 /* an app's end looks only while at most so many bursts of its process take turns */

static inline void spin_begin(struct spin_policy *p, int64_t window_ns)
{
    *p = (struct spin_policy){.window_ns = window_ns, .brisk = window_ns > 0};
}

/* Return how long to look, for a wait that begins now. */
static inline int64_t spin_budget_ns(struct spin_policy *p)
{
    if (p->brisk || !p->window_ns)
        return p->window_ns;
    return ++p->waits % SPIN_PROBE_EVERY ? 0 : 2 * p->window_ns;
}

/* Note how long a wait took, and whether this end slept in it. */
static inline void spin_waited(struct spin_policy *p, int64_t ns, bool slept)
{
    double window = (double)p->window_ns, took = (double)ns;
    if (!slept && took <= window && window < p->average_ns)
        p->average_ns = window; /* a probe that succeeds counts for all the slept waits before it */
    p->average_ns += ((took < 4 * window ? took : 4 * window) - p->average_ns) / 8; /* one long pause must not end a brisk stream */
    p->brisk = p->window_ns > 0 && p->average_ns <= window;
}

#endif
