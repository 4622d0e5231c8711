/* Packets that come again: a known body, and one element behind it, the stamp, which alone differs. Plain C11 without
 * Python. tests/fmq/native/exchange.c runs this file under ASan and UBSan. The general path (aionn/burst/packets.py, in
 * Python) is the oracle. Any packet that is not exactly a known body with a stamp stays in the queue for the general path.
 *
 * A packet is copied out of the ring once and looked at only then, because the peer may change the ring's bytes at any
 * time. The length comes from a first look at the header. The comparison with a known body, whose header has the same
 * length, confirms it on the copy. Nothing is read past the packet, and no packet is longer than EXCHANGE_MOST. */
#ifndef AIONN_FMQ_EXCHANGE_H
#define AIONN_FMQ_EXCHANGE_H

#include "ring.h"

#define EXCHANGE_ELEMENT 24u /* bytes of an NNAPI datum; DATUM_BYTES in aionn/burst/packets.py */
#define EXCHANGE_MOST 4032u  /* bytes of a packet that is recognised, a multiple of the element */
#define EXCHANGE_KNOWN 16u   /* bodies that are recognised; the oldest is forgotten first */

struct exchange_form { uint8_t kind, size_at, first_at, second_at; }; /* the stamp's kind, and where the fields lie */
/* As REQUEST_IDENTITY, _INFORMATION and _IDENTITY, and as RESULT_IDENTITY, _RESULT_INFORMATION and _TIMING in packets.py. */
static const struct exchange_form EXCHANGE_REQUEST = {7, 4, 4, 12}; /* identity, deadline in ns */
static const struct exchange_form EXCHANGE_RESULT = {4, 8, 8, 16};  /* identity, service time in ns */

struct exchange_stamp { uint64_t first, second; };

struct exchange_body {
    const uint8_t *bytes; /* borrowed; the code that fills the table keeps it alive */
    uint64_t length;
};

struct exchange_table {
    struct exchange_body known[EXCHANGE_KNOWN];
    unsigned count, oldest;
    unsigned last; /* found last; the next body mostly is that one or its successor */
};

/* Return where the body is in the table, or -1. */
static inline int exchange_find(struct exchange_table *t, const uint8_t *body, uint64_t length)
{
    for (unsigned i = 0; i < t->count; i++) {
        unsigned at = (t->last + i) % t->count;
        if (t->known[at].length == length && !memcmp(t->known[at].bytes, body, length)) {
            t->last = at;
            return (int)at;
        }
    }
    return -1;
}

/* Return the entry to overwrite with a new body. */
static inline unsigned exchange_place(struct exchange_table *t)
{
    if (t->count < EXCHANGE_KNOWN)
        return t->count++;
    unsigned at = t->oldest;
    t->oldest = (at + 1) % EXCHANGE_KNOWN;
    return at;
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
    return exchange_find(t, packet, length);
}

/* Write a body and its stamp, all or nothing, and wake the peer if it sleeps. Return RING_LESS if there is less room, or if
 * the packet is longer than EXCHANGE_MOST. */
static inline enum ring_status exchange_write(struct ring *r, const uint8_t *body, uint64_t length, const struct exchange_form *form,
                                              const struct exchange_stamp *stamp)
{
    uint8_t packet[EXCHANGE_MOST];
    struct ring_span span;
    uint64_t bytes = length + EXCHANGE_ELEMENT;
    if (length % EXCHANGE_ELEMENT || length > EXCHANGE_MOST - EXCHANGE_ELEMENT)
        return RING_LESS;
    enum ring_status status = ring_begin_write(r, bytes, &span);
    if (status != RING_OK)
        return status;
    memcpy(packet, body, length);
    memset(packet + length, 0, EXCHANGE_ELEMENT); /* so that no byte of this stack leaves in the padding */
    packet[length] = form->kind;
    memcpy(packet + length + form->first_at, &stamp->first, sizeof stamp->first);
    memcpy(packet + length + form->second_at, &stamp->second, sizeof stamp->second);
    ring_copy_in(r, &span, packet);
    return ring_commit_write(r, bytes);
}

#endif
