/* The Python object `Ring`, as the sources of the extension share it. No other program includes this file.
 *
 * Who calls whom: _module.c makes the types from the tables of the others. All others call _ring.c, which calls none of
 * them. _flight.c, _request.c, _caller.c, _listener.c and _lane.c call _exchange.c. _caller.c calls _request.c, which calls
 * _flight.c. _lane.c calls _anticipate.c, and both call _lanes.c. */
#ifndef AIONN_FMQ_RING_OBJECT_H
#define AIONN_FMQ_RING_OBJECT_H

#include <Python.h>

#include "ring.h"
#include "spin.h"

enum part { READ, WRITTEN, DATA, FLAG, CONTROL, PARTS };

/* Mirrored in message_queue.py. */
enum refusal { CLOSED = 1, CORRUPT, GONE, FORKED, FOREIGN, BAD_COUNT, NOT_WHOLE, NOT_BEGUN, NO_FLAG };

typedef struct {
    PyObject_HEAD
    struct ring ring;
    Py_buffer parts[PARTS];
    unsigned generation; /* of forks, when this handle was made */
    unsigned users;      /* threads inside without the GIL */
    bool open;
} RingObject;

struct module_state {
    PyObject *ring, *listener, *lanes; /* these types, also if their names in the module are bound to something else */
};

/* ---- _ring.c ---- */
extern _Atomic unsigned ring_fork_generation;
bool ring_watch_forks(void); /* false if the C library refused */

/* Whether this process is a child of fork, and its parent made the handle. Relaxed: the child begins with one thread. */
static inline bool ring_inherited(const RingObject *self)
{
    return self->generation != atomic_load_explicit(&ring_fork_generation, memory_order_relaxed);
}

/* Return NULL, without an exception, for a queue that was closed here or inherited by fork. */
static inline struct ring *ring_if_usable(RingObject *self)
{
    return self->open && !ring_inherited(self) ? &self->ring : NULL;
}

struct ring *ring_usable(RingObject *self); /* as ring_if_usable, but NULL sets an exception */
struct ring *ring_usable_for(RingObject *self, PyObject *count, uint64_t *bytes);
bool ring_to_mask(RingObject *self, PyObject *number, uint32_t *mask);
PyObject *ring_refuse(RingObject *self, enum refusal code); /* sets an exception and returns NULL */
bool ring_begin_look_alone(void); /* false: another thread without a loop looks already */
void ring_end_look_alone(void);
void ring_leave(RingObject *self);                          /* ends what `users++` began, with the GIL */
int ring_init(PyObject *self, PyObject *args, PyObject *kwargs);
void ring_dealloc(PyObject *self);

/* ---- tables, each ended by a row of zeros; the methods are documented in _ring.pyi ---- */
PyObject *ring_completed(PyObject *module, PyObject *work);
PyObject *ring_wait_for(PyObject *module, PyObject *const *args, Py_ssize_t given); /* of the module */
extern PyMethodDef ring_life_methods[], ring_transfer_methods[], ring_waiting_methods[];
extern PyType_Spec caller_spec, listener_spec, lanes_spec, lane_spec;

/* Two casts: the compiler is right that the types differ, and METH_FASTCALL says which one it is. */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL

#endif
