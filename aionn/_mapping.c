/* `Mapping`: a mapped descriptor. Python's `mmap` keeps a duplicate of each descriptor; this object keeps none.
 *
 * The caller has checked that the descriptor has all these bytes.
 *
 * Invariant
 *     The memory is unmapped by `close` or with the object, and never while a buffer of it is held.
 *
 * `give_back` returns pages of private memory to the system. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    void *bytes; /* NULL: unmapped */
    Py_ssize_t length, held;
    int writable;
} MappingObject;

/* Mapping(fd, size_bytes, writable, private=False, offset=0) */
static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    int fd, writable, private = 0;
    Py_ssize_t length;
    long long offset = 0;
    if (!PyArg_ParseTuple(args, "inp|pL", &fd, &length, &writable, &private, &offset))
        return NULL;
    MappingObject *self = (MappingObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    void *bytes = mmap(NULL, length > 0 ? (size_t)length : 0, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                       private ? MAP_PRIVATE : MAP_SHARED, fd, offset);
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

static void unmap(MappingObject *self)
{
    void *bytes = self->bytes;
    self->bytes = NULL; /* first, because other threads run meanwhile */
    if (!bytes)
        return;
    Py_BEGIN_ALLOW_THREADS /* to give back a large memory takes milliseconds */
    munmap(bytes, (size_t)self->length);
    Py_END_ALLOW_THREADS
}

static void mapping_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    unmap((MappingObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int mapping_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    MappingObject *self = (MappingObject *)object;
    if (!self->bytes) {
        PyErr_SetString(PyExc_ValueError, "this memory has been unmapped");
        view->obj = NULL;
        return -1;
    }
    int failed = PyBuffer_FillInfo(view, object, self->bytes, self->length, !self->writable, flags);
    self->held += !failed;
    return failed;
}

static void mapping_releasebuffer(PyObject *object, Py_buffer *Py_UNUSED(view)) { ((MappingObject *)object)->held--; }

static PyObject *mapping_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    MappingObject *self = (MappingObject *)object;
    if (self->held) {
        PyErr_SetString(PyExc_BufferError, "this memory is in use; release its views first");
        return NULL;
    }
    unmap(self);
    Py_RETURN_NONE;
}

/* give_back(buffer): whole pages within a writable buffer. Pages at its ends that it shares with other memory stay. */
static PyObject *give_back(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_WRITABLE))
        return NULL;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)view.buf + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)view.buf + (uintptr_t)view.len) / page * page;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
    if (begin < end)
        failed = madvise((void *)begin, end - begin, MADV_DONTNEED);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (failed)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef mapping_methods[] = {{"close", mapping_close, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}}; /* documented in _mapping.pyi */
static PyType_Slot mapping_slots[] = {
    {Py_tp_new, mapping_new}, {Py_tp_dealloc, mapping_dealloc}, {Py_tp_methods, mapping_methods},
    {Py_bf_getbuffer, mapping_getbuffer}, {Py_bf_releasebuffer, mapping_releasebuffer}, {0, NULL},
};
static PyType_Spec mapping_spec = {
    .name = "aionn._mapping.Mapping", .basicsize = sizeof(MappingObject), .flags = Py_TPFLAGS_DEFAULT, .slots = mapping_slots};

static int mapping_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&mapping_spec);
    int failed = !type || PyModule_AddObjectRef(module, "Mapping", type) < 0;
    Py_XDECREF(type);
    return -failed;
}

static PyMethodDef module_methods[] = {{"give_back", give_back, METH_O, NULL}, {NULL, NULL, 0, NULL}}; /* documented in _mapping.pyi */
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, mapping_exec}, {0, NULL}};
static struct PyModuleDef mapping_module = {
    PyModuleDef_HEAD_INIT, "_mapping", "Mapped memory without a descriptor.", 0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__mapping(void);
PyMODINIT_FUNC PyInit__mapping(void) { return PyModuleDef_Init(&mapping_module); }
