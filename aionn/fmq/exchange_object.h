/* The Python objects `Caller` and `Listener`: exchange.h for Python. One C call replaces a dozen calls of a burst's end.
 *
 * For a packet whose body is known, they do what the general path does. For any other packet they do nothing. The caller
 * takes the general path then, which also finds out what is wrong (closed, corrupted, forked, no room). So nothing here
 * refuses.
 *
 * Invariants
 *     Each entry of `table` is the body in the `bytes` object that is its `owner`. The owners and the values are held.
 *     Both queues are synchronized, of 24-byte elements, and held. _ring.c says what that means for their mappings.
 *     Only the holder of the GIL uses these objects. Values never refer back to them, since the garbage collector does not
 *     visit them. */
#ifndef AIONN_FMQ_EXCHANGE_OBJECT_H
#define AIONN_FMQ_EXCHANGE_OBJECT_H

#include <Python.h>

#include "exchange.h"
#include "ring_object.h"

/* Looking begins with the GIL held, because to release and take it costs a tenth of a quick peer's answer. Other threads that
 * want the GIL wait no longer than this. */
#define HOLD_NS 5000

typedef struct {
    PyObject_HEAD
    RingObject *requests, *results;
    struct exchange_table table;
} ExchangeObject;

/* ---- _exchange.c ---- */
PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
void exchange_dealloc(PyObject *object);
PyObject *exchange_forget(PyObject *object, PyObject *none);
PyObject *exchange_remember(PyObject *object, PyObject *const *args, Py_ssize_t given);
bool exchange_look(ExchangeObject *self, RingObject *queue, int64_t began_ns, int64_t budget_ns);
bool exchange_numbers(PyObject *const *args, Py_ssize_t count, long long *numbers);

/* Return the value of a known body, held for the caller. */
static inline PyObject *exchange_value(ExchangeObject *self, int known)
{
    PyObject *value = self->table.known[known].value;
    Py_INCREF(value);
    return value;
}

#endif
