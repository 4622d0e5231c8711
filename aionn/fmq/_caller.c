/* `Caller`: the app's end of a burst. See caller_object.h and exchange_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "caller_object.h"

#define EARLY_NS 1000000 /* a loop's timer may come so much too early */
#define OVERDUE_LOOK_NS INT64_C(500000000) /* how often to look whether another request has become the oldest */
#define WITHDRAWN 1 /* a deadline that has passed long ago */

/* ---- life ---------------------------------------------------------------------------------------------------------- */

static int caller_traverse(PyObject *object, visitproc visit, void *arg)
{
    CallerObject *self = (CallerObject *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->exchange.requests);
    Py_VISIT((PyObject *)self->exchange.results);
    for (unsigned i = 0; i < CALLS; i++)
        Py_VISIT(self->calls[i]);
    Py_VISIT(self->look_again);
    for (unsigned i = 0; i < 3; i++)
        Py_VISIT(self->raised[i]);
    const struct request *lists[] = {self->first, self->spare};
    for (unsigned i = 0; i < 2; i++)
        for (const struct request *r = lists[i]; r; r = r->next) {
            Py_VISIT(r->future);
            Py_VISIT(r->settled);
            Py_VISIT(r->idle);
        }
    return 0;
}

/* Drop all that may refer back to this object. From then on it does nothing. */
static int caller_clear(PyObject *object)
{
    CallerObject *self = (CallerObject *)object;
    self->over = true;
    request_takes_no_turn(self);
    for (unsigned i = 0; i < CALLS; i++)
        Py_CLEAR(self->calls[i]);
    Py_CLEAR(self->look_again);
    self->slot = NULL;
    PyBuffer_Release(&self->counts);
    struct request *lists[] = {self->first, self->spare};
    self->first = self->last = self->unsent = self->spare = NULL;
    self->in_flight = self->withdrawn = 0;
    for (unsigned i = 0; i < 2; i++)
        for (struct request *r = lists[i], *next; r; r = next) {
            next = r->next;
            flight_free(r);
        }
    return 0;
}

static int caller_collect(PyObject *object)
{
    for (unsigned i = 0; i < 3; i++)
        Py_CLEAR(((CallerObject *)object)->raised[i]);
    return caller_clear(object);
}

static void caller_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    caller_collect(object);
    for (unsigned i = 0; i < NAMES; i++)
        Py_CLEAR(((CallerObject *)object)->names[i]);
    exchange_dealloc(object);
}

/* begin(depth, window_ns, calls, counts=None, burst=0, patience_ns=0) */
static PyObject *caller_begin(PyObject *object, PyObject *args)
{
    CallerObject *self = (CallerObject *)object;
    unsigned depth;
    long long window_ns, patience_ns = 0;
    unsigned long long burst = 0;
    PyObject *calls[CALLS], *counts = Py_None;
    if (!PyArg_ParseTuple(args, "IL(OOOOOO)|OKL", &depth, &window_ns, &calls[0], &calls[1], &calls[2], &calls[3], &calls[4], &calls[5],
                          &counts, &burst, &patience_ns))
        return NULL;
    const struct ring *requests = ring_if_usable(self->exchange.requests), *results = ring_if_usable(self->exchange.results);
    if (self->names[0] || !requests || !results || !ring_can_sleep(requests) || !ring_can_sleep(results)) {
        PyErr_SetString(PyExc_ValueError, "expected a Caller that has not begun, over two open queues of aionn");
        return NULL;
    }
    Py_buffer view = {0};
    if (counts != Py_None && PyObject_GetBuffer(counts, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    struct page_slot *slot = page_slot_in(view.buf, (size_t)view.len);
    if (counts != Py_None && !slot) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_TypeError, "expected a slot of a statistics page");
        return NULL;
    }
    static const char *const names[NAMES] = {"set_result", "done", "dtype", "shape"};
    PyObject *look_again = PyObject_GetAttrString(object, "_look_again");
    for (unsigned i = 0; look_again && i < NAMES; i++)
        if (!(self->names[i] = PyUnicode_InternFromString(names[i])))
            Py_CLEAR(look_again);
    if (!look_again) {
        PyBuffer_Release(&view);
        return NULL;
    }
    self->look_again = look_again;
    self->counts = view;
    self->slot = slot;
    self->burst = burst;
    self->depth = depth;
    self->patience_ns = patience_ns;
    self->alone = calls[CALL_SOON] == Py_None;
    self->sleep_fd = -1;
    spin_begin(&self->spin, window_ns);
    for (unsigned i = 0; i < CALLS; i++) {
        Py_INCREF(calls[i]);
        self->calls[i] = calls[i];
    }
    self->over = false;
    Py_RETURN_NONE;
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *object = exchange_new(type, args, kwargs);
    if (object)
        ((CallerObject *)object)->over = true; /* until `begin` */
    return object;
}

/* end() */
static PyObject *caller_end(PyObject *object, PyObject *Py_UNUSED(none))
{
    CallerObject *self = (CallerObject *)object;
    struct request *r;
    unsigned lost = self->in_flight;
    slot_lost(self->slot, lost);
    self->over = true;
    while ((r = self->first)) {
        flight_remove(self, r);
        flight_finish(self, r, Py_None, Py_None);
    }
    caller_clear(object);
    return flight_raise(self, PyLong_FromUnsignedLong(lost));
}

/* ---- requests ------------------------------------------------------------------------------------------------------ */

/* Let a request in flight become late while it lies in the queue, so that the driver answers it and never runs it. If the driver is sure
 * to see that, what the request holds is given back now, and the next request may take its place. Return whether the driver is sure to see
 * it. This function may run any Python code. */
static bool withdraw(CallerObject *self, struct request *r)
{
    const struct ring *requests = ring_if_usable(self->exchange.requests);
    if (!requests || !exchange_amend(requests, r->stamp_at, &EXCHANGE_REQUEST, WITHDRAWN))
        return false;
    PyObject *settled = r->settled;
    r->settled = NULL;
    self->withdrawn += !r->withdrawn;
    r->withdrawn = true;
    if (settled)
        flight_call(self, settled, Py_None);
    Py_XDECREF(settled);
    if (!self->over)
        flight_send_unsent(self);
    return true;
}

/* leave(future, settled) */
static PyObject *caller_leave(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    CallerObject *self = (CallerObject *)object;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "leave(future, settled)");
        return NULL;
    }
    struct request *r = self->first;
    while (r && r->future != args[0])
        r = r->next;
    if (!r)
        Py_RETURN_FALSE;
    if (r->sent) {
        PyObject *future = r->future;
        r->future = NULL;
        r->deadline_ns = 0;
        bool withdrawn = withdraw(self, r);
        if (!withdrawn && !r->settled && args[1] != Py_None) {
            Py_INCREF(args[1]);
            r->settled = args[1];
        }
        Py_DECREF(future);
        return PyBool_FromLong(!withdrawn);
    }
    flight_remove(self, r);
    Py_CLEAR(r->future);
    flight_finish(self, r, Py_None, Py_None);
    Py_RETURN_FALSE;
}

/* make_late(identity) */
static PyObject *caller_make_late(PyObject *object, PyObject *number)
{
    CallerObject *self = (CallerObject *)object;
    unsigned long long identity = PyLong_AsUnsignedLongLong(number);
    struct request *r = self->first;
    if (PyErr_Occurred())
        return NULL;
    while (r != self->unsent && (uint32_t)r->identity != (uint32_t)identity)
        r = r->next;
    if (r != self->unsent)
        withdraw(self, r);
    Py_RETURN_NONE;
}

/* answered(identity, service_ns, value) */
static PyObject *caller_answered(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    CallerObject *self = (CallerObject *)object;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "answered(identity, service_ns, value)");
        return NULL;
    }
    unsigned long long identity = PyLong_AsUnsignedLongLong(args[0]);
    unsigned long long service_ns = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    struct request *r = flight_find(self, identity);
    if (!r)
        Py_RETURN_FALSE;
    flight_settle(self, r, args[2], service_ns, ring_now_ns());
    Py_RETURN_TRUE;
}

/* unanswered(identity) */
static PyObject *caller_unanswered(PyObject *object, PyObject *number)
{
    unsigned long long identity = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(flight_find((CallerObject *)object, identity) != NULL);
}

/* late() */
static PyObject *caller_late(PyObject *object, PyObject *Py_UNUSED(none))
{
    CallerObject *self = (CallerObject *)object;
    PyObject *late = PyList_New(0);
    if (!late) {
        self->timer_ns = 0; /* the next request that has a deadline sets the timer again */
        return NULL;
    }
    /* An answer that lies in the queue counts, also if its wake was lost. */
    flight_take(self);
    int64_t by_ns = ring_now_ns() + EARLY_NS;
    struct request *r = self->first;
    self->timer_ns = 0;
    while (late && r) {
        if (!r->deadline_ns || r->deadline_ns > by_ns) {
            if (r->deadline_ns && (!self->timer_ns || r->deadline_ns < self->timer_ns))
                self->timer_ns = r->deadline_ns;
            r = r->next;
            continue;
        }
        r->deadline_ns = 0;
        PyObject *one = Py_BuildValue("(OO)", r->future, r->sent ? Py_True : Py_False);
        if (!one || PyList_Append(late, one) < 0)
            Py_CLEAR(late);
        Py_XDECREF(one);
        r = r->next;
    }
    struct exchange_stamp overdue = {0, 0, 0};
    const struct request *oldest = self->in_flight && self->patience_ns ? self->first : NULL;
    if (oldest) {
        bool again = oldest->identity == self->asked;
        long long due_ns = (again ? self->asked_ns : oldest->began_ns) + self->patience_ns;
        if (due_ns <= by_ns) {
            overdue = (struct exchange_stamp){oldest->identity, (uint64_t)oldest->began_ns, 0};
            self->asked = oldest->identity;
            self->asked_ns = by_ns;
        }
        if (due_ns <= by_ns || (again && due_ns > by_ns + OVERDUE_LOOK_NS))
            due_ns = by_ns + (self->patience_ns < OVERDUE_LOOK_NS ? self->patience_ns : OVERDUE_LOOK_NS);
        if (!self->timer_ns || due_ns < self->timer_ns)
            self->timer_ns = due_ns;
    }
    PyObject *found = late ? Py_BuildValue("(LN(KK))", self->timer_ns, late, overdue.first, overdue.second) : NULL;
    return self->alone ? flight_raise(self, found) : found;
}

/* idle() */
static PyObject *caller_idle(PyObject *object, PyObject *Py_UNUSED(none))
{
    CallerObject *self = (CallerObject *)object;
    if (!self->last)
        Py_RETURN_NONE;
    if (!self->last->idle) {
        PyObject *idle = PyObject_CallNoArgs(self->calls[CREATE_FUTURE]);
        if (!idle || !self->last || self->last->idle) /* a burst that has ended meanwhile is idle */
            return idle;
        self->last->idle = idle;
    }
    Py_INCREF(self->last->idle);
    return self->last->idle;
}

/* nudge(mask) */
static PyObject *caller_nudge(PyObject *object, PyObject *number)
{
    unsigned long mask = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    struct ring *requests = ring_if_usable(((ExchangeObject *)object)->requests);
    if (requests)
        ring_nudge_reader(requests, (uint32_t)mask);
    Py_RETURN_NONE;
}

static PyMethodDef caller_methods[] = { /* documented in _ring.pyi */
    {"remember", FAST(exchange_remember)},
    {"forget", exchange_forget, METH_NOARGS, NULL},
    {"begin", caller_begin, METH_VARARGS, NULL},
    {"post", FAST(request_post)},
    {"send", FAST(request_send)},
    {"leave", FAST(caller_leave)},
    {"start", FAST(request_start)},
    {"make_late", caller_make_late, METH_O, NULL},
    {"answered", FAST(caller_answered)},
    {"unanswered", caller_unanswered, METH_O, NULL},
    {"late", caller_late, METH_NOARGS, NULL},
    {"idle", caller_idle, METH_NOARGS, NULL},
    {"event", flight_event, METH_NOARGS, NULL},
    {"_look_again", flight_look_again, METH_NOARGS, NULL},
    {"nudge", caller_nudge, METH_O, NULL},
    {"end", caller_end, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef caller_members[] = {
    {"brisk", T_BOOL, offsetof(CallerObject, spin.brisk), READONLY, NULL},
    {"in_flight", T_UINT, offsetof(CallerObject, in_flight), READONLY, NULL},
    {"answers", T_LONGLONG, offsetof(CallerObject, answers), READONLY, NULL},
    {"answers_at_once", T_LONGLONG, offsetof(CallerObject, answers_at_once), READONLY, NULL},
    {"sleeps", T_LONGLONG, offsetof(CallerObject, sleeps), READONLY, NULL},
    {"yield_by_ns", T_LONGLONG, offsetof(CallerObject, yield_by_ns), 0, NULL},
    {"yield_ns", T_LONGLONG, offsetof(CallerObject, yield_ns), 0, NULL},
    {"inline_ns", T_LONGLONG, offsetof(CallerObject, inline_ns), 0, NULL},
    {"sleep_fd", T_INT, offsetof(CallerObject, sleep_fd), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot caller_slots[] = {
    {Py_tp_new, caller_new},           {Py_tp_dealloc, caller_dealloc}, {Py_tp_traverse, caller_traverse},
    {Py_tp_clear, caller_collect},       {Py_tp_methods, caller_methods}, {Py_tp_members, caller_members},
    {0, NULL},
};
PyType_Spec caller_spec = {.name = "aionn.fmq._ring.Caller",
                           .basicsize = sizeof(CallerObject),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           .slots = caller_slots};
