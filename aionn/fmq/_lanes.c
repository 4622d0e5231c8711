/* `Listener`, `Lanes` and `Lane`: the driver's end of bursts. A lane is a thread that waits natively for the known requests of all
 * bursts that are lent to its `Lanes`. It takes one, runs it in Python, and answers it by its next call.
 *
 *     listener task                          lane
 *     lend -> lent                           event -> take -> run -> answer
 *     recall, or the lane gives back         a packet that is not known, is late, or the end: give back
 *     `returned` is called                   ... when no lane runs a request of this burst any more
 *
 * Invariants
 *     Everything here is changed with the GIL held. A lane without the GIL waits on `epoll`, or looks at a ring that it holds.
 *     A burst's requests are taken in order and answered in order. An answer that comes early is held until those before it are there.
 *     While a burst is lent, one of these holds: its queue is armed, or it stands in `ready`, or a lane is about to look at it. A lane
 *     that has run a request of a burst looks at it again before it sleeps.
 *     `returned` is called once for each `lend`, when the burst is not lent and no lane runs a request of it.
 *     A lane that sleeps is counted in `sleeping` before it lets go of the GIL, so a signal written after that wakes it. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "exchange_object.h"

#define AHEAD 64u                   /* requests of one burst that may be taken and not answered */
#define SOON 0x4u                   /* spin_policy.py: a bit of the event flag; a request is about to come */
#define COMPANY_NS INT64_C(1000000) /* another model that was served this lately counts as company */
#define EVENTS 8                    /* that one look at epoll takes */
#define SIGNAL UINT64_MAX           /* epoll data of `signal_fd`; else the place of a burst in `seats` and its generation */

typedef struct LanesObject LanesObject;

struct held { /* an answer */
    PyObject *body;
    struct exchange_stamp stamp;
};

typedef struct {
    ExchangeObject exchange;
    LanesObject *lanes; /* held while `returned` is */
    PyObject *returned;
    uint32_t seat;
    unsigned running;         /* requests that lanes run now */
    uint64_t taken, answered; /* numbers of the next request to be taken, and of the next to be answered */
    struct held held[AHEAD];  /* by number; answers that cannot be written yet */
    struct spin_policy spin;
    bool lent, exclusive, queued;
} ListenerObject;

struct seat {
    ListenerObject *listener; /* held while lent */
    uint32_t generation;
};

struct LanesObject {
    PyObject_HEAD
    int epoll_fd, signal_fd;
    struct seat *seats;
    uint64_t *ready; /* a ring of places with generations, in order of arrival; as large as `seats` */
    uint32_t room, lent, ready_first, ready_count;
    unsigned lanes, sleeping, jobs;
    bool looking, stopped;
};

typedef struct {
    PyObject_HEAD
    LanesObject *lanes;
    ListenerObject *serves; /* the burst whose request the lane runs now; held */
    uint64_t number;
    struct exchange_stamp stamp;
    int64_t began_ns;
    int64_t since_ns; /* since when the lane has had nothing to do, or 0 */
    bool slept;
} LaneObject;

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

static void close_when_over(LanesObject *lanes)
{
    if (!lanes->stopped || lanes->lanes)
        return;
    if (lanes->epoll_fd >= 0)
        close(lanes->epoll_fd);
    if (lanes->signal_fd >= 0)
        close(lanes->signal_fd);
    lanes->epoll_fd = lanes->signal_fd = -1;
}

static void wake_one(LanesObject *lanes)
{
    if (lanes->sleeping)
        ring_signal(lanes->signal_fd);
}

/* ---- which bursts may have a request ------------------------------------------------------------------------------- */

static void enqueue(LanesObject *lanes, ListenerObject *listener)
{
    if (listener->queued)
        return;
    listener->queued = true;
    struct seat *seat = &lanes->seats[listener->seat];
    lanes->ready[(lanes->ready_first + lanes->ready_count++) % lanes->room] = (uint64_t)seat->generation << 32 | listener->seat;
}

static ListenerObject *at_place(LanesObject *lanes, uint64_t place)
{
    uint32_t seat = (uint32_t)place;
    return seat < lanes->room && lanes->seats[seat].generation == place >> 32 ? lanes->seats[seat].listener : NULL;
}

static ListenerObject *dequeue(LanesObject *lanes)
{
    if (!lanes->ready_count)
        return NULL;
    ListenerObject *listener = at_place(lanes, lanes->ready[lanes->ready_first]); /* `give_back` leaves no other place here */
    lanes->ready_first = (lanes->ready_first + 1) % lanes->room;
    lanes->ready_count--;
    listener->queued = false;
    return listener;
}

/* Take what epoll reports into `ready`. */
static void collect(LanesObject *lanes, const struct epoll_event *events, int count)
{
    for (int i = 0; i < count; i++) {
        ListenerObject *listener = events[i].data.u64 == SIGNAL ? NULL : at_place(lanes, events[i].data.u64);
        if (listener)
            enqueue(lanes, listener);
    }
}

/* ---- lending and giving back ----------------------------------------------------------------------------------------- */

/* Call `returned`, and end what `lend` began. It may run any Python code. */
static void tell_returned(ListenerObject *listener)
{
    PyObject *returned = listener->returned;
    LanesObject *lanes = listener->lanes;
    listener->returned = NULL;
    listener->lanes = NULL;
    if (returned) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject *done = PyObject_CallNoArgs(returned);
        if (!done)
            PyErr_Clear(); /* the loop is closed, because the process ends */
        Py_XDECREF(done);
        PyErr_Restore(type, value, trace);
        Py_DECREF(returned);
    }
    Py_XDECREF((PyObject *)lanes);
}

/* Take the burst out of `ready`. */
static void unqueue(LanesObject *lanes, ListenerObject *listener)
{
    uint32_t count = lanes->ready_count, first = lanes->ready_first;
    if (!listener->queued)
        return;
    listener->queued = false;
    lanes->ready_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t place = lanes->ready[(first + i) % lanes->room];
        if ((uint32_t)place != listener->seat)
            lanes->ready[(first + lanes->ready_count++) % lanes->room] = place;
    }
}

/* Stop taking requests of this burst. Its task goes on when no lane runs one any more. */
static void give_back(ListenerObject *listener)
{
    LanesObject *lanes = listener->lanes;
    if (!listener->lent)
        return;
    unqueue(lanes, listener);
    listener->lent = false;
    struct seat *seat = &lanes->seats[listener->seat];
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    if (requests)
        epoll_ctl(lanes->epoll_fd, EPOLL_CTL_DEL, requests->reader_fd, NULL);
    seat->listener = NULL;
    seat->generation++;
    lanes->lent--;
    if (!listener->running)
        tell_returned(listener);
    Py_DECREF((PyObject *)listener);
}

static bool grow(LanesObject *lanes)
{
    uint32_t room = lanes->room ? 2 * lanes->room : 4;
    struct seat *seats = realloc(lanes->seats, room * sizeof *seats);
    if (!seats)
        return false;
    lanes->seats = seats;
    uint64_t *ready = malloc(room * sizeof *ready);
    if (!ready)
        return false;
    memset(seats + lanes->room, 0, (room - lanes->room) * sizeof *seats);
    for (uint32_t i = 0; i < lanes->ready_count; i++)
        ready[i] = lanes->ready[(lanes->ready_first + i) % lanes->room];
    free(lanes->ready);
    lanes->ready = ready;
    lanes->ready_first = 0;
    lanes->room = room;
    return true;
}

/* lend(listener, returned) */
static PyObject *lanes_lend(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    LanesObject *self = (LanesObject *)object;
    struct module_state *module = PyType_GetModuleState(Py_TYPE(object));
    if (given != 2 || !module || !PyObject_TypeCheck(args[0], (PyTypeObject *)module->listener)) {
        PyErr_SetString(PyExc_TypeError, "lend(listener, returned)");
        return NULL;
    }
    ListenerObject *listener = (ListenerObject *)args[0];
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    /* A closed queue or closed lanes: the task finds out why. */
    if (!requests || self->stopped || listener->returned || requests->reader_fd < 0 || !requests->control)
        Py_RETURN_FALSE;
    uint32_t seat = 0;
    while (seat < self->room && self->seats[seat].listener)
        seat++;
    if (seat == self->room && !grow(self))
        return PyErr_NoMemory();
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = (uint64_t)self->seats[seat].generation << 32 | seat};
    if (epoll_ctl(self->epoll_fd, EPOLL_CTL_ADD, requests->reader_fd, &event) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_INCREF(args[0]);
    Py_INCREF(args[1]);
    Py_INCREF(object);
    self->seats[seat].listener = listener;
    self->lent++;
    listener->seat = seat;
    listener->returned = args[1];
    listener->lanes = self;
    listener->lent = true;
    enqueue(self, listener); /* a lane looks at it once, and arms it */
    wake_one(self);
    Py_RETURN_TRUE;
}

/* recall(listener) */
static PyObject *lanes_recall(PyObject *object, PyObject *argument)
{
    struct module_state *module = PyType_GetModuleState(Py_TYPE(object));
    if (!module || !PyObject_TypeCheck(argument, (PyTypeObject *)module->listener)) {
        PyErr_SetString(PyExc_TypeError, "recall(listener)");
        return NULL;
    }
    Py_INCREF(argument);
    give_back((ListenerObject *)argument);
    Py_DECREF(argument);
    Py_RETURN_NONE;
}

/* announce(): a job was added to the queue of jobs, which Python keeps */
static PyObject *lanes_announce(PyObject *object, PyObject *Py_UNUSED(none))
{
    LanesObject *self = (LanesObject *)object;
    self->jobs++;
    wake_one(self);
    Py_RETURN_NONE;
}

static PyObject *lanes_stop(PyObject *object, PyObject *Py_UNUSED(none))
{
    LanesObject *self = (LanesObject *)object;
    self->stopped = true;
    for (uint32_t seat = 0; seat < self->room; seat++)
        if (self->seats[seat].listener)
            give_back(self->seats[seat].listener);
    wake_one(self);
    close_when_over(self);
    Py_RETURN_NONE;
}

/* ---- a lane's work ------------------------------------------------------------------------------------------------------ */

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

/* End the run of this lane's request with its answer. Returns its burst, still held, or NULL with an exception. */
static ListenerObject *finish(LaneObject *lane, PyObject *answer)
{
    ListenerObject *listener = lane->serves;
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(answer, &bytes, &length) < 0)
        return NULL;
    struct exchange_stamp stamp = {lane->stamp.first, (uint64_t)(ring_now_ns() - lane->began_ns)};
    struct ring *results = ring_if_usable(listener->exchange.results);
    bool first = lane->number == listener->answered;
    lane->serves = NULL;
    if (first && results && exchange_write(results, (const uint8_t *)bytes, (uint64_t)length, &EXCHANGE_RESULT, &stamp) == RING_OK) {
        listener->answered++;
    } else {
        Py_INCREF(answer);
        listener->held[lane->number % AHEAD] = (struct held){answer, stamp};
    }
    listener->running--;
    listener->exclusive = false;
    if (!write_held(listener))
        give_back(listener); /* the task waits for room */
    if (!listener->lent && !listener->running)
        tell_returned(listener);
    return listener;
}

enum taken { TAKEN, EMPTY, LATER, RETURNED };

/* Take the next request of a burst, if it is known. */
static enum taken take(LaneObject *lane, ListenerObject *listener, int *known)
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
    if (!serves || ring_commit_read(requests, bytes) != RING_OK) {
        give_back(listener);
        return RETURNED;
    }
    if (lane->since_ns)
        spin_waited(&listener->spin, now_ns - lane->since_ns, lane->slept);
    listener->running++;
    listener->exclusive = table->known[*known].serial;
    lane->number = listener->taken++;
    lane->stamp = stamp;
    lane->began_ns = now_ns;
    Py_INCREF((PyObject *)listener);
    lane->serves = listener;
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
    give_back(listener); /* closed or corrupt: the task finds out */
    return ARMED;
}

/* Let another lane take the next request of this burst, which overlaps with the one that this lane runs. */
static void share(LanesObject *lanes, ListenerObject *listener)
{
    if (lanes->lanes > 1 && !listener->exclusive && arm(listener) != ARMED) {
        enqueue(lanes, listener);
        wake_one(lanes);
    }
}

/* Return the burst to look at next, held, or NULL. A lane goes round all bursts that may have a request. */
static ListenerObject *choose(LanesObject *lanes, ListenerObject *last)
{
    if (last && last->lent && lanes->lent == 1 && !last->queued)
        return last;
    if (lanes->lent > 1) {
        struct epoll_event events[EVENTS];
        collect(lanes, events, epoll_wait(lanes->epoll_fd, events, EVENTS, 0));
    }
    if (last && last->lent)
        enqueue(lanes, last);
    Py_XDECREF((PyObject *)last);
    ListenerObject *listener = dequeue(lanes);
    Py_XINCREF((PyObject *)listener);
    if (lanes->ready_count)
        wake_one(lanes);
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
        if (listener->lent)
            enqueue(lanes, listener);
    } else if (arm(listener) != ARMED) {
        enqueue(lanes, listener);
    } else {
        struct epoll_event events[EVENTS];
        int count;
        lanes->looking = true;
        Py_BEGIN_ALLOW_THREADS
        do
            count = epoll_wait(lanes->epoll_fd, events, EVENTS, 0);
        while (!count && ring_now_ns() < now_ns + budget_ns);
        Py_END_ALLOW_THREADS
        lanes->looking = false;
        collect(lanes, events, count);
    }
}

/* A burst had no request: look for one, or arm it. */
static void idle(LaneObject *lane, ListenerObject *listener)
{
    LanesObject *lanes = lane->lanes;
    if (!lane->since_ns) {
        lane->since_ns = ring_now_ns();
        lane->slept = false;
        int64_t budget_ns = lanes->looking || !alone(lanes, lane->since_ns) ? 0 : spin_budget_ns(&listener->spin);
        if (budget_ns) {
            look(lane, listener, budget_ns);
            return;
        }
    }
    enum armed armed = arm(listener);
    if (armed == THERE)
        enqueue(lanes, listener);
    if (armed == ANNOUNCED) {
        spin_waited(&listener->spin, ring_now_ns() - lane->since_ns, true);
        lane->since_ns = -1; /* such a look says nothing about the next one, so it does not count */
        look(lane, listener, listener->spin.window_ns);
    }
}

static void sleep_for_events(LaneObject *lane)
{
    LanesObject *lanes = lane->lanes;
    struct epoll_event events[EVENTS];
    int most = lanes->lanes > 1 ? 1 : EVENTS, count; /* what this lane does not take wakes another one */
    lane->slept = true;
    lanes->sleeping++;
    Py_BEGIN_ALLOW_THREADS
    count = epoll_wait(lanes->epoll_fd, events, most, -1);
    Py_END_ALLOW_THREADS
    lanes->sleeping--;
    collect(lanes, events, count);
}

/* next(answer): answer the request that this lane has run, and take the next one. Returns the value of its body. None: a job waits, or
 * the lanes are stopped. */
static PyObject *lane_next(PyObject *object, PyObject *answer)
{
    LaneObject *lane = (LaneObject *)object;
    LanesObject *lanes = lane->lanes;
    ListenerObject *last = NULL;
    if (lane->serves) {
        last = finish(lane, answer);
        if (!last)
            return NULL;
    }
    lane->since_ns = 0;
    for (;;) {
        if (lanes->stopped || lanes->jobs) {
            if (last && last->lent)
                enqueue(lanes, last);
            Py_XDECREF((PyObject *)last);
            lanes->jobs -= lanes->jobs > 0;
            if (lanes->stopped || lanes->jobs || lanes->ready_count)
                wake_one(lanes);
            Py_RETURN_NONE;
        }
        ListenerObject *listener = choose(lanes, last);
        last = NULL;
        if (!listener) {
            if (!lane->since_ns)
                lane->since_ns = -1;
            sleep_for_events(lane);
            continue;
        }
        int known;
        enum taken taken = take(lane, listener, &known);
        PyObject *value = taken == TAKEN ? exchange_value(&listener->exchange, known) : NULL;
        if (taken == TAKEN)
            share(lanes, listener);
        else if (taken == EMPTY)
            idle(lane, listener);
        Py_DECREF((PyObject *)listener);
        if (value)
            return value;
    }
}

/* ---- the three types ---------------------------------------------------------------------------------------------------- */

/* (requests, results, window_ns) */
static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long long window_ns;
    if (PyTuple_Size(args) != 3) {
        PyErr_SetString(PyExc_TypeError, "(requests, results, window_ns)");
        return NULL;
    }
    if (!exchange_numbers((PyObject *[]){PyTuple_GetItem(args, 2)}, 1, &window_ns))
        return NULL;
    PyObject *queues = PyTuple_GetSlice(args, 0, 2);
    if (!queues)
        return NULL;
    PyObject *self = exchange_new(type, queues, kwargs);
    Py_DECREF(queues);
    if (self)
        spin_begin(&((ListenerObject *)self)->spin, window_ns < 0 ? 0 : window_ns);
    return self;
}

static void listener_dealloc(PyObject *object)
{
    ListenerObject *self = (ListenerObject *)object;
    for (unsigned i = 0; i < AHEAD; i++)
        Py_CLEAR(self->held[i].body);
    exchange_dealloc(object); /* it is not lent, because `seats` would hold it */
}

/* held(): [(body, identity, service_ns)] of the answers that had no room, in order */
static PyObject *listener_held(PyObject *object, PyObject *Py_UNUSED(none))
{
    ListenerObject *self = (ListenerObject *)object;
    PyObject *answers = PyList_New(0);
    while (answers && !self->lent && !self->running && self->answered < self->taken) {
        struct held *next = &self->held[self->answered++ % AHEAD];
        PyObject *answer = next->body ? Py_BuildValue("OKK", next->body, next->stamp.first, next->stamp.second) : NULL;
        if (next->body && (!answer || PyList_Append(answers, answer) < 0))
            Py_CLEAR(answers);
        Py_XDECREF(answer);
        Py_CLEAR(next->body);
    }
    return answers;
}

static PyObject *listener_find(PyObject *object, PyObject *body)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(body, &bytes, &length) < 0)
        return NULL;
    int known = exchange_find(&self->table, (const uint8_t *)bytes, (uint64_t)length);
    if (known < 0)
        Py_RETURN_NONE;
    return exchange_value(self, known);
}

static PyMethodDef listener_methods[] = { /* documented in _ring.pyi */
    {"remember", FAST(exchange_remember)},
    {"find", listener_find, METH_O, NULL},
    {"forget", exchange_forget, METH_NOARGS, NULL},
    {"held", listener_held, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef listener_members[] = {
    {"lent", T_BOOL, offsetof(ListenerObject, lent), READONLY, NULL},
    {"running", T_UINT, offsetof(ListenerObject, running), READONLY, NULL},
    {"taken", T_ULONGLONG, offsetof(ListenerObject, taken), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot listener_slots[] = {
    {Py_tp_new, listener_new},         {Py_tp_dealloc, listener_dealloc}, {Py_tp_methods, listener_methods},
    {Py_tp_members, listener_members}, {0, NULL},
};
PyType_Spec listener_spec = {
    .name = "aionn.fmq._ring.Listener", .basicsize = sizeof(ListenerObject), .flags = Py_TPFLAGS_DEFAULT, .slots = listener_slots};

static PyObject *lanes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if ((kwargs && PyDict_Size(kwargs)) || PyTuple_Size(args)) {
        PyErr_SetString(PyExc_TypeError, "Lanes takes no arguments");
        return NULL;
    }
    LanesObject *self = (LanesObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = SIGNAL};
    self->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    self->signal_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->epoll_fd < 0 || self->signal_fd < 0 || epoll_ctl(self->epoll_fd, EPOLL_CTL_ADD, self->signal_fd, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void lanes_dealloc(PyObject *object)
{
    LanesObject *self = (LanesObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    self->stopped = true;
    close_when_over(self);
    free(self->seats);
    free(self->ready);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef lanes_methods[] = {
    {"lend", FAST(lanes_lend)},
    {"recall", lanes_recall, METH_O, NULL},
    {"announce", lanes_announce, METH_NOARGS, NULL},
    {"stop", lanes_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef lanes_members[] = {
    {"stopped", T_BOOL, offsetof(LanesObject, stopped), READONLY, NULL},
    {"sleeping", T_UINT, offsetof(LanesObject, sleeping), READONLY, NULL},
    {"lent", T_UINT, offsetof(LanesObject, lent), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot lanes_slots[] = {
    {Py_tp_new, lanes_new}, {Py_tp_dealloc, lanes_dealloc}, {Py_tp_methods, lanes_methods}, {Py_tp_members, lanes_members}, {0, NULL},
};
PyType_Spec lanes_spec = {
    .name = "aionn.fmq._ring.Lanes", .basicsize = sizeof(LanesObject), .flags = Py_TPFLAGS_DEFAULT, .slots = lanes_slots};

static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct module_state *module = PyType_GetModuleState(type);
    PyObject *lanes;
    if ((kwargs && PyDict_Size(kwargs)) || !module || !PyArg_ParseTuple(args, "O!", (PyTypeObject *)module->lanes, &lanes)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Lane(lanes)");
        return NULL;
    }
    LaneObject *self = (LaneObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
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
    close_when_over(self->lanes);
    Py_XDECREF((PyObject *)self->serves);
    Py_DECREF((PyObject *)self->lanes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef lane_methods[] = {{"next", lane_next, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyMemberDef lane_members[] = {
    {"identity", T_ULONGLONG, offsetof(LaneObject, stamp.first), READONLY, NULL},
    {"deadline_ns", T_ULONGLONG, offsetof(LaneObject, stamp.second), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot lane_slots[] = {
    {Py_tp_new, lane_new},         {Py_tp_dealloc, lane_dealloc}, {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members}, {0, NULL},
};
PyType_Spec lane_spec = {
    .name = "aionn.fmq._ring.Lane", .basicsize = sizeof(LaneObject), .flags = Py_TPFLAGS_DEFAULT, .slots = lane_slots};
