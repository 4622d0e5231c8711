/* `Lanes`: which bursts are lent, and which of them may have a request. See lanes_object.h. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sys/eventfd.h>

#include "lanes_object.h"

void lanes_close_when_over(LanesObject *lanes)
{
    if (!lanes->stopped || lanes->lanes)
        return;
    if (lanes->epoll_fd >= 0)
        close(lanes->epoll_fd);
    if (lanes->signal_fd >= 0)
        close(lanes->signal_fd);
    lanes->epoll_fd = lanes->signal_fd = -1;
}

void lanes_wake_one(LanesObject *lanes)
{
    if (lanes->sleeping)
        ring_signal(lanes->signal_fd);
}

/* ---- which bursts may have a request ------------------------------------------------------------------------------- */

void lanes_enqueue(LanesObject *lanes, ListenerObject *listener)
{
    if (listener->queued)
        return;
    listener->queued = true;
    struct seat *seat = &lanes->seats[listener->seat];
    lanes->ready[(lanes->ready_first + lanes->ready_count++) % lanes->room] = (uint64_t)seat->generation << 32 | listener->seat;
}

static ListenerObject *at_place(LanesObject *lanes, uint64_t place)
{
    uint32_t seat = (uint32_t)place;
    return seat < lanes->room && lanes->seats[seat].generation == place >> 32 ? lanes->seats[seat].listener : NULL;
}

ListenerObject *lanes_dequeue(LanesObject *lanes)
{
    if (!lanes->ready_count)
        return NULL;
    ListenerObject *listener = at_place(lanes, lanes->ready[lanes->ready_first]); /* `give_back` leaves no other place here */
    lanes->ready_first = (lanes->ready_first + 1) % lanes->room;
    lanes->ready_count--;
    listener->queued = false;
    return listener;
}

/* Take what epoll reports into `ready`. */
void lanes_collect(LanesObject *lanes, const struct epoll_event *events, int count)
{
    for (int i = 0; i < count; i++) {
        ListenerObject *listener = events[i].data.u64 == SIGNAL ? NULL : at_place(lanes, events[i].data.u64);
        if (listener)
            lanes_enqueue(lanes, listener);
    }
}

/* ---- lending and giving back ----------------------------------------------------------------------------------------- */

/* Call a callback and forget it, if there is one. It may run any Python code. */
void lanes_call_once(PyObject **callback)
{
    PyObject *call = *callback, *type, *value, *trace;
    if (!call)
        return;
    *callback = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallNoArgs(call);
    if (!done)
        PyErr_Clear(); /* the loop is closed, because the process ends */
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
    Py_DECREF(call);
}

/* Take the burst out of `ready`. */
static void unqueue(LanesObject *lanes, ListenerObject *listener)
{
    uint32_t count = lanes->ready_count, first = lanes->ready_first;
    if (!listener->queued)
        return;
    listener->queued = false;
    lanes->ready_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t place = lanes->ready[(first + i) % lanes->room];
        if ((uint32_t)place != listener->seat)
            lanes->ready[(first + lanes->ready_count++) % lanes->room] = place;
    }
}

/* Stop taking requests of this burst, and call its task back. Lanes may still run requests of it. */
void lanes_give_back(ListenerObject *listener)
{
    LanesObject *lanes = listener->lanes;
    if (!listener->lent)
        return;
    unqueue(lanes, listener);
    listener->lent = false;
    struct seat *seat = &lanes->seats[listener->seat];
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    if (requests)
        epoll_ctl(lanes->epoll_fd, EPOLL_CTL_DEL, requests->reader_fd, NULL);
    seat->listener = NULL;
    seat->generation++;
    lanes->lent--;
    listener->lanes = NULL;
    lanes_call_once(&listener->returned);
    Py_DECREF((PyObject *)listener);
    Py_DECREF((PyObject *)lanes);
}

static bool grow(LanesObject *lanes)
{
    uint32_t room = lanes->room ? 2 * lanes->room : 4;
    struct seat *seats = realloc(lanes->seats, room * sizeof *seats);
    if (!seats)
        return false;
    lanes->seats = seats;
    uint64_t *ready = malloc(room * sizeof *ready);
    if (!ready)
        return false;
    memset(seats + lanes->room, 0, (room - lanes->room) * sizeof *seats);
    for (uint32_t i = 0; i < lanes->ready_count; i++)
        ready[i] = lanes->ready[(lanes->ready_first + i) % lanes->room];
    free(lanes->ready);
    lanes->ready = ready;
    lanes->ready_first = 0;
    lanes->room = room;
    return true;
}

/* lend(listener, returned) */
static PyObject *lanes_lend(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    LanesObject *self = (LanesObject *)object;
    struct module_state *module = PyType_GetModuleState(Py_TYPE(object));
    if (given != 2 || !module || !PyObject_TypeCheck(args[0], (PyTypeObject *)module->listener)) {
        PyErr_SetString(PyExc_TypeError, "lend(listener, returned)");
        return NULL;
    }
    ListenerObject *listener = (ListenerObject *)args[0];
    struct ring *requests = ring_if_usable(listener->exchange.requests);
    /* A closed queue or closed lanes: the task finds out why. */
    if (!requests || self->stopped || listener->lent || requests->reader_fd < 0 || !requests->control)
        Py_RETURN_FALSE;
    uint32_t seat = 0;
    while (seat < self->room && self->seats[seat].listener)
        seat++;
    if (seat == self->room && !grow(self))
        return PyErr_NoMemory();
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = (uint64_t)self->seats[seat].generation << 32 | seat};
    if (epoll_ctl(self->epoll_fd, EPOLL_CTL_ADD, requests->reader_fd, &event) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_INCREF(args[0]);
    Py_INCREF(args[1]);
    Py_INCREF(object);
    self->seats[seat].listener = listener;
    self->lent++;
    listener->seat = seat;
    listener->returned = args[1];
    listener->lanes = self;
    listener->lent = true;
    lanes_enqueue(self, listener); /* a lane looks at it once, and arms it */
    if (listener->blocked)
        lanes_give_back(listener);
    else
        lanes_wake_one(self);
    Py_RETURN_TRUE;
}

/* recall(listener) */
static PyObject *lanes_recall(PyObject *object, PyObject *argument)
{
    struct module_state *module = PyType_GetModuleState(Py_TYPE(object));
    if (!module || !PyObject_TypeCheck(argument, (PyTypeObject *)module->listener)) {
        PyErr_SetString(PyExc_TypeError, "recall(listener)");
        return NULL;
    }
    Py_INCREF(argument);
    lanes_give_back((ListenerObject *)argument);
    Py_DECREF(argument);
    Py_RETURN_NONE;
}

/* announce(): a job was added to the queue of jobs, which Python keeps */
static PyObject *lanes_announce(PyObject *object, PyObject *Py_UNUSED(none))
{
    LanesObject *self = (LanesObject *)object;
    self->jobs++;
    lanes_wake_one(self);
    Py_RETURN_NONE;
}

static PyObject *lanes_stop(PyObject *object, PyObject *Py_UNUSED(none))
{
    LanesObject *self = (LanesObject *)object;
    self->stopped = true;
    for (uint32_t seat = 0; seat < self->room; seat++)
        if (self->seats[seat].listener)
            lanes_give_back(self->seats[seat].listener);
    lanes_wake_one(self);
    lanes_close_when_over(self);
    Py_RETURN_NONE;
}

static PyObject *lanes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if ((kwargs && PyDict_Size(kwargs)) || PyTuple_Size(args)) {
        PyErr_SetString(PyExc_TypeError, "Lanes takes no arguments");
        return NULL;
    }
    LanesObject *self = (LanesObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = SIGNAL};
    self->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    self->signal_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->epoll_fd < 0 || self->signal_fd < 0 || epoll_ctl(self->epoll_fd, EPOLL_CTL_ADD, self->signal_fd, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void lanes_dealloc(PyObject *object)
{
    LanesObject *self = (LanesObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    self->stopped = true;
    lanes_close_when_over(self);
    free(self->seats);
    free(self->ready);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef lanes_methods[] = {
    {"lend", FAST(lanes_lend)},
    {"recall", lanes_recall, METH_O, NULL},
    {"announce", lanes_announce, METH_NOARGS, NULL},
    {"stop", lanes_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef lanes_members[] = {
    {"stopped", T_BOOL, offsetof(LanesObject, stopped), READONLY, NULL},
    {"sleeping", T_UINT, offsetof(LanesObject, sleeping), READONLY, NULL},
    {"lent", T_UINT, offsetof(LanesObject, lent), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot lanes_slots[] = {
    {Py_tp_new, lanes_new}, {Py_tp_dealloc, lanes_dealloc}, {Py_tp_methods, lanes_methods}, {Py_tp_members, lanes_members}, {0, NULL},
};
PyType_Spec lanes_spec = {
    .name = "aionn.fmq._ring.Lanes", .basicsize = sizeof(LanesObject), .flags = Py_TPFLAGS_DEFAULT, .slots = lanes_slots};

