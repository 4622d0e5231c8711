/* `Lane`: a thread that takes known requests, and answers them. See lanes_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "lanes_object.h"

/* Which lanes of this process were served last, and since when it has been those alone. Guarded by the GIL. */
static LanesObject *last_served;
static int64_t served_since_ns;

static bool alone(LanesObject *lanes, int64_t now_ns)
{
    if (last_served != lanes) {
        served_since_ns = last_served ? now_ns : 0;
        last_served = lanes;
    }
    return now_ns - served_since_ns > COMPANY_NS;
}

/* Begin a warm run, unless other lanes of this process were served lately. Returns what to call, or NULL. */
static PyObject *warm_up(LaneObject *lane, ListenerObject *listener)
{
    if (last_served == lane->lanes && ring_now_ns() - served_since_ns > ANTICIPATE_ALONE_NS)
        return anticipate_begin(lane, listener);
    listener->rhythm.announced = false;
    return NULL;
}

/* Write the answers that are next. Return false if one of them has no room. */
static bool write_held(ListenerObject *listener)
{
    for (;;) {
        struct held *next = &listener->held[listener->answered % AHEAD];
        if (!next->body)
            return true;
        struct ring *results = ring_if_usable(listener->exchange.results);
        char *bytes;
        Py_ssize_t length;
        PyBytes_AsStringAndSize(next->body, &bytes, &length); /* checked when it came */
        if (results && exchange_write(results, (const uint8_t *)bytes, (uint64_t)length, &EXCHANGE_RESULT, &next->stamp) != RING_OK)
            return false;
        Py_CLEAR(next->body); /* a closed queue needs no answer */
        listener->answered++;
    }
}

/* Answer one request of a run that took so long. `answer` is bytes. */
static void answer_one(LaneObject *lane, const struct run *run, PyObject *answer, int64_t now_ns, int64_t took_ns)
{
    ListenerObject *listener = run->serves;
    char *bytes;
    Py_ssize_t length;
    PyBytes_AsStringAndSize(answer, &bytes, &length);
    struct exchange_stamp stamp = {run->stamp.first, (uint64_t)took_ns, 0};
    slot_trace(lane->slot, TRACE_ANSWERED, listener->burst, stamp.first, now_ns, stamp.second, 0);
    struct ring *results = ring_if_usable(listener->exchange.results), *requests = ring_if_usable(listener->exchange.requests);
    if (requests && lane->lanes->lanes > 1 && listener->lanes == lane->lanes)
        ring_disarm(requests, true); /* `share` has armed it. This lane looks now, so the next request need not wake another one */
    bool first = run->number == listener->answered;
    rhythm_served(&listener->rhythm, (int64_t)stamp.second);
    if (first && results && exchange_write(results, (const uint8_t *)bytes, (uint64_t)length, &EXCHANGE_RESULT, &stamp) == RING_OK) {
        listener->answered++;
    } else {
        Py_INCREF(answer);
        listener->held[run->number % AHEAD] = (struct held){answer, stamp};
    }
    listener->running--;
    listener->exclusive = false;
    listener->blocked = !write_held(listener);
    int32_t status = -1; /* where `_RESULT_INFORMATION` of packets.py has it */
    if (length >= (Py_ssize_t)EXCHANGE_ELEMENT)
        memcpy(&status, bytes + 12, sizeof status);
    listener_note(listener, stamp.first, !status);
    if (listener->blocked)
        lanes_give_back(listener); /* the task waits for room */
    if (!listener->running)
        lanes_call_once(&listener->idle);
}

/* End the run of this lane with its answer, or a joined run with a list of answers in the order in which the requests were taken.
 * Returns the burst of the first request, still held, or NULL with an exception. */
static ListenerObject *finish(LaneObject *lane, PyObject *answers)
{
    struct run first = lane->run;
    unsigned count = lane->joined_count;
    bool right = count ? PyList_Check(answers) && PyList_Size(answers) == (Py_ssize_t)count + 1 : PyBytes_Check(answers);
    for (unsigned i = 0; count && right && i <= count; i++)
        right = PyBytes_Check(PyList_GetItem(answers, i));
    if (!right) {
        PyErr_SetString(PyExc_TypeError, "next(answer): give bytes, or after `join` a list of bytes with one answer for each request");
        return NULL;
    }
    int64_t now_ns = ring_now_ns(), took_ns = model_slot_end(lane->slot, lane->began_ns, now_ns);
    answer_one(lane, &first, count ? PyList_GetItem(answers, 0) : answers, now_ns, took_ns);
    for (unsigned i = 0; i < count; i++) {
        ListenerObject *listener = lane->joined[i].serves;
        answer_one(lane, &lane->joined[i], PyList_GetItem(answers, (Py_ssize_t)i + 1), now_ns, took_ns);
        if (listener->lanes == lane->lanes)
            lanes_enqueue(lane->lanes, listener); /* it is not armed */
    }
    lane->run.serves = NULL;
    lane->joined_count = 0;
    for (unsigned i = 0; i < count; i++) /* this may run any Python code */
        Py_DECREF((PyObject *)lane->joined[i].serves);
    return first.serves;
}

enum taken { TAKEN, EMPTY, LATER, RETURNED };

/* Take the next request of a burst, if it is known. `join_ns`: -1, or take it only to join the run of this lane, and that run is expected
 * to take so long. */
static enum taken take(LaneObject *lane, ListenerObject *listener, int *known, struct run *run, int64_t join_ns)
{
    struct exchange_table *table = &listener->exchange.table;
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    struct exchange_stamp stamp;
    uint64_t bytes, all = 0;
    if (requests && (listener->exclusive || listener->taken - listener->answered >= AHEAD))
        return LATER; /* the lane that runs the request before looks again */
    *known = requests ? exchange_peek(requests, table, &EXCHANGE_REQUEST, &stamp, &bytes, &all) : -1;
    if (requests && *known < 0 && !all && !ring_is_closed(requests))
        return EMPTY; /* or corrupt, which `ring_arm` finds */
    int64_t now_ns = ring_now_ns();
    bool serves = *known >= 0 && !(stamp.second && (uint64_t)now_ns >= stamp.second);
    if (serves && table->known[*known].serial && listener->running)
        return LATER;
    enum turn turn = serves && stamp.after ? listener_turn(listener, stamp.after) : COME;
    if (turn == PENDING)
        return LATER;
    serves = serves && turn == COME; /* the task answers the others */
    if (serves && join_ns >= 0) {
        bool late = stamp.second && (uint64_t)(now_ns + join_ns) > stamp.second; /* it would miss its deadline in a run of that size */
        if (late || table->known[*known].kind != lane->kind)
            return LATER;
    }
    if (!serves || !exchange_claim(requests, bytes, &EXCHANGE_REQUEST, &stamp, now_ns) || ring_commit_read(requests, bytes) != RING_OK) {
        lanes_give_back(listener);
        return RETURNED;
    }
    if (join_ns < 0) {
        if (lane->since_ns > 0)
            spin_waited(&listener->spin, now_ns - lane->since_ns, lane->slept);
        lane->kind = table->known[*known].kind;
        lane->began_ns = now_ns;
        model_slot_begin(lane->slot, now_ns);
    }
    rhythm_arrived(&listener->rhythm, now_ns);
    listener->running++;
    listener->exclusive = table->known[*known].serial;
    *run = (struct run){listener, listener->taken++, stamp};
    listener->held[run->number % AHEAD].stamp = stamp;
    slot_trace(lane->slot, TRACE_TAKEN, listener->burst, stamp.first, now_ns, stamp.second, 0);
    Py_INCREF((PyObject *)listener);
    return TAKEN;
}

enum armed { ARMED, THERE, ANNOUNCED };

/* Make sure that the next request of this burst wakes a lane. THERE: it has come. ANNOUNCED: the app says that it comes soon. */
static enum armed arm(ListenerObject *listener)
{
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    uint64_t readable, writable;
    uint32_t soon = listener->spin.window_ns && requests && requests->flag ? SOON : 0;
    if (!listener->lent)
        return ARMED;
    if (requests && ring_arm(requests, true, EXCHANGE_ELEMENT, soon))
        return ARMED;
    if (requests && ring_available(requests, &readable, &writable) == RING_OK && readable)
        return THERE;
    if (requests && soon && (atomic_fetch_and(requests->flag, ~soon) & soon))
        return ANNOUNCED;
    lanes_give_back(listener); /* closed or corrupt: the task finds out */
    return ARMED;
}

/* Let another lane take the next request of this burst, which overlaps with the one that this lane runs. */
static void share(LanesObject *lanes, ListenerObject *listener)
{
    if (lanes->lanes > 1 && !listener->exclusive && arm(listener) != ARMED) {
        lanes_enqueue(lanes, listener);
        lanes_wake_one(lanes);
    }
}

/* Return the burst to look at next, held, or NULL. A lane goes round all bursts that may have a request. `last` is lent, or NULL. */
static ListenerObject *choose(LanesObject *lanes, ListenerObject *last, bool after_job)
{
    if (last && lanes->lent == 1 && !last->queued)
        return last;
    if (lanes->lent > (after_job ? 0 : 1)) {
        struct epoll_event events[EVENTS];
        lanes_collect(lanes, events, epoll_wait(lanes->epoll_fd, events, EVENTS, 0));
    }
    if (last)
        lanes_enqueue(lanes, last);
    Py_XDECREF((PyObject *)last); /* not the last reference, because it is lent */
    ListenerObject *listener = lanes_dequeue(lanes);
    Py_XINCREF((PyObject *)listener);
    if (lanes->ready_count || lanes->jobs) /* this lane may have taken another one's signal from epoll */
        lanes_wake_one(lanes);
    return listener;
}

/* Look for a request for a while without sleeping. `listener` had none. */
static void look(LaneObject *lane, ListenerObject *listener, int64_t budget_ns)
{
    LanesObject *lanes = lane->lanes;
    int64_t now_ns = ring_now_ns();
    if (lanes->lent == 1) {
        /* Not armed, so that the app makes no system call. */
        lanes->looking = true;
        exchange_look(&listener->exchange, listener->exchange.requests, now_ns, budget_ns);
        lanes->looking = false;
    } else {
        /* An event of this burst would wake a lane that sleeps, too. The other bursts are armed. */
        struct epoll_event events[EVENTS];
        struct ring *requests = &listener->exchange.requests->ring;
        int count;
        lanes->looking = true;
        listener->exchange.requests->users++;
        Py_BEGIN_ALLOW_THREADS
        do
            count = epoll_wait(lanes->epoll_fd, events, EVENTS, 0);
        while (!count && !ring_would_wake(requests, 1) && ring_now_ns() < now_ns + budget_ns);
        Py_END_ALLOW_THREADS
        ring_leave(listener->exchange.requests);
        lanes->looking = false;
        lanes_collect(lanes, events, count);
    }
    if (listener->lent)
        lanes_enqueue(lanes, listener);
}

/* A burst had no request: look for one, or arm it. Return whether to make a warm run, because the app announces a request. */
static bool idle(LaneObject *lane, ListenerObject *listener)
{
    LanesObject *lanes = lane->lanes;
    if (!lane->since_ns) {
        lane->since_ns = ring_now_ns();
        lane->slept = false;
        int64_t budget_ns = lanes->looking || lanes->jobs || !alone(lanes, lane->since_ns) ? 0 : spin_budget_ns(&listener->spin);
        if (budget_ns) {
            look(lane, listener, budget_ns);
            return false;
        }
    }
    enum armed armed = arm(listener);
    if (armed == ARMED)
        return false;
    if (armed == THERE) {
        lanes_enqueue(lanes, listener);
        return false;
    }
    bool warm = rhythm_announce(&listener->rhythm);
    if (lane->since_ns > 0)
        spin_waited(&listener->spin, ring_now_ns() - lane->since_ns, true);
    lane->since_ns = -1; /* such a look says nothing about the next one, so it does not count */
    if (!warm)
        look(lane, listener, listener->spin.window_ns);
    return warm;
}

/* Return whether the time for a warm run has come. */
static bool sleep_for_events(LaneObject *lane)
{
    LanesObject *lanes = lane->lanes;
    struct epoll_event events[EVENTS];
    int most = lanes->lanes > 1 ? 1 : EVENTS, count; /* what this lane does not take wakes another one */
    lane->slept = true;
    lanes->sleeping++;
    bool timed = anticipate_sleep(lanes, events, most, &count);
    lanes->sleeping--;
    lanes_collect(lanes, events, count);
    return timed;
}

/* next(answer): answer the request that this lane has run, and take the next one. Returns the value of its body. None: a job waits, or
 * the lanes are stopped. */
static PyObject *lane_next(PyObject *object, PyObject *answer)
{
    LaneObject *lane = (LaneObject *)object;
    LanesObject *lanes = lane->lanes;
    ListenerObject *last = NULL;
    if (lane->run.serves) {
        last = lane->warms ? anticipate_finish(lane, answer) : finish(lane, answer);
        if (!last)
            return NULL;
        if (last->lanes != lanes) { /* not lent any more, or to others */
            Py_DECREF((PyObject *)last); /* this may run any Python code, so it comes before the look at `jobs` */
            last = NULL;
        }
    }
    bool after_job = lane->after_job; /* then a burst comes first, because jobs may never pause */
    lane->after_job = false;
    lane->since_ns = lane->warms ? -1 : 0; /* a look after a warm run has been taken already */
    lane->warms = false;
    for (;;) {
        if (lanes->stopped || (lanes->jobs && !after_job)) {
            if (last)
                lanes_enqueue(lanes, last);
            Py_XDECREF((PyObject *)last);
            lanes->jobs -= lanes->jobs > 0;
            if (lanes->stopped || lanes->jobs || lanes->ready_count)
                lanes_wake_one(lanes);
            lane->after_job = true;
            Py_RETURN_NONE;
        }
        ListenerObject *listener = choose(lanes, last, after_job);
        last = NULL;
        if (!listener && after_job) {
            after_job = false;
            continue;
        }
        if (!listener) {
            if (!lane->since_ns)
                lane->since_ns = -1;
            listener = sleep_for_events(lane) ? anticipate_whom(lanes) : NULL;
            PyObject *call = listener ? warm_up(lane, listener) : NULL;
            if (call)
                return call;
            continue;
        }
        int known;
        enum taken taken = take(lane, listener, &known, &lane->run, -1);
        PyObject *value = taken == TAKEN ? exchange_value(&listener->exchange, known) : NULL;
        if (taken == TAKEN)
            share(lanes, listener);
        else if (taken == EMPTY && idle(lane, listener)) {
            value = warm_up(lane, listener);
            if (value)
                share(lanes, listener);
            else if (listener->lent)
                lanes_enqueue(lanes, listener); /* it is not armed */
        }
        Py_DECREF((PyObject *)listener);
        if (value)
            return value;
    }
}

/* Collect all events of the bursts that are lent. They are looked at with the GIL held. */
static void collect_all(LanesObject *lanes)
{
    struct epoll_event events[EVENTS];
    int count = EVENTS;
    for (uint32_t seen = 0; count == EVENTS && seen <= lanes->lent; seen += EVENTS) {
        count = epoll_wait(lanes->epoll_fd, events, EVENTS, 0);
        lanes_collect(lanes, events, count);
    }
}

/* Take requests of the kind of this lane's run, one of each burst in turn, until there are `most`. Returns how many were taken. */
static unsigned take_ready(LaneObject *lane, unsigned most, int64_t run_ns, PyObject *values)
{
    LanesObject *lanes = lane->lanes;
    int known;
    for (uint32_t misses = 0; lane->joined_count < most && misses < lanes->ready_count;) {
        ListenerObject *listener = lanes_dequeue(lanes);
        if (!listener)
            break;
        Py_INCREF((PyObject *)listener);
        enum taken taken = take(lane, listener, &known, &lane->joined[lane->joined_count], run_ns);
        bool again = taken == TAKEN || taken == LATER;
        if (taken == TAKEN) {
            PyList_SetItem(values, lane->joined_count++, exchange_value(&listener->exchange, known));
            misses = 0;
        } else if (taken == EMPTY && listener != lane->run.serves) {
            again = arm(listener) != ARMED;
        }
        misses += taken != TAKEN && again;
        if (again && listener->lent)
            lanes_enqueue(lanes, listener);
        Py_DECREF((PyObject *)listener);
    }
    return lane->joined_count;
}

/* Whether every burst that is lent has a request that is run now, so that no other request can come before an answer. */
static bool all_wait(const LanesObject *lanes)
{
    for (uint32_t seat = 0; seat < lanes->room; seat++)
        if (lanes->seats[seat].listener && !lanes->seats[seat].listener->running)
            return false;
    return true;
}

/* When to give up waiting for more requests, so that a run of that time ends before the deadlines of those that were taken. */
static int64_t patience(const LaneObject *lane, int64_t until_ns, int64_t run_ns)
{
    for (unsigned i = 0; i <= lane->joined_count; i++) {
        const struct run *run = i ? &lane->joined[i - 1] : &lane->run;
        if (run->stamp.second && (int64_t)run->stamp.second - run_ns < until_ns)
            until_ns = (int64_t)run->stamp.second - run_ns;
    }
    return until_ns;
}

/* join(most, run_ns, until_ns) */
static PyObject *lane_join(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    LaneObject *lane = (LaneObject *)object;
    LanesObject *lanes = lane->lanes;
    long long number[3]; /* the arguments */
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "join(most, run_ns, until_ns)");
        return NULL;
    }
    if (!exchange_numbers(args, 3, number))
        return NULL;
    int64_t run_ns = number[1] < 0 ? 0 : number[1];
    unsigned most = number[0] < 0 ? 0 : number[0] < JOINED ? (unsigned)number[0] : JOINED;
    if (!lane->run.serves || lane->warms || lane->joined_count || !lane->kind || !most || lanes->sleeping || lanes->looking)
        Py_RETURN_NONE; /* another lane is free, or nothing can be joined */
    PyObject *values = PyList_New(most);
    if (!values)
        return NULL;
    if (lane->run.serves->lanes == lanes)
        lanes_enqueue(lanes, lane->run.serves);
    for (;;) {
        if (lanes->lent > 1)
            collect_all(lanes);
        take_ready(lane, most, run_ns, values);
        int64_t until_ns = patience(lane, number[2], run_ns);
        if (lane->joined_count == most || lanes->jobs || lanes->stopped || ring_now_ns() >= until_ns || all_wait(lanes))
            break;
        struct epoll_event events[EVENTS];
        int count, epoll_fd = lanes->epoll_fd;
        lanes->sleeping++; /* a job or another lane's signal ends the wait */
        Py_BEGIN_ALLOW_THREADS
        count = anticipate_wait(epoll_fd, events, EVENTS, until_ns);
        Py_END_ALLOW_THREADS
        lanes->sleeping--;
        lanes_collect(lanes, events, count);
    }
    PyList_SetSlice(values, lane->joined_count, most, NULL);
    return values;
}

static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct module_state *module = PyType_GetModuleState(type);
    PyObject *lanes, *shown = Py_None;
    Py_buffer page = {0};
    if ((kwargs && PyDict_Size(kwargs)) || !module || !PyArg_ParseTuple(args, "O!|O", (PyTypeObject *)module->lanes, &lanes, &shown)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Lane(lanes, slot=None)");
        return NULL;
    }
    if (shown != Py_None && PyObject_GetBuffer(shown, &page, PyBUF_SIMPLE) < 0)
        return NULL;
    struct page_slot *slot = page.obj ? page_slot_in(page.buf, (size_t)page.len) : NULL;
    LaneObject *self = NULL;
    if (page.obj && !slot)
        PyErr_SetString(PyExc_TypeError, "a lane is shown in a slot of a statistics page");
    else
        self = (LaneObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        if (page.obj)
            PyBuffer_Release(&page);
        return NULL;
    }
    self->page = page;
    self->slot = slot;
    Py_INCREF(lanes);
    self->lanes = (LanesObject *)lanes;
    self->lanes->lanes++;
    return (PyObject *)self;
}

static void lane_dealloc(PyObject *object)
{
    LaneObject *self = (LaneObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    self->lanes->lanes--;
    lanes_close_when_over(self->lanes);
    Py_XDECREF((PyObject *)self->run.serves);
    for (unsigned i = 0; i < self->joined_count; i++)
        Py_DECREF((PyObject *)self->joined[i].serves);
    if (self->page.obj)
        PyBuffer_Release(&self->page);
    Py_DECREF((PyObject *)self->lanes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef lane_methods[] = {{"next", lane_next, METH_O, NULL}, {"join", FAST(lane_join)}, {NULL, NULL, 0, NULL}};
static PyMemberDef lane_members[] = {
    {"identity", T_ULONGLONG, offsetof(LaneObject, run.stamp.first), READONLY, NULL},
    {"deadline_ns", T_ULONGLONG, offsetof(LaneObject, run.stamp.second), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot lane_slots[] = {
    {Py_tp_new, lane_new},         {Py_tp_dealloc, lane_dealloc}, {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members}, {0, NULL},
};
PyType_Spec lane_spec = {
    .name = "aionn.fmq._ring.Lane", .basicsize = sizeof(LaneObject), .flags = Py_TPFLAGS_DEFAULT, .slots = lane_slots};
