/* `Ring` as the sources of the extension share it: _ring.c makes it, _exchange.c holds two. Not for others. */
#ifndef AIONN_FMQ_RING_OBJECT_H
#define AIONN_FMQ_RING_OBJECT_H

#include <Python.h>

#include "ring.h"
#include "spin.h"

enum part { READ, WRITTEN, DATA, FLAG, CONTROL, PARTS };

typedef struct {
    PyObject_HEAD
    struct ring ring;
    Py_buffer parts[PARTS];
    unsigned generation; /* of forks, when this handle was made */
    unsigned users;      /* threads inside without the GIL */
    bool open;
} RingObject;

struct module_state {
    PyObject *ring; /* the type `Ring`, whatever stands under its name in the module */
};

struct ring *ring_if_usable(RingObject *self); /* NULL: closed here, or inherited by fork; no exception is set */
void ring_leave(RingObject *self);             /* ends what `users++` began, with the GIL */
int exchange_add_types(PyObject *module);

#endif
