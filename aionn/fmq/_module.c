/* The extension module `aionn.fmq._ring`: its types, made from the tables of the other sources. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ring_object.h"

#define MOST_METHODS 40

/* A type has one table of methods, and keeps a pointer to it. */
static PyMethodDef ring_methods[MOST_METHODS + 1];

static bool join_methods(void)
{
    const PyMethodDef *tables[] = {ring_life_methods, ring_transfer_methods, ring_waiting_methods};
    unsigned count = 0;
    for (unsigned table = 0; table < sizeof tables / sizeof *tables; table++)
        for (const PyMethodDef *method = tables[table]; method->ml_name; method++) {
            if (count == MOST_METHODS)
                return false;
            ring_methods[count++] = *method;
        }
    return true;
}

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

static int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int added = type ? PyModule_AddObjectRef(module, name, type) : -1;
    Py_XDECREF(type);
    return added;
}

static int module_exec(PyObject *module)
{
    if (!ring_watch_forks()) {
        PyErr_SetString(PyExc_ImportError,
                        "aionn.fmq cannot watch for forks, because pthread_atfork failed; free some memory and try again");
        return -1;
    }
    if (!join_methods()) {
        PyErr_SetString(PyExc_SystemError, "Ring has more methods than MOST_METHODS in _module.c");
        return -1;
    }
    struct module_state *state = PyModule_GetState(module);
    state->ring = PyType_FromSpec(&ring_spec);
    if (!state->ring || PyModule_AddObjectRef(module, "Ring", state->ring) < 0 || add_type(module, "Caller", &caller_spec) < 0 ||
        add_type(module, "Listener", &listener_spec) < 0)
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

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
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
