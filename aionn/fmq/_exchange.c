/* `Caller` and `Listener`: exchange.h for Python. One C call replaces a dozen calls of a burst's end for each round trip.
 *
 * For a packet whose body is known, they do what the general path does. For any other packet they do nothing. The caller
 * takes the general path then, which also finds out what is wrong (closed, corrupted, forked, no room). So nothing here
 * refuses.
 *
 * Invariants
 *     Each entry of `table` is the body in the `bytes` object beside it, which is held. `values` are held too.
 *     Both queues are synchronized, of 24-byte elements, and held. _ring.c says what that means for their mappings.
 *     Only one thread uses these objects, the event loop's. Values never refer back to them, since the garbage collector
 *     does not visit them. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "exchange.h"
#include "ring_object.h"

/* Looking begins with the GIL held, because to release and take it costs a tenth of a quick peer's answer. Other threads that
 * want the GIL wait no longer than this. */
#define HOLD_NS 5000

typedef struct {
    PyObject_HEAD
    RingObject *requests, *results;
    struct exchange_table table;
    PyObject *bodies[EXCHANGE_KNOWN], *values[EXCHANGE_KNOWN];
    struct exchange_stamp stamp; /* listener: stamp of the request taken last */
    long long began_ns;          /* listener: when it was taken */
    long long looked_ns;         /* listener: when the last `next` began to look; 0 if a request was there at once */
    long long waits, waited_ns;  /* looks that ended with a packet, and how long they took in all */
} ExchangeObject;

/* The types have no `init`, so every object has its two queues. */
static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct module_state *module = PyType_GetModuleState(type);
    PyObject *requests, *results;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "(requests, results) are positional");
        return NULL;
    }
    if (!module || !PyArg_ParseTuple(args, "OO", &requests, &results))
        return NULL;
    /* The type itself, because isinstance would believe an object's __class__. */
    PyTypeObject *ring = (PyTypeObject *)module->ring;
    bool fits = ring && PyObject_TypeCheck(requests, ring) && PyObject_TypeCheck(results, ring);
    struct ring *sent = fits ? ring_if_usable((RingObject *)requests) : NULL, *taken = fits ? ring_if_usable((RingObject *)results) : NULL;
    if (!sent || !taken || sent->quantum != EXCHANGE_ELEMENT || taken->quantum != EXCHANGE_ELEMENT || !sent->synchronized ||
        !taken->synchronized) {
        PyErr_SetString(PyExc_ValueError, "expected two open, synchronized queues of 24-byte elements");
        return NULL;
    }
    ExchangeObject *self = (ExchangeObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    Py_INCREF(requests);
    Py_INCREF(results);
    self->requests = (RingObject *)requests;
    self->results = (RingObject *)results;
    return (PyObject *)self;
}

static void forget(ExchangeObject *self)
{
    unsigned count = self->table.count;
    PyObject *held[2 * EXCHANGE_KNOWN];
    memcpy(held, self->bodies, sizeof self->bodies);
    memcpy(held + EXCHANGE_KNOWN, self->values, sizeof self->values);
    memset(&self->table, 0, sizeof self->table);
    memset(self->bodies, 0, sizeof self->bodies);
    memset(self->values, 0, sizeof self->values);
    for (unsigned i = 0; i < count; i++) { /* last, because the release may run any Python code */
        Py_XDECREF(held[i]);
        Py_XDECREF(held[EXCHANGE_KNOWN + i]);
    }
}

static void exchange_dealloc(PyObject *object)
{
    ExchangeObject *self = (ExchangeObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    forget(self);
    Py_DECREF((PyObject *)self->requests);
    Py_DECREF((PyObject *)self->results);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *exchange_forget(PyObject *object, PyObject *Py_UNUSED(none))
{
    forget((ExchangeObject *)object);
    Py_RETURN_NONE;
}

/* remember(body, value) */
static PyObject *exchange_remember(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *bytes;
    Py_ssize_t length;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "remember(body, value)");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0)
        return NULL;
    int known = exchange_find(&self->table, (const uint8_t *)bytes, (uint64_t)length);
    unsigned at = known < 0 ? exchange_place(&self->table) : (unsigned)known;
    PyObject *body = self->bodies[at], *value = self->values[at];
    Py_INCREF(args[0]);
    Py_INCREF(args[1]);
    self->bodies[at] = args[0];
    self->values[at] = args[1];
    self->table.known[at] = (struct exchange_body){(const uint8_t *)bytes, (uint64_t)length};
    Py_XDECREF(body); /* last, because the release may run any Python code */
    Py_XDECREF(value);
    Py_RETURN_NONE;
}

/* Look for a packet in one of the two queues for at most so long. Return whether that queue can still be used. */
static bool look(ExchangeObject *self, RingObject *queue, int64_t began_ns, int64_t budget_ns)
{
    struct ring *r = &queue->ring;
    if (budget_ns > 1000000000)
        budget_ns = 1000000000;
    int64_t held_ns = budget_ns < HOLD_NS ? budget_ns : HOLD_NS;
    if (ring_spin(r, EXCHANGE_ELEMENT, began_ns + held_ns) || budget_ns <= HOLD_NS)
        return true;
    self->requests->users++;
    self->results->users++;
    Py_BEGIN_ALLOW_THREADS
    ring_spin(r, EXCHANGE_ELEMENT, began_ns + budget_ns);
    Py_END_ALLOW_THREADS
    ring_leave(self->requests);
    ring_leave(self->results);
    return ring_if_usable(queue) != NULL;
}

static bool to_numbers(PyObject *const *args, Py_ssize_t count, long long *numbers)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            return false;
    }
    return true;
}

static PyObject *answer_of(ExchangeObject *self, int known, const struct exchange_stamp *stamp, bool with_identity)
{
    PyObject *value = self->values[known];
    Py_INCREF(value); /* first, because making an object may run any Python code, and that may forget the value */
    PyObject *answer = PyTuple_New(with_identity ? 3 : 2), *service = PyLong_FromUnsignedLongLong(stamp->second);
    PyObject *identity = with_identity ? PyLong_FromUnsignedLongLong(stamp->first) : NULL;
    if (!answer || !service || (with_identity && !identity)) {
        Py_DECREF(value);
        Py_XDECREF(answer);
        Py_XDECREF(service);
        Py_XDECREF(identity);
        return NULL;
    }
    PyTuple_SetItem(answer, 0, value); /* these steal, and cannot fail on a new tuple */
    PyTuple_SetItem(answer, 1, service);
    if (identity)
        PyTuple_SetItem(answer, 2, identity);
    return answer;
}

/* call(body, identity, deadline_ns, not_after_ns, budget_ns) */
static PyObject *caller_call(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *body;
    Py_ssize_t length;
    long long number[4];
    if (given != 5) {
        PyErr_SetString(PyExc_TypeError, "call(body, identity, deadline_ns, not_after_ns, budget_ns)");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &length) < 0 || !to_numbers(args + 1, 4, number))
        return NULL;
    struct ring *requests = ring_if_usable(self->requests), *results = ring_if_usable(self->results);
    int64_t began_ns = ring_now_ns();
    struct exchange_stamp stamp = {(uint64_t)number[0], (uint64_t)number[1]};
    if (!requests || !results || began_ns >= number[2] ||
        exchange_write(requests, (const uint8_t *)body, (uint64_t)length, &EXCHANGE_REQUEST, &stamp) != RING_OK)
        Py_RETURN_FALSE;
    if (!look(self, self->results, began_ns, number[3]))
        Py_RETURN_NONE;
    uint64_t bytes, all;
    int known = exchange_peek(results, &self->table, &EXCHANGE_RESULT, &stamp, &bytes, &all);
    /* Only one request was in flight. The general path judges anything else that the driver says. */
    if (known < 0 || bytes != all || stamp.first != (uint64_t)number[0] || ring_commit_read(results, bytes) != RING_OK)
        Py_RETURN_NONE;
    self->waits++;
    return answer_of(self, known, &stamp, false);
}

/* send(body, identity, deadline_ns) */
static PyObject *caller_send(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    ExchangeObject *self = (ExchangeObject *)object;
    char *body;
    Py_ssize_t length;
    long long number[2];
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "send(body, identity, deadline_ns)");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &length) < 0 || !to_numbers(args + 1, 2, number))
        return NULL;
    struct ring *requests = ring_if_usable(self->requests);
    struct exchange_stamp stamp = {(uint64_t)number[0], (uint64_t)number[1]};
    return PyBool_FromLong(
        requests && exchange_write(requests, (const uint8_t *)body, (uint64_t)length, &EXCHANGE_REQUEST, &stamp) == RING_OK);
}

static PyObject *caller_take(PyObject *object, PyObject *Py_UNUSED(none))
{
    ExchangeObject *self = (ExchangeObject *)object;
    PyObject *answers = PyList_New(0);
    while (answers) {
        struct ring *results = ring_if_usable(self->results); /* each time, because making an object may run any Python code */
        struct exchange_stamp stamp;
        uint64_t bytes, all;
        int known = results ? exchange_peek(results, &self->table, &EXCHANGE_RESULT, &stamp, &bytes, &all) : -1;
        if (known < 0 || ring_commit_read(results, bytes) != RING_OK)
            break;
        PyObject *answer = answer_of(self, known, &stamp, true);
        if (!answer || PyList_Append(answers, answer) < 0)
            Py_CLEAR(answers); /* out of memory: the taken answers are lost, and with them the burst */
        Py_XDECREF(answer);
    }
    return answers;
}

/* nudge(mask) */
static PyObject *caller_nudge(PyObject *object, PyObject *number)
{
    unsigned long mask = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    struct ring *requests = ring_if_usable(((ExchangeObject *)object)->requests);
    if (requests)
        ring_nudge_reader(requests, (uint32_t)mask);
    Py_RETURN_NONE;
}

/* next(budget_ns) */
static PyObject *listener_next(PyObject *object, PyObject *number)
{
    ExchangeObject *self = (ExchangeObject *)object;
    uint64_t bytes, all, writable;
    long long budget_ns = PyLong_AsLongLong(number); /* first, because its __index__ may close the queue */
    if (budget_ns == -1 && PyErr_Occurred())
        return NULL;
    struct ring *requests = ring_if_usable(self->requests);
    self->looked_ns = 0;
    if (!requests || ring_available(requests, &all, &writable) != RING_OK)
        Py_RETURN_NONE;
    bool waits = !all && budget_ns > 0;
    self->looked_ns = waits ? ring_now_ns() : 0;
    if (waits && !look(self, self->requests, self->looked_ns, budget_ns))
        Py_RETURN_NONE;
    int known = exchange_peek(requests, &self->table, &EXCHANGE_REQUEST, &self->stamp, &bytes, &all);
    self->began_ns = ring_now_ns();
    if (waits && known >= 0) {
        self->waits++;
        self->waited_ns += self->began_ns - self->looked_ns;
    }
    /* The general path answers a request that is too late. */
    if (known < 0 || (self->stamp.second && (uint64_t)self->began_ns >= self->stamp.second) || ring_commit_read(requests, bytes) != RING_OK)
        Py_RETURN_NONE;
    Py_INCREF(self->values[known]);
    return self->values[known];
}

/* answer(body) */
static PyObject *listener_answer(PyObject *object, PyObject *body)
{
    ExchangeObject *self = (ExchangeObject *)object;
    struct ring *results = ring_if_usable(self->results);
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(body, &bytes, &length) < 0)
        return NULL;
    int64_t now_ns = ring_now_ns();
    struct exchange_stamp stamp = {self->stamp.first, (uint64_t)(now_ns - self->began_ns)};
    bool written = results && exchange_write(results, (const uint8_t *)bytes, (uint64_t)length, &EXCHANGE_RESULT, &stamp) == RING_OK;
    return PyLong_FromLongLong(written ? now_ns : 0);
}

static PyMethodDef caller_methods[] = { /* documented in _ring.pyi */
    {"remember", FAST(exchange_remember)},
    {"forget", exchange_forget, METH_NOARGS, NULL},
    {"call", FAST(caller_call)},
    {"send", FAST(caller_send)},
    {"take", caller_take, METH_NOARGS, NULL},
    {"nudge", caller_nudge, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef listener_methods[] = {
    {"remember", FAST(exchange_remember)},
    {"forget", exchange_forget, METH_NOARGS, NULL},
    {"next", listener_next, METH_O, NULL},
    {"answer", listener_answer, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"waits", T_LONGLONG, offsetof(ExchangeObject, waits), 0, NULL},
    {"waited_ns", T_LONGLONG, offsetof(ExchangeObject, waited_ns), 0, NULL},
    {"identity", T_ULONGLONG, offsetof(ExchangeObject, stamp.first), READONLY, NULL},
    {"deadline_ns", T_ULONGLONG, offsetof(ExchangeObject, stamp.second), READONLY, NULL},
    {"looked_ns", T_LONGLONG, offsetof(ExchangeObject, looked_ns), READONLY, NULL},
    {"began_ns", T_LONGLONG, offsetof(ExchangeObject, began_ns), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define SLOTS(methods)                                                                                                        \
    {                                                                                                                         \
        {Py_tp_new, exchange_new}, {Py_tp_dealloc, exchange_dealloc}, {Py_tp_methods, methods}, \
            {Py_tp_members, members}, {0, NULL},                                                                              \
    }
static PyType_Slot caller_slots[] = SLOTS(caller_methods);
static PyType_Slot listener_slots[] = SLOTS(listener_methods);
PyType_Spec caller_spec = {
    .name = "aionn.fmq._ring.Caller", .basicsize = sizeof(ExchangeObject), .flags = Py_TPFLAGS_DEFAULT, .slots = caller_slots};
PyType_Spec listener_spec = {
    .name = "aionn.fmq._ring.Listener", .basicsize = sizeof(ExchangeObject), .flags = Py_TPFLAGS_DEFAULT, .slots = listener_slots};
