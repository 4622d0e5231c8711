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

static void listener_dealloc(PyObject *object)
{
    ListenerObject *self = (ListenerObject *)object;
    for (unsigned i = 0; i < AHEAD; i++)
        Py_CLEAR(self->held[i].body);
    Py_CLEAR(self->idle);
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

