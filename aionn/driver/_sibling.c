/* `make_sibling`: a copy of this process that is a child of this process's parent.
 *
 * The template of drivers makes drivers in this way, so that the app can wait for each of them as for any other child.
 *
 * The C library's `fork` cannot do it, because its copies are children of the caller. A bare system call would leave the numbers stale that
 * the C library and Python keep in memory. So the kernel writes the number of the copy to the place that the C library has registered for
 * it, and Python looks anew.
 *
 * Invariants
 *     This process has one thread, so no other thread holds a lock that the copy would wait for. The caller has looked.
 *     The number of the copy stands in the shared page before the copy runs. So the app learns of each child, even if this process dies in
 *     the act.
 *     Neither process keeps the page mapped. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_GET_TID_ADDRESS
#define PR_GET_TID_ADDRESS 40
#endif

enum { PAGE_BYTES = 1 << 12 };

/* The end of the copy is announced as the end of this process is: with CLONE_PARENT the kernel takes this process's own signal. */
static pid_t copy_process(int *number, int *own_number)
{
    unsigned long flags = CLONE_PARENT | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
#if defined(__x86_64__)
    return (pid_t)syscall(SYS_clone, flags, NULL, number, own_number, NULL);
#elif defined(__aarch64__)
    return (pid_t)syscall(SYS_clone, flags, NULL, number, NULL, own_number);
#else
    (void)flags, (void)number, (void)own_number;
    errno = ENOSYS; /* the order of the arguments depends on the architecture */
    return -1;
#endif
}

/* make_sibling(page, at): in this process the number of the copy, in the copy 0 */
static PyObject *make_sibling(PyObject *Py_UNUSED(module), PyObject *args)
{
    int page, at;
    if (!PyArg_ParseTuple(args, "ii", &page, &at))
        return NULL;
    int *own_number = NULL;
    if (prctl(PR_GET_TID_ADDRESS, &own_number, 0, 0, 0) < 0)
        return PyErr_SetFromErrno(PyExc_OSError); /* a kernel without CONFIG_CHECKPOINT_RESTORE */
    if (own_number == NULL || *own_number != (int)syscall(SYS_gettid)) {
        errno = ENOTSUP; /* a C library that keeps the number elsewhere */
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    char *shared = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
    if (shared == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    PyOS_BeforeFork();
    pid_t pid = copy_process((int *)(shared + at), own_number);
    int failed = errno;
    if (pid == 0)
        PyOS_AfterFork_Child();
    else
        PyOS_AfterFork_Parent();
    munmap(shared, PAGE_BYTES);
    if (pid < 0) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLong(pid);
}

static PyMethodDef module_methods[] = {{"make_sibling", make_sibling, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}}; /* see _sibling.pyi */
static PyModuleDef_Slot module_slots[] = {{0, NULL}};
static struct PyModuleDef sibling_module = {
    PyModuleDef_HEAD_INIT, "_sibling", "Copies a process beside itself.", 0, module_methods, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sibling(void);
PyMODINIT_FUNC PyInit__sibling(void) { return PyModuleDef_Init(&sibling_module); }
