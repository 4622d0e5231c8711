"""The confinement of a driver process: what a model file that has taken over a driver can still reach.

A driver parses foreign files in C++. So it gives its own rights away in its first lines, while it has one thread, and before it imports
NumPy, uvloop or an engine. Linux lets every process do that, without root. What is taken away stays away.

    facts       what an engine needs beyond the usual: files, device files, code made at run time
    paths       which files any Python driver must read
    landlock    rules of the kernel about files, TCP, signals and abstract sockets
    calls       numbers of system calls, and which of them a driver may make
    filter      the seccomp program made of them
    limits      no_new_privs, rlimits, memory that is writable or executable but never both
    confining   all of that in its order. The result says what holds, and what this kernel lacks
    report      that result

Nothing here is assumed: each mechanism is tried, and what the kernel refuses stands in the report. `docs/security.md` has the threat model.
"""
