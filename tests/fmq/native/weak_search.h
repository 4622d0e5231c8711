/* The search of weak_memory.h: every path through the choices, without those that lead to a state seen before. */
#ifndef WEAK_SEARCH_H
#define WEAK_SEARCH_H

static uint64_t *weak_seen;
static uint64_t weak_room, weak_states;

/* Whether this state is new. */
static inline bool weak_is_new(uint64_t hash)
{
    if (2 * (weak_states + 1) > weak_room) {
        uint64_t *old = weak_seen, room = weak_room;
        weak_room = room ? 2 * room : 1 << 16;
        weak_seen = calloc(weak_room, sizeof *weak_seen);
        WEAK_MUST(weak_seen);
        for (uint64_t i = 0; i < room; i++)
            for (uint64_t at = old[i]; old[i]; at++)
                if (!weak_seen[at & (weak_room - 1)]) {
                    weak_seen[at & (weak_room - 1)] = old[i];
                    break;
                }
        free(old);
    }
    hash += !hash;
    uint64_t at = hash;
    for (; weak_seen[at & (weak_room - 1)]; at++)
        if (weak_seen[at & (weak_room - 1)] == hash)
            return false;
    weak_seen[at & (weak_room - 1)] = hash;
    weak_states++;
    return true;
}

static inline uint64_t weak_hash_view(uint64_t hash, const struct weak_view *view)
{
    for (unsigned l = 0; l < weak.location_count; l++)
        hash = weak_mix(hash, view->at[l]);
    for (unsigned t = 0; t < weak.thread_count; t++)
        hash = weak_mix(hash, view->clock[t]);
    return hash;
}

static inline uint64_t weak_hash(void)
{
    uint64_t hash = weak_hash_view(1, &weak.global);
    for (unsigned i = 0; i < weak.thread_count; i++) {
        const struct weak_thread *t = &weak.threads[i];
        hash = weak_mix(hash, t->history);
        hash = weak_mix(hash, (uint64_t)(t->fd + 1) << 3 | (uint64_t)(t->futex != NULL) << 2 | (uint64_t)t->woken << 1 | t->done);
        hash = weak_mix(hash, (uint64_t)(t->other + 1) << 2 | (uint64_t)t->wants_lock << 1 | t->begun);
        hash = weak_hash_view(weak_hash_view(weak_hash_view(hash, &t->now), &t->acquired), &t->released);
    }
    for (unsigned l = 0; l < weak.location_count; l++) {
        const struct weak_location *location = &weak.locations[l];
        hash = weak_mix(hash, location->count);
        for (unsigned p = 1; p < location->count; p++) {
            const struct weak_message *message = &location->messages[location->order[p]];
            hash = weak_mix(weak_mix(hash, location->order[p]), message->value << 1 | message->update);
            hash = weak_hash_view(hash, &message->view);
        }
    }
    for (unsigned c = 0; c < weak.cell_count; c++) {
        const struct weak_cell *cell = &weak.cells[c];
        hash = weak_mix(hash, (uint64_t)cell->writer << 8 | cell->written);
        for (unsigned t = 0; t < weak.thread_count; t++)
            hash = weak_mix(hash, cell->read[t]);
    }
    hash = weak_hash_view(weak_mix(hash, weak.locked), &weak.lock_view);
    for (unsigned fd = 0; fd < FDS; fd++)
        hash = weak_hash_view(weak_mix(hash, weak.fd_readable[fd]), &weak.fd_view[fd]);
    return hash;
}

static inline void weak_enter(void)
{
    weak.threads[weak.current].body();
    weak.threads[weak.current].done = true;
    weak_to_scheduler();
}

static inline void weak_thread(void (*body)(void))
{
    WEAK_MUST(weak.thread_count < THREADS);
    struct weak_thread *t = &weak.threads[weak.thread_count++];
    char *stack = t->stack ? t->stack : malloc(1 << 16);
    WEAK_MUST(stack && !getcontext(&t->context));
    *t = (struct weak_thread){.body = body, .context = t->context, .stack = stack, .fd = -1, .other = -1};
    t->context.uc_stack.ss_sp = stack;
    t->context.uc_stack.ss_size = 1 << 16;
    makecontext(&t->context, weak_enter, 0);
}

static inline bool weak_may_run(const struct weak_thread *t)
{
    bool event = t->fd < 0 || weak.fd_readable[t->fd] || (t->other >= 0 && weak.fd_readable[t->other]);
    return !t->done && event && !(t->wants_lock && weak.locked) && (!t->futex || t->woken);
}

/* One execution: along the path that is known, then anywhere new. */
static void weak_execute(void)
{
    volatile unsigned steps = 0;
    sigsetjmp(weak.scheduler, 0); /* each thread comes back here before its next step */
    unsigned able[THREADS], count = 0, over = 0;
    if (weak.violation)
        return;
    for (unsigned i = 0; i < weak.thread_count; i++) {
        over += weak.threads[i].done;
        if (weak_may_run(&weak.threads[i]))
            able[count++] = i;
    }
    if (!count) {
        weak.violation = over < weak.thread_count ? "asleep" : NULL;
        return;
    }
    WEAK_MUST(++steps < STEPS); /* or a loop of the code under test does not end */
    if (weak_depth == weak_known && steps > 1 && !weak_is_new(weak_hash()))
        return;
    weak.current = (int)able[weak_choose(count)];
    struct weak_thread *t = &weak.threads[weak.current];
    if (t->begun)
        siglongjmp(t->at, 1);
    t->begun = true;
    setcontext(&t->context);
}

/* Run the threads that `prepare` names in each way. Returns the first violation, or NULL. */
static inline const char *weak_search(void (*prepare)(void), uint64_t *executions)
{
    free(weak_seen);
    weak_seen = NULL;
    weak_room = weak_states = weak_depth = weak_known = 0;
    *executions = 0;
    do {
        char *stacks[THREADS];
        for (unsigned i = 0; i < THREADS; i++)
            stacks[i] = weak.threads[i].stack;
        memset(&weak, 0, sizeof weak);
        for (unsigned i = 0; i < THREADS; i++)
            weak.threads[i].stack = stacks[i];
        prepare();
        weak_execute();
        ++*executions;
    } while (!weak.violation && weak_next_path());
    return weak.violation;
}

#endif
