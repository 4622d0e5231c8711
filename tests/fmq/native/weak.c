/* ring.h under a weak memory model, in all interleavings of small programs. Then again, with each of its memory orders weakened.
 * Prints a line per program, and a line per weakening: the first program that notices it, or "unnoticed". usage: weak [trace | first | large]
 * trace: also how it came to each. first: no weakening, and no more than the first violation.
 * large: the large programs, and no weakening. */
#include "weak_memory.h"

#include "ring.h"
#include "exchange.h"

enum { BIT = 0x10, MOST_WORDS = 6 };

static struct {
    _Atomic uint64_t read, written;
    _Atomic uint32_t flag;
    struct ring_control control;
    uint64_t data[MOST_WORDS];
    uint64_t payload; /* beside the queue: what a flag or an end announces */
} shared;

static struct ring writer, reader;
static unsigned elements; /* that are sent */
static bool by_futex, writer_sleeps;

#define CHECK(condition) ((condition) ? (void)0 : weak_violate("wrong"))

static void queue(uint64_t quantum, uint64_t capacity, bool synchronized)
{
    memset(&shared, 0, sizeof shared);
    struct ring handle = {
        .read = &shared.read,
        .written = &shared.written,
        .data = (uint8_t *)shared.data,
        .flag = &shared.flag,
        .control = &shared.control,
        .capacity = quantum * capacity,
        .quantum = quantum,
        .reader_fd = 0,
        .writer_fd = 1,
        .synchronized = synchronized,
    };
    WEAK_MUST(handle.capacity <= sizeof shared.data);
    writer = reader = handle;
    weak_location(&shared.read);
    weak_location(&shared.written);
    weak_location(&shared.control.closed);
    weak_hint(&shared.control.writer_cpu);
    weak_hint(&shared.control.reader_cpu);
}

/* Words that a program does not use stay zero: not to look at them makes the search smaller. */
static void asleep_by(bool futex)
{
    by_futex = futex;
    if (futex)
        weak_location(&shared.flag);
    weak_location(&shared.control.futex_bits);
    weak_location(&shared.control.reader_armed);
    weak_location(&shared.control.writer_armed);
}

static void not_ended(void)
{
    weak_hint(&writer.ended);
    weak_hint(&reader.ended);
}

static void sleep_for(struct ring *r, bool reads, uint64_t bytes)
{
    uint32_t taken;
    if (by_futex) {
        ring_flag_wait(r, reads ? RING_NOT_EMPTY : RING_NOT_FULL, NULL, &taken);
    } else if (ring_arm(r, reads, bytes, 0)) {
        int fd = reads ? r->reader_fd : r->writer_fd;
        weak_sleep(fd);
        ring_clear(fd);
    }
}

/* ---- elements: a writer and a reader that sleep for each other ------------------------------------------------------------- */

static void write_elements(void)
{
    struct ring_span span;
    if (by_futex && writer_sleeps)
        ring_expect_futex(&writer, RING_NOT_FULL);
    for (uint64_t element = 1; element <= elements; element++) {
        enum ring_status status;
        while ((status = ring_begin_write(&writer, writer.quantum, &span)) == RING_LESS)
            sleep_for(&writer, false, writer.quantum);
        CHECK(status == RING_OK);
        ring_copy_in(&writer, &span, (uint8_t *)&element);
        CHECK(ring_commit_write(&writer, writer.quantum) == RING_OK);
    }
}

static enum ring_status read_element(uint64_t *element)
{
    struct ring_span span;
    enum ring_status status;
    while ((status = ring_begin_read(&reader, reader.quantum, &span)) == RING_LESS)
        sleep_for(&reader, true, reader.quantum);
    if (status == RING_OK) {
        ring_copy_out(&reader, &span, (uint8_t *)element);
        CHECK(ring_commit_read(&reader, reader.quantum) == RING_OK);
    }
    return status;
}

static void read_elements(void)
{
    if (by_futex)
        ring_expect_futex(&reader, RING_NOT_EMPTY);
    for (uint64_t expected = 1, element = 0; expected <= elements; expected++) {
        CHECK(read_element(&element) == RING_OK);
        CHECK(element == expected);
    }
}

static void elements_program(bool futex, unsigned count, unsigned capacity)
{
    queue(8, capacity, true);
    asleep_by(futex);
    if (!futex)
        weak_hint(&shared.flag);
    not_ended();
    elements = count;
    writer_sleeps = count > capacity;
    for (unsigned i = 0; i < capacity; i++)
        weak_plain(&shared.data[i], 8);
    weak_thread(write_elements);
    weak_thread(read_elements);
}

static void elements_by_eventfd(void) { elements_program(false, 2, 1); }
static void elements_by_futex(void) { elements_program(true, 2, 1); }
static void element_by_futex(void) { elements_program(true, 1, 1); }

/* ---- the end: everything before it is read, and no sleeper stays --------------------------------------------------------------- */

static void write_and_close(void)
{
    write_elements();
    ring_close(&writer);
}

static void read_to_the_end(void)
{
    uint64_t element = 0, count = 0;
    if (by_futex)
        ring_expect_futex(&reader, RING_NOT_EMPTY);
    while (read_element(&element) == RING_OK)
        count++;
    CHECK(count == elements);
}

static void close_program(bool futex)
{
    queue(8, 1, true);
    asleep_by(futex);
    if (!futex)
        weak_hint(&shared.flag);
    not_ended();
    elements = 1;
    writer_sleeps = false;
    weak_plain(&shared.data[0], 8);
    weak_thread(write_and_close);
    weak_thread(read_to_the_end);
}

static void close_by_eventfd(void) { close_program(false); }
static void close_by_futex(void) { close_program(true); }

static void end_here(void)
{
    weak_access(&shared.payload, 8, true);
    ring_end(&reader, true);
}

static void sleep_to_the_end(void)
{
    uint32_t taken;
    while (!ring_is_closed(&reader)) {
        if (by_futex)
            ring_flag_wait(&reader, BIT, NULL, &taken);
        else if (ring_arm(&reader, true, 0, BIT)) {
            weak_sleep(reader.reader_fd);
            ring_clear(reader.reader_fd);
        }
    }
    weak_access(&shared.payload, 8, false);
}

static void end_program(bool futex)
{
    queue(8, 1, true);
    asleep_by(futex);
    if (!futex)
        weak_location(&shared.flag);
    weak_location(&reader.ended);
    weak_plain(&shared.payload, 8);
    weak_thread(end_here);
    weak_thread(sleep_to_the_end);
}

static void end_by_eventfd(void) { end_program(false); }
static void end_by_futex(void) { end_program(true); }

/* ---- the event flag word ---------------------------------------------------------------------------------------------------------- */

static void raise_flag(void)
{
    weak_access(&shared.payload, 8, true);
    ring_flag_wake(&writer, BIT);
}

static void take_flag(void)
{
    uint32_t taken = 0;
    while (!taken) {
        if (by_futex) {
            ring_flag_wait(&reader, BIT, NULL, &taken);
            continue;
        }
        if (ring_arm(&reader, true, 0, BIT)) {
            weak_sleep(reader.reader_fd);
            ring_clear(reader.reader_fd);
        }
        taken = (uint32_t)atomic_fetch_and(reader.flag, ~(uint32_t)BIT) & BIT; /* as _waiting.c takes it */
    }
    if (!by_futex)
        ring_disarm(&reader, true);
    weak_access(&shared.payload, 8, false);
}

static void flag_program(bool futex)
{
    queue(8, 1, true);
    asleep_by(futex);
    if (!futex)
        weak_location(&shared.flag);
    not_ended();
    weak_plain(&shared.payload, 8);
    weak_thread(raise_flag);
    weak_thread(take_flag);
}

static void flag_by_eventfd(void) { flag_program(false); }
static void flag_by_futex(void) { flag_program(true); }

/* ---- the unsynchronized queue: an element is whole, or it is not delivered --------------------------------------------------------- */

static void overwrite(void)
{
    struct ring_span span;
    for (uint64_t element = 1; element <= elements; element++) {
        uint64_t words[2] = {element, element};
        CHECK(ring_begin_write(&writer, 16, &span) == RING_OK);
        ring_copy_in(&writer, &span, (uint8_t *)words);
        CHECK(ring_commit_write(&writer, 16) == RING_OK);
    }
    if (elements == 1)
        ring_close(&writer);
}

static void overread(void)
{
    struct ring_span span;
    for (uint64_t attempt = 0, last = 0; attempt < 2; attempt++) {
        uint64_t words[2];
        enum ring_status status = ring_begin_read(&reader, 16, &span);
        CHECK(status != RING_CLOSED || last == elements);
        if (status != RING_OK)
            continue;
        ring_copy_out(&reader, &span, (uint8_t *)words);
        if (ring_commit_read(&reader, 16) != RING_OK)
            continue;
        CHECK(words[0] == words[1] && words[0] > last);
        last = words[0];
    }
}

static void overwrite_program(unsigned count)
{
    queue(16, 1, false);
    not_ended();
    elements = count;
    weak_location(&shared.control.futex_bits);
    weak_location(&shared.control.write_intent);
    weak_location(&shared.data[0]);
    weak_location(&shared.data[1]);
    weak_thread(overwrite);
    weak_thread(overread);
}

static void overwriting(void) { overwrite_program(2); }
static void close_when_overwriting(void) { overwrite_program(1); }

/* ---- packets of exchange.h ---------------------------------------------------------------------------------------------------------- */

static const uint8_t BODY[EXCHANGE_ELEMENT] = {1, 0, 0, 0, 2}; /* its own header says two elements */

static void write_packets(void)
{
    for (uint64_t number = 1; number <= elements; number++) {
        struct exchange_stamp stamp = {number, 0, 0};
        while (exchange_write(&writer, BODY, sizeof BODY, &EXCHANGE_REQUEST, &stamp) == RING_LESS)
            sleep_for(&writer, false, 2 * EXCHANGE_ELEMENT);
    }
}

static void read_packets(void)
{
    struct exchange_body known = {.bytes = BODY, .length = sizeof BODY};
    uint32_t index[2] = {0};
    struct exchange_table table = {.known = &known, .index = index, .count = 1, .room = 1};
    for (uint64_t number = 1; number <= elements; number++) {
        struct exchange_stamp stamp = {0, 0, 0};
        uint64_t bytes, all;
        while (exchange_peek(&reader, &table, &EXCHANGE_REQUEST, &stamp, &bytes, &all) < 0)
            sleep_for(&reader, true, 2 * EXCHANGE_ELEMENT);
        CHECK(stamp.first == number);
        CHECK(ring_commit_read(&reader, bytes) == RING_OK);
    }
}

static void packets(void)
{
    queue(EXCHANGE_ELEMENT, 2, true);
    asleep_by(false);
    weak_hint(&shared.flag);
    not_ended();
    elements = 2;
    weak_plain(shared.data, 2 * EXCHANGE_ELEMENT);
    weak_thread(write_packets);
    weak_thread(read_packets);
}

/* ---- a request whose caller leaves: either the driver does not run it, or its frame is not given back ------------------------------- */

static _Atomic uint32_t late; /* the field of the packet's stamp */

static void withdraw_element(void)
{
    write_elements();
    atomic_store_explicit(&late, 1, memory_order_relaxed);
    if (ring_unclaimed(&writer, 0))
        weak_access(&shared.payload, 8, true); /* the frame is used again */
}

static void claim_element(void)
{
    struct ring_span span;
    while (ring_begin_read(&reader, reader.quantum, &span) == RING_LESS)
        sleep_for(&reader, true, reader.quantum);
    ring_claim(&reader, span.at + reader.quantum);
    if (!atomic_load_explicit(&late, memory_order_relaxed))
        weak_access(&shared.payload, 8, true); /* the request is run */
    CHECK(ring_commit_read(&reader, reader.quantum) == RING_OK);
}

static void withdrawing(void)
{
    elements_program(false, 1, 1);
    weak.thread_count = 0;
    weak_location(&shared.control.claimed);
    weak_location(&late);
    weak_plain(&shared.payload, 8);
    late = 0;
    weak_thread(withdraw_element);
    weak_thread(claim_element);
}

/* ---- a lane reads until the listener's task takes the ring back (_lane.c); the lock is the GIL ------------------------------------- */

enum { SIGNAL = 2 }; /* the lanes' own eventfd */
static _Atomic uint32_t returned;
static bool lane_looks; /* for a while without the lock, before it arms */

#ifdef WITHOUT_GIL
#define weak_lock() ((void)0)
#define weak_unlock() ((void)0)
#endif

/* With the lock: read one element, if it is there. */
static bool take_element(void)
{
    struct ring_span span;
    uint64_t element;
    enum ring_status status = ring_begin_read(&reader, reader.quantum, &span);
    CHECK(status == RING_OK || status == RING_LESS);
    if (status != RING_OK)
        return false;
    ring_copy_out(&reader, &span, (uint8_t *)&element);
    CHECK(element == span.at / reader.quantum + 1);
    CHECK(ring_commit_read(&reader, reader.quantum) == RING_OK);
    return true;
}

static void lane(void)
{
    uint64_t readable, writable;
    bool looks = lane_looks;
    for (;;) {
        weak_lock();
        if (atomic_load_explicit(&returned, memory_order_relaxed))
            break;
        if (take_element()) {
            weak_unlock(); /* it runs the request */
            continue;
        }
        if (looks) {
            looks = false;
            weak_unlock();
            CHECK(ring_available(&reader, &readable, &writable) == RING_OK); /* ring_spin, once */
            continue;
        }
        bool armed = ring_arm(&reader, true, reader.quantum, 0);
        weak_unlock();
        if (armed)
            weak_sleep_for_either(reader.reader_fd, SIGNAL);
    }
    weak_unlock();
}

static void take_back(void)
{
    weak_lock(); /* lanes_give_back */
    atomic_store_explicit(&returned, 1, memory_order_relaxed);
    for (unsigned t = 0; t < weak.thread_count; t++)
        if (weak.threads[t].other == SIGNAL)
            weak.threads[t].fd = SIGNAL; /* EPOLL_CTL_DEL */
    weak_signal(SIGNAL);
    weak_unlock();
    for (bool over = false; !over;) { /* as the task reads and sleeps; it holds the lock wherever it runs */
        weak_lock();
        while (take_element())
            ;
        over = atomic_load_explicit(reader.read, memory_order_relaxed) == elements * reader.quantum;
        bool armed = !over && ring_arm(&reader, true, reader.quantum, 0);
        weak_unlock();
        if (armed) {
            weak_sleep(reader.reader_fd);
            ring_clear(reader.reader_fd);
        }
    }
}

static void lane_program(bool looks, unsigned count, unsigned capacity)
{
    elements_program(false, count, capacity);
    lane_looks = looks;
    weak.thread_count = 0;
    weak_location(&returned);
    weak_thread(write_elements);
    weak_thread(lane);
    weak_thread(take_back);
}

static void lane_and_task(void) { lane_program(false, 1, 1); }
static void lane_and_task_of_two(void) { lane_program(false, 2, 2); }
static void lane_that_looks(void) { lane_program(true, 1, 1); }
static void lane_and_writer_that_sleeps(void) { lane_program(false, 2, 1); }

/* ---- the runs -------------------------------------------------------------------------------------------------------------------------- */

/* `again`: also with weakened orders. The others are larger, and notice nothing that these do not. */
static const struct { const char *name; void (*prepare)(void); bool again; } PROGRAMS[] = {
    {"end_by_eventfd", end_by_eventfd, true},           {"end_by_futex", end_by_futex, true},
    {"flag_by_eventfd", flag_by_eventfd, true},         {"flag_by_futex", flag_by_futex, true},
    {"overwriting", overwriting, true},                 {"close_when_overwriting", close_when_overwriting, true},
    {"element_by_futex", element_by_futex, true},       {"close_by_eventfd", close_by_eventfd, true},
    {"close_by_futex", close_by_futex, true},           {"elements_by_eventfd", elements_by_eventfd, true},
    {"withdrawing", withdrawing, true},
    {"elements_by_futex", elements_by_futex, false},    {"packets", packets, false},
    {"lane_and_task", lane_and_task, true},             {"lane_that_looks", lane_that_looks, false},
    {"lane_and_task_of_two", lane_and_task_of_two, false}, {"lane_and_writer_that_sleeps", lane_and_writer_that_sleeps, false},
};
enum { PROGRAM_COUNT = sizeof PROGRAMS / sizeof *PROGRAMS, LARGE = 2 /* the last ones, which take a minute */ };

static const char *const ORDERS[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};

static void print_trace(void)
{
    for (unsigned i = 0; i < weak.event_count; i++)
        printf("    %d %s %s: %llu\n", weak.events[i].thread, weak.events[i].function, weak.events[i].text,
               (unsigned long long)weak.events[i].value);
}

static void weaken(int site, int order, bool traces)
{
    const struct weak_site *s = &weak_sites[site];
    static const char *const KINDS[] = {"load", "store", "update", "fence", ""};
    uint64_t executions;
    const char *found = NULL, *name = "";
    weak_weakened = site;
    weak_weaker = order;
    for (unsigned p = 0; p < PROGRAM_COUNT && !found; p++) {
        if (!PROGRAMS[p].again)
            continue;
        found = weak_search(PROGRAMS[p].prepare, &executions);
        name = PROGRAMS[p].name;
    }
    weak_weakened = -1;
    printf("weakened %s %s %s %s %s: %s %s\n", s->function, KINDS[s->kind], *s->text ? s->text : "-", ORDERS[s->order],
           order < 0 ? "none" : ORDERS[order], found ? found : "unnoticed", found ? name : "-");
    if (found && traces)
        print_trace();
}

int main(int argc, char **argv)
{
    bool traces = argc > 1 && !strcmp(argv[1], "trace");
    bool first = argc > 1 && !strcmp(argv[1], "first");
    bool large = argc > 1 && !strcmp(argv[1], "large");
    bool wrong = false;
    for (unsigned p = large ? PROGRAM_COUNT - LARGE : 0; p < PROGRAM_COUNT - (large ? 0 : LARGE) && !(first && wrong); p++) {
        uint64_t executions;
        const char *found = weak_search(PROGRAMS[p].prepare, &executions);
        printf("program %s %llu states: %s\n", PROGRAMS[p].name, (unsigned long long)weak_states, found ? found : "holds");
        if (found)
            print_trace();
        wrong = wrong || found;
        fflush(stdout);
    }
    if (wrong || first || large)
        return 0;
    int sites = (int)weak_site_count;
    for (int s = 0; s < sites; s++) {
        if (weak_sites[s].kind == WEAK_FENCE)
            weaken(s, -1, traces);
        if (weak_sites[s].kind == WEAK_FENCE && weak_sites[s].order == memory_order_seq_cst)
            weaken(s, memory_order_acq_rel, traces);
        if (weak_sites[s].kind != WEAK_FENCE && weak_sites[s].order != memory_order_relaxed)
            weaken(s, memory_order_relaxed, traces);
    }
    return 0;
}
