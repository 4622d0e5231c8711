/* A small model checker for C11 atomics: code that includes this header runs under a weak memory model, in all interleavings.
 *
 * Include it before the code under test. Its macros replace the atomic operations, the system calls for sleeping and waking, and
 * memcpy. `weak_search` runs a few threads as coroutines, again and again, until each choice has been made in each way: which
 * thread takes the next step, which store a load reads, and where in the modification order a store goes.
 *
 * The model (C11 by views, as in the operational models of release/acquire with fences)
 *     A location is a list of messages in modification order. A message is a value and a view; a view names one message per
 *     location. A thread may read any message that is not older than its own view of that location, however stale.
 *     An acquire load joins the message's view; a relaxed one keeps it for the next acquire fence. A release store carries the
 *     thread's view; a relaxed one carries the view of the last release fence. A read-modify-write reads its neighbour and carries
 *     that one's view on. A store may go before messages that the thread has not seen.
 *     A seq_cst fence joins the thread's view with one global view, both ways. seq_cst operations count as acq_rel: less than C gives.
 *     Bytes of `weak_plain` are not atomic. Each access counts in a vector clock, which release and acquire pass on; two accesses
 *     of which one writes are a race unless one happens before the other.
 *     An eventfd is a lock-protected counter. `weak_lock` is the one lock; a thread that wants it runs when it is free. FUTEX_WAIT compares the newest message. A thread that sleeps runs after its wake only.
 *
 * Not modelled: a load that reads from a store which its own thread's later store has led to (load buffering). Plain accesses
 * need it not, since they race there.
 *
 * Violations: `asleep` (threads sleep and none is left to wake them), `race`, `wrong` (a check of the code under test fails).
 *
 * A thread's own state follows from what its operations have returned. So a state is the hash of that history for each thread, and of
 * the memory; a state that was seen before is not searched again. */
#ifndef WEAK_MEMORY_H
#define WEAK_MEMORY_H

#ifndef WEAK_TESTED /* the files whose orders are weakened in turn */
#define WEAK_TESTED "ring.h"
#endif

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { THREADS = 3, LOCATIONS = 10, OWN = 20, MESSAGES = 1 + THREADS * OWN, CELLS = 4, FDS = 3, SITES = 64, STEPS = 400 };

static inline _Noreturn void weak_fail(const char *what, int line)
{
    fprintf(stderr, "weak_memory.h: line %d: %s\n", line, what);
    abort();
}
#define WEAK_MUST(condition) ((condition) ? (void)0 : weak_fail(#condition, __LINE__))

/* ---- memory --------------------------------------------------------------------------------------------------------- */

struct weak_view { uint8_t at[LOCATIONS], clock[THREADS]; };
struct weak_message {
    uint64_t value;
    struct weak_view view;
    bool update; /* made by a read-modify-write: nothing may come between it and the message before */
};
struct weak_location {
    const volatile void *address;
    unsigned count;
    uint8_t order[MESSAGES]; /* message numbers in modification order */
    uint8_t place[MESSAGES]; /* where a message is in `order` */
    struct weak_message messages[MESSAGES];
};
struct weak_cell { /* bytes that are not atomic */
    const uint8_t *from, *to;
    uint8_t writer, written, read[THREADS];
};
struct weak_thread {
    void (*body)(void);
    ucontext_t context;
    sigjmp_buf at;
    bool begun, done, woken;
    bool wants_lock;
    int fd, other;                    /* sleeps until one of these eventfds is readable; -1: does not, or there is no other */
    const volatile void *futex;       /* sleeps on this word */
    uint32_t mask;
    struct weak_view now, acquired, released;
    uint8_t made[LOCATIONS];
    uint64_t history;
    char *stack;
};

enum weak_kind { WEAK_LOAD, WEAK_STORE, WEAK_UPDATE, WEAK_FENCE, WEAK_OTHER };
struct weak_site { /* an operation in the source of the code under test */
    const char *function, *text;
    int line, order;
    enum weak_kind kind;
};
struct weak_event { int thread; const char *function, *text; uint64_t value; };

static struct {
    struct weak_location locations[LOCATIONS];
    struct weak_cell cells[CELLS];
    struct weak_thread threads[THREADS];
    unsigned location_count, cell_count, thread_count;
    struct weak_view global; /* of seq_cst fences */
    struct weak_view fd_view[FDS];
    bool fd_readable[FDS];
    struct weak_view lock_view;
    bool locked;
    const volatile void *hints[8];
    unsigned hint_count;
    int current;
    sigjmp_buf scheduler;
    const char *violation;
    struct weak_event events[STEPS];
    unsigned event_count;
} weak;

static struct weak_site weak_sites[SITES];
static unsigned weak_site_count;
static int weak_weakened = -1, weak_weaker; /* a site's number, and the order that it has instead of its own; -1: no fence at all */

static inline void weak_join(struct weak_view *into, const struct weak_view *other, bool clocks)
{
    for (unsigned l = 0; l < weak.location_count; l++) {
        const uint8_t *place = weak.locations[l].place;
        if (place[other->at[l]] > place[into->at[l]])
            into->at[l] = other->at[l];
    }
    for (unsigned t = 0; clocks && t < THREADS; t++)
        if (other->clock[t] > into->clock[t])
            into->clock[t] = other->clock[t];
}

static inline void weak_location(const volatile void *address)
{
    WEAK_MUST(weak.location_count < LOCATIONS);
    weak.locations[weak.location_count++] = (struct weak_location){.address = address, .count = 1};
}

static inline void weak_plain(const void *address, size_t bytes)
{
    WEAK_MUST(weak.cell_count < CELLS);
    weak.cells[weak.cell_count++] = (struct weak_cell){.from = address, .to = (const uint8_t *)address + bytes};
}

/* A word on which nothing rests: it reads as 0. */
static inline void weak_hint(const volatile void *address)
{
    WEAK_MUST(weak.hint_count < 8);
    weak.hints[weak.hint_count++] = address;
}

/* The number of a location, or -1: a hint. */
static inline int weak_find(const volatile void *address)
{
    for (unsigned l = 0; l < weak.location_count; l++)
        if (weak.locations[l].address == address)
            return (int)l;
    for (unsigned h = 0; h < weak.hint_count; h++)
        if (weak.hints[h] == address)
            return -1;
    weak_fail("an atomic word that the scenario has not named", __LINE__);
}

/* ---- choices: the path of this execution ------------------------------------------------------------------------------ */

static struct { uint8_t taken, options; } weak_trail[STEPS * 3];
static unsigned weak_depth, weak_known;

static inline unsigned weak_choose(unsigned options)
{
    WEAK_MUST(options > 0 && options < 256 && weak_depth < STEPS * 3);
    if (options == 1)
        return 0;
    if (weak_depth == weak_known) {
        weak_trail[weak_known].taken = 0;
        weak_trail[weak_known++].options = (uint8_t)options;
    }
    WEAK_MUST(weak_trail[weak_depth].options == options);
    return weak_trail[weak_depth++].taken;
}

static inline bool weak_next_path(void)
{
    while (weak_known && weak_trail[weak_known - 1].taken + 1 == weak_trail[weak_known - 1].options)
        weak_known--;
    if (weak_known)
        weak_trail[weak_known - 1].taken++;
    weak_depth = 0;
    return weak_known > 0;
}

/* ---- threads ---------------------------------------------------------------------------------------------------------- */

static inline void weak_to_scheduler(void)
{
    if (!sigsetjmp(weak.threads[weak.current].at, 0))
        siglongjmp(weak.scheduler, 1);
}

static inline _Noreturn void weak_violate(const char *what)
{
    weak.violation = what;
    siglongjmp(weak.scheduler, 1);
}

static inline struct weak_thread *weak_step(void)
{
    weak_to_scheduler();
    return &weak.threads[weak.current];
}

static inline uint64_t weak_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

/* What an operation has returned: the thread goes on from that. */
static inline uint64_t weak_returns(const char *function, const char *text, uint64_t value)
{
    struct weak_thread *t = &weak.threads[weak.current];
    t->history = weak_mix(weak_mix(t->history, value), 1);
    if (weak.event_count < STEPS)
        weak.events[weak.event_count++] = (struct weak_event){weak.current, function, text, value};
    return value;
}

/* The order that this operation has in this run. Known by line and kind; operations of the scenarios keep theirs. */
static inline int weak_order(const char *file, int line, const char *function, enum weak_kind kind, const char *text, int order)
{
    const char *name = strrchr(file, '/');
    if (!strstr(WEAK_TESTED, name ? name + 1 : file))
        return order;
    unsigned s = 0;
    while (s < weak_site_count && (weak_sites[s].line != line || weak_sites[s].kind != kind || strcmp(weak_sites[s].function, function)))
        s++;
    WEAK_MUST(s < SITES);
    if (s == weak_site_count)
        weak_sites[weak_site_count++] = (struct weak_site){function, text, line, order, kind};
    return (int)s == weak_weakened ? weak_weaker : order;
}

static inline bool weak_acquires(int order)
{
    return order == memory_order_acquire || order == memory_order_acq_rel || order == memory_order_seq_cst;
}

static inline bool weak_releases(int order)
{
    return order == memory_order_release || order == memory_order_acq_rel || order == memory_order_seq_cst;
}

static inline const struct weak_message *weak_read(struct weak_thread *t, int l, unsigned place, int order)
{
    struct weak_location *location = &weak.locations[l];
    const struct weak_message *message = &location->messages[location->order[place]];
    t->now.at[l] = location->order[place];
    weak_join(weak_acquires(order) ? &t->now : &t->acquired, &message->view, true);
    return message;
}

static inline void weak_insert(struct weak_thread *t, int l, unsigned place, int order, uint64_t value, const struct weak_message *read)
{
    struct weak_location *location = &weak.locations[l];
    WEAK_MUST(t->made[l] < OWN);
    uint8_t number = (uint8_t)(1 + weak.current * OWN + t->made[l]++); /* the same in each interleaving */
    for (unsigned p = location->count; p > place; p--) {
        location->order[p] = location->order[p - 1];
        location->place[location->order[p]] = (uint8_t)p;
    }
    location->count++;
    location->order[place] = number;
    location->place[number] = (uint8_t)place;
    t->now.at[l] = number;
    struct weak_message *message = &location->messages[number];
    *message = (struct weak_message){value, weak_releases(order) ? t->now : t->released, read != NULL};
    message->view.at[l] = number;
    if (read) {
        weak_join(&message->view, &read->view, true);
        message->view.at[l] = number;
    }
}

static inline uint64_t weak_load(const volatile void *address, int order, const char *function, const char *text)
{
    int l = weak_find(address);
    if (l < 0)
        return 0;
    struct weak_thread *t = weak_step();
    unsigned oldest = weak.locations[l].place[t->now.at[l]];
    unsigned place = weak.locations[l].count - 1 - weak_choose(weak.locations[l].count - oldest);
    return weak_returns(function, text, weak_read(t, l, place, order)->value);
}

static inline void weak_store(volatile void *address, uint64_t value, int order, const char *function, const char *text)
{
    int l = weak_find(address);
    if (l < 0)
        return;
    struct weak_thread *t = weak_step();
    struct weak_location *location = &weak.locations[l];
    unsigned places[MESSAGES], count = 0;
    for (unsigned p = location->count; p > location->place[t->now.at[l]]; p--)
        if (p == location->count || !location->messages[location->order[p]].update)
            places[count++] = p;
    weak_insert(t, l, places[weak_choose(count)], order, value, NULL);
    weak_returns(function, text, value);
}

enum weak_update { WEAK_EXCHANGE, WEAK_OR, WEAK_AND, WEAK_XOR };

static inline uint64_t weak_update(volatile void *address, enum weak_update how, uint32_t operand, int order, const char *function, const char *text)
{
    int l = weak_find(address);
    WEAK_MUST(l >= 0);
    struct weak_thread *t = weak_step();
    struct weak_location *location = &weak.locations[l];
    unsigned places[MESSAGES], count = 0;
    for (unsigned p = location->count; p-- > location->place[t->now.at[l]];)
        if (p + 1 == location->count || !location->messages[location->order[p + 1]].update)
            places[count++] = p;
    unsigned place = places[weak_choose(count)];
    const struct weak_message *read = weak_read(t, l, place, order);
    uint32_t old = (uint32_t)read->value;
    uint32_t value = how == WEAK_EXCHANGE ? operand : how == WEAK_OR ? old | operand : how == WEAK_AND ? old & operand : old ^ operand;
    weak_insert(t, l, place + 1, order, value, read);
    return weak_returns(function, text, old);
}

static inline void weak_fence(int order, const char *function)
{
    if (order < 0)
        return;
    /* Only a seq_cst fence touches what others see. */
    struct weak_thread *t = order == memory_order_seq_cst ? weak_step() : &weak.threads[weak.current];
    if (weak_acquires(order))
        weak_join(&t->now, &t->acquired, true);
    if (order == memory_order_seq_cst) {
        weak_join(&t->now, &weak.global, false);
        weak_join(&weak.global, &t->now, false);
    }
    if (weak_releases(order))
        t->released = t->now;
    weak_returns(function, "fence", 0);
}

static inline void weak_access(const void *address, size_t bytes, bool writes)
{
    for (unsigned c = 0; c < weak.cell_count; c++) {
        struct weak_cell *cell = &weak.cells[c];
        if (!bytes || (const uint8_t *)address >= cell->to || (const uint8_t *)address + bytes <= cell->from)
            continue;
        struct weak_thread *t = &weak.threads[weak.current];
        bool races = cell->written && t->now.clock[cell->writer] < cell->written;
        for (unsigned u = 0; writes && u < THREADS; u++)
            races = races || t->now.clock[u] < cell->read[u];
        if (races)
            weak_violate("race");
        uint8_t clock = ++t->now.clock[weak.current];
        if (writes) {
            cell->writer = (uint8_t)weak.current;
            cell->written = clock;
        } else {
            cell->read[weak.current] = clock;
        }
    }
}

static inline void *weak_copy(void *to, const void *from, size_t bytes)
{
    uint64_t read = 0;
    weak_access(from, bytes, false);
    weak_access(to, bytes, true);
    memmove(&read, from, bytes < sizeof read ? bytes : sizeof read);
    weak.threads[weak.current].history = weak_mix(weak.threads[weak.current].history, read);
    return memmove(to, from, bytes);
}

/* ---- sleeping and waking ------------------------------------------------------------------------------------------------ */

static inline int weak_poll(struct pollfd *fds)
{
    fds->revents = fds->events; /* there is room in the counter */
    return 1;
}

static inline ssize_t weak_signal(int fd)
{
    struct weak_thread *t = weak_step();
    weak.fd_readable[fd] = true;
    weak_join(&weak.fd_view[fd], &t->now, true);
    weak_returns("", "write eventfd", (uint64_t)fd);
    return sizeof(uint64_t);
}

static inline ssize_t weak_clear(int fd)
{
    struct weak_thread *t = weak_step();
    bool there = weak.fd_readable[fd];
    weak.fd_readable[fd] = false;
    weak_join(&t->now, &weak.fd_view[fd], true);
    weak_returns("", "read eventfd", there);
    errno = EAGAIN;
    return there ? (ssize_t)sizeof(uint64_t) : -1;
}

static inline void weak_sleep(int fd)
{
    weak.threads[weak.current].fd = fd;
    weak_to_scheduler();
    weak.threads[weak.current].fd = -1;
    weak_returns("", "woken by eventfd", (uint64_t)fd);
}

/* Sleep as epoll_wait over two eventfds does. Return the one whose event it took. */
static inline int weak_sleep_for_either(int fd, int other)
{
    struct weak_thread *t = &weak.threads[weak.current];
    t->other = other;
    t->fd = fd;
    weak_to_scheduler();
    int woke = weak.fd_readable[t->other] ? t->other : t->fd; /* another thread may have taken one of them out */
    t->fd = t->other = -1;
    weak.fd_readable[woke] = false;
    weak_join(&t->now, &weak.fd_view[woke], true);
    return (int)weak_returns("", "woken by an event", (uint64_t)woke);
}

static inline void weak_lock(void)
{
    struct weak_thread *t = &weak.threads[weak.current];
    t->wants_lock = true;
    weak_to_scheduler();
    t->wants_lock = false;
    weak.locked = true;
    weak_join(&t->now, &weak.lock_view, true);
    weak_returns("", "lock", 0);
}

static inline void weak_unlock(void)
{
    struct weak_thread *t = weak_step();
    weak.locked = false;
    weak_join(&weak.lock_view, &t->now, true);
    weak_returns("", "unlock", 0);
}

static inline long weak_futex(const volatile void *word, int operation, uint32_t value, uint32_t mask)
{
    struct weak_thread *t = weak_step();
    if (operation == FUTEX_WAKE_BITSET) {
        for (unsigned u = 0; u < weak.thread_count; u++)
            if (weak.threads[u].futex == word && (weak.threads[u].mask & mask))
                weak.threads[u].woken = true;
        weak_returns("", "futex wake", mask);
        return 0;
    }
    const struct weak_location *location = &weak.locations[weak_find(word)];
    if ((uint32_t)location->messages[location->order[location->count - 1]].value != value) {
        weak_returns("", "futex: the word has changed", 0);
        errno = EAGAIN;
        return -1;
    }
    t->futex = word;
    t->mask = mask;
    weak_to_scheduler();
    t->futex = NULL;
    t->woken = false;
    weak_returns("", "woken by futex", 1);
    return 0;
}

#include "weak_search.h"

/* ---- what the code under test gets instead --------------------------------------------------------------------------------- */

#define WEAK_ORDER(kind, text, order) weak_order(__FILE__, __LINE__, __func__, kind, text, order)
#define WEAK_UPDATED(p, how, v) weak_update(p, how, (uint32_t)(v), WEAK_ORDER(WEAK_UPDATE, #p, memory_order_seq_cst), __func__, #p)

#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_thread_fence
#undef atomic_exchange
#undef atomic_fetch_or
#undef atomic_fetch_and
#undef atomic_fetch_xor
#define atomic_load_explicit(p, o) weak_load(p, WEAK_ORDER(WEAK_LOAD, #p, o), __func__, #p)
#define atomic_store_explicit(p, v, o) weak_store(p, (uint64_t)(v), WEAK_ORDER(WEAK_STORE, #p, o), __func__, #p)
#define atomic_thread_fence(o) weak_fence(WEAK_ORDER(WEAK_FENCE, "", o), __func__)
#define atomic_exchange(p, v) WEAK_UPDATED(p, WEAK_EXCHANGE, v)
#define atomic_fetch_or(p, v) WEAK_UPDATED(p, WEAK_OR, v)
#define atomic_fetch_and(p, v) WEAK_UPDATED(p, WEAK_AND, v)
#define atomic_fetch_xor(p, v) WEAK_UPDATED(p, WEAK_XOR, v)
#define __atomic_load_n(p, o) weak_load(p, o, __func__, #p)
#define __atomic_store_n(p, v, o) weak_store(p, v, o, __func__, #p)
#define memcpy(to, from, bytes) weak_copy(to, from, bytes)
#define poll(fds, count, timeout) weak_poll(fds)
#define write(fd, from, bytes) ((void)(from), weak_signal(fd))
/* SYS_preadv2, of an eventfd, or SYS_futex. */
#define syscall(number, word, operation, value, deadline, other, mask)                                                  \
    ((void)(deadline), (number) == SYS_preadv2 ? weak_clear((int)(intptr_t)(word))                                      \
                                               : weak_futex((void *)(intptr_t)(word), (int)(intptr_t)(operation),       \
                                                            (uint32_t)(value), mask))
#define sched_getcpu() (-1)

#endif
