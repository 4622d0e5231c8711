/* The model checker against the field's small programs, of which it is known what C11 allows. Prints a line for each:
 * "NAME allowed" if the outcome in its `CHECK` can be, else "NAME forbidden". */
#include "weak_memory.h"

static _Atomic uint32_t x, y, z;
static uint32_t plain, seen[4];
static int first, second; /* orders, or fences */

#define RELAXED memory_order_relaxed
#define OUTCOME(condition) ((condition) ? weak_violate("wrong") : (void)0)

static void set_up(void (*one)(void), void (*two)(void), void (*three)(void))
{
    x = y = z = 0;
    plain = 0;
    memset(seen, 0xff, sizeof seen);
    weak_location(&x);
    weak_location(&y);
    weak_location(&z);
    weak_plain(&plain, sizeof plain);
    weak_thread(one);
    if (two)
        weak_thread(two);
    if (three)
        weak_thread(three);
}

static void fence(int order)
{
    if (order != RELAXED)
        atomic_thread_fence(order);
}

/* Store buffering: two threads store and then look at each other's word. */
static void buffering_end(void) { OUTCOME(seen[0] == 0 && seen[1] == 0); }
static void buffering_one(void)
{
    atomic_store_explicit(&x, 1, RELAXED);
    fence(first);
    seen[0] = (uint32_t)atomic_load_explicit(&y, RELAXED);
    buffering_end();
}
static void buffering_two(void)
{
    atomic_store_explicit(&y, 1, RELAXED);
    fence(second);
    seen[1] = (uint32_t)atomic_load_explicit(&x, RELAXED);
    buffering_end();
}
static void buffering(void) { set_up(buffering_one, buffering_two, NULL); }

/* Message passing by the orders of the operations. */
static void passing_one(void)
{
    atomic_store_explicit(&x, 1, RELAXED);
    atomic_store_explicit(&y, 1, first);
}
static void passing_two(void)
{
    seen[0] = (uint32_t)atomic_load_explicit(&y, second);
    seen[1] = (uint32_t)atomic_load_explicit(&x, RELAXED);
    OUTCOME(seen[0] == 1 && seen[1] == 0);
}
static void passing(void) { set_up(passing_one, passing_two, NULL); }

/* The same by fences. */
static void fenced_one(void)
{
    atomic_store_explicit(&x, 1, RELAXED);
    fence(first);
    atomic_store_explicit(&y, 1, RELAXED);
}
static void fenced_two(void)
{
    seen[0] = (uint32_t)atomic_load_explicit(&y, RELAXED);
    fence(second);
    seen[1] = (uint32_t)atomic_load_explicit(&x, RELAXED);
    OUTCOME(seen[0] == 1 && seen[1] == 0);
}
static void fenced(void) { set_up(fenced_one, fenced_two, NULL); }

/* A read-modify-write between the two carries the release on. */
static void carrying(void) { atomic_fetch_or(&y, 2); }
static void carried_two(void)
{
    seen[0] = (uint32_t)atomic_load_explicit(&y, memory_order_acquire);
    seen[1] = (uint32_t)atomic_load_explicit(&x, RELAXED);
    OUTCOME(seen[0] == 3 && seen[1] == 0);
}
static void carried(void) { set_up(passing_one, carried_two, carrying); }

/* A word's stores are seen in one order. */
static void coherent_one(void)
{
    atomic_store_explicit(&x, 1, RELAXED);
    atomic_store_explicit(&x, 2, RELAXED);
}
static void coherent_two(void)
{
    seen[0] = (uint32_t)atomic_load_explicit(&x, RELAXED);
    seen[1] = (uint32_t)atomic_load_explicit(&x, RELAXED);
    OUTCOME(seen[0] == 2 && seen[1] == 1);
}
static void coherent(void) { set_up(coherent_one, coherent_two, NULL); }

/* Of two swaps one alone gets the value. */
static void swapping_one(void)
{
    seen[0] = (uint32_t)atomic_exchange(&x, 1);
    OUTCOME(seen[0] == 0 && seen[1] == 0);
}
static void swapping_two(void)
{
    seen[1] = (uint32_t)atomic_exchange(&x, 1);
    OUTCOME(seen[0] == 0 && seen[1] == 0);
}
static void swapping(void) { set_up(swapping_one, swapping_two, NULL); }

/* Two threads store to two words in opposite orders; each word may keep the store that came first in its thread (2+2W). */
static void crossing_one(void)
{
    atomic_store_explicit(&x, 1, RELAXED);
    fence(first);
    atomic_store_explicit(&y, 2, RELAXED);
    atomic_fetch_or(&z, 1);
}
static void crossing_two(void)
{
    atomic_store_explicit(&y, 1, RELAXED);
    fence(first);
    atomic_store_explicit(&x, 2, RELAXED);
    atomic_fetch_or(&z, 2);
}
static void crossing_three(void)
{
    if (atomic_fetch_or(&z, 4) == 3) { /* both have come to their end, and happen before this */
        seen[0] = (uint32_t)atomic_load_explicit(&x, RELAXED);
        seen[1] = (uint32_t)atomic_load_explicit(&y, RELAXED);
        OUTCOME(seen[0] == 1 && seen[1] == 1);
    }
}
static void crossing(void) { set_up(crossing_one, crossing_two, crossing_three); }

/* Bytes that are not atomic, handed over by a word. */
static void racing_one(void)
{
    weak_access(&plain, sizeof plain, true);
    atomic_store_explicit(&y, 1, first);
}
static void racing_two(void)
{
    if (atomic_load_explicit(&y, second))
        weak_access(&plain, sizeof plain, false);
}
static void racing(void) { set_up(racing_one, racing_two, NULL); }

/* Nobody wakes it. */
static void sleeping_one(void) { weak_sleep(0); }
static void waking_two(void)
{
    if (first)
        weak_signal(0);
}
static void sleeping(void) { set_up(sleeping_one, waking_two, NULL); }

static void litmus(const char *name, void (*program)(void), int one, int two)
{
    uint64_t executions;
    first = one;
    second = two;
    printf("%s %s\n", name, weak_search(program, &executions) ? "allowed" : "forbidden");
}

int main(void)
{
    litmus("store_buffering", buffering, RELAXED, RELAXED);
    litmus("store_buffering_one_fence", buffering, memory_order_seq_cst, RELAXED);
    litmus("store_buffering_acq_rel_fences", buffering, memory_order_acq_rel, memory_order_acq_rel);
    litmus("store_buffering_two_fences", buffering, memory_order_seq_cst, memory_order_seq_cst);
    litmus("passing_relaxed", passing, RELAXED, RELAXED);
    litmus("passing_release_only", passing, memory_order_release, RELAXED);
    litmus("passing_acquire_only", passing, RELAXED, memory_order_acquire);
    litmus("passing", passing, memory_order_release, memory_order_acquire);
    litmus("fenced_release_only", fenced, memory_order_release, RELAXED);
    litmus("fenced_acquire_only", fenced, RELAXED, memory_order_acquire);
    litmus("fenced", fenced, memory_order_release, memory_order_acquire);
    litmus("carried_relaxed", carried, RELAXED, 0);
    litmus("carried", carried, memory_order_release, 0);
    litmus("coherent", coherent, 0, 0);
    litmus("swapping", swapping, 0, 0);
    litmus("crossing", crossing, RELAXED, 0);
    litmus("crossing_fenced", crossing, memory_order_seq_cst, 0);
    litmus("racing_relaxed", racing, RELAXED, RELAXED);
    litmus("racing_release_only", racing, memory_order_release, RELAXED);
    litmus("racing", racing, memory_order_release, memory_order_acquire);
    litmus("sleeping", sleeping, 0, 0);
    litmus("sleeping_woken", sleeping, 1, 0);
    return 0;
}
