/* What `Caller` and `Listener` have in common: their queues, the bodies that they know, and looking for a packet. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "exchange_object.h"

/* The types have no `init`, so every object has its two queues. */
PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct module_state *module = PyType_GetModuleState(type);
    PyObject *requests, *results;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "(requests, results) are positional");
        return NULL;
    }
    if (!module || !PyArg_ParseTuple(args, "OO", &requests, &results))
        return NULL;
    /* The type itself, because isinstance would believe an object's __class__. */
    PyTypeObject *ring = (PyTypeObject *)module->ring;
    bool fits = ring && PyObject_TypeCheck(requests, ring) && PyObject_TypeCheck(results, ring);
    struct ring *sent = fits ? ring_if_usable((RingObject *)requests) : NULL, *taken = fits ? ring_if_usable((RingObject *)results) : NULL;
    if (!sent || !taken || sent->quantum != EXCHANGE_ELEMENT || taken->quantum != EXCHANGE_ELEMENT || !sent->synchronized ||
        !taken->synchronized) {
        PyErr_SetString(PyExc_ValueError, "expected two open, synchronized queues of 24-byte elements");
        return NULL;
    }
    ExchangeObject *self = (ExchangeObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    Py_INCREF(requests);
    Py_INCREF(results);
    self->requests = (RingObject *)requests;
    self->results = (RingObject *)results;
    return (PyObject *)self;
}

/* The release of what was held comes last, because it may run any Python code. */
static void forget(ExchangeObject *self)
{
    struct exchange_table table = self->table;
    self->table = (struct exchange_table){0};
    for (unsigned i = 0; i < table.count; i++) {
        Py_DECREF((PyObject *)table.known[i].owner);
        Py_DECREF((PyObject *)table.known[i].value);
    }
    exchange_free(&table);
}

void exchange_dealloc(PyObject *object)
{
    ExchangeObject *self = (ExchangeObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    forget(self);
    Py_DECREF((PyObject *)self->requests);
    Py_DECREF((PyObject *)self->results);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyObject *exchange_forget(PyObject *object, PyObject *Py_UNUSED(none))
{
    forget((ExchangeObject *)object);
    Py_RETURN_NONE;
}

/* remember(body, value, serial=False, kind=0) */
PyObject *exchange_remember(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *bytes;
    Py_ssize_t length;
    long long kind = 0;
    if (given < 2 || given > 4) {
        PyErr_SetString(PyExc_TypeError, "remember(body, value, serial=False, kind=0)");
        return NULL;
    }
    int serial = given > 2 ? PyObject_IsTrue(args[2]) : 0;
    if (serial < 0 || (given == 4 && !exchange_numbers(args + 3, 1, &kind)))
        return NULL;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0)
        return NULL;
    int known = exchange_find(&self->table, (const uint8_t *)bytes, (uint64_t)length);
    if (known >= 0) {
        PyObject *before = self->table.known[known].value;
        Py_INCREF(args[1]);
        self->table.known[known].value = args[1];
        self->table.known[known].serial = serial;
        self->table.known[known].kind = (uint32_t)kind;
        Py_DECREF(before);
        Py_RETURN_NONE;
    }
    struct exchange_body body = {(const uint8_t *)bytes, (uint64_t)length, args[0], args[1], serial, (uint32_t)kind};
    if (exchange_add(&self->table, body) < 0) {
        forget(self); /* the table is full; bodies that still come are added again */
        if (exchange_add(&self->table, body) < 0)
            return PyErr_NoMemory();
    }
    Py_INCREF(args[0]);
    Py_INCREF(args[1]);
    Py_RETURN_NONE;
}

/* Look for a packet in one of the two queues for at most so long. Return whether that queue can still be used. */
bool exchange_look(ExchangeObject *self, RingObject *queue, int64_t began_ns, int64_t budget_ns)
{
    struct ring *r = &queue->ring;
    if (budget_ns > 1000000000)
        budget_ns = 1000000000;
    int64_t held_ns = budget_ns < HOLD_NS ? budget_ns : HOLD_NS;
    if (ring_spin(r, EXCHANGE_ELEMENT, began_ns + held_ns) || budget_ns <= HOLD_NS)
        return true;
    self->requests->users++;
    self->results->users++;
    Py_BEGIN_ALLOW_THREADS
    ring_spin(r, EXCHANGE_ELEMENT, began_ns + budget_ns);
    Py_END_ALLOW_THREADS
    ring_leave(self->requests);
    ring_leave(self->results);
    return ring_if_usable(queue) != NULL;
}

bool exchange_numbers(PyObject *const *args, Py_ssize_t count, long long *numbers)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return false;
    }
    return true;
}

