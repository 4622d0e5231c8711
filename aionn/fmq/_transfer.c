/* Elements in and out of a `Ring`: one C call for each operation, which never waits. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ring_object.h"

/* Corruption and the end are exceptions. False or None says that less is there. */
static PyObject *answer(RingObject *self, enum ring_status status, bool none)
{
    if (status == RING_CORRUPT || status == RING_CLOSED)
        return ring_refuse(self, status == RING_CORRUPT ? CORRUPT : CLOSED);
    if (status == RING_OK)
        Py_RETURN_TRUE;
    if (none)
        Py_RETURN_NONE;
    Py_RETURN_FALSE;
}

static PyObject *ring_write(PyObject *object, PyObject *data)
{
    RingObject *self = (RingObject *)object;
    struct ring_span span;
    Py_buffer from;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(data, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    struct ring *r = ring_usable(self); /* after the last call into Python, which could have closed the queue */
    if (r) {
        uint64_t bytes = (uint64_t)from.len;
        if (bytes % r->quantum) {
            ring_refuse(self, NOT_WHOLE);
        } else {
            enum ring_status status = ring_begin_write(r, bytes, &span);
            if (status == RING_OK) {
                ring_copy_in(r, &span, from.buf);
                ring_commit_write(r, bytes);
            }
            result = answer(self, status, false);
        }
    }
    PyBuffer_Release(&from);
    return result;
}

static PyObject *copy_out(PyObject *object, PyObject *count, bool consume)
{
    RingObject *self = (RingObject *)object;
    struct ring_span span;
    uint64_t bytes;
    struct ring *r = ring_usable_for(self, count, &bytes);
    if (!r)
        return NULL;
    enum ring_status status = ring_begin_read(r, bytes, &span);
    if (status != RING_OK)
        return answer(self, status, true);
    PyObject *copy = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (!copy)
        return NULL;
    if (consume && r->synchronized)
        ring_claim(r, span.at + bytes);
    ring_copy_out(r, &span, (uint8_t *)PyBytes_AsString(copy));
    if (consume ? ring_commit_read(r, bytes) != RING_OK : !r->synchronized && ring_overrun(r, span.at)) {
        Py_DECREF(copy);
        Py_RETURN_NONE; /* overwritten while it was copied */
    }
    return copy;
}

static PyObject *ring_read(PyObject *object, PyObject *count) { return copy_out(object, count, true); }
static PyObject *ring_peek(PyObject *object, PyObject *count) { return copy_out(object, count, false); }

static PyObject *available(PyObject *object, bool reads)
{
    RingObject *self = (RingObject *)object;
    struct ring *r = ring_usable(self);
    uint64_t readable, writable;
    if (!r)
        return NULL;
    if (ring_available(r, &readable, &writable) != RING_OK)
        return ring_refuse(self, CORRUPT);
    return PyLong_FromUnsignedLongLong((reads ? readable : writable) / r->quantum);
}

static PyObject *ring_available_to_read(PyObject *object, PyObject *Py_UNUSED(none)) { return available(object, true); }
static PyObject *ring_available_to_write(PyObject *object, PyObject *Py_UNUSED(none)) { return available(object, false); }

/* Return where the transaction lies in the data part, as (offset, bytes before the wrap, bytes after it), or None. */
static PyObject *begin(PyObject *object, PyObject *count, bool reads)
{
    RingObject *self = (RingObject *)object;
    struct ring_span span;
    uint64_t bytes;
    struct ring *r = ring_usable_for(self, count, &bytes);
    if (!r)
        return NULL;
    enum ring_status status = reads ? ring_begin_read(r, bytes, &span) : ring_begin_write(r, bytes, &span);
    if (status != RING_OK)
        return answer(self, status, true);
    return Py_BuildValue("KKK", (unsigned long long)(span.first - r->data), (unsigned long long)span.first_bytes,
                         (unsigned long long)span.second_bytes);
}

static PyObject *commit(PyObject *object, PyObject *count, bool reads)
{
    RingObject *self = (RingObject *)object;
    uint64_t bytes;
    struct ring *r = ring_usable_for(self, count, &bytes);
    if (!r)
        return NULL;
    if (bytes > (reads ? r->readable : r->writable))
        return ring_refuse(self, NOT_BEGUN);
    return answer(self, reads ? ring_commit_read(r, bytes) : ring_commit_write(r, bytes), false);
}

static PyObject *ring_begin_write_at(PyObject *object, PyObject *count) { return begin(object, count, false); }
static PyObject *ring_begin_read_at(PyObject *object, PyObject *count) { return begin(object, count, true); }
static PyObject *ring_commit_write_of(PyObject *object, PyObject *count) { return commit(object, count, false); }
static PyObject *ring_commit_read_of(PyObject *object, PyObject *count) { return commit(object, count, true); }

PyMethodDef ring_transfer_methods[] = {
    {"write", ring_write, METH_O, NULL},
    {"read", ring_read, METH_O, NULL},
    {"peek", ring_peek, METH_O, NULL},
    {"available_to_read", ring_available_to_read, METH_NOARGS, NULL},
    {"available_to_write", ring_available_to_write, METH_NOARGS, NULL},
    {"_begin_write", ring_begin_write_at, METH_O, NULL},
    {"_begin_read", ring_begin_read_at, METH_O, NULL},
    {"commit_write", ring_commit_write_of, METH_O, NULL},
    {"commit_read", ring_commit_read_of, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
