/* `aionn.fmq._ring.Ring`: ring.h for Python. Arguments are checked here, then plain C runs on the shared words.
 *
 * Invariants
 *     While `open`, every pointer in `ring` points into one of `parts`, whose buffers are held: Python cannot unmap them.
 *     A method that lets go of the GIL counts itself in `users`; `release` then leaves the buffers to the last of them.
 *     A child of fork never touches the shared words: `generation` is compared at every call (a load, not a system call).
 *
 * Refusals are words for people and kinds of exception, so they are made in Python: `_refuse(code)` must raise. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>

#include "ring_object.h"

/* Mirrored in message_queue.py. */
enum refusal { CLOSED = 1, CORRUPT, GONE, FORKED, FOREIGN, BAD_COUNT, NOT_WHOLE, NOT_BEGUN, NO_FLAG };

static _Atomic unsigned fork_generation;

static void child_of_fork(void)
{
    /* Relaxed: the child has one thread. */
    atomic_fetch_add_explicit(&fork_generation, 1, memory_order_relaxed);
}

static PyObject *refuse(RingObject *self, enum refusal code)
{
    PyObject *returned = PyObject_CallMethod((PyObject *)self, "_refuse", "i", (int)code);
    if (returned) {
        Py_DECREF(returned);
        PyErr_SetString(PyExc_SystemError, "_refuse must raise");
    }
    return NULL;
}

struct ring *ring_if_usable(RingObject *self)
{
    bool inherited = self->generation != atomic_load_explicit(&fork_generation, memory_order_relaxed);
    return self->open && !inherited ? &self->ring : NULL;
}

static struct ring *usable(RingObject *self)
{
    struct ring *r = ring_if_usable(self);
    if (r)
        return r;
    refuse(self, self->open ? FORKED : GONE);
    return NULL;
}

/* Corruption and the end are exceptions; "not that much there" is an answer. */
static PyObject *answer(RingObject *self, enum ring_status status, bool none)
{
    if (status == RING_CORRUPT || status == RING_CLOSED)
        return refuse(self, status == RING_CORRUPT ? CORRUPT : CLOSED);
    if (status == RING_OK)
        Py_RETURN_TRUE;
    if (none)
        Py_RETURN_NONE;
    Py_RETURN_FALSE;
}

/* The ring, and `count` elements of it in bytes. The number is read first, since its __index__ may run any Python code and
 * close the queue. More than the queue holds becomes one element more than it holds: never there, never overflowing. */
static struct ring *usable_for(RingObject *self, PyObject *count, uint64_t *bytes)
{
    long long elements = PyLong_AsLongLong(count);
    if (elements == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
    }
    struct ring *r = usable(self);
    if (!r)
        return NULL;
    if (elements < 0) {
        refuse(self, BAD_COUNT);
        return NULL;
    }
    uint64_t most = r->capacity / r->quantum + 1;
    *bytes = ((uint64_t)elements < most ? (uint64_t)elements : most) * r->quantum;
    return r;
}

static bool to_mask(RingObject *self, PyObject *number, uint32_t *mask)
{
    unsigned long value = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred() || value > UINT32_MAX) {
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))
            return false;
        PyErr_Clear();
        refuse(self, BAD_COUNT);
        return false;
    }
    *mask = (uint32_t)value;
    return true;
}

/* ---- life --------------------------------------------------------------------------------------------------------- */

static void let_go(Py_buffer *parts)
{
    for (int part = 0; part < PARTS; part++)
        if (parts[part].obj)
            PyBuffer_Release(&parts[part]);
}

void ring_leave(RingObject *self)
{
    if (--self->users == 0 && !self->open)
        let_go(self->parts);
}

static int ring_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    RingObject *self = (RingObject *)object;
    static const Py_ssize_t least[PARTS] = {8, 8, 1, 4, sizeof(struct ring_control)};
    static const Py_ssize_t aligned[PARTS] = {8, 8, 1, 4, 8}; /* libfmq's own data offset is 16: fine for plain loads */
    PyObject *parts[PARTS];
    Py_buffer buffers[PARTS] = {{0}}; /* copied to `self` last: taking a buffer may run any Python code */
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
            PyErr_Format(PyExc_ValueError, "part %d of a ring: too small or misaligned", part);
            goto failed;
        }
    }
    if (!quantum || (uint64_t)buffers[DATA].len % quantum) {
        PyErr_SetString(PyExc_ValueError, "the data part of a ring is a whole number of elements");
        goto failed;
    }
    if (self->ring.quantum) { /* also after its release: a Caller has checked this ring once */
        PyErr_SetString(PyExc_TypeError, "a Ring is initialised once");
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
    self->generation = atomic_load_explicit(&fork_generation, memory_order_relaxed);
    self->open = true;
    return 0;
failed:
    let_go(buffers);
    return -1;
}

static void ring_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    let_go(((RingObject *)object)->parts); /* nobody is inside: a thread inside holds a reference */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *ring_release_parts(PyObject *object, PyObject *Py_UNUSED(none))
{
    RingObject *self = (RingObject *)object;
    if (self->open) {
        self->open = false;
        self->ring.reader_fd = self->ring.writer_fd = -1;
        /* A child of fork has the count of its parent's threads, and none of the threads. */
        bool inherited = self->generation != atomic_load_explicit(&fork_generation, memory_order_relaxed);
        if (self->users && !inherited)
            ring_end(&self->ring, true);
        else
            let_go(self->parts);
    }
    Py_RETURN_NONE;
}

static PyObject *ring_set_closed(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_close(r);
    Py_RETURN_NONE;
}

static PyObject *ring_set_ended(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_end(r, ((RingObject *)object)->users);
    Py_RETURN_NONE;
}

static PyObject *ring_closed(PyObject *object, PyObject *Py_UNUSED(none))
{
    struct ring *r = usable((RingObject *)object);
    return r ? PyBool_FromLong(ring_is_closed(r)) : NULL;
}

/* ---- reading and writing -------------------------------------------------------------------------------------------- */

static PyObject *ring_write(PyObject *object, PyObject *data)
{
    RingObject *self = (RingObject *)object;
    struct ring_span span;
    Py_buffer from;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(data, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    struct ring *r = usable(self); /* after the last call into Python: that could have closed the queue */
    if (r) {
        uint64_t bytes = (uint64_t)from.len;
        if (bytes % r->quantum) {
            refuse(self, NOT_WHOLE);
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
    struct ring *r = usable_for(self, count, &bytes);
    if (!r)
        return NULL;
    enum ring_status status = ring_begin_read(r, bytes, &span);
    if (status != RING_OK)
        return answer(self, status, true);
    PyObject *copy = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (!copy)
        return NULL;
    ring_copy_out(r, &span, (uint8_t *)PyBytes_AsString(copy));
    if (consume ? ring_commit_read(r, bytes) != RING_OK : !r->synchronized && ring_overrun(r, span.at)) {
        Py_DECREF(copy);
        Py_RETURN_NONE; /* overwritten while it was copied */
    }
    return copy;
}

static PyObject *ring_read(PyObject *object, PyObject *count) { return copy_out(object, count, true); }
static PyObject *ring_peek(PyObject *object, PyObject *count) { return copy_out(object, count, false); }

static PyObject *ring_read_into(PyObject *object, PyObject *buffer)
{
    RingObject *self = (RingObject *)object;
    struct ring_span span;
    Py_buffer into;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(buffer, &into, PyBUF_WRITABLE) < 0)
        return NULL;
    struct ring *r = usable(self);
    if (r) {
        uint64_t bytes = (uint64_t)into.len;
        if (bytes % r->quantum) {
            refuse(self, NOT_WHOLE);
        } else {
            enum ring_status status = ring_begin_read(r, bytes, &span);
            if (status == RING_OK) {
                ring_copy_out(r, &span, into.buf);
                status = ring_commit_read(r, bytes);
            }
            result = answer(self, status, false);
        }
    }
    PyBuffer_Release(&into);
    return result;
}

static PyObject *available(PyObject *object, bool reads)
{
    RingObject *self = (RingObject *)object;
    struct ring *r = usable(self);
    uint64_t readable, writable;
    if (!r)
        return NULL;
    if (ring_available(r, &readable, &writable) != RING_OK)
        return refuse(self, CORRUPT);
    return PyLong_FromUnsignedLongLong((reads ? readable : writable) / r->quantum);
}

static PyObject *ring_available_to_read(PyObject *object, PyObject *Py_UNUSED(none)) { return available(object, true); }
static PyObject *ring_available_to_write(PyObject *object, PyObject *Py_UNUSED(none)) { return available(object, false); }

/* Where the transaction lies in the data part: (offset, bytes before the wrap, bytes after it), or None. */
static PyObject *begin(PyObject *object, PyObject *count, bool reads)
{
    RingObject *self = (RingObject *)object;
    struct ring_span span;
    uint64_t bytes;
    struct ring *r = usable_for(self, count, &bytes);
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
    struct ring *r = usable_for(self, count, &bytes);
    if (!r)
        return NULL;
    if (bytes > (reads ? r->readable : r->writable))
        return refuse(self, NOT_BEGUN);
    return answer(self, reads ? ring_commit_read(r, bytes) : ring_commit_write(r, bytes), false);
}

static PyObject *ring_begin_write_at(PyObject *object, PyObject *count) { return begin(object, count, false); }
static PyObject *ring_begin_read_at(PyObject *object, PyObject *count) { return begin(object, count, true); }
static PyObject *ring_commit_write_of(PyObject *object, PyObject *count) { return commit(object, count, false); }
static PyObject *ring_commit_read_of(PyObject *object, PyObject *count) { return commit(object, count, true); }

/* ---- sleeping and waking ---------------------------------------------------------------------------------------------- */

/* arm_*(count=1, mask=0) */
static PyObject *arm(PyObject *object, PyObject *const *args, Py_ssize_t given, bool reads)
{
    RingObject *self = (RingObject *)object;
    uint64_t bytes = 0;
    uint32_t mask = 0;
    struct ring *r = given > 0 ? usable_for(self, args[0], &bytes) : usable(self);
    if (!r || (given > 1 && !to_mask(self, args[1], &mask)))
        return NULL;
    if (!given)
        bytes = r->quantum;
    if (!r->control || !r->synchronized)
        return refuse(self, FOREIGN);
    if (mask && !r->flag)
        return refuse(self, NO_FLAG);
    return PyBool_FromLong(ring_arm(r, reads, bytes, mask));
}

static PyObject *ring_arm_reader(PyObject *object, PyObject *const *args, Py_ssize_t given) { return arm(object, args, given, true); }
static PyObject *ring_arm_writer(PyObject *object, PyObject *const *args, Py_ssize_t given) { return arm(object, args, given, false); }

static PyObject *disarm(PyObject *object, bool reads)
{
    struct ring *r = usable((RingObject *)object);
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
    struct ring *r = usable((RingObject *)object);
    if (!r)
        return NULL;
    ring_clear(reads ? r->reader_fd : r->writer_fd);
    Py_RETURN_NONE;
}

static PyObject *ring_clear_reader_event(PyObject *object, PyObject *Py_UNUSED(none)) { return clear_event(object, true); }
static PyObject *ring_clear_writer_event(PyObject *object, PyObject *Py_UNUSED(none)) { return clear_event(object, false); }

/* spin_until_*(nanoseconds, count=1) */
static PyObject *spin(PyObject *object, PyObject *const *args, Py_ssize_t given, bool reads)
{
    RingObject *self = (RingObject *)object;
    uint64_t bytes = 0;
    bool there;
    long long ns = given > 0 ? PyLong_AsLongLong(args[0]) : 0; /* before the ring, as in usable_for */
    if (ns == -1 && PyErr_Occurred())
        return NULL;
    struct ring *r = given > 1 ? usable_for(self, args[1], &bytes) : usable(self);
    if (!r)
        return NULL;
    if (given < 2)
        bytes = r->quantum;
    self->users++;
    Py_BEGIN_ALLOW_THREADS
    there = ring_spin(r, reads, bytes, ring_now_ns() + (ns < 0 ? 0 : ns > 1000000000 ? 1000000000 : ns));
    Py_END_ALLOW_THREADS
    ring_leave(self);
    return usable(self) ? PyBool_FromLong(there) : NULL;
}

static PyObject *ring_spin_readable(PyObject *object, PyObject *const *args, Py_ssize_t given) { return spin(object, args, given, true); }
static PyObject *ring_spin_writable(PyObject *object, PyObject *const *args, Py_ssize_t given) { return spin(object, args, given, false); }

static struct ring *with_flag(RingObject *self)
{
    struct ring *r = usable(self);
    if (r && !r->flag) {
        refuse(self, NO_FLAG);
        return NULL;
    }
    return r;
}

static PyObject *ring_wake_flag(PyObject *object, PyObject *number)
{
    struct ring *r = with_flag((RingObject *)object);
    uint32_t mask;
    if (!r || !to_mask((RingObject *)object, number, &mask))
        return NULL;
    ring_flag_wake(r, mask);
    Py_RETURN_NONE;
}

static PyObject *ring_take_flag(PyObject *object, PyObject *number)
{
    struct ring *r = with_flag((RingObject *)object);
    uint32_t mask;
    if (!r || !to_mask((RingObject *)object, number, &mask))
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
    if (!r || !to_mask((RingObject *)object, number, &mask))
        return NULL;
    ring_expect_futex(r, mask);
    Py_RETURN_NONE;
}

/* wait_flag(mask, deadline_ns): the bits taken, 0 when the deadline has passed; a negative deadline is none at all. */
static PyObject *ring_wait_flag(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    RingObject *self = (RingObject *)object;
    uint32_t mask, taken = 0;
    int outcome;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "wait_flag(mask, deadline_ns)");
        return NULL;
    }
    long long at = PyLong_AsLongLong(args[1]); /* before the ring, as in usable_for */
    if (at == -1 && PyErr_Occurred())
        return NULL;
    struct ring *r = with_flag(self);
    if (!r || !to_mask(self, args[0], &mask))
        return NULL;
    struct timespec deadline = {.tv_sec = (time_t)(at / 1000000000), .tv_nsec = (long)(at % 1000000000)};
    self->users++;
    Py_BEGIN_ALLOW_THREADS
    outcome = ring_flag_wait(r, mask, at < 0 ? NULL : &deadline, &taken);
    Py_END_ALLOW_THREADS
    ring_leave(self);
    if ((outcome == EINTR && PyErr_CheckSignals() < 0) || !usable(self))
        return NULL;
    if (outcome && outcome != EINTR && outcome != EAGAIN && outcome != ETIMEDOUT) {
        errno = outcome;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLong(taken); /* 0: look at the clock, then wait again */
}

static PyObject *cpu(PyObject *object, bool reads, bool publish)
{
    struct ring *r = usable((RingObject *)object);
    if (!r)
        return NULL;
    if (!r->control)
        Py_RETURN_NONE;
    _Atomic uint32_t *word = reads ? &r->control->reader_cpu : &r->control->writer_cpu;
    if (publish)
        ring_publish_cpu(word);
    uint32_t number = atomic_load_explicit(word, memory_order_relaxed); /* a hint, ordered with nothing */
    if (!number)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(number - 1);
}

static PyObject *ring_reader_cpu(PyObject *object, PyObject *Py_UNUSED(none)) { return cpu(object, true, false); }
static PyObject *ring_writer_cpu(PyObject *object, PyObject *Py_UNUSED(none)) { return cpu(object, false, false); }
static PyObject *ring_publish_reader_cpu(PyObject *object, PyObject *Py_UNUSED(none)) { return cpu(object, true, true); }
static PyObject *ring_publish_writer_cpu(PyObject *object, PyObject *Py_UNUSED(none)) { return cpu(object, false, true); }

/* Two casts: the compiler is right that the types differ, and METH_FASTCALL says which one it is. */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL

static PyMethodDef ring_methods[] = { /* documented in _ring.pyi, where their types are */
    {"write", ring_write, METH_O, NULL},
    {"read", ring_read, METH_O, NULL},
    {"peek", ring_peek, METH_O, NULL},
    {"read_into", ring_read_into, METH_O, NULL},
    {"available_to_read", ring_available_to_read, METH_NOARGS, NULL},
    {"available_to_write", ring_available_to_write, METH_NOARGS, NULL},
    {"_begin_write", ring_begin_write_at, METH_O, NULL},
    {"_begin_read", ring_begin_read_at, METH_O, NULL},
    {"commit_write", ring_commit_write_of, METH_O, NULL},
    {"commit_read", ring_commit_read_of, METH_O, NULL},
    {"arm_reader", FAST(ring_arm_reader)},
    {"arm_writer", FAST(ring_arm_writer)},
    {"disarm_reader", ring_disarm_reader, METH_NOARGS, NULL},
    {"disarm_writer", ring_disarm_writer, METH_NOARGS, NULL},
    {"clear_reader_event", ring_clear_reader_event, METH_NOARGS, NULL},
    {"clear_writer_event", ring_clear_writer_event, METH_NOARGS, NULL},
    {"spin_until_readable", FAST(ring_spin_readable)},
    {"spin_until_writable", FAST(ring_spin_writable)},
    {"wake_flag", ring_wake_flag, METH_O, NULL},
    {"take_flag", ring_take_flag, METH_O, NULL},
    {"peek_flag", ring_peek_flag, METH_NOARGS, NULL},
    {"await_futex", ring_await_futex, METH_O, NULL},
    {"wait_flag", FAST(ring_wait_flag)},
    {"publish_reader_cpu", ring_publish_reader_cpu, METH_NOARGS, NULL},
    {"publish_writer_cpu", ring_publish_writer_cpu, METH_NOARGS, NULL},
    {"reader_cpu", ring_reader_cpu, METH_NOARGS, NULL},
    {"writer_cpu", ring_writer_cpu, METH_NOARGS, NULL},
    {"_closed_word", ring_closed, METH_NOARGS, NULL},
    {"_set_closed", ring_set_closed, METH_NOARGS, NULL},
    {"_set_ended", ring_set_ended, METH_NOARGS, NULL},
    {"_release", ring_release_parts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_init, ring_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {0, NULL},
};
static PyType_Spec ring_spec = {
    .name = "aionn.fmq._ring.Ring",
    .basicsize = sizeof(RingObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = ring_slots,
};

static int ring_exec(PyObject *module)
{
    static bool watching_forks;
    if (!watching_forks && pthread_atfork(NULL, NULL, child_of_fork)) {
        PyErr_SetString(PyExc_ImportError, "aionn.fmq: forks cannot be watched (pthread_atfork)");
        return -1;
    }
    watching_forks = true;
    struct module_state *state = PyModule_GetState(module);
    state->ring = PyType_FromSpec(&ring_spec);
    if (!state->ring || PyModule_AddObjectRef(module, "Ring", state->ring) < 0 || exchange_add_types(module) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "CONTROL_BYTES", sizeof(struct ring_control));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((struct module_state *)PyModule_GetState(module))->ring);
    return 0;
}

static int module_clear(PyObject *module)
{
    Py_CLEAR(((struct module_state *)PyModule_GetState(module))->ring);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, ring_exec}, {0, NULL}};
static struct PyModuleDef ring_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_ring",
    .m_doc = "Atomics, fences, futex and eventfd: the native part of aionn's queues.",
    .m_size = sizeof(struct module_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__ring(void);
PyMODINIT_FUNC PyInit__ring(void) { return PyModuleDef_Init(&ring_module); }
