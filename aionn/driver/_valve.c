/* `open_valve`: a thread that keeps this process from waiting on its full output.
 *
 * Descriptors 1 and 2 are a pipe that the app reads in its event loop. An app whose loop stands still reads nothing, and a thread that
 * prints would wait in `write`. A pipe that does not wait would be worse: a C++ stream that fails once prints nothing any more. So
 * this thread looks at the pipe. If it is full and the app has read nothing for some time, the thread reads the older part of what is in
 * it, and adds the number of bytes to a counter, which is an eventfd. The app reads the counter and says how many bytes are lost. A line
 * in the pipe would not do: the process may end before the thread finds room for it.
 *
 * The thread is native, because the thread that prints may hold Python's lock.
 *
 * Invariants
 *     While the pipe is empty the thread sleeps until something is printed. Else it looks at most twice in `patience_ms`.
 *     It counts each piece before it reads it, because a writer that can go on may end the process.
 *     Something is left in the pipe, so the app's loop wakes and reads the counter.
 *     It owns the descriptors, and ends with the process. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_WHILE_LOSING_MS = 100, PIECE_BYTES = 1 << 12, SMALLEST_PIPE_BYTES = 1 << 12, STACK_BYTES = 1 << 16 };

struct valve {
    int reading, writing; /* the ends of the pipe; neither waits */
    int counter;          /* an eventfd */
    int patience_ms;
};

static struct valve only;       /* set before its thread starts */
static char piece[PIECE_BYTES]; /* of the thread */

static int ready(int fd, short event, int timeout_ms)
{
    struct pollfd look = {fd, event, 0};
    int found;
    do
        found = poll(&look, 1, timeout_ms);
    while (found < 0 && errno == EINTR);
    return found < 0 || look.revents & POLLNVAL ? -1 : found;
}

/* Drop the oldest three quarters of what a full pipe holds. The rest stays, because writers may not fill the pipe again. A pipe is full when
 * each of its pages has something. So it holds fewer bytes than its size where a write did not fit in the rest of a page. */
static void drop(const struct valve *valve)
{
    static uint64_t ahead = 0; /* bytes that are counted and not dropped, because the app has read them meanwhile */
    int held = SMALLEST_PIPE_BYTES; /* if a filter of system calls refuses the question */
    (void)!ioctl(valve->reading, FIONREAD, &held);
    uint64_t most = (uint64_t)(held - held / 4);
    while (most > 0) {
        uint64_t wanted = most < PIECE_BYTES ? most : PIECE_BYTES, bytes = wanted > ahead ? wanted - ahead : 0;
        if (bytes && write(valve->counter, &bytes, sizeof bytes) < 0)
            return; /* an engine has closed what is not its own */
        ahead += bytes;
        ssize_t got;
        do
            got = read(valve->reading, piece, (size_t)wanted);
        while (got < 0 && errno == EINTR);
        if (got <= 0)
            return;
        ahead -= (uint64_t)got;
        most -= (uint64_t)got;
    }
}

static void nap(int milliseconds)
{
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

static void *mind(void *argument)
{
    const struct valve *valve = argument;
    int patience_ms = valve->patience_ms;
    for (;;) {
        int something = ready(valve->reading, POLLIN, 0);
        if (!something) { /* the app has read everything */
            patience_ms = valve->patience_ms;
            something = ready(valve->reading, POLLIN, -1);
        }
        if (something < 0)
            return NULL; /* an engine has closed what is not its own */
        if (!ready(valve->writing, POLLOUT, 0) && !ready(valve->writing, POLLOUT, patience_ms)) {
            drop(valve);
            patience_ms = PATIENCE_WHILE_LOSING_MS;
        }
        nap(patience_ms / 2);
    }
}

/* open_valve(reading, writing, counter, patience_ms) */
static PyObject *open_valve(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct valve valve;
    if (!PyArg_ParseTuple(args, "iiii", &valve.reading, &valve.writing, &valve.counter, &valve.patience_ms))
        return NULL;
    if (only.patience_ms) {
        PyErr_SetString(PyExc_RuntimeError, "this process has a valve");
        return NULL;
    }
    only = valve;
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
    int failed = pthread_create(&thread, &attributes, mind, &only);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed) {
        only.patience_ms = 0;
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    pthread_setname_np(thread, "aionn-output");
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {{"open_valve", open_valve, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}}; /* documented in _valve.pyi */
static PyModuleDef_Slot module_slots[] = {{0, NULL}};
static struct PyModuleDef valve_module = {
    PyModuleDef_HEAD_INIT, "_valve", "Keeps a process from waiting on its own output.", 0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__valve(void);
PyMODINIT_FUNC PyInit__valve(void) { return PyModuleDef_Init(&valve_module); }
