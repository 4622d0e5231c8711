/* Anticipation (rhythm.h) for lanes: a lane that would sleep makes a warm run shortly before the next request is due, and then
 * looks for that request without sleeping. See lanes_object.h.
 *
 * Invariants
 *     A warm run counts in `running` of its burst. So a recalled burst is idle only when its warm run is over.
 *     It calls `warm_up` of a request that is known now, so what was forgotten is not run. A request that is serial is not run.
 *     Only the single burst that is lent is anticipated, and only while no other lanes of the process are served. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sched.h>
#include <sys/syscall.h>

#include "lanes_object.h"

#define SLICE_NS INT64_C(100000) /* after which a look finds out whether a job waits, or the burst is recalled */
#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif

/* Return the only burst that is lent, if its app has asked for anticipation, or NULL. */
ListenerObject *anticipate_whom(LanesObject *lanes)
{
    for (uint32_t seat = 0; lanes->lent == 1 && seat < lanes->room; seat++) {
        ListenerObject *listener = lanes->seats[seat].listener;
        if (listener)
            return listener->rhythm.asked ? listener : NULL;
    }
    return NULL;
}

/* Wait for events until `wake_ns`. An old kernel, or a sandbox, may only know milliseconds. */
int anticipate_wait(int epoll_fd, struct epoll_event *events, int most, int64_t wake_ns)
{
    static _Atomic bool coarse;
    int64_t ns = wake_ns - ring_now_ns();
    ns = ns < 0 ? 0 : ns;
    if (!atomic_load_explicit(&coarse, memory_order_relaxed)) {
        struct timespec timeout = {ns / 1000000000, ns % 1000000000};
        long count = syscall(SYS_epoll_pwait2, epoll_fd, events, most, &timeout, NULL, (size_t)0);
        if (count >= 0 || errno == EINTR)
            return (int)count;
        atomic_store_explicit(&coarse, true, memory_order_relaxed); /* a hint */
    }
    return epoll_wait(epoll_fd, events, most, (int)(ns / 1000000 < 3600000 ? ns / 1000000 : 3600000));
}

/* Sleep until there are events, or until the next request will soon be due. Return true for the latter. One lane at a time waits for
 * that. */
bool anticipate_sleep(LanesObject *lanes, struct epoll_event *events, int most, int *count)
{
    ListenerObject *listener = lanes->timed ? NULL : anticipate_whom(lanes);
    int64_t wake_ns = listener ? rhythm_wake_ns(&listener->rhythm, ring_now_ns()) : 0;
    int epoll_fd = lanes->epoll_fd;
    lanes->timed |= wake_ns != 0;
    Py_BEGIN_ALLOW_THREADS
    *count = wake_ns ? anticipate_wait(epoll_fd, events, most, wake_ns) : epoll_wait(epoll_fd, events, most, -1);
    Py_END_ALLOW_THREADS
    lanes->timed &= wake_ns == 0;
    return wake_ns && *count == 0;
}

/* Whether this thread may run on one CPU only, on which the app was seen last. It would look where the app must write. */
static bool shares_one_cpu(const ListenerObject *listener)
{
    const struct ring *requests = &listener->exchange.requests->ring;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) < 0 || CPU_COUNT(&set) > 1)
        return false;
    return atomic_load_explicit(&requests->control->writer_cpu, memory_order_relaxed) == (uint32_t)(sched_getcpu() + 1);
}

static bool is_free(const LanesObject *lanes, const ListenerObject *listener)
{
    bool ready = lanes->ready_count > (listener->queued ? 1u : 0u);
    return !lanes->stopped && !lanes->jobs && !ready && !lanes->looking && lanes->lent == 1 && listener->lent && !listener->running;
}

/* Return the call that makes a warm run, or NULL if there must be none now. */
PyObject *anticipate_begin(LaneObject *lane, ListenerObject *listener)
{
    struct exchange_table *table = &listener->exchange.table;
    if (!is_free(lane->lanes, listener)) {
        listener->rhythm.announced = false;
        return NULL;
    }
    unsigned known = table->last;
    if (known >= table->count || table->known[known].serial || shares_one_cpu(listener)) {
        rhythm_cannot(&listener->rhythm);
        return NULL;
    }
    PyObject *call = PyObject_GetAttrString((PyObject *)table->known[known].value, "warm_up");
    if (!call || !is_free(lane->lanes, listener)) { /* the lookup may have run any Python code */
        PyErr_Clear();
        Py_XDECREF(call);
        rhythm_cannot(&listener->rhythm);
        return NULL;
    }
    Py_INCREF((PyObject *)listener);
    lane->run.serves = listener;
    lane->warms = true;
    lane->began_ns = ring_now_ns();
    rhythm_warm(&listener->rhythm, lane->began_ns);
    listener->running++;
    listener->warm_ups++;
    return call;
}

static bool is_there(ListenerObject *listener)
{
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    return !requests || ring_would_wake(requests, 1);
}

/* As ring_spin, also if the app was seen last on this CPU: it sleeps, and wakes on another one while this thread looks. */
static void spin(const struct ring *r, int64_t deadline_ns)
{
    for (unsigned turn = 1; !ring_would_wake(r, 1); turn++) {
        if (turn % 32 == 0 && ring_now_ns() >= deadline_ns)
            return;
        ring_pause();
    }
}

static void look(LanesObject *lanes, ListenerObject *listener, int64_t budget_ns)
{
    ExchangeObject *exchange = &listener->exchange;
    int64_t began_ns = ring_now_ns(), until_ns = began_ns + budget_ns, now_ns = began_ns;
    ring_disarm(&exchange->requests->ring, true); /* the app needs no system call */
    lanes->looking = true;
    while (now_ns < until_ns && listener->lent && !lanes->stopped && !lanes->jobs && !is_there(listener)) {
        exchange->requests->users++;
        Py_BEGIN_ALLOW_THREADS
        spin(&exchange->requests->ring, now_ns + SLICE_NS < until_ns ? now_ns + SLICE_NS : until_ns);
        Py_END_ALLOW_THREADS
        ring_leave(exchange->requests);
        now_ns = ring_now_ns();
    }
    lanes->looking = false;
    rhythm_looked(&listener->rhythm, ring_now_ns() - began_ns);
}

/* End the warm run of this lane, and look for the request. Returns its burst, still held. `answer`: whether it could run. */
ListenerObject *anticipate_finish(LaneObject *lane, PyObject *answer)
{
    ListenerObject *listener = lane->run.serves;
    int64_t now_ns = ring_now_ns();
    lane->run.serves = NULL;
    listener->running--;
    if (!listener->running)
        lanes_call_once(&listener->idle);
    rhythm_warmed(&listener->rhythm, lane->began_ns, now_ns, is_there(listener));
    if (answer != Py_True)
        rhythm_cannot(&listener->rhythm);
    else if (listener->lent && lane->lanes->lent == 1) {
        int64_t budget_ns = rhythm_look_ns(&listener->rhythm, now_ns);
        if (budget_ns)
            look(lane->lanes, listener, budget_ns);
    }
    return listener;
}
