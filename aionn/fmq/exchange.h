/* Packets that come again: a known body, and one element behind it, the stamp, which alone differs. Plain C11 without
 * Python. tests/fmq/native/exchange.c runs this file under ASan and UBSan. The general path (aionn/burst/packets.py, in
 * Python) is the oracle. Any packet that is not exactly a known body with a stamp stays in the queue for the general path.
 *
 * A packet is copied out of the ring once and looked at only then, because the peer may change the ring's bytes at any
 * time. The length comes from a first look at the header. The comparison with a known body, whose header has the same
 * length, confirms it on the copy. Nothing is read past the packet, and no packet is longer than EXCHANGE_MOST. */
#ifndef AIONN_FMQ_EXCHANGE_H
#define AIONN_FMQ_EXCHANGE_H

#include <stdlib.h>

#include "ring.h"

#define EXCHANGE_ELEMENT 24u /* bytes of an NNAPI datum; DATUM_BYTES in aionn/burst/packets.py */
#define EXCHANGE_MOST 4032u  /* bytes of a packet that is recognised, a multiple of the element */
#define EXCHANGE_KNOWN 4096u /* bodies that a table holds at most; then its owner forgets all of them */

struct exchange_form { uint8_t kind, size_at, first_at, second_at, after_at; }; /* the stamp's kind, and where the fields lie */
/* As REQUEST_IDENTITY, _INFORMATION and _IDENTITY, and as RESULT_IDENTITY, _RESULT_INFORMATION and _TIMING in packets.py. */
static const struct exchange_form EXCHANGE_REQUEST = {7, 4, 4, 12, 20}; /* identity, deadline in ns, what it runs after */
static const struct exchange_form EXCHANGE_RESULT = {4, 8, 8, 16, 0};   /* identity, service time in ns */

struct exchange_stamp {
    uint64_t first, second;
    uint64_t after; /* the request that must be over before: its burst's number in the upper half, the lower half of its identity; or 0 */
};

struct exchange_body {
    const uint8_t *bytes; /* borrowed; the code that fills the table keeps it alive */
    uint64_t length;
    void *owner, *value; /* of the code that fills the table */
    bool serial;         /* listener: such a request runs while no other request of its burst does */
    uint32_t kind;       /* listener: requests of one kind may be joined into one run; 0 joins with none */
};

/* Grows with what is in use. `index` is a hash table of open addresses, twice as large as `room`: 0 is free, else entry + 1. */
struct exchange_table {
    struct exchange_body *known;
    uint32_t *index;
    unsigned count, room;
    unsigned last; /* found last; the next body mostly is that one or its successor */
};

static inline uint64_t exchange_hash(const uint8_t *body, uint64_t length)
{
    uint64_t hash = UINT64_C(0x9e3779b97f4a7c15) ^ length;
    for (uint64_t at = 0, word; at + sizeof word <= length; at += sizeof word) { /* a body is a whole number of words */
        memcpy(&word, body + at, sizeof word);
        hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 32;
    }
    return hash;
}

static inline bool exchange_is(const struct exchange_body *known, const uint8_t *body, uint64_t length)
{
    return known->length == length && !memcmp(known->bytes, body, length);
}

/* Return where the body is in the table, or -1. */
static inline int exchange_find(struct exchange_table *t, const uint8_t *body, uint64_t length)
{
    if (!t->count)
        return -1;
    for (unsigned step = 0; step < 2; step++) {
        unsigned at = t->last + step < t->count ? t->last + step : 0;
        if (exchange_is(&t->known[at], body, length)) {
            t->last = at;
            return (int)at;
        }
    }
    unsigned mask = 2 * t->room - 1;
    for (unsigned at = (unsigned)exchange_hash(body, length) & mask; t->index[at]; at = (at + 1) & mask)
        if (exchange_is(&t->known[t->index[at] - 1], body, length)) {
            t->last = t->index[at] - 1;
            return (int)t->last;
        }
    return -1;
}

static inline void exchange_enter(struct exchange_table *t, unsigned entry)
{
    unsigned mask = 2 * t->room - 1;
    unsigned at = (unsigned)exchange_hash(t->known[entry].bytes, t->known[entry].length) & mask;
    while (t->index[at])
        at = (at + 1) & mask;
    t->index[at] = entry + 1;
}

/* Add a body that is not in the table. Return its entry, or -1 if the table is full or the system has no memory. */
static inline int exchange_add(struct exchange_table *t, struct exchange_body body)
{
    if (t->count == t->room) {
        unsigned room = t->room ? 2 * t->room : 8;
        if (room > EXCHANGE_KNOWN)
            return -1;
        uint32_t *index = calloc(2 * (size_t)room, sizeof *index);
        struct exchange_body *known = index ? realloc(t->known, room * sizeof *known) : NULL;
        if (!known) {
            free(index);
            return -1;
        }
        free(t->index);
        t->index = index;
        t->known = known;
        t->room = room;
        for (unsigned entry = 0; entry < t->count; entry++)
            exchange_enter(t, entry);
    }
    t->known[t->count] = body;
    exchange_enter(t, t->count);
    return (int)t->count++;
}

/* Free the table's own memory. The table is empty then, and usable. */
static inline void exchange_free(struct exchange_table *t)
{
    free(t->known);
    free(t->index);
    *t = (struct exchange_table){0};
}

/* Look at the packet that lies first in `r`, without taking it. Return the index of its body, or -1 for an unknown packet.
 * `bytes` becomes the length of a known packet, for ring_commit_read. `all` becomes the length of everything in the queue. */
static inline int exchange_peek(struct ring *r, struct exchange_table *t, const struct exchange_form *form,
                                struct exchange_stamp *stamp, uint64_t *bytes, uint64_t *all)
{
    uint8_t packet[EXCHANGE_MOST];
    uint64_t writable;
    struct ring_span span;
    uint32_t elements;
    if (ring_available(r, all, &writable) != RING_OK || *all < 2 * EXCHANGE_ELEMENT ||
        ring_begin_read(r, EXCHANGE_ELEMENT, &span) != RING_OK)
        return -1;
    ring_copy_out(r, &span, packet);
    memcpy(&elements, packet + form->size_at, sizeof elements);
    *bytes = (uint64_t)elements * EXCHANGE_ELEMENT;
    if (elements < 2 || *bytes > EXCHANGE_MOST || *bytes > *all || ring_begin_read(r, *bytes, &span) != RING_OK)
        return -1;
    ring_copy_out(r, &span, packet);
    uint64_t length = *bytes - EXCHANGE_ELEMENT;
    if (packet[length] != form->kind)
        return -1;
    memcpy(&stamp->first, packet + length + form->first_at, sizeof stamp->first);
    memcpy(&stamp->second, packet + length + form->second_at, sizeof stamp->second);
    stamp->after = 0;
    if (form->after_at) {
        uint32_t head, identity;
        memcpy(&head, packet + length, sizeof head);
        memcpy(&identity, packet + length + form->after_at, sizeof identity);
        stamp->after = (uint64_t)(head >> 8) << 32 | identity;
    }
    return exchange_find(t, packet, length);
}

/* Copy bytes to their place in a span that begins `at` bytes before it. */
static inline void exchange_copy_in(const struct ring_span *span, uint64_t at, const uint8_t *from, uint64_t bytes)
{
    uint64_t room = at < span->first_bytes ? span->first_bytes - at : 0, first = bytes < room ? bytes : room;
    if (first)
        memcpy(span->first + at, from, first);
    if (bytes > first)
        memcpy(span->second + (at + first - span->first_bytes), from + first, bytes - first);
}

/* Write a body and its stamp, all or nothing, and wake the peer if it sleeps. Return RING_LESS if there is less room. */
static inline enum ring_status exchange_write(struct ring *r, const uint8_t *body, uint64_t length, const struct exchange_form *form,
                                              const struct exchange_stamp *stamp)
{
    uint8_t last[EXCHANGE_ELEMENT] = {form->kind}; /* zeros in the padding, so that no byte of this stack leaves */
    struct ring_span span;
    uint64_t bytes = length + EXCHANGE_ELEMENT;
    if (length % EXCHANGE_ELEMENT || length > r->capacity)
        return RING_LESS;
    enum ring_status status = ring_begin_write(r, bytes, &span);
    if (status != RING_OK)
        return status;
    memcpy(last + form->first_at, &stamp->first, sizeof stamp->first);
    memcpy(last + form->second_at, &stamp->second, sizeof stamp->second);
    if (form->after_at && stamp->after) {
        uint32_t head = form->kind | (uint32_t)(stamp->after >> 32) << 8, identity = (uint32_t)stamp->after;
        memcpy(last, &head, sizeof head);
        memcpy(last + form->after_at, &identity, sizeof identity);
    }
    exchange_copy_in(&span, 0, body, length);
    exchange_copy_in(&span, length, last, sizeof last);
    return ring_commit_write(r, bytes);
}

/* Claim the request that exchange_peek has found, and look again for its deadline, which the peer brings forward if the caller has left.
 * Return whether it is not late. */
static inline bool exchange_claim(const struct ring *r, uint64_t bytes, const struct exchange_form *form, struct exchange_stamp *stamp,
                                  int64_t now_ns)
{
    uint8_t last[EXCHANGE_ELEMENT];
    struct ring_span span;
    ring_claim(r, r->read_at + bytes);
    ring_place(r, r->read_at + bytes - EXCHANGE_ELEMENT, EXCHANGE_ELEMENT, &span);
    ring_copy_out(r, &span, last);
    memcpy(&stamp->second, last + form->second_at, sizeof stamp->second);
    return !stamp->second || (uint64_t)now_ns < stamp->second;
}

/* Replace the second field of the stamp that this side has written at `at`, if the peer has not taken the packet. Return whether the peer
 * is sure to see it before it takes the packet. Else the peer may copy it at the same time and see half of the new field. So the caller
 * gives a value that does no harm with either half of the old one. */
static inline bool exchange_amend(const struct ring *r, uint64_t at, const struct exchange_form *form, uint64_t second)
{
    struct ring_span span;
    uint64_t read, written;
    if (ring_counters(r, &read, &written) != RING_OK || read > at || written < at + EXCHANGE_ELEMENT)
        return false; /* its place may hold another packet now */
    ring_place(r, at, EXCHANGE_ELEMENT, &span);
    exchange_copy_in(&span, form->second_at, (const uint8_t *)&second, sizeof second);
    return ring_unclaimed(r, at);
}

#endif
