/* `open_valve`: a thread that keeps this process from waiting on its full output.
 *
 * Descriptors 1 and 2 are a pipe that the app reads in its event loop. An app whose loop stands still reads nothing, and a thread that
 * prints would wait in `write`. A pipe that does not wait would be worse: a C++ stream that fails once prints nothing any more. So
 * this thread looks at the pipe. If it is full and the app has read nothing for some time, the thread reads what is in it, counts the
 * bytes, and writes a line that says how many are lost.
 *
 * The thread is native, because the thread that prints may hold Python's lock.
 *
 * Invariants
 *     While the pipe is empty the thread sleeps until something is printed. Else it looks at most twice in `patience_ms`.
 *     It writes without waiting, because its open file description does not wait.
 *     It owns both descriptors, and ends with the process. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_WHILE_LOSING_MS = 100, TAKEN_BYTES = 1 << 16, STACK_BYTES = 1 << 16 };

static const char LINE[] = "\n[aionn: the app did not read what this driver process prints; %llu bytes are lost]\n";

struct valve {
    int reading, writing; /* neither waits */
    int patience_ms;
};

static struct valve only;      /* set before its thread starts */
static char taken[TAKEN_BYTES]; /* of the thread */

static int ready(int fd, short event, int timeout_ms)
{
    struct pollfd look = {fd, event, 0};
    int found;
    do
        found = poll(&look, 1, timeout_ms);
    while (found < 0 && errno == EINTR);
    return found < 0 || look.revents & POLLNVAL ? -1 : found;
}

/* Read what is in the pipe, and no more than it can hold: writers fill it meanwhile. Returns the bytes. */
static unsigned long long emptied(const struct valve *valve, int most)
{
    unsigned long long bytes = 0;
    while (bytes < (unsigned long long)most) {
        ssize_t got = read(valve->reading, taken, sizeof taken);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        bytes += (unsigned long long)got;
    }
    return bytes;
}

static void nap(int milliseconds)
{
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

static void *mind(void *argument)
{
    const struct valve *valve = argument;
    int size = fcntl(valve->writing, F_GETPIPE_SZ), patience_ms = valve->patience_ms;
    unsigned long long lost = 0, said = 0; /* since the app has last read everything */
    int line_bytes = 0;                    /* of the line in the pipe that says it, which is lost with the rest */
    for (;;) {
        int something = ready(valve->reading, POLLIN, 0);
        if (!something && lost == said) {
            lost = said = 0;
            line_bytes = 0;
            patience_ms = valve->patience_ms;
            something = ready(valve->reading, POLLIN, -1);
        }
        if (something < 0)
            return NULL; /* an engine has closed what is not its own */
        if (!ready(valve->writing, POLLOUT, 0) && !ready(valve->writing, POLLOUT, patience_ms)) {
            lost += emptied(valve, size > 0 ? size : TAKEN_BYTES) - (unsigned long long)line_bytes;
            line_bytes = 0;
            patience_ms = PATIENCE_WHILE_LOSING_MS;
        }
        if (lost != said) {
            int length = snprintf(taken, sizeof taken, LINE, lost);
            if (write(valve->writing, taken, (size_t)length) == length) {
                said = lost;
                line_bytes = length;
            }
        }
        nap(patience_ms / 2);
    }
}

/* open_valve(reading, writing, patience_ms) */
static PyObject *open_valve(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct valve valve;
    if (!PyArg_ParseTuple(args, "iii", &valve.reading, &valve.writing, &valve.patience_ms))
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
