/* The Python objects of `aionn.pages._page`, as the sources of the extension share them. _page.c makes the module from
 * _slots.c. */
#ifndef AIONN_PAGES_SLOT_OBJECTS_H
#define AIONN_PAGES_SLOT_OBJECTS_H

#include <Python.h>

#include <stdbool.h>

PyObject *slots_leave_page(PyObject *module, PyObject *none); /* all that are on the app's page */
bool slots_watch_forks(void); /* false if the C library refused */

/* Take a buffer of whole, aligned words that has at least `bytes` from `offset` on. Sets an exception and returns NULL if it has not. */
void *slots_memory(PyObject *memory, Py_ssize_t offset, Py_ssize_t bytes, int flags, Py_buffer *buffer);

extern PyType_Spec trace_spec, slot_spec, burst_slot_spec;

/* Two casts: the compiler is right that the types differ, and METH_FASTCALL says which one it is. */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL

#endif
