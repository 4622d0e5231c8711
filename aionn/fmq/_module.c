/* The extension module `aionn.fmq._ring`: its types, made from the tables of the other sources. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "lanes_object.h"
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

/* Return the new type, which the module also has under `name`, or NULL. */
static PyObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddObjectRef(module, name, type) < 0)
        Py_CLEAR(type);
    return type;
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
    if (!(state->ring = add_type(module, "Ring", &ring_spec)) || !(state->listener = add_type(module, "Listener", &listener_spec)) ||
        !(state->lanes = add_type(module, "Lanes", &lanes_spec)))
        return -1;
    PyObject *caller = add_type(module, "Caller", &caller_spec), *lane = caller ? add_type(module, "Lane", &lane_spec) : NULL;
    Py_XDECREF(caller);
    Py_XDECREF(lane);
    if (!lane)
        return -1;
    if (PyModule_AddIntConstant(module, "SOON", SOON) < 0 || PyModule_AddIntConstant(module, "LONGEST_KNOWN", EXCHANGE_MOST) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "CONTROL_BYTES", sizeof(struct ring_control));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = PyModule_GetState(module);
    Py_VISIT(state->ring);
    Py_VISIT(state->listener);
    Py_VISIT(state->lanes);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->ring);
    Py_CLEAR(state->listener);
    Py_CLEAR(state->lanes);
    return 0;
}

static PyMethodDef module_methods[] = {{"wait_for", FAST(ring_wait_for)}, {"completed", ring_completed, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef ring_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_ring",
    .m_doc = "Atomics, fences, futex and eventfd: the native part of aionn's queues.",
    .m_size = sizeof(struct module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__ring(void);
PyMODINIT_FUNC PyInit__ring(void) { return PyModuleDef_Init(&ring_module); }
