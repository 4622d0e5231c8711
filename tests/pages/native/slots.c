/* The headers of aionn/pages by themselves, under the sanitizers. usage: slots HOW
 *     off      every function does nothing without a slot, without words, without a page
 *     counts   a slot's words against a plain model, with its exact size on the heap
 *     threads  a writer and a reader of a slot, of a sequence and of a ring */
#define _GNU_SOURCE
#include "burst_slot.h"
#include "model_slot.h"
#include "must.h"
#include "sequence.h"
#include "trace_ring.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static page_word *some_words(size_t count)
{
    page_word *words = calloc(count, sizeof *words);
    MUST(words);
    return words;
}

static void call_all(struct page_slot *slot)
{
    slot_sent(slot);
    slot_lost(slot, 2);
    slot_add(slot, SLOT_DROPPED, 3);
    slot_answered(slot, 5, 6);
    model_slot_begin(slot, 100);
    MUST(model_slot_end(slot, 100, 350) == 250 && model_slot_end(slot, 350, 100) == 0);
    slot_trace(slot, TRACE_SENT, 1, 2, 3, 4, 5);
}

static void off(void)
{
    struct page_slot slot = {.magic = PAGE_SLOT_MAGIC};
    struct trace_ring ring = {.fd = -1};
    call_all(NULL);
    call_all(&slot);
    slot.traced = &ring;
    call_all(&slot);
    page_word *page = some_words(PAGE_HEADER_BYTES / 8);
    atomic_store(&ring.page, page);
    page_store(&page[PAGE_TRACE_UNTIL], 3); /* call_all traces at 3 */
    call_all(&slot);
    MUST(!ring.memory);
    page_store(&page[PAGE_TRACE_UNTIL], 4);
    call_all(&slot);
    MUST(ring.memory && page_load(&ring.memory->written) == 1);
    trace_ring_close(&ring);
    trace_ring_close(&ring);
    MUST(!page_slot_in(NULL, sizeof slot) && !page_slot_in(&slot, sizeof slot - 1) && page_slot_in(&slot, sizeof slot) == &slot);
    slot.magic++;
    MUST(!page_slot_in(&slot, sizeof slot));
    free(page);
}

static void counts(void)
{
    static const int64_t TIMES[] = {INT64_MIN, -1, 0, 1, 3814, 3815, 1000000, 15999999999, 16000000000, INT64_MAX};
    struct page_slot slot = {.magic = PAGE_SLOT_MAGIC};
    page_word *words = some_words(SLOT_WORDS), *model = some_words(MODEL_WORDS);
    atomic_store(&slot.words, words);
    uint64_t calls = 0, services = 0, total = 0;
    for (unsigned i = 0; i < sizeof TIMES / sizeof *TIMES; i++)
        for (unsigned j = 0; j < sizeof TIMES / sizeof *TIMES; j++) {
            slot_sent(&slot);
            slot_answered(&slot, TIMES[i], TIMES[j]);
            services += TIMES[j] >= 0;
            total++;
        }
    MUST(page_load(&words[SLOT_SENT]) == total && page_load(&words[SLOT_ANSWERED]) == total);
    for (unsigned bucket = 0; bucket < PAGE_BUCKETS; bucket++) {
        calls += page_load(&words[SLOT_CALL_TIMES + bucket]);
        services -= page_load(&words[SLOT_SERVICE_TIMES + bucket]);
    }
    MUST(calls == total && services == 0);
    for (unsigned word = 0; word < SLOT_SENT; word++)
        MUST(page_load(&words[word]) == 0);
    atomic_store(&slot.words, model);
    for (unsigned i = 0; i < sizeof TIMES / sizeof *TIMES; i++) {
        model_slot_begin(&slot, 0);
        MUST(page_load(&model[MODEL_BEGUN]) == i + 1 && page_load(&model[MODEL_FINISHED]) == i);
        model_slot_end(&slot, 0, TIMES[i]);
        MUST(page_load(&model[MODEL_BEGUN]) == i + 1 && page_load(&model[MODEL_FINISHED]) == i + 1);
    }
    free(words);
    free(model);
}

enum { TURNS = 200000 };
static struct page_slot shared;
static page_word *page;
static struct trace_ring traced;
static _Atomic bool over;

static void *write_all(void *unused)
{
    (void)unused;
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        slot_sent(&shared);
        slot_answered(&shared, 1000, 1000);
        slot_trace(&shared, TRACE_SENT, turn, turn, 1, turn, turn);
        sequence_begin(&page[PAGE_SEQUENCE]);
        for (unsigned word = 100; word < 108; word++)
            page_store(&page[word], turn);
        sequence_end(&page[PAGE_SEQUENCE]);
    }
    atomic_store(&over, true);
    return NULL;
}

static void *read_all(void *unused)
{
    (void)unused;
    page_word *words = page_words(&shared);
    uint64_t cursor = 0, lost = 0, taken = 0, answered = 0;
    for (bool last = false; !last;) {
        last = atomic_load(&over);
        uint64_t copy[8], record[TRACE_RECORD_WORDS], before = sequence_now(&page[PAGE_SEQUENCE]);
        sequence_copy(copy, &page[100], 8);
        if (sequence_same(&page[PAGE_SEQUENCE], before))
            for (unsigned word = 0; word < 8; word++)
                MUST(copy[word] == before / 2);
        sequence_copy(copy, &words[SLOT_ANSWERED], 1);
        MUST(copy[0] >= answered);
        answered = copy[0];
        sequence_copy(copy, &words[SLOT_CALL_TIMES + page_bucket_of(1000)], 1);
        MUST(copy[0] >= answered);
        while (traced.memory && trace_ring_take(traced.memory, &cursor, &lost, record)) {
            for (unsigned word = 2; word < 7; word++)
                MUST(word == 4 || record[word] == cursor);
            MUST(record[0] == cursor - 1 && record[1] == TRACE_SENT);
            taken++;
        }
    }
    MUST(taken + lost == TURNS && cursor == TURNS && answered == TURNS);
    return NULL;
}

static void threads(void)
{
    pthread_t both[2];
    page = some_words(PAGE_HEADER_BYTES / 8);
    page_store(&page[PAGE_TRACE_UNTIL], 2);
    shared = (struct page_slot){.magic = PAGE_SLOT_MAGIC, .traced = &traced};
    atomic_store(&shared.words, some_words(SLOT_WORDS));
    atomic_store(&traced.page, page);
    trace_ring_make(&traced, page); /* before the reader, which is in this process here and uses the writer's mapping */
    MUST(traced.memory);
    MUST(!pthread_create(&both[0], NULL, write_all, NULL) && !pthread_create(&both[1], NULL, read_all, NULL));
    MUST(!pthread_join(both[0], NULL) && !pthread_join(both[1], NULL));
    trace_ring_close(&traced);
    free((void *)page_words(&shared));
    free(page);
}

int main(int argc, char **argv)
{
    MUST(argc == 2);
    if (!strcmp(argv[1], "off"))
        off();
    else if (!strcmp(argv[1], "counts"))
        counts();
    else
        threads();
    return 0;
}
