/* exchange.h against a plain model, with packets known, unknown and mutated, and with counters and bytes that a peer pokes;
 * and two threads that call and answer, asleep whenever they can be. usage: exchange packets|threads SEED ROUNDS */
#include "harness.h"

#include "exchange.h"

#define MOST_ELEMENTS 20

static struct exchange_body known_body(uint64_t *seed, const struct exchange_form *form)
{
    uint32_t elements = 1 + random_next(seed) % MOST_ELEMENTS; /* of the body; the header counts the stamp too */
    uint64_t length = (uint64_t)elements * EXCHANGE_ELEMENT;
    uint8_t *bytes = malloc(length); /* exactly: ASan sees one byte too far */
    MUST(bytes);
    for (uint64_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)(random_next(seed) % 4);
    elements++;
    memcpy(bytes + form->size_at, &elements, sizeof elements);
    return (struct exchange_body){.bytes = bytes, .length = length};
}

/* What lies first in the queue, told the long way: everything is copied out, then looked at. */
static int model(struct shared *s, const struct exchange_table *t, const struct exchange_form *form, struct exchange_stamp *stamp,
                 uint64_t *bytes)
{
    uint64_t read = atomic_load(&s->read), all = atomic_load(&s->written) - read;
    uint8_t *copy = malloc(all ? all : 1);
    int found = -1;
    MUST(copy);
    for (uint64_t i = 0; i < all; i++)
        copy[i] = s->data[(read + i) % s->capacity];
    for (unsigned k = 0; k < t->count && found < 0; k++) {
        uint64_t length = t->known[k].length;
        if (all >= length + EXCHANGE_ELEMENT && !memcmp(copy, t->known[k].bytes, length) && copy[length] == form->kind) {
            found = (int)k;
            *bytes = length + EXCHANGE_ELEMENT;
            memcpy(&stamp->first, copy + length + form->first_at, 8);
            memcpy(&stamp->second, copy + length + form->second_at, 8);
            if (form->after_at)
                for (unsigned i = 0; i < 7; i++) /* three bytes behind the kind, and four more */
                    stamp->after |= (uint64_t)copy[length + (i < 4 ? form->after_at + i : i - 3)] << 8 * i;
        }
    }
    free(copy);
    return found;
}

static void packets(uint64_t *seed, const struct exchange_form *form, bool hostile)
{
    struct shared *s = shared_new(EXCHANGE_ELEMENT, 4 + random_next(seed) % 80);
    struct ring writer = attach(s, true), reader = attach(s, true);
    struct exchange_table table = {0};
    uint8_t *raw = malloc(s->capacity);
    MUST(raw);
    for (int step = 0; step < 200; step++) {
        struct exchange_stamp sent = {random_next(seed), random_next(seed), random_next(seed) >> 8}, taken = {0, 0, 0}, told = {0, 0, 0};
        uint64_t bytes = 0, all, told_bytes = 0;
        switch (random_next(seed) % 6) {
        case 0: {
            struct exchange_body body = known_body(seed, form);
            if (exchange_find(&table, body.bytes, body.length) >= 0) {
                free((void *)(uintptr_t)body.bytes);
                break;
            }
            MUST(exchange_add(&table, body) == (int)table.count - 1);
            MUST(exchange_find(&table, body.bytes, body.length) == (int)table.count - 1);
            break;
        }
        case 1:
        case 2:
            if (table.count) {
                struct exchange_body *body = &table.known[random_next(seed) % table.count];
                enum ring_status status = exchange_write(&writer, body->bytes, body->length, form, &sent);
                MUST(status != RING_CLOSED && (hostile || status != RING_CORRUPT));
            }
            break;
        case 3: { /* anything at all, mostly like a known packet */
            uint64_t length = (1 + random_next(seed) % 6) * EXCHANGE_ELEMENT;
            for (uint64_t i = 0; i < length && i < s->capacity; i++)
                raw[i] = (uint8_t)(random_next(seed) % 5);
            if (table.count) {
                struct exchange_body *body = &table.known[random_next(seed) % table.count];
                uint64_t copied = body->length < s->capacity ? body->length : s->capacity;
                memcpy(raw, body->bytes, copied);
                length = copied + (random_next(seed) % 3) * EXCHANGE_ELEMENT;
                if (length > copied && length <= s->capacity)
                    raw[copied] = random_next(seed) % 4 ? form->kind : 0;
                raw[random_next(seed) % copied] ^= (uint8_t)(random_next(seed) % 2);
            }
            if (length <= s->capacity)
                put(&writer, raw, length);
            break;
        }
        case 4:
            if (hostile) {
                uint32_t size = (uint32_t)random_next(seed);
                _Atomic uint64_t *counter = random_next(seed) % 2 ? &s->read : &s->written;
                atomic_store(counter, random_next(seed) % 2 ? random_next(seed) : atomic_load(counter) + EXCHANGE_ELEMENT);
                memcpy(s->data + random_next(seed) % (s->capacity / 4) * 4, &size, 4);
            }
            break;
        default: {
            uint64_t before = atomic_load(&s->read);
            int at = exchange_peek(&reader, &table, form, &taken, &bytes, &all);
            MUST(at >= -1 && at < (int)table.count && (at < 0 || bytes == table.known[at].length + EXCHANGE_ELEMENT));
            MUST(atomic_load(&s->read) == before); /* a look takes nothing */
            if (!hostile) {
                int expected = model(s, &table, form, &told, &told_bytes);
                MUST((at < 0) == (expected < 0));
                MUST(at < 0 || (bytes == told_bytes && taken.first == told.first && taken.second == told.second));
            }
            if (at >= 0) {
                MUST(ring_commit_read(&reader, bytes) == RING_OK);
            } else {
                uint64_t readable, writable;
                if (ring_available(&reader, &readable, &writable) == RING_OK && readable) {
                    MUST(readable <= s->capacity);
                    take(&reader, raw, readable); /* the general path takes all there is */
                } else if (hostile) {
                    atomic_store(&s->read, 0);
                    atomic_store(&s->written, 0);
                }
            }
        }
        }
    }
    for (unsigned k = 0; k < table.count; k++)
        free((void *)(uintptr_t)table.known[k].bytes);
    exchange_free(&table);
    free(raw);
    shared_free(s);
}

/* ---- two threads ---------------------------------------------------------------------------------------------------- */

static struct shared *requests, *results;
static struct exchange_body bodies[2][4]; /* of requests, of results */
static uint64_t trips;

static struct exchange_table table_of(int which)
{
    struct exchange_table table = {0};
    for (int i = 0; i < 4; i++)
        MUST(exchange_add(&table, bodies[which][i]) == i);
    return table;
}

static int await_packet(struct ring *r, struct shared *s, struct exchange_table *t, const struct exchange_form *form,
                        struct exchange_stamp *stamp)
{
    uint64_t bytes, all;
    int at;
    while ((at = exchange_peek(r, t, form, stamp, &bytes, &all)) < 0)
        if (ring_arm(r, true, EXCHANGE_ELEMENT, 0)) {
            struct pollfd wanted = {.fd = s->reader_fd, .events = POLLIN};
            MUST(poll(&wanted, 1, 30000) == 1); /* a lost wake ends here, and fails */
            ring_clear(s->reader_fd);
        }
    MUST(ring_commit_read(r, bytes) == RING_OK);
    return at;
}

static void *listen(void *unused)
{
    struct ring reader = attach(requests, true), writer = attach(results, true);
    struct exchange_table table = table_of(0);
    (void)unused;
    for (uint64_t trip = 1; trip <= trips; trip++) {
        struct exchange_stamp stamp;
        int at = await_packet(&reader, requests, &table, &EXCHANGE_REQUEST, &stamp);
        MUST(stamp.first == trip && at == (int)(trip % 4));
        stamp.second = trip * 3;
        MUST(exchange_write(&writer, bodies[1][at].bytes, bodies[1][at].length, &EXCHANGE_RESULT, &stamp) == RING_OK);
    }
    exchange_free(&table);
    return NULL;
}

static void *call(void *unused)
{
    struct ring writer = attach(requests, true), reader = attach(results, true);
    struct exchange_table table = table_of(1);
    uint64_t answered = 0;
    (void)unused;
    for (uint64_t trip = 1; trip <= trips; trip++) {
        struct exchange_stamp stamp = {trip, 0, 0};
        struct exchange_body *body = &bodies[0][trip % 4];
        MUST(exchange_write(&writer, body->bytes, body->length, &EXCHANGE_REQUEST, &stamp) == RING_OK);
        while (trip - answered > (trip % 16 ? 3 : 0)) { /* up to three in flight, and now and then none */
            int at = await_packet(&reader, results, &table, &EXCHANGE_RESULT, &stamp);
            MUST(stamp.first == ++answered && stamp.second == answered * 3 && at == (int)(answered % 4));
        }
    }
    exchange_free(&table);
    return NULL;
}

/* A cycle of many bodies is known as a whole, up to the bound. */
static void growth(void)
{
    struct exchange_table table = {0};
    static uint8_t many[EXCHANGE_KNOWN + 1][EXCHANGE_ELEMENT];
    for (unsigned i = 0; i <= EXCHANGE_KNOWN; i++) {
        memcpy(many[i], &i, sizeof i);
        MUST(exchange_find(&table, many[i], EXCHANGE_ELEMENT) < 0);
        int at = exchange_add(&table, (struct exchange_body){.bytes = many[i], .length = EXCHANGE_ELEMENT});
        MUST(at == (i < EXCHANGE_KNOWN ? (int)i : -1));
    }
    for (unsigned turn = 0; turn < 2; turn++)
        for (unsigned i = 0; i < EXCHANGE_KNOWN; i++)
            MUST(exchange_find(&table, many[i], EXCHANGE_ELEMENT) == (int)i);
    exchange_free(&table);
    MUST(exchange_find(&table, many[0], EXCHANGE_ELEMENT) < 0);
}

static void threads(uint64_t *seed)
{
    requests = shared_new(EXCHANGE_ELEMENT, 4 * (MOST_ELEMENTS + 1));
    results = shared_new(EXCHANGE_ELEMENT, 4 * (MOST_ELEMENTS + 1));
    for (int i = 0; i < 4; i++) {
        bodies[0][i] = known_body(seed, &EXCHANGE_REQUEST);
        bodies[1][i] = known_body(seed, &EXCHANGE_RESULT);
    }
    pthread_t ends[2];
    MUST(!pthread_create(&ends[0], NULL, listen, NULL) && !pthread_create(&ends[1], NULL, call, NULL));
    MUST(!pthread_join(ends[0], NULL) && !pthread_join(ends[1], NULL));
    for (int i = 0; i < 4; i++) {
        free((void *)(uintptr_t)bodies[0][i].bytes);
        free((void *)(uintptr_t)bodies[1][i].bytes);
    }
    shared_free(requests);
    shared_free(results);
}

/* Packets around the longest one that is recognised. A longer one stays in the queue, and ASan sees a copy past the stack's buffer. */
static void longest(const struct exchange_form *form)
{
    const uint32_t most = EXCHANGE_MOST / EXCHANGE_ELEMENT;
    for (uint32_t elements = most - 1; elements <= 2 * most; elements++) {
        struct shared *s = shared_new(EXCHANGE_ELEMENT, 2 * most);
        struct ring writer = attach(s, true), reader = attach(s, true);
        struct exchange_table table = {0};
        uint64_t length = (uint64_t)(elements - 1) * EXCHANGE_ELEMENT, bytes = 0, all;
        struct exchange_stamp sent = {7, 9, 0}, taken = {0, 0, 0};
        uint8_t *body = calloc(1, length);
        MUST(body);
        memcpy(body + form->size_at, &elements, sizeof elements);
        MUST(exchange_add(&table, (struct exchange_body){.bytes = body, .length = length}) == 0);
        MUST(exchange_write(&writer, body, length, form, &sent) == RING_OK);
        int found = exchange_peek(&reader, &table, form, &taken, &bytes, &all);
        MUST(found == (elements <= most ? 0 : -1));
        MUST(all == length + EXCHANGE_ELEMENT);
        MUST(found < 0 || (bytes == all && taken.first == 7 && taken.second == 9));
        exchange_free(&table);
        free(body);
        shared_free(s);
    }
}

/* A request is made late before the reader claims it, and the reader sees that. Or after that, and the writer is not told that it does. */
static void withdrawals(void)
{
    struct shared *s = shared_new(EXCHANGE_ELEMENT, 4);
    struct ring writer = attach(s, true), reader = attach(s, true);
    struct exchange_table table = {0};
    const uint8_t body[EXCHANGE_ELEMENT] = {1, 0, 0, 0, 2};
    const int64_t now_ns = 1000;
    MUST(exchange_add(&table, (struct exchange_body){.bytes = body, .length = sizeof body}) == 0);
    for (uint64_t number = 1; number <= 9; number++) {
        struct exchange_stamp sent = {number, number % 3 ? 2000 : 0, 0}, taken = {0, 0, 0};
        uint64_t bytes, all;
        MUST(exchange_write(&writer, body, sizeof body, &EXCHANGE_REQUEST, &sent) == RING_OK);
        uint64_t at = writer.write_at + sizeof body;
        MUST(exchange_peek(&reader, &table, &EXCHANGE_REQUEST, &taken, &bytes, &all) == 0 && taken.second == sent.second);
        bool first = number % 2;
        if (first)
            MUST(exchange_amend(&writer, at, &EXCHANGE_REQUEST, 1));
        MUST(exchange_claim(&reader, bytes, &EXCHANGE_REQUEST, &taken, now_ns) == !first);
        MUST(taken.second == (first ? 1 : sent.second));
        MUST(!exchange_amend(&writer, at, &EXCHANGE_REQUEST, 1));
        MUST(ring_commit_read(&reader, bytes) == RING_OK);
        MUST(!exchange_amend(&writer, at, &EXCHANGE_REQUEST, 1));
    }
    exchange_free(&table);
    shared_free(s);
}

int main(int argc, char **argv)
{
    MUST(argc == 4);
    uint64_t seed = strtoull(argv[2], NULL, 10) | 1;
    trips = strtoull(argv[3], NULL, 10);
    if (!strcmp(argv[1], "threads")) {
        threads(&seed);
        return 0;
    }
    growth();
    withdrawals();
    longest(&EXCHANGE_REQUEST);
    longest(&EXCHANGE_RESULT);
    for (uint64_t round = 0; round < trips; round++)
        for (int hostile = 0; hostile < 2; hostile++) {
            packets(&seed, &EXCHANGE_REQUEST, hostile);
            packets(&seed, &EXCHANGE_RESULT, hostile);
        }
    return 0;
}
