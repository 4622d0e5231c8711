/* The page's sequence word: a rare change of many words looks like one step to a reader. Even means stable.
 *
 * Names, and who has which slot, change inside it. Counters of frames do not: they are stored whole, one by one.
 * The writer holds the GIL from begin to end. A reader that finds another number afterwards reads again. */
#ifndef AIONN_PAGES_SEQUENCE_H
#define AIONN_PAGES_SEQUENCE_H

#include "words.h"

static inline void sequence_begin(page_word *sequence)
{
    page_store(sequence, page_load(sequence) + 1);
    /* Pairs with the acquire in sequence_copy: a reader that copies a word of this change sees the odd number afterwards. */
    atomic_thread_fence(memory_order_release);
}

static inline void sequence_end(page_word *sequence) { page_publish(sequence, page_load(sequence) + 1); }

/* Acquire pairs with sequence_end: a reader of an even number reads no word older than that change. */
static inline uint64_t sequence_now(const page_word *sequence) { return atomic_load_explicit(sequence, memory_order_acquire); }

/* Whether what was copied since `before` was read is of one moment. */
static inline bool sequence_same(const page_word *sequence, uint64_t before)
{
    return before % 2 == 0 && page_load(sequence) == before;
}

/* Acquire pairs with sequence_begin. It pairs with page_publish, too: behind a published count, the copy has all that was stored
 * before it. */
static inline void sequence_copy(uint64_t *to, const page_word *from, size_t words)
{
    for (size_t i = 0; i < words; i++)
        to[i] = atomic_load_explicit(&from[i], memory_order_acquire);
}

#endif
