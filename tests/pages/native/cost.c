/* What one call costs, in ns: the least of five runs. usage: cost */
#define _GNU_SOURCE
#include "burst_slot.h"
#include "model_slot.h"
#include "trace_ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CALLS = 2000000 };

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#define COST(name, call)                                                     \
    do {                                                                     \
        double least = 1e9;                                                  \
        for (int run = 0; run < 5; run++) {                                  \
            int64_t began = now_ns();                                        \
            for (int64_t i = 0; i < CALLS; i++) {                            \
                call;                                                        \
                __asm__ volatile("" ::: "memory");                           \
            }                                                                \
            double each = (double)(now_ns() - began) / CALLS;                \
            least = each < least ? each : least;                             \
        }                                                                    \
        printf("%s %.1f\n", name, least);                                    \
    } while (0)

int main(void)
{
    page_word *words = calloc(SLOT_WORDS, 8), *page = calloc(PAGE_HEADER_BYTES, 1);
    struct trace_ring ring = {.fd = -1};
    struct page_slot slot = {.magic = PAGE_SLOT_MAGIC, .traced = &ring};
    if (!words || !page)
        return 1;
    atomic_store(&slot.words, words);
    atomic_store(&ring.page, page);
    COST("slot_sent", slot_sent(&slot));
    COST("slot_answered", slot_answered(&slot, 1000 + i * 37 % 1000000, 500 + i * 31 % 500000));
    COST("slot_answered_without_slot", slot_answered(NULL, i, i));
    COST("slot_trace_off", slot_trace(&slot, TRACE_SENT, 1, (uint64_t)i, i, 0, 0));
    page_store(&page[PAGE_TRACE_UNTIL], UINT64_MAX);
    COST("slot_trace_on", slot_trace(&slot, TRACE_SENT, 1, (uint64_t)i, i, 0, 0));
    page_store(&page[PAGE_TRACE_UNTIL], 0);
    COST("model_slot_begin_end", (model_slot_begin(&slot, i), model_slot_end(&slot, i, i + i * 31 % 500000)));
    trace_ring_close(&ring);
    free(words);
    free(page);
    return 0;
}
