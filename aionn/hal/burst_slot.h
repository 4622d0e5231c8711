/* What the app counts of one burst, from C: a request went out, an answer came back. app_layout.py says what the words mean.
 *
 * Every function does nothing if `slot` is NULL or off. The callers hold the GIL, so each slot has one writer at a time.
 * The buckets are stored before ANSWERED is published, so a reader that loads ANSWERED first, with acquire, never finds fewer durations. */
#ifndef AIONN_PAGES_BURST_SLOT_H
#define AIONN_PAGES_BURST_SLOT_H

#include "words.h"

/* app_layout.py: words of an app's slot. The first eight counters of a frame share one cache line. */
enum {
    SLOT_NUMBER = 1,
    SLOT_SENT = 48, SLOT_ANSWERED, SLOT_COMPUTED, SLOT_FAILED, SLOT_COPIED_BYTES, SLOT_DRIVER_BUSY_NS, SLOT_LOST, SLOT_DROPPED,
    SLOT_CONNECTIONS,
    SLOT_COUNTERS_END = 96,
    SLOT_CALL_TIMES = 96,
    SLOT_SERVICE_TIMES = 192,
    SLOT_AGES = 288,
    SLOT_WORDS = 384,
};
_Static_assert(SLOT_CONNECTIONS == 56, "app_layout.py has the same numbers");
_Static_assert(SLOT_CALL_TIMES + PAGE_BUCKETS <= SLOT_SERVICE_TIMES && SLOT_SERVICE_TIMES + PAGE_BUCKETS <= SLOT_AGES, "no overlap");
_Static_assert(SLOT_AGES + PAGE_BUCKETS <= SLOT_WORDS, "no overlap");

/* Add to one counter, from SLOT_SENT to before SLOT_COUNTERS_END. */
static inline void slot_add(struct page_slot *slot, unsigned counter, uint64_t more)
{
    page_word *words = page_words(slot);
    if (words)
        page_add(&words[counter], more);
}

/* A request lies in the queue. SENT - ANSWERED - LOST is the number in flight. */
static inline void slot_sent(struct page_slot *slot) { slot_add(slot, SLOT_SENT, 1); }

/* These many requests will not be answered: the driver died, or the burst was closed. */
static inline void slot_lost(struct page_slot *slot, uint64_t requests) { slot_add(slot, SLOT_LOST, requests); }

/* slot_answered for words that are there. */
static inline void slot_count_answer(page_word *words, int64_t call_ns, int64_t service_ns)
{
    page_add(&words[SLOT_CALL_TIMES + page_bucket_of(page_ns(call_ns))], 1);
    if (service_ns >= 0) {
        page_add(&words[SLOT_SERVICE_TIMES + page_bucket_of((uint64_t)service_ns)], 1);
        page_add(&words[SLOT_DRIVER_BUSY_NS], (uint64_t)service_ns);
    }
    page_publish(&words[SLOT_ANSWERED], page_load(&words[SLOT_ANSWERED]) + 1);
}

/* One request has been answered. Python judges the answer, and counts it as computed or failed.
 *     call_ns     from sending to this answer, by the app's clock
 *     service_ns  the driver's time on it, or negative if unknown */
static inline void slot_answered(struct page_slot *slot, int64_t call_ns, int64_t service_ns)
{
    page_word *words = page_words(slot);
    if (words)
        slot_count_answer(words, call_ns, service_ns);
}

#endif
