/* The requests of a `Caller`: sent in order, settled as their answers come, watched while any is in flight. See caller_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "caller_object.h"

/* Keep the exception of a callback for `flight_raise`. It ends nothing here, because the other requests must be settled. The handler of a
 * signal may raise it in any Python code. Loops get only what ends the app, such as KeyboardInterrupt, and report any other. */
static void failed(CallerObject *self, PyObject *callable)
{
    if (self->raised[0] || (!self->alone && PyErr_ExceptionMatches(PyExc_Exception)))
        PyErr_WriteUnraisable(callable);
    else
        PyErr_Fetch(&self->raised[0], &self->raised[1], &self->raised[2]);
}

/* Raise what a callback has raised, in place of returning `result`. */
PyObject *flight_raise(CallerObject *self, PyObject *result)
{
    if (!self->raised[0] || PyErr_Occurred())
        return result;
    PyErr_Restore(self->raised[0], self->raised[1], self->raised[2]);
    self->raised[0] = self->raised[1] = self->raised[2] = NULL;
    Py_XDECREF(result);
    return NULL;
}

void flight_call(CallerObject *self, PyObject *callable, PyObject *argument)
{
    PyObject *returned = PyObject_CallFunctionObjArgs(callable, argument, NULL);
    if (!returned)
        failed(self, callable);
    Py_XDECREF(returned);
}

void flight_call_back(CallerObject *self, enum call which, PyObject *argument)
{
    PyObject *callable = self->calls[which];
    if (!callable)
        return; /* the burst has ended */
    Py_INCREF(callable);
    flight_call(self, callable, argument);
    Py_DECREF(callable);
}

/* Return whether the caller was cancelled or is late, and has not run since. */
static bool has_left(CallerObject *self, PyObject *future)
{
    PyObject *done = PyObject_CallMethodObjArgs(future, self->names[DONE], NULL);
    if (!done)
        failed(self, future);
    Py_XDECREF(done);
    return done == Py_True;
}

static void set_result(CallerObject *self, PyObject *future, PyObject *value)
{
    PyObject *returned = PyObject_CallMethodObjArgs(future, self->names[SET_RESULT], value, NULL);
    if (!returned && (self->alone || !PyErr_ExceptionMatches(PyExc_Exception)))
        failed(self, future);
    else if (!returned) { /* the future was cancelled, or set by a deadline */
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        bool left = has_left(self, future);
        PyErr_Restore(type, error, traceback);
        if (left)
            PyErr_Clear();
        else
            failed(self, future);
    }
    Py_XDECREF(returned);
}

/* ---- the list ------------------------------------------------------------------------------------------------------ */

/* Return the spare request, which has a future. NULL sets an exception. */
struct request *flight_prepare(CallerObject *self)
{
    if (self->spare)
        return self->spare;
    PyObject *future = PyObject_CallNoArgs(self->calls[CREATE_FUTURE]);
    struct request *r = future ? calloc(1, sizeof *r) : NULL;
    if (!r) {
        Py_XDECREF(future);
        return future ? (struct request *)PyErr_NoMemory() : NULL;
    }
    r->future = future;
    if (self->spare) /* the call ran Python code that came here, too */
        flight_free(r);
    else
        self->spare = r;
    return self->spare;
}

void flight_free(struct request *r)
{
    PyObject *held[] = {r->body, r->future, r->settled, r->idle};
    free(r); /* first, because a release may run any Python code */
    for (unsigned i = 0; i < sizeof held / sizeof *held; i++)
        Py_XDECREF(held[i]);
}

/* Put the spare request at the end of the list. */
void flight_add(CallerObject *self, struct request *r)
{
    self->spare = NULL;
    if (self->last)
        self->last->next = r;
    else
        self->first = r;
    self->last = r;
    self->in_flight += r->sent;
    if (!r->sent && !self->unsent)
        self->unsent = r;
}

void flight_remove(CallerObject *self, struct request *r)
{
    struct request *before = NULL;
    for (struct request *other = self->first; other != r; other = other->next)
        before = other;
    if (before)
        before->next = r->next;
    else
        self->first = r->next;
    if (self->last == r)
        self->last = before;
    if (self->unsent == r)
        self->unsent = r->next;
    self->in_flight -= r->sent;
    self->withdrawn -= r->withdrawn;
}

/* Return the request in flight that has this identity, or NULL. Mostly it is the first one. */
struct request *flight_find(CallerObject *self, uint64_t identity)
{
    for (struct request *r = self->first; r != self->unsent; r = r->next)
        if (r->identity == identity)
            return r;
    return NULL;
}

/* ---- answers ------------------------------------------------------------------------------------------------------- */

/* Wake the caller of a request that has left the list, give back what it held, and free it. */
void flight_finish(CallerObject *self, struct request *r, PyObject *answer, PyObject *value)
{
    if (r->future) {
        self->woken++;
        set_result(self, r->future, answer);
    }
    if (r->settled)
        flight_call(self, r->settled, value);
    if (r->idle)
        set_result(self, r->idle, Py_None);
    flight_free(r);
}

/* Count the answer, and return (value, service time). NULL sets an exception. */
PyObject *flight_answer(CallerObject *self, const struct request *r, PyObject *value, uint64_t service_ns, int64_t now_ns)
{
    slot_answered(self->slot, now_ns - r->began_ns, service_ns > INT64_MAX ? -1 : (int64_t)service_ns);
    slot_trace(self->slot, TRACE_SETTLED, self->burst, r->identity, now_ns, service_ns, 0);
    PyObject *service = PyLong_FromUnsignedLongLong(service_ns), *answer = service ? PyTuple_New(2) : NULL;
    if (!answer) {
        Py_XDECREF(service);
        return NULL;
    }
    Py_INCREF(value);
    PyTuple_SetItem(answer, 0, value); /* these steal, and cannot fail on a new tuple */
    PyTuple_SetItem(answer, 1, service);
    return answer;
}

/* Settle a request of the list with the driver's answer. */
void flight_settle(CallerObject *self, struct request *r, PyObject *value, uint64_t service_ns, int64_t now_ns)
{
    flight_remove(self, r);
    self->answers++;
    self->last_began_ns = r->began_ns;
    self->last_sleeps = r->sleeps;
    PyObject *answer = flight_answer(self, r, value, service_ns, now_ns);
    if (!answer)
        PyErr_WriteUnraisable((PyObject *)self);
    flight_finish(self, r, answer ? answer : Py_None, value);
    Py_XDECREF(answer);
}

/* Send those that wait, while there is a place and the queue has room. */
void flight_send_unsent(CallerObject *self)
{
    struct request *r;
    while ((r = self->unsent) && flight_has_place(self)) {
        if (has_left(self, r->future)) {
            flight_remove(self, r);
            flight_finish(self, r, Py_None, Py_None);
            continue;
        }
        struct ring *requests = ring_if_usable(self->exchange.requests);
        struct exchange_stamp stamp = {r->identity, (uint64_t)r->deadline_ns, 0};
        char *body;
        Py_ssize_t length;
        if (!requests || PyBytes_AsStringAndSize(r->body, &body, &length) < 0)
            return;
        enum ring_status status = exchange_write(requests, (const uint8_t *)body, (uint64_t)length, &EXCHANGE_REQUEST, &stamp);
        if (status == RING_LESS && self->in_flight)
            return; /* the driver reads a request before it answers, so an answer brings room */
        if (status != RING_OK) {
            flight_call_back(self, UNSENDABLE, NULL);
            return;
        }
        self->unsent = r->next;
        self->in_flight++;
        r->sent = true;
        r->began_ns = ring_now_ns();
        r->sleeps = self->sleeps;
        flight_note_sent(self, r, length, r->began_ns);
        PyObject *sent = r->body;
        r->body = NULL;
        Py_DECREF(sent);
    }
}

/* Settle every answer that lies in the queue, then send what waits. `now_ns` is set if the loop has run. Then the wait for the
 * last answer decides whether to stay awake. `expected`: the queue did not allow this end to sleep, so it has something. */
void flight_look(CallerObject *self, int64_t now_ns, bool expected)
{
    long long before = self->answers;
    int64_t at_ns = now_ns;
    uint64_t bytes, all, writable;
    self->woken = 0;
    while (!self->over) {
        struct ring *results = ring_if_usable(self->exchange.results);
        struct exchange_stamp stamp;
        int known = results ? exchange_peek(results, &self->exchange.table, &EXCHANGE_RESULT, &stamp, &bytes, &all) : -1;
        struct request *r = known < 0 ? NULL : flight_find(self, stamp.first);
        if (!r || ring_commit_read(results, bytes) != RING_OK)
            break;
        PyObject *value = exchange_value(&self->exchange, known);
        at_ns = at_ns ? at_ns : ring_now_ns();
        flight_settle(self, r, value, stamp.second, at_ns);
        Py_DECREF(value);
    }
    struct ring *results = self->over ? NULL : ring_if_usable(self->exchange.results);
    if (results && (ring_available(results, &all, &writable) != RING_OK || all || (expected && self->answers == before)))
        flight_call_back(self, GENERAL, NULL);
    if (now_ns && self->answers != before)
        spin_waited(&self->spin, now_ns - self->last_began_ns, self->sleeps != self->last_sleeps);
    if (!self->over)
        flight_send_unsent(self);
}

/* ---- waiting ------------------------------------------------------------------------------------------------------- */

static void keep_watch(CallerObject *self)
{
    while (!self->over && self->in_flight && !self->armed && !self->looking) {
        struct ring *results = ring_if_usable(self->exchange.results);
        if (!results)
            return;
        if (ring_arm(results, true, EXCHANGE_ELEMENT, 0)) {
            self->armed = true;
            self->sleeps++;
            return;
        }
        flight_look(self, 0, true);
    }
}

static void schedule_look(CallerObject *self)
{
    self->looking = true;
    PyObject *call_soon = self->calls[CALL_SOON], *look_again = self->look_again;
    Py_INCREF(call_soon);
    Py_INCREF(look_again);
    PyObject *handle = PyObject_CallFunctionObjArgs(call_soon, look_again, NULL);
    if (!handle) {
        self->looking = false;
        failed(self, call_soon);
    }
    Py_XDECREF(handle);
    Py_DECREF(call_soon);
    Py_DECREF(look_again);
}

/* Make sure that the answer to the request that has just been sent will be seen. */
void flight_watch(CallerObject *self)
{
    struct ring *requests = ring_if_usable(self->exchange.requests), *results = ring_if_usable(self->exchange.results);
    int64_t budget_ns = self->alone || self->crowded ? 0 : spin_budget_ns(&self->spin);
    if (budget_ns && requests && results && ring_apart(requests, results)) {
        if (self->armed) {
            /* This end is awake and needs no event. An event that is already under way comes as a spurious callback. */
            ring_disarm(results, true);
            self->armed = false;
        }
        self->looking_until_ns = ring_now_ns() + budget_ns;
        schedule_look(self);
    }
    keep_watch(self);
}

/* Look once per iteration of the loop, for all callers. Sleep only if nothing came within the budget. */
PyObject *flight_look_again(PyObject *object, PyObject *Py_UNUSED(none))
{
    CallerObject *self = (CallerObject *)object;
    if (self->over)
        Py_RETURN_NONE;
    int64_t now_ns = ring_now_ns();
    self->yield_by_ns = now_ns + self->yield_ns;
    flight_look(self, now_ns, false);
    self->looking = false;
    if (self->joined) {
        self->joined = false;
        self->looking_until_ns = now_ns + spin_budget_ns(&self->spin);
    }
    if (!self->over && self->in_flight && now_ns < self->looking_until_ns)
        schedule_look(self);
    keep_watch(self);
    Py_INCREF(Py_None);
    return flight_raise(self, Py_None);
}

/* Take the answers that have come, after an event or where one may be lost. */
void flight_take(CallerObject *self)
{
    struct ring *results = self->over ? NULL : ring_if_usable(self->exchange.results);
    if (!results)
        return; /* this callback was on its way when the burst ended */
    ring_clear(results->reader_fd);
    self->armed = false;
    int64_t now_ns = ring_now_ns();
    self->yield_by_ns = now_ns + self->yield_ns;
    flight_look(self, now_ns, false);
    keep_watch(self);
}

PyObject *flight_event(PyObject *object, PyObject *Py_UNUSED(none))
{
    flight_take((CallerObject *)object);
    Py_INCREF(Py_None);
    return flight_raise((CallerObject *)object, Py_None);
}
