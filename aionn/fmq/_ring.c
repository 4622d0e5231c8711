/* The life of a `Ring` object: its buffers, its end, and whether a call may use it.
 *
 * Each call checks its arguments first. Plain C runs on the shared words only after that.
 *
 * Invariants
 *     While `open`, every pointer in `ring` points into one of `parts`, whose buffers are held: Python cannot unmap them.
 *     A method that releases the GIL counts itself in `users`. `_release` then leaves the buffers to the last such method.
 *     A child of fork never touches the shared words. Each call compares `generation`, which costs a load and no system call.
 *
 * Refusals have texts and kinds of exception, so Python makes them: `_raise_refusal(code)` must raise. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>

#include "ring_object.h"

_Atomic unsigned ring_fork_generation;

static void child_of_fork(void)
{
    /* Relaxed, because the child has one thread. */
    atomic_fetch_add_explicit(&ring_fork_generation, 1, memory_order_relaxed);
}

bool ring_watch_forks(void)
{
    static bool watching;
    watching = watching || !pthread_atfork(NULL, NULL, child_of_fork);
    return watching;
}

PyObject *ring_refuse(RingObject *self, enum refusal code)
{
    PyObject *returned = PyObject_CallMethod((PyObject *)self, "_raise_refusal", "i", (int)code);
    if (returned) {
        Py_DECREF(returned);
        PyErr_SetString(PyExc_SystemError, "_raise_refusal must raise");
    }
    return NULL;
}

struct ring *ring_usable(RingObject *self)
{
    struct ring *r = ring_if_usable(self);
    if (r)
        return r;
    ring_refuse(self, self->open ? FORKED : GONE);
    return NULL;
}

/* Return the ring, and `count` elements of it in bytes. The number is read first, since its __index__ may run any Python
 * code and close the queue. A count beyond the capacity becomes one element more than the capacity: too many, without overflow. */
struct ring *ring_usable_for(RingObject *self, PyObject *count, uint64_t *bytes)
{
    long long elements = PyLong_AsLongLong(count);
    if (elements == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
    }
    struct ring *r = ring_usable(self);
    if (!r)
        return NULL;
    if (elements < 0) {
        ring_refuse(self, BAD_COUNT);
        return NULL;
    }
    uint64_t most = r->capacity / r->quantum + 1;
    *bytes = ((uint64_t)elements < most ? (uint64_t)elements : most) * r->quantum;
    return r;
}

bool ring_to_mask(RingObject *self, PyObject *number, uint32_t *mask)
{
    unsigned long value = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred() || value > UINT32_MAX) {
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))
            return false;
        PyErr_Clear();
        ring_refuse(self, BAD_COUNT);
        return false;
    }
    *mask = (uint32_t)value;
    return true;
}

static void release_buffers(Py_buffer *parts)
{
    for (int part = 0; part < PARTS; part++)
        if (parts[part].obj)
            PyBuffer_Release(&parts[part]);
}

void ring_leave(RingObject *self)
{
    if (--self->users == 0 && !self->open)
        release_buffers(self->parts);
}

int ring_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    RingObject *self = (RingObject *)object;
    static const Py_ssize_t least[PARTS] = {8, 8, 1, 4, sizeof(struct ring_control)};
    static const Py_ssize_t aligned[PARTS] = {8, 8, 1, 4, 8}; /* libfmq's data offset is 16, which is fine for plain loads */
    PyObject *parts[PARTS];
    Py_buffer buffers[PARTS] = {{0}}; /* copied to `self` last, because taking a buffer may run any Python code */
    unsigned long long quantum;
    int synchronized, reader_fd, writer_fd;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Ring takes positional arguments only");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OOOOOKpii", &parts[0], &parts[1], &parts[2], &parts[3], &parts[4], &quantum, &synchronized,
                          &reader_fd, &writer_fd))
        return -1;
    for (int part = 0; part < PARTS; part++) {
        if (part >= FLAG && parts[part] == Py_None)
            continue;
        if (PyObject_GetBuffer(parts[part], &buffers[part], PyBUF_WRITABLE) < 0)
            goto failed;
        if (buffers[part].len < least[part] || (uintptr_t)buffers[part].buf % (uintptr_t)aligned[part]) {
            PyErr_Format(PyExc_ValueError, "part %d of a ring is too small or misaligned; pass the parts that layout.py describes", part);
            goto failed;
        }
    }
    if (!quantum || (uint64_t)buffers[DATA].len % quantum) {
        PyErr_SetString(PyExc_ValueError, "the data part of a ring must be a whole number of elements");
        goto failed;
    }
    if (self->ring.quantum) { /* also after its release, because a Caller has checked this ring once */
        PyErr_SetString(PyExc_TypeError, "a Ring is initialised only once; make another one");
        goto failed;
    }
    memcpy(self->parts, buffers, sizeof buffers);
    self->ring = (struct ring){
        .read = self->parts[READ].buf,
        .written = self->parts[WRITTEN].buf,
        .data = self->parts[DATA].buf,
        .flag = self->parts[FLAG].buf,
        .control = self->parts[CONTROL].buf,
        .capacity = (uint64_t)self->parts[DATA].len,
        .quantum = quantum,
        .reader_fd = reader_fd,
        .writer_fd = writer_fd,
        .synchronized = synchronized,
    };
    self->generation = atomic_load_explicit(&ring_fork_generation, memory_order_relaxed);
    self->open = true;
    return 0;
failed:
    release_buffers(buffers);
    return -1;
}

void ring_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    release_buffers(((RingObject *)object)->parts); /* no thread is inside, because it would hold a reference */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *ring_release_parts(PyObject *object, PyObject *Py_UNUSED(none))
{
    RingObject *self = (RingObject *)object;
    if (self->open) {
        self->open = false;
        self->ring.reader_fd = self->ring.writer_fd = -1;
        /* A child of fork has the count of its parent's threads, but not the threads. */
        if (self->users && !ring_inherited(self))
            ring_end(&self->ring, true);
        else
            release_buffers(self->parts);
    }
    Py_RETURN_NONE;
}

static PyObject *ring_set_closed(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = ring_usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_close(r);
    Py_RETURN_NONE;
}

static PyObject *ring_set_ended(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = ring_usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_end(r, ((RingObject *)object)->users);
    Py_RETURN_NONE;
}

static PyObject *ring_closed(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = ring_usable((RingObject *)object);
    return r ? PyBool_FromLong(ring_is_closed(r)) : NULL;
}

PyMethodDef ring_life_methods[] = {
    {"_closed_word", ring_closed, METH_NOARGS, NULL},
    {"_set_closed", ring_set_closed, METH_NOARGS, NULL},
    {"_set_ended", ring_set_ended, METH_NOARGS, NULL},
    {"_release", ring_release_parts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
