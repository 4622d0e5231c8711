/* What every native writer of a statistics page shares: its words, how they are stored, and the histogram's bucket.
 *
 * No Python here. aionn/fmq includes this header and its neighbours for the frame path. layout.py has the same numbers, and
 * tests/pages compares the two.
 *
 * Invariants
 *     Each word has one writer at a time, and is stored whole. So an increment is a load and a store, without a lock prefix.
 *     A writer takes `words` once per call. NULL means that nothing is counted: no page, a released slot, or a child of fork.
 *     The memory behind `words` stays mapped while the object that exports this struct lives. */
#ifndef AIONN_PAGES_WORDS_H
#define AIONN_PAGES_WORDS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* layout.py: words of the header that native code uses. */
enum { PAGE_PID = 3, PAGE_START = 4, PAGE_TRACE_UNTIL = 10, PAGE_SEQUENCE = 11, PAGE_SLOTS_USED = 39, PAGE_HEADER_BYTES = 4096 };
enum { PAGE_BUCKETS = 90, PAGE_FIRST_OCTAVE = 12, PAGE_LAST_OCTAVE = 33 };

typedef _Atomic uint64_t page_word;
_Static_assert(sizeof(page_word) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "another process shares the words, not a hidden lock");

struct trace_ring;

/* The buffer of a Python slot object: how native code outside this package gets at a slot. Take the buffer with
 * PyObject_GetBuffer(slot, &view, PyBUF_SIMPLE), hold it while you write, and pass view.buf as `struct page_slot *`. */
struct page_slot {
    uint64_t magic;            /* PAGE_SLOT_MAGIC */
    page_word *_Atomic words;  /* NULL: off */
    struct trace_ring *traced; /* NULL: never traced */
};
#define PAGE_SLOT_MAGIC UINT64_C(0x746f6c7367706e61)

/* The struct in a buffer, or NULL if the buffer is not a slot's. */
static inline struct page_slot *page_slot_in(void *memory, size_t bytes)
{
    struct page_slot *slot = memory;
    return slot && bytes == sizeof *slot && slot->magic == PAGE_SLOT_MAGIC ? slot : NULL;
}

static inline uint64_t page_load(const page_word *word) { return atomic_load_explicit(word, memory_order_relaxed); }
static inline void page_store(page_word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_relaxed); }
static inline void page_add(page_word *word, uint64_t more) { page_store(word, page_load(word) + more); }

/* Release: a reader that sees this value also sees what was stored before it. Pairs with the reader's acquire. */
static inline void page_publish(page_word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }

/* `python -m tests.bench page` compares with a build that counts nothing. */
static inline page_word *page_words(const struct page_slot *slot)
{
#ifdef AIONN_COUNTS_NOTHING
    slot = NULL;
#endif
    return slot ? (page_word *)(uintptr_t)atomic_load_explicit(&slot->words, memory_order_relaxed) : NULL;
}

/* Four buckets per octave from 2^-18 s to 2^4 s, in units of 2^-30 s, and one for shorter and one for longer durations. */
static inline unsigned page_bucket_of(uint64_t ns)
{
    if (ns >= UINT64_C(16000000000))
        return PAGE_BUCKETS - 1;
    uint64_t units = ns * UINT64_C(1152921504) >> 30; /* the product fits, because ns is below 16 s */
    if (units < (UINT64_C(1) << PAGE_FIRST_OCTAVE))
        return 0;
    unsigned octave = 63 - (unsigned)__builtin_clzll(units);
    return octave > PAGE_LAST_OCTAVE ? PAGE_BUCKETS - 1
                                     : 1 + (octave - PAGE_FIRST_OCTAVE) * 4 + (unsigned)(units >> (octave - 2)) - 4;
}

/* A duration in ns as a histogram counts it: a clock that two CPUs disagree about gives 0, never a huge number. */
static inline uint64_t page_ns(int64_t ns) { return ns > 0 ? (uint64_t)ns : 0; }

#endif
