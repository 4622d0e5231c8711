/* The extension module `aionn.pages._page`: its types, and what a reader in another process does in one step. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sched.h>
#include <time.h>

#include "../hal/burst_slot.h"
#include "../hal/sequence.h"
#include "slot_objects.h"
#include "../hal/trace_ring.h"

/* A writer that lost its CPU within a change gets it back within that many looks, about half a second. A dead writer does not. */
enum { QUICK_LOOKS = 100, LOOKS = 5000, LOOK_NS = 100000, MOST_TAKEN = 1024 };

static PyObject *page_bucket_of_ns(PyObject *Py_UNUSED(module), PyObject *ns)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(ns);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(page_bucket_of(value));
}

/* snapshot(page, slot_bytes): header and used slots, of one moment */
static PyObject *page_snapshot(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *memory, *copy;
    Py_buffer buffer;
    Py_ssize_t slot_bytes;
    bool whole = false;
    if (!PyArg_ParseTuple(args, "On", &memory, &slot_bytes))
        return NULL;
    const page_word *page = slots_memory(memory, 0, PAGE_HEADER_BYTES, PyBUF_SIMPLE, &buffer);
    if (!page)
        return NULL;
    uint64_t most = slot_bytes < 8 ? 0 : (uint64_t)(buffer.len - PAGE_HEADER_BYTES) / (uint64_t)slot_bytes;
    copy = PyBytes_FromStringAndSize(NULL, buffer.len);
    uint64_t *words = copy ? (uint64_t *)(void *)PyBytes_AsString(copy) : NULL;
    size_t bytes = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int look = 0; words && !whole && look < LOOKS; look++) {
        uint64_t before = sequence_now(&page[PAGE_SEQUENCE]), used = page_load(&page[PAGE_SLOTS_USED]);
        bytes = PAGE_HEADER_BYTES + (size_t)(used < most ? used : most) * (size_t)slot_bytes;
        sequence_copy(words, page, bytes / 8);
        whole = sequence_same(&page[PAGE_SEQUENCE], before);
        if (!whole && look < QUICK_LOOKS)
            sched_yield();
        else if (!whole)
            nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    if (!words || whole) {
        PyObject *cut = copy ? PySequence_GetSlice(copy, 0, (Py_ssize_t)bytes) : NULL;
        Py_XDECREF(copy);
        return cut;
    }
    Py_DECREF(copy);
    Py_RETURN_NONE;
}

/* take_records(ring, cursor) */
static PyObject *page_take_records(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *memory;
    Py_buffer buffer;
    unsigned long long given;
    if (!PyArg_ParseTuple(args, "OK", &memory, &given))
        return NULL;
    const struct trace_memory *ring = slots_memory(memory, 0, sizeof(struct trace_memory), PyBUF_SIMPLE, &buffer);
    if (!ring)
        return NULL;
    uint64_t cursor = given, lost = 0, records[MOST_TAKEN][TRACE_RECORD_WORDS];
    Py_ssize_t taken = 0;
    while (taken < MOST_TAKEN && trace_ring_take(ring, &cursor, &lost, records[taken]))
        taken++;
    PyBuffer_Release(&buffer);
    return Py_BuildValue("y#KK", (const char *)records, taken * (Py_ssize_t)sizeof records[0], (unsigned long long)cursor,
                         (unsigned long long)lost);
}

static PyMethodDef page_functions[] = { /* documented in _page.pyi */
    {"bucket_of", page_bucket_of_ns, METH_O, NULL},
    {"leave_page", slots_leave_page, METH_NOARGS, NULL},
    {"snapshot", page_snapshot, METH_VARARGS, NULL},
    {"take_records", page_take_records, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static const struct { const char *name; long value; } CONSTANTS[] = { /* which layout.py repeats; a test compares */
    {"PAGE_PID", PAGE_PID}, {"PAGE_START", PAGE_START}, {"PAGE_TRACE_UNTIL", PAGE_TRACE_UNTIL}, {"PAGE_SEQUENCE", PAGE_SEQUENCE},
    {"PAGE_SLOTS_USED", PAGE_SLOTS_USED}, {"PAGE_HEADER_BYTES", PAGE_HEADER_BYTES}, {"SLOT_SENT", SLOT_SENT},
    {"SLOT_ANSWERED", SLOT_ANSWERED}, {"SLOT_COMPUTED", SLOT_COMPUTED}, {"SLOT_FAILED", SLOT_FAILED},
    {"SLOT_COPIED_BYTES", SLOT_COPIED_BYTES}, {"SLOT_DRIVER_BUSY_NS", SLOT_DRIVER_BUSY_NS}, {"SLOT_LOST", SLOT_LOST},
    {"SLOT_DROPPED", SLOT_DROPPED}, {"SLOT_CONNECTIONS", SLOT_CONNECTIONS}, {"SLOT_CALL_TIMES", SLOT_CALL_TIMES},
    {"SLOT_SERVICE_TIMES", SLOT_SERVICE_TIMES},
    {"SLOT_AGES", SLOT_AGES}, {"SLOT_COUNTERS_END", SLOT_COUNTERS_END}, {"SLOT_WORDS", SLOT_WORDS}, {"TRACE_RECORDS", TRACE_RECORDS},
    {"SLOT_NUMBER", SLOT_NUMBER},
    {"TRACE_BYTES", sizeof(struct trace_memory)}, {"TRACE_SETTLED", TRACE_SETTLED},
};

static int page_exec(PyObject *module)
{
    static const struct { const char *name; PyType_Spec *spec; } TYPES[] = {
        {"Slot", &slot_spec}, {"BurstSlot", &burst_slot_spec}, {"Trace", &trace_spec}};
    if (!slots_watch_forks()) {
        PyErr_SetString(PyExc_ImportError,
                        "aionn.pages cannot watch for forks, because pthread_atfork failed; free some memory and try again");
        return -1;
    }
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++) {
        PyObject *type = PyType_FromSpec(TYPES[i].spec);
        int failed = !type || PyModule_AddObjectRef(module, TYPES[i].name, type) < 0;
        Py_XDECREF(type);
        if (failed)
            return -1;
    }
    for (size_t i = 0; i < sizeof CONSTANTS / sizeof *CONSTANTS; i++)
        if (PyModule_AddIntConstant(module, CONSTANTS[i].name, CONSTANTS[i].value) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, page_exec}, {0, NULL}};
static struct PyModuleDef page_module = {
    PyModuleDef_HEAD_INIT, "_page", "Slots of a statistics page, and rings of trace records.", 0, page_functions, module_slots, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__page(void);
PyMODINIT_FUNC PyInit__page(void) { return PyModuleDef_Init(&page_module); }
