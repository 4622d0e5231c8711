/* Sending a request of a `Caller`: the one call of a stream's usual frame. See caller_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "caller_object.h"

/* The bursts that have sent last, each once, as far as they are open. Guarded by the GIL. */
static const CallerObject *recent[SPIN_FEW];

/* Return whether more than SPIN_FEW bursts of this process take turns. To look for the answers of all would cost more than to sleep. */
static bool in_crowd(const CallerObject *self)
{
    const CallerObject *before = self;
    for (unsigned i = 0; i < SPIN_FEW; i++) {
        const CallerObject *here = recent[i];
        recent[i] = before;
        if (!here || here == self)
            return false;
        before = here;
    }
    return true;
}

void request_takes_no_turn(const CallerObject *self)
{
    unsigned kept = 0;
    for (unsigned i = 0; i < SPIN_FEW; i++)
        if (recent[i] != self)
            recent[kept++] = recent[i];
    while (kept < SPIN_FEW)
        recent[kept++] = NULL;
}

/* Look for a packet, as long as the policy says. Return whether the queues can still be used. */
static bool looked(CallerObject *self, const struct request *r)
{
    if (!self->alone)
        return exchange_look(&self->exchange, self->exchange.results, r->began_ns, self->inline_ns) && !self->over;
    if (!spin_budget_ns(&self->spin) || !ring_begin_look_alone())
        return true;
    bool usable = exchange_look(&self->exchange, self->exchange.results, r->began_ns, self->inline_ns);
    ring_end_look_alone();
    return usable && !self->over;
}

/* Sleep until a packet has come, a descriptor of this thread's waits is ready, or it is time. Only in a thread without a loop. */
static bool slept(CallerObject *self, const struct request *r)
{
    RingObject *queues[] = {self->exchange.requests, self->exchange.results};
    struct ring *results = &queues[1]->ring;
    if (self->sleep_fd < 0 || !ring_arm(results, true, EXCHANGE_ELEMENT, 0))
        return true;
    int64_t by_ns = self->patience_ns ? r->began_ns + self->patience_ns : r->deadline_ns;
    by_ns = r->deadline_ns && r->deadline_ns < by_ns ? r->deadline_ns : by_ns;
    int64_t look_ns = r->began_ns + RING_SIGNAL_LOOK_NS;
    by_ns = by_ns && by_ns < look_ns ? by_ns : look_ns;
    self->sleeps++;
    queues[0]->users++;
    queues[1]->users++;
    Py_BEGIN_ALLOW_THREADS
    (void)ring_sleep_on(self->sleep_fd, by_ns); /* whatever ended it, the queue is looked at next */
    Py_END_ALLOW_THREADS
    ring_leave(queues[0]);
    ring_leave(queues[1]);
    if (self->over || !ring_if_usable(queues[1]))
        return false;
    ring_disarm(results, true);
    ring_clear(results->reader_fd);
    return true;
}

/* Look for the answer to the only request in flight, right here. Return NULL without an exception if it has not come. */
static PyObject *answer_at_once(CallerObject *self, const struct request *r)
{
    uint64_t bytes, all;
    struct exchange_stamp stamp;
    long long sleeps = self->sleeps;
    if (!looked(self, r))
        return NULL;
    struct ring *results = &self->exchange.results->ring;
    if (self->alone && !ring_would_wake(results, EXCHANGE_ELEMENT) && !slept(self, r))
        return NULL;
    int known = exchange_peek(results, &self->exchange.table, &EXCHANGE_RESULT, &stamp, &bytes, &all);
    /* The general path judges anything else that the driver says. */
    if (known < 0 || bytes != all || stamp.first != r->identity || ring_commit_read(results, bytes) != RING_OK)
        return NULL;
    self->answers_at_once++;
    self->woken = 0;
    int64_t now_ns = ring_now_ns();
    spin_waited(&self->spin, self->alone ? now_ns - r->began_ns : self->inline_ns, self->sleeps != sleeps);
    PyObject *value = exchange_value(&self->exchange, known), *answer = flight_answer(self, r, value, stamp.second, now_ns);
    Py_DECREF(value); /* the table holds it, and no Python code has run */
    return answer;
}

/* When the frame of a traced request was captured, as the app's context says, or 0. */
static uint64_t captured_ns(const CallerObject *self)
{
    PyObject *found = PyObject_CallNoArgs(self->calls[CAPTURED]);
    unsigned long long ns = found ? PyLong_AsUnsignedLongLong(found) : 0;
    Py_XDECREF(found);
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* a trace fails no request */
        return 0;
    }
    return ns;
}

/* Return the answer, or a future of it, or None if the request cannot be sent. `after`: NULL, or the request is started after that one.
 * No caller waits for it here, and its identity is returned. Where it would have to wait for its turn, nothing is sent. */
static PyObject *begin_request(CallerObject *self, PyObject *body, PyObject *settled, long long deadline_ns, const uint64_t *after)
{
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(body, &bytes, &length) < 0)
        return NULL;
    if (self->over)
        Py_RETURN_NONE;
    struct request *r = flight_prepare(self);
    if (!r)
        return NULL;
    struct ring *requests = ring_if_usable(self->exchange.requests), *results = ring_if_usable(self->exchange.results);
    if (self->over || !requests || !results || length % EXCHANGE_ELEMENT || (uint64_t)length + EXCHANGE_ELEMENT > requests->capacity)
        Py_RETURN_NONE;
    int64_t now_ns = ring_now_ns();
    r->captured_ns = 0;
    if (slot_is_traced(self->slot, now_ns)) {
        uint64_t captured = captured_ns(self);
        if (self->over || self->spare != r) /* the call ran Python code that ended the burst */
            Py_RETURN_NONE;
        r->captured_ns = captured;
    }
    /* A caller that is alone waits right here. Suspending and resuming a task costs more time than many answers take. */
    self->crowded = !self->alone && in_crowd(self);
    bool looks = self->alone || (self->spin.brisk && !self->crowded && now_ns < self->yield_by_ns);
    bool alone = !after && !self->first && self->woken <= 1 && looks;
    self->woken -= self->woken > 0;
    bool sends = !self->unsent && flight_has_place(self);
    struct exchange_stamp stamp = {self->last_identity + 1, (uint64_t)deadline_ns, after ? *after : 0};
    PyObject *number = after ? PyLong_FromUnsignedLongLong(stamp.first) : NULL;
    if (after && !number)
        return NULL;
    if (sends) {
        if (alone && self->armed) { /* for a request whose caller has left */
            ring_disarm(results, true);
            self->armed = false;
        }
        enum ring_status status = exchange_write(requests, (const uint8_t *)bytes, (uint64_t)length, &EXCHANGE_REQUEST, &stamp);
        if (status != RING_OK && (status != RING_LESS || !self->in_flight)) {
            Py_XDECREF(number);
            Py_RETURN_NONE;
        }
        sends = status == RING_OK;
    }
    if (number && !sends) {
        Py_DECREF(number);
        Py_RETURN_NONE;
    }
    self->last_identity++;
    r->identity = stamp.first;
    r->began_ns = now_ns;
    deadline_ns = after ? 0 : deadline_ns; /* what waits for a started request has its own timer */
    r->deadline_ns = deadline_ns;
    r->sleeps = self->sleeps;
    if (sends)
        flight_note_sent(self, r, length, now_ns);
    if (alone) {
        PyObject *answer = answer_at_once(self, r);
        if (answer || PyErr_Occurred()) {
            PyObject *type = NULL, *error = NULL, *trace = NULL;
            if (!answer)
                PyErr_Fetch(&type, &error, &trace); /* no memory; what follows may run any Python code */
            if (settled)
                flight_call(self, settled, answer ? PyTuple_GetItem(answer, 0) : Py_None);
            if (!answer)
                PyErr_Restore(type, error, trace);
            return answer;
        }
        if (self->spare != r) /* another thread has ended the burst meanwhile */
            Py_RETURN_NONE;
    }
    r->sent = sends;
    if (!sends) {
        Py_INCREF(body);
        r->body = body;
    }
    Py_XINCREF(settled);
    r->settled = settled;
    PyObject *future = r->future;
    if (number) {
        r->future = NULL;
        Py_DECREF(future);
        future = number;
    } else {
        Py_INCREF(future);
    }
    flight_add(self, r); /* from here on the request may be settled and freed */
    if (alone)
        flight_look(self, 0, false);
    if (self->looking)
        self->joined = true;
    else if (sends && !self->over)
        flight_watch(self);
    long long by_ns = self->patience_ns ? now_ns + self->patience_ns : deadline_ns;
    by_ns = deadline_ns && deadline_ns < by_ns ? deadline_ns : by_ns;
    if (by_ns && (!self->timer_ns || by_ns < self->timer_ns) && !self->over) {
        PyObject *number = PyLong_FromLongLong(by_ns);
        self->timer_ns = by_ns;
        if (number)
            flight_call_back(self, WAKE_BY, number);
        else
            PyErr_WriteUnraisable((PyObject *)self);
        Py_XDECREF(number);
    }
    return future;
}

/* Do so. A thread that is alone gets here what a callback has raised, because it may never see an event. */
static PyObject *request(CallerObject *self, PyObject *body, PyObject *settled, long long deadline_ns, const uint64_t *after)
{
    PyObject *found = begin_request(self, body, settled, deadline_ns, after);
    return self->alone ? flight_raise(self, found) : found;
}

/* send(body, settled, deadline_ns) */
PyObject *request_send(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    long long deadline_ns;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "send(body, settled, deadline_ns)");
        return NULL;
    }
    if (!exchange_numbers(args + 2, 1, &deadline_ns))
        return NULL;
    return request((CallerObject *)object, args[0], args[1] == Py_None ? NULL : args[1], deadline_ns, NULL);
}

/* start(body, settled, deadline_ns, after) */
PyObject *request_start(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    long long number[2]; /* the deadline, and what it runs after */
    if (given != 4) {
        PyErr_SetString(PyExc_TypeError, "start(body, settled, deadline_ns, after)");
        return NULL;
    }
    if (!exchange_numbers(args + 2, 2, number))
        return NULL;
    uint64_t after = (uint64_t)number[1];
    return request((CallerObject *)object, args[0], args[1], number[0], &after);
}

/* Return 1 if `array` has the type, the dtype and the shape of `place`, else 0, or -1 with an exception. */
static int alike(const CallerObject *self, PyObject *place, PyObject *array)
{
    int same = 0;
    if (Py_TYPE(array) != Py_TYPE(place))
        return 0;
    for (enum name name = DTYPE; name <= SHAPE; name++) {
        PyObject *one = PyObject_GetAttr(place, self->names[name]), *other = one ? PyObject_GetAttr(array, self->names[name]) : NULL;
        same = !other ? -1 : one == other ? 1 : PyObject_RichCompareBool(one, other, Py_EQ);
        Py_XDECREF(one);
        Py_XDECREF(other);
        if (same <= 0)
            break;
    }
    return same;
}

/* post(places, inputs, body, deadline_ns) */
PyObject *request_post(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    long long deadline_ns;
    PyObject *name, *place;
    Py_ssize_t at = 0;
    if (given != 4 || !PyDict_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "post(places, inputs, body, deadline_ns)");
        return NULL;
    }
    if (!exchange_numbers(args + 3, 1, &deadline_ns))
        return NULL;
    if (((CallerObject *)object)->over || !PyDict_CheckExact(args[1]) || PyDict_Size(args[0]) != PyDict_Size(args[1]))
        Py_RETURN_NONE;
    while (PyDict_Next(args[0], &at, &name, &place)) {
        PyObject *array = PyDict_GetItemWithError(args[1], name);
        if (!array) {
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_NONE;
        }
        Py_INCREF(array); /* a large copy releases the GIL */
        int fits = alike((CallerObject *)object, place, array);
        if (fits > 0 && PyObject_SetItem(place, Py_Ellipsis, array) < 0)
            fits = -1;
        Py_DECREF(array);
        if (fits < 0)
            return NULL;
        if (!fits)
            Py_RETURN_NONE;
    }
    return request((CallerObject *)object, args[2], NULL, deadline_ns, NULL);
}
