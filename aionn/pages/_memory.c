/* `Memory`: a mapped memfd. Python's `mmap` would keep a duplicate of each descriptor, in children of fork too.
 *
 * Invariant
 *     The memory is unmapped by `close` or with the object, and never while a buffer of it is held. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sys/mman.h>

#include "slot_objects.h"

typedef struct {
    PyObject_HEAD
    void *bytes; /* NULL: unmapped */
    Py_ssize_t length, held;
    int writable;
} MemoryObject;

/* Memory(fd, bytes, writable) */
static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    int fd, writable;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "inp", &fd, &length, &writable))
        return NULL;
    MemoryObject *self = (MemoryObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    void *bytes = mmap(NULL, length > 0 ? (size_t)length : 0, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->bytes = bytes;
    self->length = length;
    self->writable = writable;
    return (PyObject *)self;
}

static void unmap(MemoryObject *self)
{
    if (self->bytes)
        munmap(self->bytes, (size_t)self->length);
    self->bytes = NULL;
}

static void memory_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    unmap((MemoryObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int memory_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    MemoryObject *self = (MemoryObject *)object;
    if (!self->bytes) {
        PyErr_SetString(PyExc_ValueError, "this memory has been unmapped");
        view->obj = NULL;
        return -1;
    }
    int failed = PyBuffer_FillInfo(view, object, self->bytes, self->length, !self->writable, flags);
    self->held += !failed;
    return failed;
}

static void memory_releasebuffer(PyObject *object, Py_buffer *Py_UNUSED(view)) { ((MemoryObject *)object)->held--; }

static PyObject *memory_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    MemoryObject *self = (MemoryObject *)object;
    if (self->held) {
        PyErr_SetString(PyExc_BufferError, "this memory is in use; release its views first");
        return NULL;
    }
    unmap(self);
    Py_RETURN_NONE;
}

static PyMethodDef memory_methods[] = {{"close", memory_close, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}}; /* documented in _page.pyi */
static PyType_Slot memory_slots[] = {
    {Py_tp_new, memory_new}, {Py_tp_dealloc, memory_dealloc}, {Py_tp_methods, memory_methods},
    {Py_bf_getbuffer, memory_getbuffer}, {Py_bf_releasebuffer, memory_releasebuffer}, {0, NULL},
};
PyType_Spec memory_spec = {
    .name = "aionn.pages._page.Memory", .basicsize = sizeof(MemoryObject), .flags = Py_TPFLAGS_DEFAULT, .slots = memory_slots};
