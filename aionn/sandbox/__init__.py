"""The confinement of a driver process: what a model file that has taken over a driver can still reach.

A driver parses foreign files in C++. So it gives its own rights away while it has one thread, before it sees a model and before it imports
an engine of another package. NumPy and the library of a built-in engine may be imported before: drivers from a template have them from
there. Linux lets every process do that, without root. What is taken away stays away.

    paths       which files any Python driver must read
    landlock    rules of the kernel about files, TCP, signals and abstract sockets
    filter      the seccomp program: which system calls a driver may make, and with which arguments
    confining   all of that and limits of the process in their order. The result says what holds, and what this kernel lacks
    strict      for tests: names a denied system call on stderr before it ends the driver (`_strict.c`)

Each mechanism is tried. What the kernel refuses stands in the result (`aionn.needs.Confinement`). `docs/security.md` has the threat model.

A driver confines itself once. A second step after the engine's import could take away more, such as the right to run code from files. But
Landlock before its ABI 8 restricts one thread, and an imported engine has several. A second filter reaches all threads, but aionn imports
`onnx` and `sqlite3` when they are needed first, and engines load parts of themselves with the first model. To load all of that before would
delay each start.
"""
