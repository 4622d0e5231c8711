/* `Caller`: the app's end of a burst. See exchange_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "exchange_object.h"

static PyObject *answer_of(ExchangeObject *self, int known, const struct exchange_stamp *stamp, bool with_identity)
{
    PyObject *value = exchange_value(self, known); /* first, because making an object may run any Python code, and that may forget the value */
    PyObject *answer = PyTuple_New(with_identity ? 3 : 2), *service = PyLong_FromUnsignedLongLong(stamp->second);
    PyObject *identity = with_identity ? PyLong_FromUnsignedLongLong(stamp->first) : NULL;
    if (!answer || !service || (with_identity && !identity)) {
        Py_DECREF(value);
        Py_XDECREF(answer);
        Py_XDECREF(service);
        Py_XDECREF(identity);
        return NULL;
    }
    PyTuple_SetItem(answer, 0, value); /* these steal, and cannot fail on a new tuple */
    PyTuple_SetItem(answer, 1, service);
    if (identity)
        PyTuple_SetItem(answer, 2, identity);
    return answer;
}

/* call(body, identity, deadline_ns, not_after_ns, budget_ns) */
static PyObject *caller_call(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *body;
    Py_ssize_t length;
    long long number[4];
    if (given != 5) {
        PyErr_SetString(PyExc_TypeError, "call(body, identity, deadline_ns, not_after_ns, budget_ns)");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &length) < 0 || !exchange_numbers(args + 1, 4, number))
        return NULL;
    struct ring *requests = ring_if_usable(self->requests), *results = ring_if_usable(self->results);
    int64_t began_ns = ring_now_ns();
    struct exchange_stamp stamp = {(uint64_t)number[0], (uint64_t)number[1]};
    if (!requests || !results || began_ns >= number[2] ||
        exchange_write(requests, (const uint8_t *)body, (uint64_t)length, &EXCHANGE_REQUEST, &stamp) != RING_OK)
        Py_RETURN_FALSE;
    if (!exchange_look(self, self->results, began_ns, number[3]))
        Py_RETURN_NONE;
    uint64_t bytes, all;
    int known = exchange_peek(results, &self->table, &EXCHANGE_RESULT, &stamp, &bytes, &all);
    /* Only one request was in flight. The general path judges anything else that the driver says. */
    if (known < 0 || bytes != all || stamp.first != (uint64_t)number[0] || ring_commit_read(results, bytes) != RING_OK)
        Py_RETURN_NONE;
    self->waits++;
    return answer_of(self, known, &stamp, false);
}

/* send(body, identity, deadline_ns) */
static PyObject *caller_send(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *body;
    Py_ssize_t length;
    long long number[2];
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "send(body, identity, deadline_ns)");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &length) < 0 || !exchange_numbers(args + 1, 2, number))
        return NULL;
    struct ring *requests = ring_if_usable(self->requests);
    struct exchange_stamp stamp = {(uint64_t)number[0], (uint64_t)number[1]};
    return PyBool_FromLong(
        requests && exchange_write(requests, (const uint8_t *)body, (uint64_t)length, &EXCHANGE_REQUEST, &stamp) == RING_OK);
}

static PyObject *caller_take(PyObject *object, PyObject *Py_UNUSED(none))
{
    ExchangeObject *self = (ExchangeObject *)object;
    PyObject *answers = PyList_New(0);
    while (answers) {
        struct ring *results = ring_if_usable(self->results); /* each time, because making an object may run any Python code */
        struct exchange_stamp stamp;
        uint64_t bytes, all;
        int known = results ? exchange_peek(results, &self->table, &EXCHANGE_RESULT, &stamp, &bytes, &all) : -1;
        if (known < 0 || ring_commit_read(results, bytes) != RING_OK)
            break;
        PyObject *answer = answer_of(self, known, &stamp, true);
        if (!answer || PyList_Append(answers, answer) < 0)
            Py_CLEAR(answers); /* out of memory: the taken answers are lost, and with them the burst */
        Py_XDECREF(answer);
    }
    return answers;
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
    {"call", FAST(caller_call)},
    {"send", FAST(caller_send)},
    {"take", caller_take, METH_NOARGS, NULL},
    {"nudge", caller_nudge, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef caller_members[] = {
    {"waits", T_LONGLONG, offsetof(ExchangeObject, waits), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot caller_slots[] = {
    {Py_tp_new, exchange_new},         {Py_tp_dealloc, exchange_dealloc}, {Py_tp_methods, caller_methods},
    {Py_tp_members, caller_members}, {0, NULL},
};
PyType_Spec caller_spec = {
    .name = "aionn.fmq._ring.Caller", .basicsize = sizeof(ExchangeObject), .flags = Py_TPFLAGS_DEFAULT, .slots = caller_slots};
