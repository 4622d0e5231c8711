/* `Listener`: the driver's end of a burst. See exchange_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "exchange_object.h"

/* next(budget_ns) */
static PyObject *listener_next(PyObject *object, PyObject *number)
{
    ExchangeObject *self = (ExchangeObject *)object;
    uint64_t bytes, all, writable;
    long long budget_ns = PyLong_AsLongLong(number); /* first, because its __index__ may close the queue */
    if (budget_ns == -1 && PyErr_Occurred())
        return NULL;
    struct ring *requests = ring_if_usable(self->requests);
    self->looked_ns = 0;
    if (!requests || ring_available(requests, &all, &writable) != RING_OK)
        Py_RETURN_NONE;
    bool waits = !all && budget_ns > 0;
    self->looked_ns = waits ? ring_now_ns() : 0;
    if (waits && !exchange_look(self, self->requests, self->looked_ns, budget_ns))
        Py_RETURN_NONE;
    int known = exchange_peek(requests, &self->table, &EXCHANGE_REQUEST, &self->stamp, &bytes, &all);
    self->began_ns = ring_now_ns();
    if (waits && known >= 0) {
        self->waits++;
        self->waited_ns += self->began_ns - self->looked_ns;
    }
    /* The general path answers a request that is too late. */
    if (known < 0 || (self->stamp.second && (uint64_t)self->began_ns >= self->stamp.second) || ring_commit_read(requests, bytes) != RING_OK)
        Py_RETURN_NONE;
    return exchange_value(self, known);
}

/* answer(body) */
static PyObject *listener_answer(PyObject *object, PyObject *body)
{
    ExchangeObject *self = (ExchangeObject *)object;
    struct ring *results = ring_if_usable(self->results);
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(body, &bytes, &length) < 0)
        return NULL;
    int64_t now_ns = ring_now_ns();
    struct exchange_stamp stamp = {self->stamp.first, (uint64_t)(now_ns - self->began_ns)};
    bool written = results && exchange_write(results, (const uint8_t *)bytes, (uint64_t)length, &EXCHANGE_RESULT, &stamp) == RING_OK;
    return PyLong_FromLongLong(written ? now_ns : 0);
}

static PyMethodDef listener_methods[] = {
    {"remember", FAST(exchange_remember)},
    {"forget", exchange_forget, METH_NOARGS, NULL},
    {"next", listener_next, METH_O, NULL},
    {"answer", listener_answer, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef listener_members[] = {
    {"waits", T_LONGLONG, offsetof(ExchangeObject, waits), 0, NULL},
    {"waited_ns", T_LONGLONG, offsetof(ExchangeObject, waited_ns), 0, NULL},
    {"identity", T_ULONGLONG, offsetof(ExchangeObject, stamp.first), READONLY, NULL},
    {"deadline_ns", T_ULONGLONG, offsetof(ExchangeObject, stamp.second), READONLY, NULL},
    {"looked_ns", T_LONGLONG, offsetof(ExchangeObject, looked_ns), READONLY, NULL},
    {"began_ns", T_LONGLONG, offsetof(ExchangeObject, began_ns), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot listener_slots[] = {
    {Py_tp_new, exchange_new},           {Py_tp_dealloc, exchange_dealloc}, {Py_tp_methods, listener_methods},
    {Py_tp_members, listener_members}, {0, NULL},
};
PyType_Spec listener_spec = {
    .name = "aionn.fmq._ring.Listener", .basicsize = sizeof(ExchangeObject), .flags = Py_TPFLAGS_DEFAULT, .slots = listener_slots};
