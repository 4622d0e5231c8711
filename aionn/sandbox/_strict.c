/* The handler of SIGSYS in strict mode: name the system call that the filter denied, dump the stacks, die by the signal.
 *
 * Only tests use strict mode. The handler writes one line to stderr. Then it calls the handler that was there before it, which is
 * faulthandler's. Then it restores the default action and raises the signal again, so the parent sees a process killed by SIGSYS.
 *
 * A thread that blocks SIGSYS never comes here: the kernel kills the process at once. The parent sees the same signal then, but no line. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#ifndef SYS_SECCOMP
#define SYS_SECCOMP 1 /* si_code, asm-generic/siginfo.h */
#endif

enum { NAME_BYTES = 32 };

static char *names; /* entry n is the name of call n, ended and filled up with zeros */
static int known;   /* number of entries */
static struct sigaction previous;

/* Only async-signal-safe calls from here on. */

static size_t append(char *line, size_t at, const char *text)
{
    size_t length = strlen(text);
    memcpy(line + at, text, length);
    return at + length;
}

static size_t append_number(char *line, size_t at, unsigned int number)
{
    char digits[10];
    size_t count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while (number /= 10);
    while (count)
        line[at++] = digits[--count];
    return at;
}

static void say(const siginfo_t *info)
{
    char line[128];
    const char *name = info->si_syscall >= 0 && info->si_syscall < known ? names + (size_t)info->si_syscall * NAME_BYTES : "";
    size_t at = append(line, 0, "aionn: the sandbox denied system call ");
    at = append_number(line, at, (unsigned int)info->si_syscall);
    at = append(line, at, " (");
    at = append(line, at, *name ? name : "not in aionn's tables");
    at = append(line, at, ")\n");
    ssize_t written = write(STDERR_FILENO, line, at);
    (void)written; /* nothing else can be done */
}

static void denied(int number, siginfo_t *info, void *context)
{
    if (info->si_code == SYS_SECCOMP)
        say(info);
    if (previous.sa_flags & SA_SIGINFO)
        previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
        previous.sa_handler(number);
    struct sigaction usual = {.sa_handler = SIG_DFL};
    sigaction(number, &usual, NULL);
    sigset_t this;
    sigemptyset(&this);
    sigaddset(&this, number);
    raise(number); /* pending until it is unblocked */
    pthread_sigmask(SIG_UNBLOCK, &this, NULL);
    _exit(128 + number); /* not reached */
}

/* watch(names): one entry of NAME_BYTES for each call from number 0 on */
static PyObject *watch(PyObject *Py_UNUSED(module), PyObject *object)
{
    char *given;
    Py_ssize_t length;
    if (names) {
        PyErr_SetString(PyExc_RuntimeError, "SIGSYS is watched already");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(object, &given, &length))
        return NULL;
    for (Py_ssize_t end = NAME_BYTES; end <= length; end += NAME_BYTES)
        if (given[end - 1]) {
            PyErr_SetString(PyExc_ValueError, "a name is too long");
            return NULL;
        }
    names = PyMem_Malloc(length ? (size_t)length : 1);
    if (!names)
        return PyErr_NoMemory();
    memcpy(names, given, (size_t)length);
    known = (int)(length / NAME_BYTES);
    struct sigaction action = {.sa_sigaction = denied, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGSYS, &action, &previous))
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {{"watch", watch, METH_O, NULL}, {NULL, NULL, 0, NULL}}; /* documented in _strict.pyi */
static PyModuleDef_Slot module_slots[] = {{0, NULL}};
static struct PyModuleDef strict_module = {
    PyModuleDef_HEAD_INIT, "_strict", "The handler of SIGSYS in strict mode.", 0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__strict(void);
PyMODINIT_FUNC PyInit__strict(void) { return PyModuleDef_Init(&strict_module); }
