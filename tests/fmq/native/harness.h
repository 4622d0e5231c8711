/* A queue in plain memory, for ring.h alone. The data part has its exact size on the heap, so that ASan sees one byte too far. */
#ifndef HARNESS_H
#define HARNESS_H

#define _GNU_SOURCE
#include "must.h"
#include "ring.h"
#include "spin.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>

struct shared { /* what two processes share */
    _Alignas(64) _Atomic uint64_t read;
    _Alignas(64) _Atomic uint64_t written;
    _Alignas(64) _Atomic uint32_t flag;
    struct ring_control control;
    uint8_t *data;
    uint64_t capacity, quantum;
    int reader_fd, writer_fd;
};

static inline struct shared *shared_new(uint64_t quantum, uint64_t elements)
{
    struct shared *s = aligned_alloc(64, sizeof *s);
    MUST(s);
    memset(s, 0, sizeof *s);
    s->quantum = quantum;
    s->capacity = quantum * elements;
    s->data = malloc(s->capacity);
    s->reader_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s->writer_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    MUST(s->data && s->reader_fd >= 0 && s->writer_fd >= 0);
    return s;
}

static inline void shared_free(struct shared *s)
{
    close(s->reader_fd);
    close(s->writer_fd);
    free(s->data);
    free(s);
}

static inline struct ring attach(struct shared *s, bool synchronized)
{
    return (struct ring){
        .read = &s->read,
        .written = &s->written,
        .data = s->data,
        .flag = &s->flag,
        .control = &s->control,
        .capacity = s->capacity,
        .quantum = s->quantum,
        .reader_fd = s->reader_fd,
        .writer_fd = s->writer_fd,
        .synchronized = synchronized,
    };
}

static inline enum ring_status put(struct ring *r, const void *from, uint64_t bytes)
{
    struct ring_span span;
    enum ring_status status = ring_begin_write(r, bytes, &span);
    if (status != RING_OK)
        return status;
    ring_copy_in(r, &span, from);
    return ring_commit_write(r, bytes);
}

static inline enum ring_status take(struct ring *r, void *to, uint64_t bytes)
{
    struct ring_span span;
    enum ring_status status = ring_begin_read(r, bytes, &span);
    if (status != RING_OK)
        return status;
    ring_copy_out(r, &span, to);
    return ring_commit_read(r, bytes);
}

static inline uint64_t random_next(uint64_t *state) /* xorshift64 */
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

#endif
