/* `Slot`: begin and end of a model's executions, as another process reads them. layout.py says what the words mean.
 *
 * Invariants
 *     `words` points into `buffer`, which is held until `release`, so Python cannot unmap it.
 *     One execution of a model runs at a time, so each slot has one writer at a time, which holds the GIL.
 *     `since` is stored before `begun`, and the duration before `finished`. A reader that sees a count also sees the values that
 *     belong to it. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* layout.py: words of a slot. */
enum { MODEL = 0, BEGUN = 1, FINISHED = 2, SINCE = 3, ENDED = 4, HISTOGRAM = 16, BUCKETS = 90, WORDS = 128 };
enum { FIRST_OCTAVE = 12, LAST_OCTAVE = 33 };

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    _Atomic uint64_t *words; /* NULL after `release` */
} SlotObject;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t load(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_relaxed); }
static void store(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_relaxed); }
static void publish(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }

static unsigned bucket_of(uint64_t ns)
{
    if (ns >= UINT64_C(16000000000))
        return BUCKETS - 1;
    uint64_t units = ns * UINT64_C(1152921504) >> 30; /* 2^-30 s; the product fits, because ns is clamped */
    if (units < (UINT64_C(1) << FIRST_OCTAVE))
        return 0;
    unsigned octave = 63 - (unsigned)__builtin_clzll(units);
    return octave > LAST_OCTAVE ? BUCKETS - 1 : 1 + (octave - FIRST_OCTAVE) * 4 + (unsigned)(units >> (octave - 2)) - 4;
}

static void drop_memory(SlotObject *self)
{
    if (self->words) {
        self->words = NULL;
        PyBuffer_Release(&self->buffer);
    }
}

static int slot_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    SlotObject *self = (SlotObject *)object;
    PyObject *memory;
    Py_ssize_t offset;
    if ((kwargs && PyDict_Size(kwargs)) || self->words) {
        PyErr_SetString(PyExc_TypeError, "Slot(memory, offset), once");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "On", &memory, &offset) || PyObject_GetBuffer(memory, &self->buffer, PyBUF_WRITABLE) < 0)
        return -1;
    if (offset < 0 || offset > self->buffer.len - (Py_ssize_t)(WORDS * sizeof(uint64_t)) ||
        ((uintptr_t)self->buffer.buf + (uintptr_t)offset) % sizeof(uint64_t)) {
        PyBuffer_Release(&self->buffer);
        PyErr_SetString(PyExc_ValueError, "a slot is 1024 bytes of the memory, and begins at a multiple of 8");
        return -1;
    }
    self->words = (_Atomic uint64_t *)((char *)self->buffer.buf + offset);
    return 0;
}

static void slot_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    drop_memory((SlotObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *slot_begin(PyObject *object, PyObject *Py_UNUSED(none))
{
    _Atomic uint64_t *words = ((SlotObject *)object)->words;
    int64_t now = now_ns();
    if (words) {
        store(&words[SINCE], (uint64_t)now);
        publish(&words[BEGUN], load(&words[FINISHED]) + 1);
    }
    return PyLong_FromLongLong(now);
}

static PyObject *slot_end(PyObject *object, PyObject *began)
{
    _Atomic uint64_t *words = ((SlotObject *)object)->words;
    long long began_ns = PyLong_AsLongLong(began);
    if (began_ns == -1 && PyErr_Occurred())
        return NULL;
    int64_t now = now_ns(), took = now > began_ns ? now - began_ns : 0;
    if (words) {
        _Atomic uint64_t *bucket = &words[HISTOGRAM + bucket_of((uint64_t)took)];
        store(bucket, load(bucket) + 1);
        store(&words[ENDED], (uint64_t)now);
        publish(&words[FINISHED], load(&words[BEGUN]));
    }
    return PyLong_FromLongLong(took);
}

static PyObject *slot_release(PyObject *object, PyObject *Py_UNUSED(none))
{
    drop_memory((SlotObject *)object);
    Py_RETURN_NONE;
}

static PyMethodDef slot_methods[] = { /* documented in _page.pyi */
    {"begin", slot_begin, METH_NOARGS, NULL},
    {"end", slot_end, METH_O, NULL},
    {"release", slot_release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slot_slots[] = {
    {Py_tp_init, slot_init}, {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, slot_dealloc}, {Py_tp_methods, slot_methods}, {0, NULL},
};
static PyType_Spec slot_spec = {
    .name = "aionn.pages._page.Slot", .basicsize = sizeof(SlotObject), .flags = Py_TPFLAGS_DEFAULT, .slots = slot_slots,
};

static PyObject *page_bucket_of(PyObject *Py_UNUSED(module), PyObject *ns)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(ns);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(bucket_of(value));
}

static PyMethodDef page_functions[] = {{"bucket_of", page_bucket_of, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static int page_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&slot_spec);
    int failed = !type || PyModule_AddObjectRef(module, "Slot", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, page_exec}, {0, NULL}};
static struct PyModuleDef page_module = {
    PyModuleDef_HEAD_INIT, "_page", "A model's slot of a statistics page.", 0, page_functions, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__page(void);
PyMODINIT_FUNC PyInit__page(void) { return PyModuleDef_Init(&page_module); }
