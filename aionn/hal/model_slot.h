/* Begin and end of the executions of one model, as a driver shows them. layout.py says what the words mean.
 *
 * One execution at a time runs in a slot, so each lane has a slot. Any thread may be that writer, with or without the GIL.
 * SINCE is stored before BEGUN, and the duration before FINISHED. A reader that sees a count also sees the values that
 * belong to it. Both functions do nothing if `slot` is NULL or off. */
#ifndef AIONN_PAGES_MODEL_SLOT_H
#define AIONN_PAGES_MODEL_SLOT_H

#include "words.h"

/* layout.py: words of a driver's slot. */
enum { MODEL_BEGUN = 1, MODEL_FINISHED = 2, MODEL_SINCE = 3, MODEL_ENDED = 4, MODEL_HISTOGRAM = 16, MODEL_WORDS = 128 };

static inline void model_slot_begin(struct page_slot *slot, int64_t now_ns)
{
    page_word *words = page_words(slot);
    if (!words)
        return;
    page_store(&words[MODEL_SINCE], (uint64_t)now_ns);
    page_publish(&words[MODEL_BEGUN], page_load(&words[MODEL_FINISHED]) + 1);
}

/* Returns how long the execution took in ns, also if the slot is off. */
static inline int64_t model_slot_end(struct page_slot *slot, int64_t began_ns, int64_t now_ns)
{
    page_word *words = page_words(slot);
    int64_t took_ns = (int64_t)page_ns(now_ns - began_ns);
    if (words) {
        page_add(&words[MODEL_HISTOGRAM + page_bucket_of((uint64_t)took_ns)], 1);
        page_store(&words[MODEL_ENDED], (uint64_t)now_ns);
        page_publish(&words[MODEL_FINISHED], page_load(&words[MODEL_BEGUN]));
    }
    return took_ns;
}

/* The execution that began last does not count. */
static inline void model_slot_drop(struct page_slot *slot)
{
    page_word *words = page_words(slot);
    if (words)
        page_publish(&words[MODEL_BEGUN], page_load(&words[MODEL_FINISHED]));
}

#endif
