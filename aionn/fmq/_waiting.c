/* How a `Ring` sleeps, looks for a while without sleeping, and wakes its peer. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ring_object.h"

/* Whether a call looks in a thread without a loop. More than one would take the CPUs from the drivers that they wait for. */
static _Atomic bool one_looks;

bool ring_begin_look_alone(void) { return !atomic_exchange(&one_looks, true); }

void ring_end_look_alone(void) { one_looks = false; }

/* arm_*(count=1, mask=0) */
static PyObject *arm(PyObject *object, PyObject *const *args, Py_ssize_t given, bool reads)
{
    RingObject *self = (RingObject *)object;
    uint64_t bytes = 0;
    uint32_t mask = 0;
    struct ring *r = given > 0 ? ring_usable_for(self, args[0], &bytes) : ring_usable(self);
    if (!r || (given > 1 && !ring_to_mask(self, args[1], &mask)))
        return NULL;
    if (!given)
        bytes = r->quantum;
    if (!r->control || !r->synchronized)
        return ring_refuse(self, FOREIGN);
    if (mask && !r->flag)
        return ring_refuse(self, NO_FLAG);
    return PyBool_FromLong(ring_arm(r, reads, bytes, mask));
}

static PyObject *ring_arm_reader(PyObject *object, PyObject *const *args, Py_ssize_t given) { return arm(object, args, given, true); }
static PyObject *ring_arm_writer(PyObject *object, PyObject *const *args, Py_ssize_t given) { return arm(object, args, given, false); }

static PyObject *disarm(PyObject *object, bool reads)
{
    struct ring *r = ring_usable((RingObject *)object);
    if (!r)
        return NULL;
    if (r->control)
        ring_disarm(r, reads);
    Py_RETURN_NONE;
}

static PyObject *ring_disarm_reader(PyObject *object, PyObject *Py_UNUSED(none)) { return disarm(object, true); }
static PyObject *ring_disarm_writer(PyObject *object, PyObject *Py_UNUSED(none)) { return disarm(object, false); }

static PyObject *clear_event(PyObject *object, bool reads)
{
    struct ring *r = ring_usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_clear(reads ? r->reader_fd : r->writer_fd);
    Py_RETURN_NONE;
}

static PyObject *ring_clear_reader_event(PyObject *object, PyObject *Py_UNUSED(none)) { return clear_event(object, true); }
static PyObject *ring_clear_writer_event(PyObject *object, PyObject *Py_UNUSED(none)) { return clear_event(object, false); }

/* spin_until_readable(nanoseconds, count=1) */
static PyObject *ring_spin_until_readable(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    RingObject *self = (RingObject *)object;
    uint64_t bytes = 0;
    bool there;
    long long ns = given > 0 ? PyLong_AsLongLong(args[0]) : 0; /* before the ring, as in ring_usable_for */
    if (ns == -1 && PyErr_Occurred())
        return NULL;
    struct ring *r = given > 1 ? ring_usable_for(self, args[1], &bytes) : ring_usable(self);
    if (!r)
        return NULL;
    if (given < 2)
        bytes = r->quantum;
    self->users++;
    Py_BEGIN_ALLOW_THREADS
    there = ring_spin(r, bytes, ring_now_ns() + (ns < 0 ? 0 : ns > 1000000000 ? 1000000000 : ns));
    Py_END_ALLOW_THREADS
    ring_leave(self);
    return ring_usable(self) ? PyBool_FromLong(there) : NULL;
}

static PyObject *ring_signal_both(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = ring_usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_signal(r->reader_fd);
    ring_signal(r->writer_fd);
    Py_RETURN_NONE;
}

static struct ring *with_flag(RingObject *self)
{
    struct ring *r = ring_usable(self);
    if (r && !r->flag) {
        ring_refuse(self, NO_FLAG);
        return NULL;
    }
    return r;
}

static PyObject *ring_wake_flag(PyObject *object, PyObject *number)
{
    struct ring *r = with_flag((RingObject *)object);
    uint32_t mask;
    if (!r || !ring_to_mask((RingObject *)object, number, &mask))
        return NULL;
    ring_flag_wake(r, mask);
    Py_RETURN_NONE;
}

static PyObject *ring_take_flag(PyObject *object, PyObject *number)
{
    struct ring *r = with_flag((RingObject *)object);
    uint32_t mask;
    if (!r || !ring_to_mask((RingObject *)object, number, &mask))
        return NULL;
    return PyLong_FromUnsignedLong(atomic_fetch_and(r->flag, ~mask) & mask);
}

static PyObject *ring_peek_flag(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = with_flag((RingObject *)object);
    return r ? PyLong_FromUnsignedLong(atomic_load(r->flag)) : NULL;
}

static PyObject *ring_await_futex(PyObject *object, PyObject *number)
{
    struct ring *r = with_flag((RingObject *)object);
    uint32_t mask;
    if (!r || !ring_to_mask((RingObject *)object, number, &mask))
        return NULL;
    ring_expect_futex(r, mask);
    Py_RETURN_NONE;
}

/* wait_flag(mask, deadline_ns). Returns the bits taken, 0 when the deadline has passed. A negative deadline never passes. */
static PyObject *ring_wait_flag(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    RingObject *self = (RingObject *)object;
    uint32_t mask, taken = 0;
    int outcome;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "wait_flag(mask, deadline_ns)");
        return NULL;
    }
    long long at = PyLong_AsLongLong(args[1]); /* before the ring, as in ring_usable_for */
    if (at == -1 && PyErr_Occurred())
        return NULL;
    struct ring *r = with_flag(self);
    if (!r || !ring_to_mask(self, args[0], &mask))
        return NULL;
    struct timespec deadline = {.tv_sec = (time_t)(at / 1000000000), .tv_nsec = (long)(at % 1000000000)};
    self->users++;
    Py_BEGIN_ALLOW_THREADS
    outcome = ring_flag_wait(r, mask, at < 0 ? NULL : &deadline, &taken);
    Py_END_ALLOW_THREADS
    ring_leave(self);
    if ((outcome == EINTR && PyErr_CheckSignals() < 0) || !ring_usable(self))
        return NULL;
    if (outcome && outcome != EINTR && outcome != EAGAIN && outcome != ETIMEDOUT) {
        errno = outcome;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLong(taken); /* 0 means: look at the clock, then wait again */
}

/* wait_for(fd, until_ns). A signal that Python code handles runs its handler here, and the handler may raise. */
PyObject *ring_wait_for(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    long fd = given == 2 ? PyLong_AsLong(args[0]) : -1;
    long long until_ns = given == 2 && !PyErr_Occurred() ? PyLong_AsLongLong(args[1]) : 0;
    if (given != 2)
        PyErr_SetString(PyExc_TypeError, "wait_for(fd, until_ns)");
    if (PyErr_Occurred())
        return NULL;
    bool main_thread = syscall(SYS_gettid) == getpid(); /* there Python runs the handlers of signals */
    for (;;) {
        int error;
        int64_t look_ns = main_thread ? ring_now_ns() + RING_SIGNAL_LOOK_NS : 0;
        int64_t by_ns = look_ns && (!until_ns || look_ns < until_ns) ? look_ns : until_ns;
        Py_BEGIN_ALLOW_THREADS
        error = ring_sleep_on((int)fd, by_ns);
        Py_END_ALLOW_THREADS
        errno = error;
        if (error && error != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        if (PyErr_CheckSignals() < 0)
            return NULL;
        if (!error && (by_ns == until_ns || ring_now_ns() < by_ns))
            Py_RETURN_NONE;
    }
}

/* completed(work). In Python each call would cost a StopIteration. */
PyObject *ring_completed(PyObject *Py_UNUSED(module), PyObject *work)
{
    PyObject *given;
    PySendResult sent;
    while ((sent = PyIter_Send(work, Py_None, &given)) == PYGEN_NEXT && given == Py_None)
        Py_DECREF(given);
    if (sent != PYGEN_NEXT)
        return given;
    Py_DECREF(given);
    PyObject *closed = PyObject_CallMethod(work, "close", NULL);
    if (closed)
        PyErr_SetString(PyExc_RuntimeError, "a call of a blocking face waits for an event loop; please report this as a bug of aionn");
    Py_XDECREF(closed);
    return NULL;
}

PyMethodDef ring_waiting_methods[] = {
    {"arm_reader", FAST(ring_arm_reader)},
    {"arm_writer", FAST(ring_arm_writer)},
    {"disarm_reader", ring_disarm_reader, METH_NOARGS, NULL},
    {"disarm_writer", ring_disarm_writer, METH_NOARGS, NULL},
    {"clear_reader_event", ring_clear_reader_event, METH_NOARGS, NULL},
    {"clear_writer_event", ring_clear_writer_event, METH_NOARGS, NULL},
    {"spin_until_readable", FAST(ring_spin_until_readable)},
    {"signal", ring_signal_both, METH_NOARGS, NULL},
    {"wake_flag", ring_wake_flag, METH_O, NULL},
    {"take_flag", ring_take_flag, METH_O, NULL},
    {"peek_flag", ring_peek_flag, METH_NOARGS, NULL},
    {"await_futex", ring_await_futex, METH_O, NULL},
    {"wait_flag", FAST(ring_wait_flag)},
    {NULL, NULL, 0, NULL},
};
