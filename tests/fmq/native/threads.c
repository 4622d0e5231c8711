/* Two threads, one queue, both asleep whenever they can be (run under TSan and ASan). usage: threads MESSAGES HOW
 * HOW: eventfd (armed words), futex (event flag word), overwrite (unsynchronized, elements must never be torn). */
#include "harness.h"

static struct shared *queue;
static uint64_t messages;
static bool by_futex;
static struct ring writer, reader;

static void sleep_on(int fd)
{
    struct pollfd wanted = {.fd = fd, .events = POLLIN};
    MUST(poll(&wanted, 1, 30000) == 1); /* a lost wake ends here, and fails */
    ring_clear(fd);
}

static void sleep_for(struct ring *r, bool reads, uint64_t bytes)
{
    if (!by_futex) {
        if (ring_arm(r, reads, bytes, 0))
            sleep_on(reads ? queue->reader_fd : queue->writer_fd);
        return;
    }
    int64_t at = ring_now_ns() + 30000000000;
    struct timespec deadline = {at / 1000000000, at % 1000000000};
    uint32_t taken;
    MUST(ring_flag_wait(r, reads ? RING_NOT_EMPTY : RING_NOT_FULL, &deadline, &taken) != ETIMEDOUT);
}

static void *write_all(void *seed)
{
    uint64_t state = *(uint64_t *)seed, elements[4];
    for (uint64_t sent = 0; sent < messages;) {
        uint64_t count = 1 + random_next(&state) % 4;
        if (count > messages - sent)
            count = messages - sent;
        for (uint64_t i = 0; i < count; i++)
            elements[i] = sent + i;
        while (put(&writer, elements, count * 8) == RING_LESS)
            sleep_for(&writer, false, count * 8);
        sent += count;
    }
    return NULL;
}

static void *read_all(void *seed)
{
    uint64_t state = *(uint64_t *)seed, elements[4];
    for (uint64_t received = 0; received < messages;) {
        uint64_t count = 1 + random_next(&state) % 4;
        if (count > messages - received)
            count = messages - received;
        while (take(&reader, elements, count * 8) == RING_LESS)
            sleep_for(&reader, true, count * 8);
        for (uint64_t i = 0; i < count; i++)
            MUST(elements[i] == received + i);
        received += count;
    }
    return NULL;
}

struct wide { uint64_t word[8]; };

static void *overwrite(void *unused)
{
    (void)unused;
    for (uint64_t sent = 1; sent <= messages; sent++) {
        struct wide element;
        for (int i = 0; i < 8; i++)
            element.word[i] = sent;
        MUST(put(&writer, &element, sizeof element) == RING_OK);
    }
    return NULL;
}

static void *overread(void *unused)
{
    (void)unused;
    uint64_t last = 0;
    while (last < messages) {
        struct wide element;
        if (take(&reader, &element, sizeof element) != RING_OK)
            continue; /* nothing there, or overtaken */
        for (int i = 1; i < 8; i++)
            MUST(element.word[i] == element.word[0]);
        MUST(element.word[0] > last);
        last = element.word[0];
    }
    return NULL;
}

int main(int argc, char **argv)
{
    MUST(argc == 3);
    messages = strtoull(argv[1], NULL, 10);
    bool overwrites = !strcmp(argv[2], "overwrite");
    by_futex = !strcmp(argv[2], "futex");
    queue = overwrites ? shared_new(sizeof(struct wide), 4) : shared_new(8, 7); /* 4 + 4 - 1: less, and a writer of 4 and a reader of 4 could wait for each other */
    writer = attach(queue, !overwrites);
    reader = attach(queue, !overwrites);
    if (by_futex)
        ring_expect_futex(&reader, RING_NOT_EMPTY | RING_NOT_FULL);
    uint64_t seeds[2] = {88172645463325252u, 362436069u};
    pthread_t threads[2];
    MUST(!pthread_create(&threads[0], NULL, overwrites ? overwrite : write_all, &seeds[0]));
    MUST(!pthread_create(&threads[1], NULL, overwrites ? overread : read_all, &seeds[1]));
    MUST(!pthread_join(threads[0], NULL) && !pthread_join(threads[1], NULL));
    shared_free(queue);
    return 0;
}
