/* A peer that pokes any value into the counters makes no access outside the data part, ever (run under ASan and UBSan).
 * And without a poke, what is read is what was written, against a plain model. usage: counters SEED ROUNDS */
#include "harness.h"

static uint64_t poke(uint64_t *seed, uint64_t near, uint64_t capacity)
{
    switch (random_next(seed) % 8) {
    case 0: return 0;
    case 1: return UINT64_MAX - random_next(seed) % 64;
    case 2: return near + capacity;
    case 3: return near + capacity + 1;
    case 4: return near - 1;
    case 5: return near + 1;
    case 6: return (uint64_t)1 << (random_next(seed) % 64);
    default: return random_next(seed);
    }
}

static void hostile(uint64_t *seed, bool synchronized)
{
    uint64_t quantum = 1 + random_next(seed) % 40, elements = 1 + random_next(seed) % 70;
    struct shared *s = shared_new(quantum, elements);
    struct ring writer = attach(s, synchronized), reader = attach(s, synchronized);
    uint8_t *buffer = calloc(1, s->capacity + quantum);
    MUST(buffer);
    for (int step = 0; step < 200; step++) {
        struct ring_span span;
        uint64_t readable, writable, bytes = random_next(seed) % (elements + 2) * quantum;
        _Atomic uint64_t *counter = random_next(seed) % 2 ? &s->read : &s->written;
        if (random_next(seed) % 3 == 0)
            atomic_store(counter, poke(seed, atomic_load(counter), s->capacity));
        switch (random_next(seed) % 7) {
        case 0: put(&writer, buffer, bytes); break;
        case 1: take(&reader, buffer, bytes); break;
        case 2:
            if (ring_begin_write(&writer, bytes, &span) == RING_OK) {
                MUST(span.first_bytes + span.second_bytes == bytes && bytes <= s->capacity);
                atomic_store(counter, poke(seed, atomic_load(counter), s->capacity)); /* between begin and commit */
                ring_copy_in(&writer, &span, buffer);
                ring_commit_write(&writer, random_next(seed) % (bytes + 1));
            }
            break;
        case 3:
            if (ring_begin_read(&reader, bytes, &span) == RING_OK) {
                MUST(span.first_bytes + span.second_bytes == bytes && bytes <= s->capacity);
                atomic_store(counter, poke(seed, atomic_load(counter), s->capacity));
                ring_copy_out(&reader, &span, buffer);
                ring_commit_read(&reader, random_next(seed) % (bytes + 1));
            }
            break;
        case 4:
            ring_available(&reader, &readable, &writable);
            MUST(readable <= s->capacity && writable <= s->capacity);
            break;
        case 5:
            if (synchronized && ring_arm(&reader, true, quantum, 0))
                ring_disarm(&reader, true);
            break;
        default:
            ring_clear(s->reader_fd);
            atomic_store(&s->control.write_intent, poke(seed, atomic_load(&s->written), s->capacity));
        }
    }
    free(buffer);
    shared_free(s);
}

static void honest(uint64_t *seed)
{
    uint64_t quantum = 1 + random_next(seed) % 40, elements = 1 + random_next(seed) % 70;
    struct shared *s = shared_new(quantum, elements);
    struct ring writer = attach(s, true), reader = attach(s, true);
    uint8_t *buffer = malloc(s->capacity + quantum);
    uint64_t sent = 0, received = 0; /* bytes; byte i of the stream is i % 251 */
    MUST(buffer);
    for (int step = 0; step < 300; step++) {
        uint64_t bytes = random_next(seed) % (elements + 2) * quantum;
        if (random_next(seed) % 2) {
            for (uint64_t i = 0; i < bytes && i < s->capacity + quantum; i++)
                buffer[i] = (uint8_t)((sent + i) % 251);
            bool fits = bytes <= s->capacity - (sent - received);
            MUST(put(&writer, buffer, bytes) == (fits ? RING_OK : RING_LESS));
            sent += fits ? bytes : 0;
        } else {
            bool there = bytes <= sent - received;
            MUST(take(&reader, buffer, bytes) == (there ? RING_OK : RING_LESS));
            for (uint64_t i = 0; there && i < bytes; i++)
                MUST(buffer[i] == (uint8_t)((received + i) % 251));
            received += there ? bytes : 0;
        }
    }
    free(buffer);
    shared_free(s);
}

int main(int argc, char **argv)
{
    MUST(argc == 3);
    uint64_t seed = strtoull(argv[1], NULL, 10) | 1;
    for (long rounds = strtol(argv[2], NULL, 10); rounds > 0; rounds--) {
        honest(&seed);
        hostile(&seed, true);
        hostile(&seed, false);
    }
    return 0;
}
