/* The headers of aionn/pages under a weak memory model, in all interleavings of small programs. Then again, with each of their memory
 * orders weakened. Prints a line per program, and a line per weakening: the first program that notices it, or "unnoticed". */
#define WEAK_TESTED "trace_ring.h sequence.h words.h"
#include "weak_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#define TRACE_RECORDS 2
#define TRACE_RECORD_WORDS 2
#include "burst_slot.h"
#include "sequence.h"
#include "trace_ring.h"

#define CHECK(condition) ((condition) ? (void)0 : weak_violate("wrong"))

static struct trace_memory ring;
static page_word sequence, content[2], words[SLOT_WORDS];
static unsigned writes;

/* ---- trace_ring.h: a record is whole, or it is lost and counted ------------------------------------------------------------ */

static void put_records(void)
{
    for (uint64_t number = 0; number < writes; number++)
        trace_ring_put(&ring, (const uint64_t[TRACE_RECORD_WORDS]){number + 1, number + 1});
}

static void take_records(void)
{
    uint64_t cursor = 0, lost = 0, taken = 0, record[TRACE_RECORD_WORDS] = {0, 0};
    for (unsigned attempt = 0; attempt < 2; attempt++)
        if (trace_ring_take(&ring, &cursor, &lost, record)) {
            taken++;
            CHECK(record[0] == record[1] && record[0] == cursor);
        }
    CHECK(taken + lost == cursor && cursor <= writes);
}

static void trace_program(unsigned count)
{
    writes = count;
    weak_location(&ring.intent);
    weak_location(&ring.written);
    for (unsigned i = 0; i < TRACE_RECORDS; i++)
        for (unsigned word = 0; word < TRACE_RECORD_WORDS; word++)
            weak_location(&ring.record[i][word]);
    weak_thread(put_records);
    weak_thread(take_records);
}

static void tracing_with_room(void) { trace_program(2); }
static void tracing_when_lapped(void) { trace_program(4); }

/* ---- sequence.h: a change of several words is one step ----------------------------------------------------------------------- */

static void change(void)
{
    for (uint64_t turn = 1; turn <= writes; turn++) {
        sequence_begin(&sequence);
        page_store(&content[0], turn);
        page_store(&content[1], turn);
        sequence_end(&sequence);
    }
}

static void look(void)
{
    uint64_t copy[2];
    for (unsigned attempt = 0; attempt < 2; attempt++) {
        uint64_t before = sequence_now(&sequence);
        sequence_copy(copy, content, 2);
        if (sequence_same(&sequence, before))
            CHECK(copy[0] == copy[1] && copy[0] == before / 2);
    }
}

static void changing(void)
{
    writes = 2;
    weak_location(&sequence);
    weak_location(&content[0]);
    weak_location(&content[1]);
    weak_thread(change);
    weak_thread(look);
}

/* ---- burst_slot.h: behind a count stand its durations --------------------------------------------------------------------------- */

static void answer(void)
{
    for (unsigned i = 0; i < 2; i++)
        slot_count_answer(words, 0, 0);
}

static void count(void)
{
    uint64_t copy[SLOT_WORDS];
    sequence_copy(&copy[SLOT_ANSWERED], &words[SLOT_ANSWERED], 1);
    sequence_copy(&copy[SLOT_CALL_TIMES], &words[SLOT_CALL_TIMES], 1);
    sequence_copy(&copy[SLOT_SERVICE_TIMES], &words[SLOT_SERVICE_TIMES], 1);
    CHECK(copy[SLOT_CALL_TIMES] >= copy[SLOT_ANSWERED] && copy[SLOT_SERVICE_TIMES] >= copy[SLOT_ANSWERED]);
    CHECK(copy[SLOT_CALL_TIMES] <= 2);
}

static void answering(void)
{
    weak_location(&words[SLOT_ANSWERED]);
    weak_location(&words[SLOT_CALL_TIMES]);
    weak_location(&words[SLOT_SERVICE_TIMES]);
    weak_location(&words[SLOT_DRIVER_BUSY_NS]);
    weak_thread(answer);
    weak_thread(count);
}

static const struct { const char *name; void (*prepare)(void); } PROGRAMS[] = {
    {"tracing_with_room", tracing_with_room}, {"changing", changing}, {"answering", answering}, {"tracing_when_lapped", tracing_when_lapped},
};
enum { PROGRAM_COUNT = sizeof PROGRAMS / sizeof *PROGRAMS };

static const char *const ORDERS[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};

static void weaken(int site)
{
    const struct weak_site *s = &weak_sites[site];
    uint64_t executions;
    const char *found = NULL, *name = "-";
    weak_weakened = site;
    weak_weaker = s->kind == WEAK_FENCE ? -1 : memory_order_relaxed;
    for (unsigned p = 0; p < PROGRAM_COUNT && !found; p++) {
        found = weak_search(PROGRAMS[p].prepare, &executions);
        name = PROGRAMS[p].name;
    }
    weak_weakened = -1;
    printf("weakened %s %s: %s %s\n", s->function, ORDERS[s->order], found ? found : "unnoticed", found ? name : "-");
}

int main(void)
{
    bool wrong = false;
    for (unsigned p = 0; p < PROGRAM_COUNT; p++) {
        uint64_t executions;
        const char *found = weak_search(PROGRAMS[p].prepare, &executions);
        printf("program %s %llu states: %s\n", PROGRAMS[p].name, (unsigned long long)weak_states, found ? found : "holds");
        wrong = wrong || found;
        fflush(stdout);
    }
    for (int s = 0, sites = (int)weak_site_count; s < sites && !wrong; s++)
        if (weak_sites[s].order != memory_order_relaxed)
            weaken(s);
    return 0;
}
