/* Records of single frames, written by C while another process asks for them. Off, it costs one load and a comparison.
 *
 * A ring has one writer and any number of readers, and it overwrites, as aionn's unsynchronized queue does (fmq/ring.h). The
 * order of operations is that queue's. Each record has a fixed size here and each ring 2^N of them, so a record costs some ten
 * stores. Readers map the ring for reading only. Each record has its number, so a reader knows how many it has lost.
 *
 * The ring is a sealed memfd "aionn-trace", made by its writer at the first record. Another process finds it as it finds a page,
 * by the links in /proc/PID/fd. It vanishes with the process, or with the object that holds it.
 *
 * Invariants
 *     A record is written only while TRACE_UNTIL of the page is later than its time. A tracer that dies costs nothing after that.
 *     A writer that cannot make its ring writes nothing, and tries again only when TRACE_UNTIL has changed.
 *     written <= intent <= written + 1. Both count records since the ring was made, and never wrap. */
#ifndef AIONN_PAGES_TRACE_RING_H
#define AIONN_PAGES_TRACE_RING_H

#ifndef _GNU_SOURCE
#error "memfd_create: compile with _GNU_SOURCE defined before any include"
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "words.h"

enum trace_kind { /* app_layout.py has the same numbers */
    TRACE_SENT = 1,     /* app: the request lies in the queue. first: number of the burst's slot. second: when it was captured, or 0 */
    TRACE_TAKEN = 2,    /* driver: a lane has taken it. first: its deadline, or 0 */
    TRACE_EVENT = 3,    /* a span or counter of Python: trace_records.py says what the words mean */
    TRACE_TEXT = 4,     /* 24 bytes of an event's text */
    TRACE_ANSWERED = 5, /* driver: the answer lies in the queue. first: how long it took */
    TRACE_SETTLED = 6,  /* app: the answer has been taken. first: how long the driver says it took */
};
#ifndef TRACE_RECORDS /* the weak-memory test runs with fewer and smaller ones */
#define TRACE_RECORDS 8192
#define TRACE_RECORD_WORDS 8
#endif
#define TRACE_MAGIC UINT64_C(0x006372746e6e6f69)

struct trace_memory { /* the memfd: a page of counters, then the records */
    page_word magic, pid, start, records;
    _Alignas(64) page_word intent; /* how many records the writer has begun */
    page_word written;             /* how many records are whole */
    _Alignas(4096) page_word record[TRACE_RECORDS][TRACE_RECORD_WORDS]; /* number, kind, burst, identity, at_ns, first, second, 0 */
};
_Static_assert((TRACE_RECORDS & (TRACE_RECORDS - 1)) == 0, "a record's place is its number's lowest bits");
_Static_assert(offsetof(struct trace_memory, intent) == 64 && offsetof(struct trace_memory, record) == 4096, "layout.py");

struct trace_ring { /* one writer's handle. Zeros, and `page`, are a new one. */
    const page_word *_Atomic page; /* the header of its process's page; NULL: off */
    struct trace_memory *memory;   /* NULL: not made yet */
    uint64_t refused;              /* TRACE_UNTIL at which the ring could not be made */
    int fd;                        /* of the memory */
};

/* Make the memory. At any failure `memory` stays NULL and nothing is left open. */
static inline void trace_ring_make(struct trace_ring *ring, const page_word *page)
{
    int fd = memfd_create("aionn-trace", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return;
    /* Its size is sealed and its memory reserved, so neither this writer nor a reader ever gets SIGBUS. */
    void *memory = MAP_FAILED;
    if (!ftruncate(fd, sizeof(struct trace_memory)) && !posix_fallocate(fd, 0, sizeof(struct trace_memory)) &&
        !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        memory = mmap(NULL, sizeof(struct trace_memory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        close(fd);
        return;
    }
    ring->fd = fd;
    ring->memory = memory;
    page_store(&ring->memory->pid, page_load(&page[PAGE_PID]));
    page_store(&ring->memory->start, page_load(&page[PAGE_START]));
    page_store(&ring->memory->records, TRACE_RECORDS);
    page_publish(&ring->memory->magic, TRACE_MAGIC); /* last: a reader that sees it sees the rest */
}

/* Unmap and close. The writer has stopped. */
static inline void trace_ring_close(struct trace_ring *ring)
{
    if (ring->memory) {
        munmap(ring->memory, sizeof(struct trace_memory));
        close(ring->fd);
        ring->memory = NULL;
    }
}

/* Write one record of TRACE_RECORD_WORDS words. The order is that of ring_begin_write and ring_commit_write. */
static inline void trace_ring_put(struct trace_memory *memory, const uint64_t *record)
{
    uint64_t number = page_load(&memory->written);
    page_word *place = memory->record[number & (TRACE_RECORDS - 1)];
    page_store(&memory->intent, number + 1);
    /* Pairs with the acquire fence in trace_ring_take. A reader that copies a word of this record sees the intent. */
    atomic_thread_fence(memory_order_release);
    for (unsigned i = 0; i < TRACE_RECORD_WORDS; i++)
        page_store(&place[i], record[i]);
    page_publish(&memory->written, number + 1);
}

/* Copy the record with the number `*cursor`, or an older writer's next one that is still there, and move on. Returns false if
 * there is nothing new. `*lost` grows by the records that were overwritten before they were read. A reader that was lapped goes
 * on with the newest half, or the writer would lap it again at once. */
static inline bool trace_ring_take(const struct trace_memory *memory, uint64_t *cursor, uint64_t *lost, uint64_t *record)
{
    for (;;) {
        uint64_t written = atomic_load_explicit(&memory->written, memory_order_acquire); /* pairs with the release in trace_ring_put */
        if (*cursor >= written)
            return false;
        if (written - *cursor <= TRACE_RECORDS) {
            const page_word *place = memory->record[*cursor & (TRACE_RECORDS - 1)];
            for (unsigned i = 0; i < TRACE_RECORD_WORDS; i++)
                record[i] = page_load(&place[i]);
            atomic_thread_fence(memory_order_acquire);
            if (page_load(&memory->intent) - *cursor <= TRACE_RECORDS) {
                ++*cursor;
                return true;
            }
        }
        uint64_t newest = written - (written < TRACE_RECORDS / 2 ? written : TRACE_RECORDS / 2);
        newest = newest > *cursor ? newest : *cursor + 1;
        *lost += newest - *cursor;
        *cursor = newest;
    }
}

#if TRACE_RECORD_WORDS == 8
/* Whether records of that moment are wanted. False if `slot` is NULL. */
static inline bool slot_is_traced(const struct page_slot *slot, int64_t now_ns)
{
    const struct trace_ring *ring = slot ? slot->traced : NULL;
    const page_word *page = ring ? atomic_load_explicit(&ring->page, memory_order_relaxed) : NULL;
    return page && (uint64_t)now_ns < page_load(&page[PAGE_TRACE_UNTIL]);
}

/* Note what happens to a frame at `now_ns` (CLOCK_MONOTONIC), if the slot is being traced. Does nothing if `slot` is NULL.
 *     burst     names the burst in both processes: the inode number of its request queue
 *     identity  of the request, as its packets have it
 *     first, second  as `enum trace_kind` says */
static inline void slot_trace(struct page_slot *slot, enum trace_kind kind, uint64_t burst, uint64_t identity, int64_t now_ns,
                              uint64_t first, uint64_t second)
{
    struct trace_ring *ring = slot ? slot->traced : NULL;
    const page_word *page = ring ? atomic_load_explicit(&ring->page, memory_order_relaxed) : NULL;
    uint64_t until = page ? page_load(&page[PAGE_TRACE_UNTIL]) : 0;
    if ((uint64_t)now_ns >= until)
        return;
    if (!ring->memory) {
        if (ring->refused == until)
            return;
        ring->refused = until;
        trace_ring_make(ring, page);
        if (!ring->memory)
            return;
    }
    const uint64_t record[TRACE_RECORD_WORDS] = {page_load(&ring->memory->written), kind, burst, identity, (uint64_t)now_ns, first, second, 0};
    trace_ring_put(ring->memory, record);
}
#endif

#endif
