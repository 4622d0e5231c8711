/* `Listener`: one burst, as its task has it. See lanes_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "lanes_object.h"

/* (requests, results, window_ns, burst=0, anticipate=False) */
static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long long number[3] = {0, 0, 0}; /* the window, the burst, whether to anticipate */
    Py_ssize_t given = PyTuple_Size(args);
    if (given < 3 || given > 5) {
        PyErr_SetString(PyExc_TypeError, "(requests, results, window_ns, burst=0, anticipate=False)");
        return NULL;
    }
    for (Py_ssize_t i = 2; i < given; i++) {
        PyObject *argument = PyTuple_GetItem(args, i);
        if (!exchange_numbers(&argument, 1, &number[i - 2]))
            return NULL;
    }
    PyObject *queues = PyTuple_GetSlice(args, 0, 2);
    if (!queues)
        return NULL;
    PyObject *self = exchange_new(type, queues, kwargs);
    Py_DECREF(queues);
    if (self) {
        spin_begin(&((ListenerObject *)self)->spin, number[0] < 0 ? 0 : number[0]);
        ((ListenerObject *)self)->burst = (uint64_t)number[1];
        rhythm_begin(&((ListenerObject *)self)->rhythm, number[2] && number[0] > 0);
    }
    return self;
}

/* ---- requests that others wait for ---------------------------------------------------------------------------------- */

/* Let the bursts look again whose next request waits for one of this burst. */
static void wake_waiting(ListenerObject *self)
{
    PyObject *number, *other;
    Py_ssize_t at = 0;
    if (!self->awaited)
        return;
    self->awaited = false;
    while (self->siblings && PyDict_Next(self->siblings, &at, &number, &other)) {
        ListenerObject *listener = (ListenerObject *)other;
        LanesObject *lanes = listener->lanes;
        if (!listener->waits)
            continue;
        listener->waits = false;
        if (!listener->lent)
            continue;
        lanes_enqueue(lanes, listener);
        if (lanes->sleeping || lanes->looking)
            ring_signal(lanes->signal_fd);
    }
}

/* Note that a request is over. */
void listener_note(ListenerObject *self, uint64_t identity, bool succeeded)
{
    self->outcomes[identity % AHEAD] = (struct outcome){(uint32_t)identity, succeeded};
    wake_waiting(self);
}

/* Return whether the turn of a request of this burst has come. PENDING: a lane looks again when the request before is over. */
enum turn listener_turn(ListenerObject *self, uint64_t after)
{
    uint32_t identity = (uint32_t)after;
    PyObject *number = self->siblings ? PyLong_FromUnsignedLongLong(after >> 32) : NULL;
    ListenerObject *other = number ? (ListenerObject *)PyDict_GetItemWithError(self->siblings, number) : NULL;
    Py_XDECREF(number);
    if (!other) {
        PyErr_Clear(); /* no memory; the app decides then, too */
        return FORFEITED;
    }
    const struct outcome *outcome = &other->outcomes[identity % AHEAD];
    if (outcome->identity == identity)
        return outcome->succeeded ? COME : FORFEITED;
    if ((int32_t)(identity - outcome->identity) < 0)
        return FORFEITED; /* its place has the outcome of a later one */
    other->awaited = self->waits = true;
    return PENDING;
}

/* note(identity, succeeded) */
static PyObject *listener_note_call(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    long long number[2];
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "note(identity, succeeded)");
        return NULL;
    }
    if (!exchange_numbers(args, 2, number))
        return NULL;
    listener_note((ListenerObject *)object, (uint64_t)number[0], number[1] != 0);
    Py_RETURN_NONE;
}

/* may_run(after) */
static PyObject *listener_may_run(PyObject *object, PyObject *number)
{
    unsigned long long after = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(listener_turn((ListenerObject *)object, after) == COME);
}

/* beside(siblings, number) */
static PyObject *listener_beside(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ListenerObject *self = (ListenerObject *)object;
    PyObject *before = self->siblings;
    if (given != 2 || (args[0] != Py_None && !PyDict_CheckExact(args[0]))) {
        PyErr_SetString(PyExc_TypeError, "beside(siblings, number): give a dict of listeners by number, or None");
        return NULL;
    }
    if (args[0] != Py_None && PyDict_SetItem(args[0], args[1], object) < 0)
        return NULL;
    if (before && PyDict_DelItem(before, self->number) < 0)
        PyErr_Clear(); /* the burst has left already */
    wake_waiting(self);
    PyObject *number = self->number;
    self->siblings = args[0] == Py_None ? NULL : args[0];
    self->number = args[1];
    Py_INCREF(args[1]);
    Py_XINCREF(self->siblings);
    Py_XDECREF(number);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* ---- life ------------------------------------------------------------------------------------------------------------ */

static void listener_dealloc(PyObject *object)
{
    ListenerObject *self = (ListenerObject *)object;
    for (unsigned i = 0; i < AHEAD; i++)
        Py_CLEAR(self->held[i].body);
    Py_CLEAR(self->idle);
    Py_CLEAR(self->siblings);
    Py_CLEAR(self->number);
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
        self->blocked = false;
    }
    return answers;
}

/* has(identity) */
static PyObject *listener_has(PyObject *object, PyObject *number)
{
    const ListenerObject *self = (ListenerObject *)object;
    unsigned long long identity = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    for (uint64_t taken = self->answered; taken != self->taken; taken++)
        if (self->held[taken % AHEAD].stamp.first == identity)
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* when_idle(callback) */
static PyObject *listener_when_idle(PyObject *object, PyObject *callback)
{
    ListenerObject *self = (ListenerObject *)object;
    PyObject *before = self->idle;
    if (!self->running)
        Py_RETURN_TRUE;
    Py_INCREF(callback);
    self->idle = callback;
    Py_XDECREF(before);
    Py_RETURN_FALSE;
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
    {"has", listener_has, METH_O, NULL},
    {"when_idle", listener_when_idle, METH_O, NULL},
    {"beside", FAST(listener_beside)},
    {"may_run", listener_may_run, METH_O, NULL},
    {"note", FAST(listener_note_call)},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef listener_members[] = {
    {"lent", T_BOOL, offsetof(ListenerObject, lent), READONLY, NULL},
    {"blocked", T_BOOL, offsetof(ListenerObject, blocked), READONLY, NULL},
    {"running", T_UINT, offsetof(ListenerObject, running), READONLY, NULL},
    {"taken", T_ULONGLONG, offsetof(ListenerObject, taken), READONLY, NULL},
    {"answered", T_ULONGLONG, offsetof(ListenerObject, answered), READONLY, NULL},
    {"warm_ups", T_UINT, offsetof(ListenerObject, warm_ups), READONLY, NULL},
    {"foreseen", T_UINT, offsetof(ListenerObject, rhythm.foreseen), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot listener_slots[] = {
    {Py_tp_new, listener_new},         {Py_tp_dealloc, listener_dealloc}, {Py_tp_methods, listener_methods},
    {Py_tp_members, listener_members}, {0, NULL},
};
PyType_Spec listener_spec = {
    .name = "aionn.fmq._ring.Listener", .basicsize = sizeof(ListenerObject), .flags = Py_TPFLAGS_DEFAULT, .slots = listener_slots};

