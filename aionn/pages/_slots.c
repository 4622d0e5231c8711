/* `Slot`, `BurstSlot` and `Trace`: what native code counts into, as Python holds it. layout.py and app_layout.py say what the words mean.
 *
 * Invariants
 *     A buffer is held until its object is freed, so Python cannot unmap what a struct of words.h points to.
 *     `live` has every object of this process. A child of fork turns them all off before it runs any other code.
 *     All methods run with the GIL. A driver's lane may use the exported struct without it. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "../hal/burst_slot.h"
#include "../hal/model_slot.h"
#include "../hal/sequence.h"
#include "slot_objects.h"
#include "../hal/trace_ring.h"

typedef struct slot_object {
    PyObject_HEAD
    struct slot_object *next, **at; /* in `live` */
    struct page_slot slot;          /* exported; `traced` is `&ring`, or `&trace->ring`, or NULL */
    struct trace_ring ring;
    Py_buffer memory;           /* of the page; `obj` is NULL without one */
    struct slot_object *trace;  /* whose ring this slot uses, held */
    struct slot_object *parent; /* BurstSlot: which gets the counts at the end, or when another parent follows; held */
    page_word *sequence;        /* BurstSlot in a page: the page's */
    page_word own[];            /* BurstSlot: without a page its words, in a page what it has counted for earlier parents */
} SlotObject;

static SlotObject *live;

static void child_of_fork(void)
{
    for (SlotObject *object = live; object; object = object->next) {
        atomic_store_explicit(&object->slot.words, NULL, memory_order_relaxed);
        atomic_store_explicit(&object->ring.page, NULL, memory_order_relaxed);
        object->sequence = NULL;
        trace_ring_close(&object->ring); /* two system calls that are safe here; the parent's mapping and descriptor stay */
    }
}

bool slots_watch_forks(void)
{
    static bool watching;
    watching = watching || !pthread_atfork(NULL, NULL, child_of_fork);
    return watching;
}

void *slots_memory(PyObject *memory, Py_ssize_t offset, Py_ssize_t bytes, int flags, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(memory, buffer, flags) < 0)
        return NULL;
    if (offset < 0 || offset > buffer->len - bytes || ((uintptr_t)buffer->buf + (uintptr_t)offset) % sizeof(page_word)) {
        PyBuffer_Release(buffer);
        PyErr_Format(PyExc_ValueError, "expected %zd bytes of the memory from a multiple of 8 on; it has %zd", bytes, buffer->len);
        return NULL;
    }
    return (char *)buffer->buf + offset;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- life ------------------------------------------------------------------------------------------------------------ */

static SlotObject *slot_alloc(PyTypeObject *type)
{
    SlotObject *self = (SlotObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    self->slot.magic = PAGE_SLOT_MAGIC;
    self->next = live;
    self->at = &live;
    if (live)
        live->at = &self->next;
    live = self;
    return self;
}

/* Move the counts to the parent, except for `in_flight` of the requests that were sent. `own` remembers what has moved. */
static void move_counts(SlotObject *self, page_word *words, uint64_t in_flight)
{
    page_word *parents = self->parent ? page_words(&self->parent->slot) : NULL;
    for (unsigned i = SLOT_SENT; i < SLOT_WORDS; i++) {
        uint64_t moved = page_load(&words[i]) - (i == SLOT_SENT ? in_flight : 0);
        page_add(&self->own[i], moved);
        page_store(&words[i], page_load(&words[i]) - moved);
        if (parents)
            page_add(&parents[i], moved);
    }
}

/* Leave the page. Its room is free from now on; the counts go to the parent, and stay here too.
 * With `closing`, the page itself ends: the words stay as they are, for a reader that still maps them. */
static void leave_page(SlotObject *self, bool closing)
{
    page_word *words = page_words(&self->slot);
    if (!words || !self->sequence)
        return;
    if (closing) {
        for (unsigned i = 0; i < SLOT_WORDS; i++)
            page_store(&self->own[i], (i < SLOT_SENT ? 0 : page_load(&self->own[i])) + page_load(&words[i]));
    } else {
        sequence_begin(self->sequence);
        move_counts(self, words, 0);
        for (unsigned i = 0; i < SLOT_WORDS; i++) {
            if (i < SLOT_SENT)
                page_store(&self->own[i], page_load(&words[i]));
            page_store(&words[i], 0);
        }
        sequence_end(self->sequence);
    }
    atomic_store_explicit(&self->slot.words, self->own, memory_order_relaxed);
    self->sequence = NULL;
    PyBuffer_Release(&self->memory); /* its writers hold the GIL, so none is inside */
}

PyObject *slots_leave_page(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    for (SlotObject *object = live; object; object = object->next)
        leave_page(object, true);
    Py_RETURN_NONE;
}

static void slot_dealloc(PyObject *object)
{
    SlotObject *self = (SlotObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    leave_page(self, false);
    *self->at = self->next;
    if (self->next)
        self->next->at = self->at;
    trace_ring_close(&self->ring);
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    Py_XDECREF((PyObject *)self->trace);
    Py_XDECREF((PyObject *)self->parent);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Trace(page) */
static PyObject *trace_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *memory;
    if (!PyArg_ParseTuple(args, "O", &memory))
        return NULL;
    SlotObject *self = slot_alloc(type);
    page_word *page = self ? slots_memory(memory, 0, PAGE_HEADER_BYTES, PyBUF_WRITABLE, &self->memory) : NULL;
    if (!page) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->slot.traced = &self->ring;
    atomic_store_explicit(&self->ring.page, page, memory_order_relaxed);
    return (PyObject *)self;
}

/* Whether `trace` is None, or a Trace. A Trace exports no buffer, so its type is recognised by its destructor and lack of words. */
static bool use_trace(SlotObject *self, PyObject *trace)
{
    if (trace == Py_None)
        return true;
    if (PyType_GetSlot(Py_TYPE(trace), Py_tp_new) != (void *)trace_new) {
        PyErr_SetString(PyExc_TypeError, "expected a Trace, or None");
        return false;
    }
    Py_INCREF(trace);
    self->trace = (SlotObject *)trace;
    self->slot.traced = &self->trace->ring;
    return true;
}

/* Slot(memory, offset, trace=None) */
static PyObject *slot_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *memory, *trace = Py_None;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "On|O", &memory, &offset, &trace))
        return NULL;
    SlotObject *self = slot_alloc(type);
    page_word *words =
        self && use_trace(self, trace) ? slots_memory(memory, offset, MODEL_WORDS * 8, PyBUF_WRITABLE, &self->memory) : NULL;
    if (!words) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    atomic_store_explicit(&self->slot.words, words, memory_order_relaxed);
    return (PyObject *)self;
}

static PyObject *burst_slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

static bool is_burst_slot(PyObject *object)
{
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)burst_slot_new)
        return true;
    PyErr_SetString(PyExc_TypeError, "expected a BurstSlot");
    return false;
}

/* BurstSlot(trace=None, page=None, offset=0, parent=None) */
static PyObject *burst_slot_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *memory = Py_None, *trace = Py_None, *parent = Py_None;
    Py_ssize_t offset = 0;
    if (!PyArg_ParseTuple(args, "|OOnO", &trace, &memory, &offset, &parent) || (parent != Py_None && !is_burst_slot(parent)))
        return NULL;
    SlotObject *self = slot_alloc(type);
    page_word *words = self && use_trace(self, trace) ? self->own : NULL;
    if (words && memory != Py_None) {
        words = slots_memory(memory, offset, SLOT_WORDS * 8, PyBUF_WRITABLE, &self->memory);
        if (words && offset < PAGE_HEADER_BYTES) {
            PyErr_SetString(PyExc_ValueError, "a slot lies behind the page's header");
            words = NULL;
        }
    }
    if (!words) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    if (parent != Py_None) {
        Py_INCREF(parent);
        self->parent = (SlotObject *)parent;
    }
    if (self->memory.obj)
        self->sequence = (page_word *)self->memory.buf + PAGE_SEQUENCE;
    atomic_store_explicit(&self->slot.words, words, memory_order_relaxed);
    return (PyObject *)self;
}

static int slot_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    /* Read-only for Python. Native code that knows the struct writes through it. */
    return PyBuffer_FillInfo(view, object, &((SlotObject *)object)->slot, sizeof(struct page_slot), 1, flags);
}

/* ---- Trace ------------------------------------------------------------------------------------------------------------ */

static bool to_numbers(PyObject *const *args, Py_ssize_t count, unsigned long long *numbers)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (numbers[i] == (unsigned long long)-1 && PyErr_Occurred())
            return false;
    }
    return true;
}

/* note(kind, burst, identity, at_ns, first, second) */
static PyObject *trace_note(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    SlotObject *self = (SlotObject *)object;
    unsigned long long number[6];
    if (given != 6) {
        PyErr_SetString(PyExc_TypeError, "note(kind, burst, identity, at_ns, first, second)");
        return NULL;
    }
    if (!to_numbers(args, 6, number))
        return NULL;
    slot_trace(&self->slot, (enum trace_kind)number[0], number[1], number[2], (int64_t)number[3], number[4], number[5]);
    Py_RETURN_NONE;
}

static PyObject *trace_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    SlotObject *self = (SlotObject *)object;
    atomic_store_explicit(&self->ring.page, NULL, memory_order_relaxed);
    trace_ring_close(&self->ring);
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    Py_RETURN_NONE;
}

static PyMethodDef trace_methods[] = { /* documented in _page.pyi */
    {"note", FAST(trace_note)},
    {"close", trace_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot trace_slots[] = {
    {Py_tp_new, trace_new}, {Py_tp_dealloc, slot_dealloc}, {Py_tp_methods, trace_methods}, {0, NULL},
};
PyType_Spec trace_spec = {
    .name = "aionn.pages._page.Trace", .basicsize = sizeof(SlotObject), .flags = Py_TPFLAGS_DEFAULT, .slots = trace_slots};

/* ---- Slot: a driver's ------------------------------------------------------------------------------------------------- */

static PyObject *slot_begin(PyObject *object, PyObject *Py_UNUSED(none))
{
    int64_t now = now_ns();
    model_slot_begin(&((SlotObject *)object)->slot, now);
    return PyLong_FromLongLong(now);
}

static PyObject *slot_end(PyObject *object, PyObject *began)
{
    long long began_ns = PyLong_AsLongLong(began);
    if (began_ns == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLongLong(model_slot_end(&((SlotObject *)object)->slot, began_ns, now_ns()));
}

static PyObject *slot_drop(PyObject *object, PyObject *Py_UNUSED(none))
{
    model_slot_drop(&((SlotObject *)object)->slot);
    Py_RETURN_NONE;
}

static PyObject *slot_release(PyObject *object, PyObject *Py_UNUSED(none))
{
    atomic_store_explicit(&((SlotObject *)object)->slot.words, NULL, memory_order_relaxed);
    Py_RETURN_NONE;
}

static PyMethodDef slot_methods[] = {
    {"begin", slot_begin, METH_NOARGS, NULL},
    {"end", slot_end, METH_O, NULL},
    {"drop", slot_drop, METH_NOARGS, NULL},
    {"release", slot_release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slot_slots[] = {
    {Py_tp_new, slot_new}, {Py_tp_dealloc, slot_dealloc}, {Py_tp_methods, slot_methods}, {Py_bf_getbuffer, slot_getbuffer}, {0, NULL},
};
PyType_Spec slot_spec = {
    .name = "aionn.pages._page.Slot", .basicsize = sizeof(SlotObject), .flags = Py_TPFLAGS_DEFAULT, .slots = slot_slots};

/* ---- BurstSlot: an app's ---------------------------------------------------------------------------------------------- */

static bool is_counter(unsigned long long counter)
{
    if (counter >= SLOT_SENT && counter < SLOT_COUNTERS_END)
        return true;
    PyErr_Format(PyExc_ValueError, "counter %llu: expected %d to %d", counter, (int)SLOT_SENT, (int)SLOT_COUNTERS_END - 1);
    return false;
}

/* add(counter, more) */
static PyObject *burst_slot_add(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    unsigned long long number[2];
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "add(counter, more)");
        return NULL;
    }
    if (!to_numbers(args, 2, number) || !is_counter(number[0]))
        return NULL;
    slot_add(&((SlotObject *)object)->slot, (unsigned)number[0], number[1]);
    Py_RETURN_NONE;
}

/* computed(copied_bytes): count one usual execution */
static PyObject *burst_slot_computed(PyObject *object, PyObject *copied)
{
    unsigned long long bytes;
    if (!to_numbers(&copied, 1, &bytes))
        return NULL;
    slot_add(&((SlotObject *)object)->slot, SLOT_COMPUTED, 1);
    slot_add(&((SlotObject *)object)->slot, SLOT_COPIED_BYTES, bytes);
    Py_RETURN_NONE;
}

/* get(word) */
static PyObject *burst_slot_get(PyObject *object, PyObject *word)
{
    SlotObject *self = (SlotObject *)object;
    unsigned long long number;
    if (!to_numbers(&word, 1, &number))
        return NULL;
    if (number >= SLOT_WORDS)
        return PyErr_Format(PyExc_ValueError, "word %llu: expected 0 to %d", number, (int)SLOT_WORDS - 1);
    page_word *words = page_words(&self->slot);
    bool moved = words && words != self->own && number >= SLOT_SENT; /* perhaps, to an earlier parent */
    return PyLong_FromUnsignedLongLong(page_load(&(words ? words : self->own)[number]) + (moved ? page_load(&self->own[number]) : 0));
}

/* follow(parent): the counts so far go to the parent before */
static PyObject *burst_slot_follow(PyObject *object, PyObject *parent)
{
    SlotObject *self = (SlotObject *)object, *before = self->parent;
    if (!is_burst_slot(parent))
        return NULL;
    page_word *words = page_words(&self->slot);
    if (words && self->sequence && before && (PyObject *)before != parent) {
        uint64_t sent = page_load(&words[SLOT_SENT]), over = page_load(&words[SLOT_ANSWERED]) + page_load(&words[SLOT_LOST]);
        sequence_begin(self->sequence);
        move_counts(self, words, sent > over ? sent - over : 0);
        sequence_end(self->sequence);
    }
    Py_INCREF(parent);
    self->parent = (SlotObject *)parent;
    Py_XDECREF((PyObject *)before);
    Py_RETURN_NONE;
}

/* took(histogram, ns): count one duration. `histogram` is its first word. */
static PyObject *burst_slot_took(PyObject *object, PyObject *args)
{
    unsigned int histogram;
    long long ns;
    if (!PyArg_ParseTuple(args, "IL", &histogram, &ns))
        return NULL;
    if (histogram != SLOT_CALL_TIMES && histogram != SLOT_SERVICE_TIMES && histogram != SLOT_AGES)
        return PyErr_Format(PyExc_ValueError, "word %u: expected the first word of a histogram", histogram);
    slot_add(&((SlotObject *)object)->slot, histogram + page_bucket_of(page_ns(ns)), 1);
    Py_RETURN_NONE;
}

/* answered(call_ns, service_ns) */
static PyObject *burst_slot_answered(PyObject *object, PyObject *args)
{
    long long call_ns, service_ns;
    if (!PyArg_ParseTuple(args, "LL", &call_ns, &service_ns))
        return NULL;
    slot_answered(&((SlotObject *)object)->slot, call_ns, service_ns);
    Py_RETURN_NONE;
}

/* describe(word, content): store text or numbers below the counters, as one step */
static PyObject *burst_slot_describe(PyObject *object, PyObject *args)
{
    SlotObject *self = (SlotObject *)object;
    Py_ssize_t word;
    Py_buffer content;
    if (!PyArg_ParseTuple(args, "ny*", &word, &content))
        return NULL;
    bool fits = word >= 0 && content.len % 8 == 0 && word <= SLOT_SENT - content.len / 8;
    page_word *words = page_words(&self->slot);
    if (fits && words) {
        if (self->sequence)
            sequence_begin(self->sequence);
        for (Py_ssize_t i = 0; i < content.len / 8; i++) {
            uint64_t value;
            memcpy(&value, (const char *)content.buf + 8 * i, 8);
            page_store(&words[word + i], value);
        }
        if (self->sequence)
            sequence_end(self->sequence);
    }
    PyBuffer_Release(&content);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a description is whole words, and ends before the counters");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *burst_slot_release(PyObject *object, PyObject *Py_UNUSED(none))
{
    leave_page((SlotObject *)object, false);
    Py_RETURN_NONE;
}

/* become_sum_of(slots) */
static PyObject *burst_slot_become_sum_of(PyObject *object, PyObject *slots)
{
    page_word *words = page_words(&((SlotObject *)object)->slot);
    uint64_t sums[SLOT_WORDS] = {0};
    Py_ssize_t count = PyList_Size(slots);
    for (Py_ssize_t s = 0; s < count; s++) {
        PyObject *other = PyList_GetItem(slots, s);
        if (!is_burst_slot(other))
            return NULL;
        page_word *theirs = page_words(&((SlotObject *)other)->slot);
        for (unsigned i = SLOT_SENT; theirs && i < SLOT_WORDS; i++)
            sums[i] += page_load(&theirs[i]);
    }
    if (count < 0)
        return NULL;
    for (unsigned i = SLOT_WORDS; words && i-- > SLOT_SENT;) /* the durations before their number */
        page_store(&words[i], sums[i]);
    Py_RETURN_NONE;
}

static PyMethodDef burst_slot_methods[] = {
    {"add", FAST(burst_slot_add)},
    {"get", burst_slot_get, METH_O, NULL},
    {"answered", burst_slot_answered, METH_VARARGS, NULL},
    {"computed", burst_slot_computed, METH_O, NULL},
    {"follow", burst_slot_follow, METH_O, NULL},
    {"took", burst_slot_took, METH_VARARGS, NULL},
    {"describe", burst_slot_describe, METH_VARARGS, NULL},
    {"release", burst_slot_release, METH_NOARGS, NULL},
    {"become_sum_of", burst_slot_become_sum_of, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot burst_slot_slots[] = {
    {Py_tp_new, burst_slot_new}, {Py_tp_dealloc, slot_dealloc}, {Py_tp_methods, burst_slot_methods},
    {Py_bf_getbuffer, slot_getbuffer}, {0, NULL},
};
PyType_Spec burst_slot_spec = {
    .name = "aionn.pages._page.BurstSlot", .basicsize = sizeof(SlotObject) + SLOT_WORDS * sizeof(page_word), .flags = Py_TPFLAGS_DEFAULT,
    .slots = burst_slot_slots};
